"""The reference backend: a dense mask and a plain softmax. It defines what the others must compute."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout


def reference_attention(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    tree: TreeLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention over a tree by a dense [T, T] mask; honours every feature, at quadratic time and memory.

    Args:
        query_BHTD: [1, H, T, D] float.
        key_BHTD, value_BHTD: [1, H / G, T, D], G query heads share one of them.
        tree: the layout of the T nodes.
        scaling: factor on the dot products.
        sliding_window: tokens a query looks back along its path, itself included.
        softcap: ``c`` of ``c * tanh(logit / c)``.
        sinks_H: [H], one logit per head that takes part in the softmax and adds nothing to the output.
        dropout: probability that an attention weight is dropped.

    Returns:
        [1, H, T, D].
    """
    window = tree.effective_window(sliding_window)
    visible_TT = tree.built(("dense mask", window), lambda: tree.visible_TT(window))
    if softcap is None and sinks_H is None:
        groups = query_BHTD.shape[1] // key_BHTD.shape[1]
        key_BHTD, value_BHTD = (x.repeat_interleave(groups, 1) for x in (key_BHTD, value_BHTD))
        return F.scaled_dot_product_attention(
            query_BHTD, key_BHTD, value_BHTD, attn_mask=visible_TT, dropout_p=dropout, scale=scaling
        )
    return softmax_attention(
        query_BHTD,
        key_BHTD,
        value_BHTD,
        visible_TT,
        scaling=scaling,
        softcap=softcap,
        sinks_H=sinks_H,
        dropout=dropout,
    )


def softmax_attention(
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    visible_QK: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention spelled out, for the features that SDPA has no argument for.

    Args:
        query_BHQD: [B, H, Q, D] float; ``key_BHKD``, ``value_BHKD``: [B, H / G, K, D].
        visible_QK: bool, broadcast against [B, H, Q, K], True where the query sees the key.
        scaling, softcap, sinks_H, dropout: as in :func:`reference_attention`.

    Returns:
        [B, H, Q, D] in the dtype of the query; the softmax is at least float32 inside.
    """
    groups = query_BHQD.shape[1] // key_BHKD.shape[1]
    key_BHKD, value_BHKD = (x.repeat_interleave(groups, 1) for x in (key_BHKD, value_BHKD))
    logit_BHQK = torch.matmul(query_BHQD, key_BHKD.transpose(-1, -2)) * scaling
    if softcap is not None:
        logit_BHQK = softcap * torch.tanh(logit_BHQK / softcap)
    logit_BHQK = logit_BHQK.to(torch.promote_types(logit_BHQK.dtype, torch.float32))
    # Not -inf: a row of left padding sees nothing, and must not become NaN.
    logit_BHQK = logit_BHQK.masked_fill(~visible_QK, torch.finfo(logit_BHQK.dtype).min)
    if sinks_H is not None:
        sink_BHQ1 = sinks_H.to(logit_BHQK.dtype)[:, None, None].expand(*logit_BHQK.shape[:-1], 1)
        logit_BHQK = torch.cat([logit_BHQK, sink_BHQ1], dim=-1)
    weight_BHQK = logit_BHQK.softmax(-1)[..., : key_BHKD.shape[-2]].to(query_BHQD.dtype)
    return torch.matmul(F.dropout(weight_BHQK, dropout), value_BHKD)
