"""The tree as attention sees it: one interval of queries per key.

Suffixes: T nodes, H heads, D head width, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Built = TypeVar("Built")


class TreeLayout:
    """Which node of a prefix trie sees which, for one micro-batch and all layers of a model.

    Nodes are in depth-first pre-order. Query ``q`` sees key ``k`` exactly when ``k <= q < subtree_end[k]``; under a
    sliding window of ``w`` tokens it must also hold that ``position_ids[q] - position_ids[k] < w``: distance is depth,
    not storage. Build it once per micro-batch: what backends derive from it (masks, plans) is kept with it.

    Args:
        position_ids_T: [T] int64, depth of each node; 0 at a root.
        subtree_end_T: [T] int64, one past the last descendant of each node; same device.
        parent_T: [T] int64, the node before it on its path, -1 at a root; derived from the depths if not given.

    Raises:
        ValueError: if the shapes differ, T is 0, or the tensors do not describe a forest in pre-order.
    """

    def __init__(self, position_ids_T: Tensor, subtree_end_T: Tensor, parent_T: Tensor | None = None) -> None:
        if position_ids_T.ndim != 1 or position_ids_T.shape != subtree_end_T.shape or not len(position_ids_T):
            raise ValueError(
                f"position_ids has shape {tuple(position_ids_T.shape)} and subtree_end {tuple(subtree_end_T.shape)}; "
                "give one value per node, [T] each with T >= 1."
            )
        self.position_ids_T = position_ids_T
        self.subtree_end_T = subtree_end_T
        self.depth_T: np.ndarray = position_ids_T.detach().cpu().numpy()
        self.end_T: np.ndarray = subtree_end_T.detach().cpu().numpy()
        self.parent_T: np.ndarray = _parents(self.depth_T) if parent_T is None else parent_T.detach().cpu().numpy()
        _check_preorder(self.depth_T, self.end_T, self.parent_T)
        self.max_depth = int(self.depth_T.max())
        self._built: dict[Hashable, Any] = {}

    @property
    def num_nodes(self) -> int:
        """T, the number of nodes."""
        return len(self.depth_T)

    @property
    def device(self) -> torch.device:
        """Where the layout's tensors are; the model's inputs must be there too."""
        return self.subtree_end_T.device

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments that run a model, on which :func:`install` was called, over the tree.

        ``model(input_ids=input_ids_T[None], **layout.model_inputs())``. The layout itself travels to the attention
        function as the keyword argument ``tree``. The mask is an empty 4-d tensor: transformers hands a 4-d mask on
        unchanged, so none is built, and any attention that would ignore ``tree`` fails on it instead of misreading it.

        Returns:
            ``position_ids`` [1, T] int64, ``attention_mask`` [1, 1, 0, 0] bool, ``tree``, ``use_cache=False``.
        """
        return {
            "position_ids": self.position_ids_T[None],
            "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=self.device),
            "tree": self,
            "use_cache": False,
        }

    def effective_window(self, sliding_window: int | None) -> int | None:
        """``sliding_window``, or None where no path is long enough for it to hide anything."""
        return None if sliding_window is None or sliding_window > self.max_depth else sliding_window

    def visible_TT(self, sliding_window: int | None = None) -> Tensor:
        """The dense mask: what the reference attends with and every other backend is tested against.

        Args:
            sliding_window: tokens a query looks back, itself included; None for all.

        Returns:
            [T, T] bool, query by key, True where the query sees the key.
        """
        query_T1 = torch.arange(self.num_nodes, device=self.device)[:, None]
        visible_TT = (query_T1.T <= query_T1) & (query_T1 < self.subtree_end_T)
        window = self.effective_window(sliding_window)
        if window is not None:
            visible_TT &= self.position_ids_T[:, None] - self.position_ids_T < window
        return visible_TT

    def built(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """What a backend derived from the layout under ``key``, built on first use and shared by all layers."""
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]


def is_tree_mask(attention_mask: Any) -> bool:
    """True for the empty mask of :meth:`TreeLayout.model_inputs`."""
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and attention_mask.numel() == 0


def _parents(depth_T: np.ndarray) -> np.ndarray:
    """[T], the last node before each that is one level up, -1 at depth 0."""
    T = len(depth_T)
    code_T = depth_T * T + np.arange(T)
    order_T = np.argsort(code_T, kind="stable")
    slot_T = np.searchsorted(code_T[order_T], code_T - T, side="right") - 1
    return np.where(depth_T > 0, order_T[slot_T.clip(0)], -1)


def _check_preorder(depth_T: np.ndarray, end_T: np.ndarray, parent_T: np.ndarray) -> None:
    T = len(depth_T)
    index_T = np.arange(T)
    root_T = depth_T == 0
    above_T = np.where(root_T, 0, parent_T)
    _require((depth_T >= 0) & ((parent_T < 0) == root_T), "depth 0 marks a root and no other node")
    _require((above_T >= 0) & (root_T | (above_T < index_T)), "a parent stands before its children")
    _require(root_T | (depth_T[above_T] == depth_T - 1), "a child is one deeper than its parent")
    _require((end_T > index_T) & (end_T <= T), "a subtree ends behind its node and inside the batch")
    _require(root_T | ((index_T < end_T[above_T]) & (end_T <= end_T[above_T])), "a subtree lies in its parent's")
    covering_T = 1 + index_T - np.cumsum(np.bincount(end_T, minlength=T + 1))[:T]
    _require(covering_T == depth_T + 1, "only ancestors' subtrees hold a node")


def _require(holds_T: np.ndarray, rule: str) -> None:
    if not holds_T.all():
        raise ValueError(
            f"TreeLayout is not a forest in depth-first pre-order at node {int(holds_T.argmin())}: {rule}."
        )
