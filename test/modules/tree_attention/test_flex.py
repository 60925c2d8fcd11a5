"""The flex backend: its block mask against brute force and its forward on CPU; its backward needs CUDA."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from tree_oracle import NaiveTrie, assert_same, random_rollouts, run_alone, run_tree, tiny_model

from torchrl_asyncgrpo.modules.tree_attention import TreeLayout, install
from torchrl_asyncgrpo.modules.tree_attention.flex import BLOCK, block_mask, mask_mod, tree_flex_attention
from torchrl_asyncgrpo.modules.tree_attention.reference import reference_attention


def blocks_of(visible_TT: torch.Tensor) -> torch.Tensor:
    """[I, J, BLOCK, BLOCK], padded with pairs that are not visible."""
    missing = -len(visible_TT) % BLOCK
    padded = torch.nn.functional.pad(visible_TT, (0, missing, 0, missing))
    return padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2)


def table(count: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    chosen_IJ = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for i, n in enumerate(count[0, 0].tolist()):
        chosen_IJ[i, indices[0, 0, i, :n].long()] = True
    return chosen_IJ


@pytest.mark.parametrize("window", [None, 3, 90, 300])
@pytest.mark.parametrize(("seed", "num", "max_new"), [(0, 30, 70), (1, 4, 500), (2, 300, 10), (3, 2, 3)])
def test_block_mask_equals_brute_force(seed: int, num: int, max_new: int, window: int | None) -> None:
    trie = NaiveTrie(random_rollouts(seed, num=num, max_new=max_new))
    tree, visible_TT = trie.layout(), trie.visible_TT(window)
    T = tree.num_nodes
    assert torch.equal(create_mask(mask_mod(tree, window), 1, 1, T, T, device="cpu")[0, 0], visible_TT)
    mask = block_mask(tree, window)
    assert mask.shape == (1, 1, T, T)
    full_IJ = table(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial_IJ = table(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(full_IJ, blocks_of(visible_TT).all(-1).all(-1))
    some_IJ = blocks_of(visible_TT).any(-1).any(-1)
    assert not (partial_IJ & full_IJ).any()
    assert ((partial_IJ | full_IJ) | ~some_IJ).all()
    if window is None:
        assert torch.equal(partial_IJ | full_IJ, some_IJ)


@pytest.mark.parametrize("features", ["plain", "window", "softcap", "sinks"])
def test_forward_on_cpu_equals_the_reference(features: str) -> None:
    tree = NaiveTrie(random_rollouts(4, num=20, max_new=30)).layout()
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, tree.num_nodes, 16) for h in (4, 2, 2))
    kwargs = {
        "plain": {},
        "window": {"sliding_window": 9},
        "softcap": {"softcap": 0.7},
        "sinks": {"sinks_H": torch.randn(4), "sliding_window": 9},
    }[features]
    expected = reference_attention(query, key, value, tree, scaling=0.3, **kwargs)
    actual = tree_flex_attention(query, key, value, tree, scaling=0.3, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_backward_on_cpu_is_refused_by_name() -> None:
    tree = TreeLayout(torch.tensor([0, 1]), torch.tensor([2, 2]))
    query = torch.randn(1, 2, 2, 16, requires_grad=True)
    with pytest.raises(ValueError, match="'flex' has no backward on CPU; use backend 'segments'"):
        tree_flex_attention(query, query, query, tree, scaling=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's backward needs CUDA")
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt2"]
)
def test_models_on_cuda_equal_each_rollout_alone(model_type: str) -> None:
    width = {"n_embd": 64} if model_type == "gpt2" else {"hidden_size": 64, "head_dim": 16}
    model = tiny_model(model_type, torch.float32, **width).cuda()
    rollouts = random_rollouts(7, num=20, max_new=40)
    alone = run_alone(model, rollouts)
    assert install(model, "flex") == "flex"
    assert_same(alone, run_tree(model, rollouts), rollouts, 1e-3)
