"""The prefix trie of sorted token rows, as flat arrays in depth-first pre-order.

Suffixes: S rows, T nodes, L entries, N tokens of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Trie(NamedTuple):
    """Nodes of a trie and where its rows lie on them.

    Attributes:
        input_ids: [T] int64, the token of each node.
        position_ids: [T] int64, depth; 0 at a root.
        parent: [T] int64, -1 at a root.
        subtree_end: [T] int64; the descendants of node ``i`` are ``i + 1 .. subtree_end[i] - 1``.
        leaf: [S] int64, the node at which each row ends; an inner node where a row is a prefix of another.
        entry_node: [L] int64, the node of each entry.
        entry_row: [L] int64, the row of each entry; non-decreasing.
    """

    input_ids: Ints
    position_ids: Ints
    parent: Ints
    subtree_end: Ints
    leaf: Ints
    entry_node: Ints
    entry_row: Ints


def common_prefixes(rows: Sequence[Ints]) -> Ints:
    """Length of the prefix that each row shares with the row before it.

    Args:
        rows: S arrays of [N] tokens, N >= 1.

    Returns:
        [S] int64; 0 for the first row. Where the rows are sorted, no earlier row shares more than this.
    """
    shared_S = np.zeros(len(rows), dtype=np.int64)
    for r in range(1, len(rows)):
        shortest = min(len(rows[r - 1]), len(rows[r]))
        differs_N = rows[r - 1][:shortest] != rows[r][:shortest]
        first = int(differs_N.argmax())
        shared_S[r] = first if differs_N[first] else shortest
    return shared_S


def fold(rows: Sequence[Ints], shared_S: Ints, entries_S: Ints, entry_depth_L: Ints) -> Trie:
    """Lay rows out as a trie: each row adds the tail behind the prefix it shares with the row before it.

    With rows in lexicographic order and ``shared_S`` their common prefixes the trie is minimal, one node per
    distinct (path from the root, token). With ``shared_S`` all zero it is flat, one chain per row.

    Args:
        rows: S arrays of [N] tokens, N >= 1.
        shared_S: [S] int64, the prefix each row shares with the row before it; 0 for the first.
        entries_S: [S] int64, the number of entries of each row; 0 to N.
        entry_depth_L: [L] int64, their positions in the row, row after row.

    Returns:
        The trie, nodes in depth-first pre-order.
    """
    length_S = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    tail_S = length_S - shared_S
    start_S = np.cumsum(tail_S) - tail_S
    trie = _allocate(int(tail_S.sum()), len(entry_depth_L), len(rows))
    shared, lengths, starts = shared_S.tolist(), length_S.tolist(), start_S.tolist()
    np.concatenate([row[depth:] for row, depth in zip(rows, shared, strict=True)], out=trie.input_ids)
    index_T = np.arange(len(trie.parent))
    np.subtract(index_T, 1, out=trie.parent)
    trie.subtree_end.fill(len(index_T))
    depth_N = np.arange(max(lengths))
    path_N = np.empty_like(depth_N)  # the node at each depth of the current row
    above = done = 0
    for r, (depth, length, start, entries) in enumerate(zip(shared, lengths, starts, entries_S.tolist(), strict=True)):
        trie.subtree_end[path_N[depth:above]] = start
        if depth < length:
            stop = start + length - depth
            trie.position_ids[start:stop] = depth_N[depth:length]
            trie.parent[start] = path_N[depth - 1] if depth else -1
            path_N[depth:length] = index_T[start:stop]
        trie.leaf[r] = path_N[length - 1]
        trie.entry_node[done : done + entries] = path_N[entry_depth_L[done : done + entries]]
        trie.entry_row[done : done + entries] = r
        above, done = length, done + entries
    return trie


def _allocate(T: int, L: int, S: int) -> Trie:
    """All columns in one block: in many medium-sized ones, first touches of memory would take most of the time."""
    sizes = (T, T, T, T, S, L, L)
    return Trie(*np.split(np.empty(sum(sizes), dtype=np.int64), np.cumsum(sizes)[:-1]))
