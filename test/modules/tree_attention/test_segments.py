"""The segments backend against dense softmax attention: values, gradients, features, and the plan it follows."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_oracle import NaiveTrie, random_rollouts

from torchrl_asyncgrpo.kernels.linear import serves
from torchrl_asyncgrpo.modules.tree_attention import TreeLayout, rectangle
from torchrl_asyncgrpo.modules.tree_attention.blocks import Plan, plan_blocks
from torchrl_asyncgrpo.modules.tree_attention.kernel import _balanced_splits
from torchrl_asyncgrpo.modules.tree_attention.reference import reference_attention
from torchrl_asyncgrpo.modules.tree_attention.segments import segments_attention


def tiny_segments(seed: int = 0) -> NaiveTrie:
    """Prompts that share a head, with many short completions that share beginnings: hundreds of segments."""
    rng = random.Random(seed)
    head = [1] * 9
    rollouts = []
    for _ in range(8):
        prompt = head + [rng.randrange(2, 23) for _ in range(11)]
        rollouts += [prompt + [rng.randrange(2, 4) for _ in range(rng.randint(1, 12))] for _ in range(60)]
    return NaiveTrie(rollouts)


def caterpillar(length: int = 120) -> NaiveTrie:
    """A chain with a leaf at every node: no segment is longer than one node."""
    spine = [i % 7 for i in range(length)]
    return NaiveTrie([spine] + [spine[:i] + [20] for i in range(1, length)])


def long_branches() -> NaiveTrie:
    rng = random.Random(3)
    prompt = [rng.randrange(23) for _ in range(150)]
    return NaiveTrie([prompt[:100]] + [prompt + [i] + [rng.randrange(23) for _ in range(70)] for i in range(4)])


SHAPES = {"tiny segments": tiny_segments, "caterpillar": caterpillar, "long branches": long_branches}


def random_heads(
    tree: TreeLayout, *, heads=4, key_heads=2, width=8, value_width=8, dtype=torch.float64
) -> list[Tensor]:
    """Query, key, value as a model makes them, [1, T, H, D] transposed, and sinks."""
    torch.manual_seed(1)
    T = tree.num_nodes
    shapes = [(heads, width), (key_heads, width), (key_heads, value_width)]
    leaves = [torch.randn(1, T, h, d, dtype=dtype).transpose(1, 2).requires_grad_() for h, d in shapes]
    return leaves + [torch.randn(heads, dtype=dtype).requires_grad_()]


def assert_equal_attention(
    tree: TreeLayout, leaves: list[Tensor], tolerance: float, *, sinks=False, plain=False, **kwargs
) -> None:
    sinks_H = leaves[3] if sinks else None
    used = leaves if sinks else leaves[:3]
    expected = reference_attention(*leaves[:3], tree, scaling=0.7, sinks_H=sinks_H, **kwargs)
    actual = segments_attention(*leaves[:3], tree, scaling=0.7, sinks_H=sinks_H, plain=plain, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    cotangent = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(actual, used, cotangent), torch.autograd.grad(expected, used, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6, 40, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_the_reference(shape: str, window: int | None, sinks: bool, plain: bool) -> None:
    tree = SHAPES[shape]().layout()
    leaves = random_heads(tree)
    assert_equal_attention(tree, leaves, 1e-10, sinks=sinks, plain=plain, sliding_window=window)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num=st.integers(1, 40),
    max_new=st.integers(1, 60),
    window=st.none() | st.integers(1, 70),
    overhead=st.sampled_from([1, 30, 300]),
)
def test_every_visible_pair_is_covered_exactly_once(
    seed: int, num: int, max_new: int, window: int | None, overhead: int
) -> None:
    trie = NaiveTrie(random_rollouts(seed, num=num, max_new=max_new))
    plan = plan_blocks(trie.layout(), window, overhead, torch.float64)
    assert torch.equal(pair_counts(plan, len(trie.tokens)), trie.visible_TT(window).int())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num=st.integers(1, 40),
    max_new=st.integers(1, 60),
    window=st.none() | st.integers(1, 70),
)
def test_random_trees_equal_the_reference(seed: int, num: int, max_new: int, window: int | None) -> None:
    tree = NaiveTrie(random_rollouts(seed, num=num, max_new=max_new)).layout()
    leaves = random_heads(tree, heads=6, key_heads=3, width=64)
    assert_equal_attention(tree, leaves, 1e-10, sinks=True, sliding_window=window)


def pair_counts(plan: Plan, num_nodes: int) -> Tensor:
    """How often a plan attends each pair; checks its promises about squares, padding and blind rows on the way."""
    count_TT = torch.zeros(num_nodes + 1, num_nodes, dtype=torch.int32)
    index_T = torch.arange(num_nodes + 1)
    squares_T = torch.cat([index_T[s.rows] for s in plan.squares]).sort().values
    assert torch.equal(squares_T[:num_nodes], index_T[:-1])
    assert (squares_T[num_nodes:] == num_nodes).all()
    for block in plan.squares + plan.rectangles:
        queries_NQ, rows_NQ, keys_NK = (
            index_T[x].view(block.size, -1) for x in (block.queries, block.rows, block.keys)
        )
        padding_NQ = rows_NQ == num_nodes
        assert torch.equal(queries_NQ[~padding_NQ], rows_NQ[~padding_NQ])
        assert len(rows_NQ[~padding_NQ].unique()) == len(rows_NQ[~padding_NQ]), "one merge per query and block"
        seen_NQK = torch.ones(*queries_NQ.shape, keys_NK.shape[1], dtype=torch.bool)
        if block.bias_N1QK is not None:
            seen_NQK = block.bias_N1QK[:, 0] == 0
        blind_NQ = torch.zeros_like(padding_NQ) if block.blind_N1Q is None else block.blind_N1Q[:, 0]
        assert torch.equal(~seen_NQK.any(-1), blind_NQ)
        assert blind_NQ[padding_NQ].all()
        pair = (rows_NQ[..., None].expand_as(seen_NQK)[seen_NQK], keys_NK[:, None].expand_as(seen_NQK)[seen_NQK])
        count_TT.index_put_(pair, torch.tensor(1, dtype=torch.int32), accumulate=True)
    assert not count_TT[num_nodes].any()
    return count_TT[:num_nodes]


def area(plan: Plan, num_nodes: int) -> int:
    """Pairs that the kernels attend, visible or not."""
    index_T = torch.arange(num_nodes)
    blocks = plan.squares + plan.rectangles
    return sum(len(index_T[b.queries]) * len(index_T[b.keys]) // b.size for b in blocks)


@pytest.mark.parametrize("window", [None, 200, 700])
def test_the_work_is_that_of_the_visible_pairs(window: int | None) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(23) for _ in range(1500)]
    trie = NaiveTrie(
        [prompt] + [prompt[: 900 + 40 * i] + [50] + [rng.randrange(23) for _ in range(200)] for i in range(8)]
    )
    tree = trie.layout()
    visible_pairs = int(tree.visible_TT(window).sum())
    plan = plan_blocks(tree, window, 300, torch.float32)
    assert area(plan, tree.num_nodes) < 1.45 * visible_pairs
    assert len(plan.squares) + len(plan.rectangles) < tree.num_nodes / 10


def test_many_tiny_segments_take_few_calls() -> None:
    tree = tiny_segments().layout()
    plan = plan_blocks(tree, None, 2000, torch.float32)
    segments = int((tree.parent_T != range(-1, tree.num_nodes - 1)).sum())
    assert segments > 200
    assert len(plan.squares) + len(plan.rectangles) < segments / 6


def test_a_value_of_another_width_than_the_key() -> None:
    tree = tiny_segments().layout()
    for width, value_width in [(12, 8), (8, 12)]:
        assert_equal_attention(tree, random_heads(tree, width=width, value_width=value_width), 1e-10)


def test_float32_and_bfloat16_stay_within_their_precision() -> None:
    tree = long_branches().layout()
    exact = random_heads(tree, width=16, value_width=16)
    expected = reference_attention(*exact[:3], tree, scaling=0.25)
    gradients = torch.autograd.grad(expected.square().sum(), exact[:3])
    for dtype, tolerance in [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in exact[:3]]
        actual = segments_attention(*leaves, tree, scaling=0.25)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)
        actual.float().square().sum().backward()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert leaf.grad.dtype == dtype
            scale = float(gradient.abs().max())
            torch.testing.assert_close(leaf.grad.double(), gradient, rtol=0, atol=tolerance * max(1.0, scale))


def test_one_node_and_only_roots() -> None:
    for end in ([1], [1, 2, 3]):
        tree = TreeLayout(torch.zeros(len(end), dtype=torch.int64), torch.tensor(end))
        assert_equal_attention(tree, random_heads(tree), 1e-12, sinks=True)


def test_the_plan_is_built_once_for_all_layers() -> None:
    tree = tiny_segments().layout()
    leaves = random_heads(tree)
    segments_attention(*leaves[:3], tree, scaling=1.0)
    built = dict(tree._built)
    segments_attention(*leaves[:3], tree, scaling=1.0, sliding_window=10_000)
    assert built.keys() == tree._built.keys()
    assert all(tree._built[key] is value for key, value in built.items())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_queries_split_among_threads_give_the_same_gradients(threads: int, plain: bool) -> None:
    rng = random.Random(9)
    prompt = [rng.randrange(23) for _ in range(300)]
    tree = NaiveTrie([prompt + [i] + [rng.randrange(23) for _ in range(150)] for i in range(5)]).layout()
    leaves = random_heads(tree, heads=3, key_heads=1, width=4, value_width=4)
    torch.set_num_threads(threads)
    assert_equal_attention(tree, leaves, 1e-10, sinks=True, plain=plain)
    assert_equal_attention(tree, leaves, 1e-10, sliding_window=350, plain=plain)


def test_heads_are_balanced_among_threads_by_the_fewest_parts() -> None:
    assert [_balanced_splits(9, queries, 2) for queries in (100, 255, 256, 4096)] == [1, 1, 2, 2]
    assert _balanced_splits(8, 4096, 2) == 1
    assert _balanced_splits(2, 4096, 8) == 4
    assert _balanced_splits(1, 300, 16) == 2


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("tile", [16, 50, 1024])
def test_products_of_a_rectangle_equal_the_softmax(monkeypatch: pytest.MonkeyPatch, tile: int, threads: int) -> None:
    monkeypatch.setattr(rectangle, "TILE", tile)
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    shapes = [(6, 70, 8), (2, 90, 8), (2, 90, 8)]
    query, key, value = (torch.randn(s, dtype=torch.float64).mul_(3).requires_grad_() for s in shapes)
    logit = query @ key.repeat_interleave(3, 0).transpose(-1, -2) * 0.7
    expected = logit.softmax(-1) @ value.repeat_interleave(3, 0)
    cotangent = torch.randn_like(expected)
    with torch.no_grad():
        output, lse = rectangle.forward(query, key, value, 0.7)
        grads = rectangle.backward(query, key, value, cotangent, output, lse, 0.7, parts=threads)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(lse, logit.logsumexp(-1), rtol=0, atol=1e-10)
    for a, b in zip(grads, torch.autograd.grad(expected, (query, key, value), cotangent), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * float(b.abs().max()))


@pytest.mark.parametrize("threads", [1, 2])
def test_large_rectangles_in_float32_equal_float64(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(threads)
    calls = []
    forward = rectangle.forward
    monkeypatch.setattr(rectangle, "forward", lambda *arguments: (calls.append(1), forward(*arguments))[1])
    rng = random.Random(11)
    prompt = [rng.randrange(23) for _ in range(900)]
    tree = NaiveTrie([prompt + [i] + [rng.randrange(23) for _ in range(150)] for i in range(5)]).layout()
    exact = random_heads(tree, heads=3, key_heads=1, width=64, value_width=64)
    single = [x.detach().float().requires_grad_() for x in exact]
    outputs = [
        reference_attention(*exact[:3], tree, scaling=0.125, sinks_H=exact[3]),
        segments_attention(*single[:3], tree, scaling=0.125, sinks_H=single[3]),
    ]
    torch.testing.assert_close(outputs[1].double(), outputs[0], rtol=0, atol=1e-5)
    assert bool(calls) == serves(single[0].detach()), "the rectangle goes through matrix products where oneDNN serves"
    with torch.inference_mode():
        scored = segments_attention(*single[:3], tree, scaling=0.125, sinks_H=single[3])
    torch.testing.assert_close(scored, outputs[1].detach(), rtol=0, atol=1e-6)
    grads = [torch.autograd.grad(o.sin().sum(), x) for o, x in zip(outputs, (exact, single), strict=True)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b.double(), a, rtol=0, atol=1e-5 * max(1.0, float(a.abs().max())))
