"""Attention over a :class:`~torchrl_asyncgrpo.engines.group_cache.GroupCache`, as transformers calls it.

Shapes: B sequences, H query heads, K key-value heads, J = H / K, Q queries, P keys, M queries of one key-value head,
D head width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from torchrl_asyncgrpo.data.layer_window import layer_window

#: name under which transformers finds :func:`group_attention`; it has no mask function, so no mask is ever built
GROUP_ATTENTION = "asyncgrpo_group"

Partial = tuple[Tensor, Tensor]


class _Pass(Protocol):
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        /,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sink_H: Tensor | None,
    ) -> Tensor: ...


def group_attention(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BKQD: Tensor,
    value_BKQD: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: _Pass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of the engine's model: the pass in ``cache`` stores keys and values and attends.

    Args:
        sliding_window: a query sees this many keys, itself included; None for all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: [H] attention sinks, extra logits in the denominator.

    Raises:
        ValueError: for what it cannot honour: a mask or bias of the model's own, a window that the layer does not
            pass on, or attention to later tokens; or if the model does not pass ``cache`` on.
    """
    if cache is None:
        raise ValueError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention function; TransformersEngine "
            "cannot decode it. Serve the model with VLLMEngine."
        )
    if attention_mask is not None or position_bias is not None or is_causal is False:
        raise ValueError(
            f"{type(module).__name__} brings its own attention mask or position bias, or attends to later tokens; "
            "TransformersEngine decodes causal attention only. Serve the model with VLLMEngine."
        )
    if sliding_window is None and layer_window(module) is not None:
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {layer_window(module)} tokens that it does not pass to "
            "its attention function; TransformersEngine would attend to all tokens. Serve the model with VLLMEngine."
        )
    out_BQHD = cache.attend(
        query_BHQD,
        key_BKQD,
        value_BKQD,
        scaling=query_BHQD.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sink_H=s_aux,
    )
    return out_BQHD, None


def prompt_attention(
    query_BHQD: Tensor,
    key_BKPD: Tensor,
    value_BKPD: Tensor,
    mask_QP: Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    sink_H: Tensor | None,
) -> Tensor:
    """Attention [B, Q, H, D] of a prompt to itself; ``mask_QP`` None is causal with Q = P."""
    if softcap is None and sink_H is None:
        repeats = query_BHQD.shape[1] // key_BKPD.shape[1]
        out_BHQD = nn.functional.scaled_dot_product_attention(
            query_BHQD,
            key_BKPD.repeat_interleave(repeats, 1),
            value_BKPD.repeat_interleave(repeats, 1),
            attn_mask=mask_QP,
            is_causal=mask_QP is None,
            scale=scaling,
        )
        return out_BHQD.transpose(1, 2)
    queries = query_BHQD.shape[2]
    if mask_QP is None:
        mask_QP = torch.ones(queries, queries, dtype=torch.bool, device=query_BHQD.device).tril_()
    query_BKJQD = query_BHQD.unflatten(1, (key_BKPD.shape[1], -1))
    precision = torch.promote_types(query_BHQD.dtype, torch.float32)
    bias_QP = torch.zeros(mask_QP.shape, dtype=precision, device=mask_QP.device).masked_fill_(~mask_QP, -1e30)
    out_BKMD, lse_BKM1 = attend_partially(
        query_BKJQD.flatten(2, 3), key_BKPD, value_BKPD, bias_QP.repeat(query_BKJQD.shape[2], 1), scaling, softcap
    )
    if sink_H is not None:
        sink_KM1 = sink_H.repeat_interleave(queries).view(key_BKPD.shape[1], -1, 1)
        out_BKMD = out_BKMD * (lse_BKM1 - sink_KM1).sigmoid()
    return out_BKMD.unflatten(2, (-1, queries)).flatten(1, 2).transpose(1, 2).to(query_BHQD.dtype)


def attend_partially(
    query_BKMD: Tensor,
    key_BKPD: Tensor,
    value_BKPD: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Partial:
    """Attention to some of the keys, and the log-sum-exp that merges it with the others.

    Scores and softmax are float32 at least.

    Returns:
        output [B, K, M, D], and log-sum-exp [B, K, M, 1].
    """
    precision = torch.promote_types(query_BKMD.dtype, torch.float32)
    score_BKMP = (query_BKMD @ key_BKPD.mT).to(precision) * scaling
    if softcap is not None:
        score_BKMP = torch.tanh(score_BKMP / softcap) * softcap
    if bias is not None:
        score_BKMP = score_BKMP + bias
    max_BKM1 = score_BKMP.amax(-1, keepdim=True)
    weight_BKMP = score_BKMP.sub_(max_BKM1).exp_()
    total_BKM1 = weight_BKMP.sum(-1, keepdim=True)
    out_BKMD = (weight_BKMP.to(value_BKPD.dtype) @ value_BKPD).to(precision) / total_BKM1
    return out_BKMD, max_BKM1 + total_BKM1.log()


def merge_partials(one: Partial, other: Partial, sink_H: Tensor | None) -> Tensor:
    """Attention [R, K, J, D] over the keys of both parts, with the sinks in the denominator."""
    (one_RKJD, lse_one_RKJ1), (other_RKJD, lse_other_RKJ1) = one, other
    out_RKJD = torch.lerp(other_RKJD, one_RKJD, (lse_one_RKJ1 - lse_other_RKJ1).sigmoid())
    if sink_H is None:
        return out_RKJD
    lse_RKJ1 = torch.logaddexp(lse_one_RKJ1, lse_other_RKJ1)
    return out_RKJD * (lse_RKJ1 - sink_H.view(lse_RKJ1.shape[1:])).sigmoid()


AttentionInterface.register(GROUP_ATTENTION, group_attention)
