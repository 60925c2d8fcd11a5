"""The flex backend: FlexAttention with a block mask computed from the intervals. The default on CUDA.

Suffixes: T nodes, H heads, G key heads, D head width, I query blocks, J key blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout

BLOCK = 128


def tree_flex_attention(
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    tree: TreeLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention over a tree by FlexAttention (arXiv:2412.05496), compiled on CUDA.

    Args:
        query_BHTD: [1, H, T, D] float.
        key_BGTD, value_BGTD: [1, G, T, D], G divides H.
        tree: the layout of the T nodes.
        scaling: factor on the dot products.
        sliding_window: tokens a query looks back along its path, itself included.
        softcap: ``c`` of ``c * tanh(logit / c)``.
        sinks_H: [H], one logit per head that takes part in the softmax and adds nothing to the output.

    Returns:
        [1, H, T, D].

    Raises:
        ValueError: on CPU where a gradient is wanted: FlexAttention has no backward there.
    """
    on_cpu = query_BHTD.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (query_BHTD, key_BGTD, value_BGTD)):
        raise ValueError("Tree attention backend 'flex' has no backward on CPU; use backend 'segments' or 'reference'.")
    window = tree.effective_window(sliding_window)
    attend: Any = flex_attention if on_cpu else _compiled()
    output_BHTD, aux = attend(
        query_BHTD,
        key_BGTD,
        value_BGTD,
        score_mod=None if softcap is None else _softcap(softcap),
        block_mask=tree.built(("flex", window), lambda: block_mask(tree, window)),
        scale=scaling,
        enable_gqa=query_BHTD.shape[1] != key_BGTD.shape[1],
        return_aux=AuxRequest(lse=sinks_H is not None),
    )
    if sinks_H is not None:
        # The share of the softmax that the sink leaves to the keys.
        output_BHTD = output_BHTD * (aux.lse - sinks_H.to(aux.lse.dtype)[:, None]).sigmoid()[..., None].to(
            output_BHTD.dtype
        )
    return output_BHTD


def mask_mod(tree: TreeLayout, window: int | None) -> Callable[..., Tensor]:
    """The visibility of one pair, as FlexAttention asks for it inside a partly visible block."""
    end_T, depth_T = tree.subtree_end_T, tree.position_ids_T

    def on_path(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end_T[k])

    if window is None:
        return on_path

    def in_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end_T[k]) & (depth_T[q] - depth_T[k] < window)

    return in_window


def block_mask(tree: TreeLayout, window: int | None) -> BlockMask:
    """Which blocks of ``BLOCK`` queries see which blocks of keys: not, partly or wholly.

    From the least and greatest subtree end and depth of each block, in O(T) plus the table of blocks; no pair of nodes
    is looked at. Under a window a block may be called partly visible though it is not, which costs time only.

    Args:
        tree: the layout.
        window: tokens a query looks back along its path, itself included; None for all.

    Returns:
        A ``BlockMask`` of T × T on the layout's device, batch and head size 1.
    """
    T = tree.num_nodes
    least_end_J, most_end_J = _block_range(tree.subtree_end_T)
    block_I1 = torch.arange(len(most_end_J), device=tree.device)[:, None]
    before_IJ = block_I1.T < block_I1
    # The ends in a block reach past the first query of a later block exactly when that query sees one of its keys.
    visible_IJ = (before_IJ & (most_end_J > block_I1 * BLOCK)) | (block_I1.T == block_I1)
    full_IJ = before_IJ & (least_end_J >= (block_I1 + 1) * BLOCK)
    if window is not None:
        least_depth_J, most_depth_J = _block_range(tree.position_ids_T)
        visible_IJ &= least_depth_J[:, None] - most_depth_J < window
        full_IJ &= most_depth_J[:, None] - least_depth_J < window
    visible_num, visible_blocks = _ordered(visible_IJ & ~full_IJ)
    full_num, full_blocks = _ordered(visible_IJ & full_IJ)
    return BlockMask.from_kv_blocks(
        visible_num,
        visible_blocks,
        full_num,
        full_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(tree, window),
        seq_lengths=(T, T),
    )


def _block_range(x_T: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each block of nodes, [J] each; values lie in [0, T]."""
    missing = -len(x_T) % BLOCK
    least = F.pad(x_T, (0, missing), value=len(x_T)).view(-1, BLOCK).amin(1)
    most = F.pad(x_T, (0, missing), value=0).view(-1, BLOCK).amax(1)
    return least, most


def _ordered(chosen_IJ: Tensor) -> tuple[Tensor, Tensor]:
    """Count [1, 1, I] and indices [1, 1, I, J] of the chosen key blocks, the chosen ones first."""
    indices_IJ = chosen_IJ.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen_IJ.sum(1).to(torch.int32)[None, None], indices_IJ.to(torch.int32)[None, None].contiguous()


def _softcap(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
