"""Which rectangles of queries × keys cover a tree: exactly the visible pairs, and few of them.

A range of nodes in pre-order is cut in two. What its right half sees of the left half are the ancestors of the cut
node: one rectangle, no mask where no subtree ends inside it. Both halves are covered the same way, until one masked
square is cheaper than the calls that it saves. The work is that of the visible pairs plus a bounded waste per square.

Suffixes: T nodes, Q queries, K keys. All arrays are numpy; a plan is built once per layout and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout

# Cost of reading and merging one row of a rectangle, in query-key pairs of attention.
_PAIRS_PER_ROW = 16


@dataclass(frozen=True)
class Rectangle:
    """Queries and keys that one kernel call attends.

    Attributes:
        queries: contiguous range of nodes, Q of them.
        keys: contiguous range of nodes, or [K] int64 their indices.
        causal: the keys are the queries, and form a chain.
        bias_QK: 0 where the query sees the key, -inf elsewhere; None where it sees all, or by ``causal``.
        blind_Q: True where a query sees no key of this rectangle; None where there is no such query.
    """

    queries: slice
    keys: slice | Tensor
    causal: bool = False
    bias_QK: Tensor | None = None
    blind_Q: Tensor | None = None


class Plan(NamedTuple):
    """``squares`` hold every query once, and its own key; ``rectangles`` the pairs outside them, each once."""

    squares: list[Rectangle]
    rectangles: list[Rectangle]


class _Tile(NamedTuple):
    first: int
    last: int
    keys_K: np.ndarray
    full: bool


class _Cover(NamedTuple):
    cost: float
    squares: list[tuple[int, int]]
    tiles: list[_Tile]


def plan_rectangles(tree: TreeLayout, sliding_window: int | None, overhead: int, dtype: torch.dtype) -> Plan:
    """Cover the visible pairs of a tree by rectangles.

    Args:
        tree: the layout.
        sliding_window: tokens a query looks back along its path, itself included; None for all.
        overhead: cost of one kernel call, in query-key pairs.
        dtype: of the biases.

    Returns:
        The plan, its tensors on the layout's device.
    """
    planner = _Planner(tree, tree.effective_window(sliding_window), overhead)
    cover = planner.cover(0, tree.num_nodes)
    return Plan(
        [planner.square(a, b, dtype) for a, b in cover.squares],
        [planner.rectangle(tile, dtype) for tile in cover.tiles],
    )


class _Planner:
    def __init__(self, tree: TreeLayout, window: int | None, overhead: int) -> None:
        self.depth_T, self.end_T = tree.depth_T, tree.end_T
        self.starts_branch_T = tree.parent_T != np.arange(-1, tree.num_nodes - 1)
        self.device, self.window, self.overhead = tree.device, window, overhead

    def cover(self, a: int, b: int) -> _Cover:
        """The cheapest cover of the pairs whose query and key both lie in [a, b)."""
        area = (b - a) ** 2
        whole = _Cover(self.overhead + area, [(a, b)], [])
        if area <= 2 * self.overhead:
            return whole
        m = self.cut(a, b)
        left, right, tiles = self.cover(a, m), self.cover(m, b), self.tiles(a, m, b)
        cost = (
            left.cost
            + right.cost
            + sum(
                self.overhead + (t.last - t.first) * len(t.keys_K) + _PAIRS_PER_ROW * (t.last - t.first + len(t.keys_K))
                for t in tiles
            )
        )
        if whole.cost <= cost:
            return whole
        return _Cover(cost, left.squares + right.squares, left.tiles + right.tiles + tiles)

    def cut(self, a: int, b: int) -> int:
        """The highest branch near the middle, where few ancestors are cut off; the middle of a chain."""
        middle, quarter = (a + b) // 2, max((b - a) // 4, 1)
        branches = a + quarter + np.flatnonzero(self.starts_branch_T[a + quarter : b - quarter])
        if not len(branches):
            return middle
        depth = self.depth_T[branches]
        highest = branches[depth == depth.min()]
        return int(highest[np.abs(highest - middle).argmin()])

    def tiles(self, a: int, m: int, b: int) -> list[_Tile]:
        """The pairs of queries in [m, b) with keys in [a, m)."""
        keys_K = a + np.flatnonzero(self.end_T[a:m] > m)
        if not len(keys_K):
            return []
        query_Q = np.arange(m, min(b, self.end_T[keys_K[0]]))
        # A query sees a range of the ancestors of m: from where its window begins, down to where its path turned off.
        high_Q = np.searchsorted(-self.end_T[keys_K], -query_Q, side="left")
        low_Q = np.zeros_like(high_Q)
        if self.window is not None:
            low_Q = (self.depth_T[query_Q] - self.window + 1 - self.depth_T[keys_K[0]]).clip(0)
        blind_Q = low_Q >= high_Q
        low_Q[blind_Q], high_Q[blind_Q] = len(keys_K), 0
        return [
            _Tile(m + first, m + last, keys_K[low:high], full)
            for first, last, low, high, full in _tile_rows(low_Q, high_Q, self.overhead)
        ]

    def visible_QK(self, query_Q: np.ndarray, key_K: np.ndarray) -> np.ndarray:
        query_Q1 = query_Q[:, None]
        visible_QK = (key_K <= query_Q1) & (query_Q1 < self.end_T[key_K])
        if self.window is not None:
            visible_QK &= self.depth_T[query_Q1] - self.depth_T[key_K] < self.window
        return visible_QK

    def square(self, a: int, b: int, dtype: torch.dtype) -> Rectangle:
        chain = self.depth_T[b - 1] - self.depth_T[a] == b - 1 - a
        if chain and (self.window is None or b - a <= self.window):
            return Rectangle(slice(a, b), slice(a, b), causal=True)
        index_T = np.arange(a, b)
        return Rectangle(slice(a, b), slice(a, b), bias_QK=self.bias(self.visible_QK(index_T, index_T), dtype))

    def rectangle(self, tile: _Tile, dtype: torch.dtype) -> Rectangle:
        first, last = int(tile.keys_K[0]), int(tile.keys_K[-1]) + 1
        contiguous = last - first == len(tile.keys_K)
        keys = slice(first, last) if contiguous else torch.as_tensor(tile.keys_K, device=self.device)
        queries = slice(tile.first, tile.last)
        if tile.full:
            return Rectangle(queries, keys)
        visible_QK = self.visible_QK(np.arange(tile.first, tile.last), tile.keys_K)
        blind_Q = ~visible_QK.any(1)
        return Rectangle(
            queries,
            keys,
            bias_QK=self.bias(visible_QK, dtype),
            blind_Q=torch.as_tensor(blind_Q, device=self.device) if blind_Q.any() else None,
        )

    def bias(self, visible_QK: np.ndarray, dtype: torch.dtype) -> Tensor:
        bias_QK = torch.zeros(visible_QK.shape, dtype=dtype)
        return bias_QK.masked_fill_(torch.as_tensor(~visible_QK), -torch.inf).to(self.device)


def _tile_rows(low_Q: np.ndarray, high_Q: np.ndarray, overhead: int) -> list[tuple[int, int, int, int, bool]]:
    """Cover rows that each see keys [low, high) by few tiles; a row that sees none has high < low."""
    tiles = []
    pending = [(0, len(low_Q))]
    while pending:
        first, last = pending.pop()
        seen = first + np.flatnonzero(high_Q[first:last] > low_Q[first:last])
        if not len(seen):
            continue
        first, last = int(seen[0]), int(seen[-1]) + 1
        low, high = low_Q[first:last], high_Q[first:last]
        split = _best_split(seen, low, high, first, overhead)
        if split is not None:
            pending += [(first, split), (split, last)]
            continue
        l0, h0 = int(low.min()), int(high.max())
        tiles.append((first, last, l0, h0, bool((low == l0).all() and (high == h0).all())))
    return tiles


def _best_split(seen: np.ndarray, low: np.ndarray, high: np.ndarray, first: int, overhead: int) -> int | None:
    """Where two tiles save more pairs than a call costs; in the widest gap of blind rows, or where the hulls shrink."""
    width = int(high.max() - low.min())
    gap = np.diff(seen)
    if len(gap) and (gap.max() - 1) * width > overhead:
        return int(seen[gap.argmax() + 1])
    rows = np.arange(1, len(low))
    above = rows * (np.maximum.accumulate(high)[:-1] - np.minimum.accumulate(low)[:-1])
    below = rows[::-1] * (np.maximum.accumulate(high[::-1])[::-1][1:] - np.minimum.accumulate(low[::-1])[::-1][1:])
    if not len(rows):
        return None
    best = int((above + below).argmin())
    saved = len(low) * width - (above[best] + below[best])
    return first + best + 1 if saved > overhead else None
