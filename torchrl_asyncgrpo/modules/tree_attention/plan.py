"""Which tiles of queries × keys cover a tree: exactly the visible pairs, and few of them.

A range of nodes in pre-order is cut in two. What its right half sees of the left half are the ancestors of the cut
node: one tile, no mask where no subtree ends inside it. Both halves are covered the same way, until one masked
square is cheaper than the calls that it saves. The work is that of the visible pairs plus a bounded waste per square.

Suffixes: T nodes, Q queries, K keys. All arrays are numpy.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout

# Cost of reading and merging one row of a tile, in query-key pairs of attention.
_PAIRS_PER_ROW = 16


class Tile(NamedTuple):
    """Queries [first, last) over ``keys_K``; ``full`` where each of them sees all of these."""

    first: int
    last: int
    keys_K: np.ndarray
    full: bool

    @property
    def area(self) -> int:
        """Query-key pairs, visible or not."""
        return (self.last - self.first) * len(self.keys_K)


class Cover(NamedTuple):
    """``squares`` hold every query once, and its own key; ``levels`` hold the pairs outside them, each once.

    The tiles of one level share no query.
    """

    cost: float
    squares: list[Tile]
    levels: list[list[Tile]]


def cover_tree(tree: TreeLayout, window: int | None, overhead: int) -> Cover:
    """Cover the visible pairs of a tree by tiles.

    Args:
        tree: the layout.
        window: tokens a query looks back along its path, itself included; None for all.
        overhead: cost of one more tile, in query-key pairs.

    Returns:
        The cheapest cover that cutting near the middle finds.
    """
    return _Planner(tree, window, overhead).cover(0, tree.num_nodes)


def visible_QK(tree: TreeLayout, window: int | None, tile: Tile) -> np.ndarray:
    """[Q, K] bool, True where a query of the tile sees a key of it."""
    query_Q1, key_K = np.arange(tile.first, tile.last)[:, None], tile.keys_K
    seen_QK = (key_K <= query_Q1) & (query_Q1 < tree.end_T[key_K])
    if window is not None:
        seen_QK &= tree.depth_T[query_Q1] - tree.depth_T[key_K] < window
    return seen_QK


class _Planner:
    def __init__(self, tree: TreeLayout, window: int | None, overhead: int) -> None:
        self.depth_T, self.end_T = tree.depth_T, tree.end_T
        self.starts_branch_T = tree.parent_T != np.arange(-1, tree.num_nodes - 1)
        self.window, self.overhead = window, overhead

    def cover(self, a: int, b: int) -> Cover:
        """The cheapest cover of the pairs whose query and key both lie in [a, b)."""
        area = (b - a) ** 2
        whole = Cover(self.overhead + area, [Tile(a, b, np.arange(a, b), False)], [])
        if area <= 2 * self.overhead:
            return whole
        m = self.cut(a, b)
        left, right, tiles = self.cover(a, m), self.cover(m, b), self.tiles(a, m, b)
        cost = left.cost + right.cost + sum(map(self.cost, tiles))
        if whole.cost <= cost:
            return whole
        none: list[Tile] = []
        below = [x + y for x, y in zip_longest(left.levels, right.levels, fillvalue=none)]
        return Cover(cost, left.squares + right.squares, [tiles, *below])

    def cost(self, tile: Tile) -> int:
        return self.overhead + tile.area + _PAIRS_PER_ROW * (tile.last - tile.first + len(tile.keys_K))

    def cut(self, a: int, b: int) -> int:
        """The highest branch near the middle, where few ancestors are cut off; the middle of a chain."""
        middle, quarter = (a + b) // 2, max((b - a) // 4, 1)
        branches = a + quarter + np.flatnonzero(self.starts_branch_T[a + quarter : b - quarter])
        if not len(branches):
            return middle
        depth = self.depth_T[branches]
        highest = branches[depth == depth.min()]
        return int(highest[np.abs(highest - middle).argmin()])

    def tiles(self, a: int, m: int, b: int) -> list[Tile]:
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
            Tile(m + first, m + last, keys_K[low:high], full)
            for first, last, low, high, full in _tile_rows(low_Q, high_Q, self.overhead)
        ]


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
