"""Tiles of like size side by side, as one kernel call attends them.

Calls cost as much as thousands of pairs, and more where threads have to wait for each other, so tiles are padded to a
common size wherever the padding is cheaper. Built once per layout, shared by all layers.

Suffixes: N tiles of a block, Q queries and K keys of the largest of them, T nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout
from torchrl_asyncgrpo.modules.tree_attention.plan import Tile, cover_tree, visible_QK


@dataclass(frozen=True)
class Block:
    """The tiles of one kernel call.

    Attributes:
        size: N.
        queries: nodes, as a slice where N is 1, else [N·Q] int64. Padding repeats a node of the tile.
        rows: the same with T, a row to throw away, in the place of padding.
        keys: nodes, as a slice where N is 1 and they are contiguous, else [N·K] int64; padding repeats a node.
        bias_N1QK: 0 where the query sees the key, -inf elsewhere and in padding; None where all see all.
        blind_N1Q: True where a query sees no key of its tile; None where there is no such query.
    """

    size: int
    queries: slice | Tensor
    rows: slice | Tensor
    keys: slice | Tensor
    bias_N1QK: Tensor | None
    blind_N1Q: Tensor | None


class Plan(NamedTuple):
    """``squares`` hold every query once, and its own key; ``rectangles`` the other visible pairs, each once."""

    squares: list[Block]
    rectangles: list[Block]


def plan_blocks(tree: TreeLayout, window: int | None, overhead: int, dtype: torch.dtype) -> Plan:
    """Cover the visible pairs of a tree by blocks; no block holds a query twice.

    Args:
        tree: the layout.
        window: tokens a query looks back along its path, itself included; None for all.
        overhead: cost of one more tile or call, in query-key pairs.
        dtype: of the biases.

    Returns:
        The plan, its tensors on the layout's device.
    """
    cover = cover_tree(tree, window, overhead)
    return Plan(
        [_block(tree, window, group, dtype) for group in _groups(cover.squares, overhead)],
        [_block(tree, window, group, dtype) for level in cover.levels for group in _groups(level, overhead)],
    )


def _groups(tiles: list[Tile], overhead: int) -> list[list[Tile]]:
    """Tiles that cost less padded to one size than one by one."""
    groups: list[list[Tile]] = []
    Q = K = 0
    for tile in sorted(tiles, key=lambda t: t.area, reverse=True):
        wide, high = max(Q, tile.last - tile.first), max(K, len(tile.keys_K))
        if groups and wide * high * (len(groups[-1]) + 1) - Q * K * len(groups[-1]) <= tile.area + overhead:
            groups[-1].append(tile)
            Q, K = wide, high
        else:
            groups.append([tile])
            Q, K = tile.last - tile.first, len(tile.keys_K)
    return groups


def _block(tree: TreeLayout, window: int | None, tiles: list[Tile], dtype: torch.dtype) -> Block:
    N, T = len(tiles), tree.num_nodes
    Q, K = max(t.last - t.first for t in tiles), max(len(t.keys_K) for t in tiles)
    seen_N1QK = np.zeros((N, 1, Q, K), dtype=bool)
    rows_NQ, keys_NK = np.full((N, Q), T), np.empty((N, K), dtype=np.int64)
    for n, tile in enumerate(tiles):
        q, k = tile.last - tile.first, len(tile.keys_K)
        seen_N1QK[n, 0, :q, :k] = True if tile.full else visible_QK(tree, window, tile)
        rows_NQ[n, :q] = np.arange(tile.first, tile.last)
        keys_NK[n] = tile.keys_K[0]
        keys_NK[n, :k] = tile.keys_K
    queries_NQ = np.where(rows_NQ == T, rows_NQ[:, :1], rows_NQ)
    blind_N1Q = ~seen_N1QK.any(-1)
    return Block(
        N,
        _nodes(queries_NQ, tree.device),
        _nodes(rows_NQ, tree.device),
        _nodes(keys_NK, tree.device),
        None if seen_N1QK.all() else _bias(seen_N1QK, dtype).to(tree.device),
        torch.from_numpy(blind_N1Q).to(tree.device) if blind_N1Q.any() else None,
    )


def _nodes(nodes_NM: np.ndarray, device: torch.device) -> slice | Tensor:
    first, last = int(nodes_NM[0, 0]), int(nodes_NM[0, -1]) + 1
    if len(nodes_NM) == 1 and last - first == nodes_NM.shape[1]:
        return slice(first, last)
    return torch.from_numpy(nodes_NM.reshape(-1)).to(device)


def _bias(seen_N1QK: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen_N1QK.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen_N1QK), -torch.inf)
