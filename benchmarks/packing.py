"""Time packing against TRL's prefix trie on the same rollouts: python benchmarks/packing.py.

The workload is 8 groups × 16 rollouts, prompt 1024, completions 1024–2048: 330k tokens. Ours goes from rollout
TensorDicts to TreeBatches, entries included; TRL's ``TreeRow`` adds and packs the same samples.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrl_asyncgrpo.data.schema import make_rollout
from torchrl_asyncgrpo.packing import TreePacker, packing_ratio

GROUPS, ROLLOUTS, PROMPT, COMPLETION = 8, 16, 1024, 2048
TOKEN_BUDGET = 32_768


def samples(seed: int = 0) -> list[tuple[int, np.ndarray]]:
    """(group id, tokens) with completions of COMPLETION / 2 .. COMPLETION tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(GROUPS):
        prompt = rng.integers(0, 150_000, PROMPT)
        for _ in range(ROLLOUTS):
            completion = rng.integers(0, 150_000, rng.integers(COMPLETION // 2, COMPLETION + 1))
            rows.append((group, np.concatenate([prompt, completion])))
    return rows


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median wall time of ``work`` after one call to warm up."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def load_peer() -> Any | None:
    """TRL's packing module, loaded by path: importing its package pulls in optional dependencies."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        print("trl is not installed, so there is no peer to compare with: pip install -e '.[bench]'")
        return None
    spec = importlib.util.spec_from_file_location(
        "trl_packing", Path(found.origin).parent / "experimental/async_grpo/packing.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer_work(peer: Any, rows: list[tuple[int, np.ndarray]]) -> Callable[[], Any]:
    """TRL's fold of the same rollouts."""
    inputs = [
        {
            "input_ids": torch.from_numpy(tokens),
            "completion_mask": (torch.arange(len(tokens)) >= PROMPT).long(),
            "old_log_probs": torch.zeros(len(tokens)),
            "advantage": 0.5,
            "group_id": group,
        }
        for group, tokens in rows
    ]

    def work() -> Any:
        row = peer.TreeRow()
        for sample in inputs:
            row.add(sample)
        return row.pack()

    return work


def run() -> list[dict[str, Any]]:
    """Rows of the benchmark table: name, ours, peer, unit, ratio, bar; peer and ratio are None without TRL."""
    rows = samples()
    rollouts = [
        make_rollout(tokens, torch.arange(len(tokens)) >= PROMPT, torch.zeros(len(tokens)), group_id=group)
        for group, tokens in rows
    ]
    raw = sum(len(tokens) for _, tokens in rows)
    ours = median_seconds(lambda: TreePacker()(rollouts), repeats=21)
    planned = median_seconds(lambda: TreePacker(TOKEN_BUDGET)(rollouts), repeats=21)
    peer = load_peer()
    theirs = None if peer is None else median_seconds(peer_work(peer, rows), repeats=5)
    ratio = packing_ratio(TreePacker()(rollouts))
    return [
        {
            "name": f"pack {raw / 1e3:.0f}k tokens, ρ {ratio:.2f}, against TRL TreeRow",
            "ours": ours,
            "peer": theirs,
            "unit": "s",
            "ratio": None if theirs is None else theirs / ours,
            "bar": "ratio >= 100",
        },
        {
            "name": f"plan and pack, budget {TOKEN_BUDGET}, per 100k tokens",
            "ours": planned / raw * 1e5 * 1e3,
            "peer": None,
            "unit": "ms",
            "ratio": None,
            "bar": "ours < 5",
        },
    ]


if __name__ == "__main__":
    for row in run():
        figures = {key: f"{row[key]:.4g}" if row[key] is not None else "-" for key in ("ours", "peer", "ratio")}
        print(
            f"{row['name']}: ours {figures['ours']} {row['unit']}, peer {figures['peer']}, "
            f"ratio {figures['ratio']} ({row['bar']})"
        )
