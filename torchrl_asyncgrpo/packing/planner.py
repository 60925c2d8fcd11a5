"""Where to cut a sorted window into micro-batches: exact, by dynamic programming over cut positions.

The rollouts are sorted, so a micro-batch is a range ``[i, j)`` of them, and its nodes follow from the prefix that
each rollout shares with the one before it: Σ length − Σ shared, plus the prefix that the cut at ``i`` re-forwards.

Suffixes: S rollouts, C cut positions 0..S, W positions that one cut may take.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_EVENNESS = 1 << 10  # resolution of the tie-break, parts of the window


def plan(
    length_S: Ints, shared_S: Ints, entries_S: Ints, *, token_budget: int | None = None, min_micro_batches: int = 1
) -> list[int]:
    """Choose the cuts of a window.

    In this order: the fewest micro-batches that keep both the nodes and the entries of each within ``token_budget``
    (but at least ``min_micro_batches``, as far as there are rollouts); then the fewest nodes over all micro-batches,
    that is the fewest shared tokens forwarded again; then the most even split. A rollout that alone exceeds the
    budget gets a micro-batch of its own.

    Args:
        length_S: [S] int64, tokens of each rollout in sorted order, >= 1; S >= 1.
        shared_S: [S] int64, leading tokens shared with the rollout before it; 0 for the first, all 0 without sharing.
        entries_S: [S] int64, loss entries of each rollout.
        token_budget: most nodes, and most entries, of one micro-batch; None for no limit.
        min_micro_batches: least number of micro-batches.

    Returns:
        K + 1 increasing positions, from 0 to S; micro-batch ``k`` holds the rollouts ``cuts[k] .. cuts[k + 1] - 1``.
    """
    S = len(length_S)
    nodes_C = np.concatenate([[0], np.cumsum(length_S - shared_S)])
    first_C = _first_starts(nodes_C, shared_S, entries_S, token_budget)
    low, high = _cut_ranges(first_C, S, min_micro_batches)
    count = len(low) - 1
    values: list[Ints] = [np.zeros(1, dtype=np.int64)]  # per cut, over its positions: the least cost so far
    for k in range(1, count + 1):
        position_W = np.arange(low[k], high[k] + 1)
        left_W = np.maximum(first_C[position_W], low[k - 1]) - low[k - 1]
        right_W = np.minimum(position_W - 1, high[k - 1]) + 1 - low[k - 1]
        cost_W = _range_min(values[-1], left_W, right_W)
        if k < count:
            off_W = np.abs(nodes_C[position_W] * count - k * nodes_C[-1]) * _EVENNESS // (count * nodes_C[-1])
            cost_W += shared_S[position_W] * _EVENNESS * count + off_W
        values.append(cost_W)
    cuts = [S]
    for k in range(count - 1, -1, -1):
        left, right = max(int(first_C[cuts[-1]]), low[k]), min(cuts[-1] - 1, high[k]) + 1
        cuts.append(left + int(values[k][left - low[k] : right - low[k]].argmin()))
    return cuts[::-1]


def _first_starts(nodes_C: Ints, shared_S: Ints, entries_S: Ints, token_budget: int | None) -> Ints:
    """[S + 1]: the smallest start of a micro-batch that ends before position ``c``; non-decreasing in ``c``."""
    S = len(shared_S)
    if token_budget is None:
        return np.zeros(S + 1, dtype=np.int64)
    entries_C = np.concatenate([[0], np.cumsum(entries_S)])
    by_nodes_C = np.searchsorted(nodes_C[:-1] - shared_S, nodes_C - token_budget)
    by_entries_C = np.searchsorted(entries_C[:-1], entries_C - token_budget)
    return np.minimum(np.maximum(by_nodes_C, by_entries_C), np.maximum(np.arange(S + 1) - 1, 0))


def _cut_ranges(first_C: Ints, S: int, min_micro_batches: int) -> tuple[list[int], list[int]]:
    """Lowest and highest position of every cut 0..K, where K is the number of micro-batches.

    The highest comes from filling micro-batches from the front, the lowest from filling them from the back; the
    positions between are all feasible, since a part of a micro-batch within the budget is within it too.
    """
    furthest_C = np.searchsorted(first_C[1:], np.arange(S), side="right").tolist()
    high = [0]
    while high[-1] < S:
        high.append(furthest_C[high[-1]])
    count = max(len(high) - 1, min(min_micro_batches, S))
    high += [S] * (count + 1 - len(high))
    low = [S]
    for k in range(count - 1, -1, -1):
        low.append(max(int(first_C[low[-1]]), k))
    return low[::-1], [min(position, S - (count - k)) for k, position in enumerate(high)]


def _range_min(value_W: Ints, left_Q: Ints, right_Q: Ints) -> Ints:
    """Minimum of ``value_W[left:right]`` for every pair, from minima over windows of powers of two."""
    level_Q = np.log2(right_Q - left_Q).astype(np.int64)
    minimum_Q = np.empty_like(left_Q)
    for level in range(int(level_Q.max()) + 1):
        at_Q, span = level_Q == level, 1 << level
        minimum_Q[at_Q] = np.minimum(value_W[left_Q[at_Q]], value_W[right_Q[at_Q] - span])
        value_W = np.minimum(value_W[:-span], value_W[span:])
    return minimum_Q
