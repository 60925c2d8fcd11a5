"""Tree attention on CPU against SDPA with a dense mask: one layer of SmolLM2-135M, forward and backward.

9 query heads that share 3 key heads, width 64, float32. All layers share the peer's mask and our plan alike, so
making them is in the first of the rounds that a median is taken of; the time of planning is a row of its own.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

# Threads that wait for each other without spinning: on a shared machine spinning measures the other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from torchrl_asyncgrpo.modules.tree_attention import TreeLayout
from torchrl_asyncgrpo.modules.tree_attention.blocks import plan_blocks
from torchrl_asyncgrpo.modules.tree_attention.reference import reference_attention
from torchrl_asyncgrpo.modules.tree_attention.segments import call_overhead, segments_attention

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


def caterpillar(length: int) -> TreeLayout:
    """A chain with a leaf at every node: not one segment is longer than a node."""
    return layout_of([level for node in range(length) for level in (node, node + 1)])


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


def in_turns(steps: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each step; they take turns, so that a busy machine slows all of them down alike."""
    taken = []
    for _ in range(rounds):
        taken.append([])
        for step in steps:
            start = time.perf_counter()
            step()
            taken[-1].append(time.perf_counter() - start)
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def against_dense(name: str, tree: TreeLayout, bar: str | None, rounds: int) -> dict[str, Any]:
    ours, peer = in_turns(
        [forward_backward(segments_attention, tree), forward_backward(reference_attention, tree)], rounds
    )
    return {"name": name, "ours": ours, "peer": peer, "unit": "s", "ratio": peer / ours, "bar": bar}


def growth() -> dict[str, Any]:
    """Time per visible pair over shapes whose pairs span a factor of 10: flat where time grows with them."""
    trees = [fan(*shape) for shape in [(1024, 4, 128), (512, 32, 128), (1024, 8, 256), (2048, 16, 256)]]
    taken = in_turns([forward_backward(segments_attention, tree) for tree in trees], 3)
    per_pair = [t / int((tree.depth_T + 1).sum()) * 1e9 for t, tree in zip(taken, trees, strict=True)]
    return {
        "name": "time per visible pair, dearest (ours) and cheapest (peer) of 4 shapes with 1 to 11 million pairs",
        "ours": max(per_pair),
        "peer": min(per_pair),
        "unit": "ns",
        "ratio": min(per_pair) / max(per_pair),
        "bar": "ratio >= 0.4",
    }


def planning(name: str, tree: TreeLayout) -> dict[str, Any]:
    """Planning, once for all layers, against attending one layer."""
    overhead = call_overhead(HEADS, WIDTH)

    def plan() -> None:
        plan_blocks(tree, None, overhead, torch.float32)

    ours, layer = in_turns([plan, forward_backward(segments_attention, tree)], 7)
    return {"name": name, "ours": ours, "peer": layer, "unit": "s", "ratio": layer / ours, "bar": "ratio >= 3"}


def run() -> list[dict[str, Any]]:
    """One row per claim; ``run.py`` says what the keys mean."""
    short = many_short_branches()
    return [
        against_dense("tree attention, 4096 + 32 × 128, against a dense mask", fan(4096, 32, 128), "ratio >= 3", 3),
        against_dense("tree attention, 2048 + 16 × 256, against a dense mask", fan(2048, 16, 256), "ratio >= 3", 3),
        against_dense(
            "tree attention, 16 prompts × 8 short completions, against a dense mask", short, "ratio >= 1", 15
        ),
        # the worst case: no segment is longer than one node, so that there is nothing to win
        against_dense(
            "tree attention, a branch at each of 500 nodes, against a dense mask", caterpillar(500), None, 15
        ),
        growth(),
        planning("planning 16 prompts × 8 short completions, against one layer", short),
    ]


def main() -> None:
    for row in run():
        figures = f"ours {row['ours']:9.4f} {row['unit']:<2}  peer {row['peer']:9.4f}  ratio {row['ratio']:6.2f}"
        print(f"{row['name']:<100} {figures}  (bar {row['bar']})")


if __name__ == "__main__":
    main()
