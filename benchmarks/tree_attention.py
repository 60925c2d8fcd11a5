"""Tree attention on CPU against SDPA with a dense mask: one layer of SmolLM2-135M, forward and backward.

9 query heads that share 3 key heads, width 64, float32. The peer's mask is made beforehand; ours plans its rectangles
beforehand too, as all layers share a plan, and the time of planning is a row of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from torchrl_asyncgrpo.modules.tree_attention import TreeLayout
from torchrl_asyncgrpo.modules.tree_attention.reference import reference_attention
from torchrl_asyncgrpo.modules.tree_attention.segments import segments_attention

HEADS, KEY_HEADS, WIDTH = 9, 3, 64


def layout_of(depth: list[int]) -> TreeLayout:
    """A layout from the depths of its nodes in pre-order."""
    end, open_nodes = [len(depth)] * len(depth), []
    for node, level in enumerate(depth):
        while len(open_nodes) > level:
            end[open_nodes.pop()] = node
        open_nodes.append(node)
    return TreeLayout(torch.tensor(depth), torch.tensor(end))


def fan(prompt: int, branches: int, length: int) -> TreeLayout:
    """A prompt with branches of one length that part at its end."""
    return layout_of([*range(prompt), *list(range(prompt, prompt + length)) * branches])


def many_short_branches() -> TreeLayout:
    """16 prompts of 35 tokens with a head of 20 in common × 8 completions of up to 12, which share beginnings."""
    rng = random.Random(0)
    depth = list(range(20))
    for _ in range(16):
        depth += range(20, 35)
        completions = sorted({tuple(rng.randrange(2) for _ in range(rng.randint(3, 12))) for _ in range(8)})
        before: tuple[int, ...] = ()
        for completion in completions:
            shared = next((i for i, (a, b) in enumerate(zip(before, completion, strict=False)) if a != b), len(before))
            depth += range(35 + shared, 35 + len(completion))
            before = completion
    return layout_of(depth)


def forward_backward(attend: Callable, tree: TreeLayout) -> Callable[[], None]:
    torch.manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, tree.num_nodes, heads, WIDTH).transpose(1, 2).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )

    def step() -> None:
        output = attend(query, key, value, tree, scaling=WIDTH**-0.5)
        torch.autograd.grad(output, (query, key, value), grad)

    return step


def seconds(step: Callable[[], None], repeats: int) -> float:
    step()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def against_dense(name: str, tree: TreeLayout, bar: float, repeats: int, peer_repeats: int) -> dict:
    ours = seconds(forward_backward(segments_attention, tree), repeats)
    peer = seconds(forward_backward(reference_attention, tree), peer_repeats)
    return {"name": name, "ours": ours, "peer": peer, "unit": "s", "ratio": peer / ours, "bar": bar}


def growth() -> dict:
    """Time per visible pair over shapes whose visible pairs span a factor of 40: flat, if time grows with them."""
    per_pair = {}
    for shape in [(512, 4, 128), (1024, 8, 256), (2048, 16, 256), (512, 32, 128)]:
        tree = fan(*shape)
        pairs = int((tree.depth_T + 1).sum())
        per_pair[shape] = seconds(forward_backward(segments_attention, tree), 3) / pairs * 1e9
    worst, best = max(per_pair.values()), min(per_pair.values())
    return {
        "name": "tree attention: ns per visible pair, dearest and cheapest of 4 shapes",
        "ours": worst,
        "peer": best,
        "unit": "ns/pair",
        "ratio": best / worst,
        "bar": 0.5,
    }


def planning(tree: TreeLayout) -> dict:
    """Building the plan against attending one layer."""
    step = forward_backward(segments_attention, tree)
    layer = seconds(step, 5)

    def plan() -> None:
        tree._built.clear()
        segments_attention(*(torch.empty(1, h, tree.num_nodes, WIDTH) for h in (9, 3, 3)), tree, scaling=1.0)

    with torch.no_grad():
        once = seconds(plan, 5)
        kept = seconds(lambda: segments_attention(*empties(tree), tree, scaling=1.0), 5)
    return {
        "name": "plan of many short branches",
        "ours": once - kept,
        "peer": layer,
        "unit": "s",
        "ratio": layer / (once - kept),
        "bar": 2.0,
    }


def run() -> list[dict]:
    """One row per claim: name, ours, peer, unit, ratio (peer / ours; larger is better), bar (the least ratio)."""
    return [
        against_dense("tree attention: 4096 + 32 × 128 (T = 8192)", fan(4096, 32, 128), 3.0, 3, 1),
        against_dense("tree attention: 2048 + 16 × 256 (T = 6144)", fan(2048, 16, 256), 3.0, 3, 1),
        against_dense("tree attention: 16 prompts × 8 short completions", many_short_branches(), 1.0, 15, 9),
        growth(),
    ]


def main() -> None:
    for row in run():
        print(
            f"{row['name']:<75} ours {row['ours']:8.4f} {row['unit']:<8} peer {row['peer']:8.4f}  "
            f"ratio {row['ratio']:6.2f} (bar {row['bar']})"
        )


if __name__ == "__main__":
    main()
