"""The segments backend: a tree as a few rectangles, merged by log-sum-exp. The default on CPU.

Time grows with the visible pairs, memory with T. Suffixes: B batch (1), H query heads, G key heads, T nodes, D head
width, Q and K queries and keys of one rectangle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchrl_asyncgrpo.modules.tree_attention import kernel
from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout
from torchrl_asyncgrpo.modules.tree_attention.plan import Plan, Rectangle, plan_rectangles

# Multiply-adds that take as long as one more kernel call, forward and backward: about 100 µs on two cores.
_CALL_WIDTH = 1 << 20


def segments_attention(
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    tree: TreeLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    sinks_H: Tensor | None = None,
    plain: bool = False,
) -> Tensor:
    """Attention over a tree, rectangle by rectangle.

    The partial softmaxes are merged exactly (as in FlashAttention, arXiv:2205.14135, section 3.1), and the backward
    gives each rectangle the output and log-sum-exp of the whole row.

    Args:
        query_BHTD: [1, H, T, D] float.
        key_BGTD, value_BGTD: [1, G, T, D], G divides H; the value may be narrower or wider than D.
        tree: the layout of the T nodes.
        scaling: factor on the dot products.
        sliding_window: tokens a query looks back along its path, itself included.
        sinks_H: [H], one logit per head that takes part in the softmax and adds nothing to the output.
        plain: use plain PyTorch instead of the flash kernels on CPU too.

    Returns:
        [1, H, T, width of value], laid out as [1, T, H, D].
    """
    overhead = _CALL_WIDTH // max(query_BHTD.shape[1] * query_BHTD.shape[3], 1)
    window = tree.effective_window(sliding_window)
    plan = tree.built(
        ("segments", window, overhead, query_BHTD.dtype),
        lambda: plan_rectangles(tree, window, overhead, query_BHTD.dtype),
    )
    width = value_BGTD.shape[-1]
    wider = max(width, query_BHTD.shape[-1])
    if width != query_BHTD.shape[-1]:
        query_BHTD, key_BGTD, value_BGTD = (
            F.pad(x, (0, wider - x.shape[-1])) for x in (query_BHTD, key_BGTD, value_BGTD)
        )
    output_BHTD = _Segments.apply(query_BHTD, key_BGTD, value_BGTD, sinks_H, plan, scaling, plain)
    return output_BHTD[..., :width]


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BHTD: Tensor,
        key_BGTD: Tensor,
        value_BGTD: Tensor,
        sinks_H: Tensor | None,
        plan: Plan,
        scaling: float,
        plain: bool,
    ) -> Tensor:
        output_BHTD, lse_BHT = _merge(query_BHTD, key_BGTD, value_BGTD, plan, scaling, plain)
        if sinks_H is not None:
            with_sink_BHT = torch.logaddexp(lse_BHT, sinks_H.to(lse_BHT.dtype)[:, None])
            output_BHTD *= (lse_BHT - with_sink_BHT).exp_()[..., None]
            lse_BHT = with_sink_BHT
        output_BHTD = output_BHTD.to(query_BHTD.dtype)
        ctx.save_for_backward(query_BHTD, key_BGTD, value_BGTD, sinks_H, output_BHTD, lse_BHT)
        ctx.plan, ctx.scaling, ctx.plain = plan, scaling, plain
        return output_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BGTD, value_BGTD, sinks_H, output_BHTD, lse_BHT = ctx.saved_tensors
        grad_query, grad_key, grad_value = (_accumulator(x) for x in (query_BHTD, key_BGTD, value_BGTD))
        for r in ctx.plan.squares + ctx.plan.rectangles:
            x = _operands(r, query_BHTD, key_BGTD, value_BGTD, ctx.scaling)
            q = r.queries
            part_query, part_key, part_value = kernel.backward(
                x, grad_BHTD[:, :, q], output_BHTD[:, :, q], lse_BHT[:, :, q], plain=ctx.plain
            )
            grad_query[:, :, q] += part_query
            _add_rows(grad_key, r.keys, part_key)
            _add_rows(grad_value, r.keys, part_value)
        grad_sinks_H = None
        if sinks_H is not None:
            # A sink is a key whose value is 0: its weight is exp(sink - lse), whose gradient is -grad · output.
            weight_BHT = (sinks_H.to(lse_BHT.dtype)[:, None] - lse_BHT).exp()
            grad_sinks_H = -(weight_BHT * (grad_BHTD * output_BHTD).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
        grads = (g.to(query_BHTD.dtype) for g in (grad_query, grad_key, grad_value))
        return *grads, grad_sinks_H, None, None, None


def _merge(
    query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, plan: Plan, scaling: float, plain: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of every row over all its rectangles."""
    output_BHTD = _accumulator(query_BHTD)
    B, H, T, _ = query_BHTD.shape
    lse_BHT = output_BHTD.new_empty(B, T, H).transpose(1, 2)
    for r in plan.squares:
        output_BHTD[:, :, r.queries], lse_BHT[:, :, r.queries] = kernel.forward(
            _operands(r, query_BHTD, key_BGTD, value_BGTD, scaling), plain=plain
        )
    for r in plan.rectangles:
        part_BHQD, part_lse_BHQ = kernel.forward(_operands(r, query_BHTD, key_BGTD, value_BGTD, scaling), plain=plain)
        if r.blind_Q is not None:
            part_lse_BHQ = part_lse_BHQ.masked_fill(r.blind_Q, -torch.inf)
        whole_BHQD, whole_lse_BHQ = output_BHTD[:, :, r.queries], lse_BHT[:, :, r.queries]
        share_BHQ1 = (part_lse_BHQ - whole_lse_BHQ).sigmoid_()[..., None]
        whole_BHQD.lerp_(part_BHQD.to(whole_BHQD.dtype), share_BHQ1)
        torch.logaddexp(whole_lse_BHQ, part_lse_BHQ, out=whole_lse_BHQ)
    return output_BHTD, lse_BHT


def _operands(
    r: Rectangle, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scaling: float
) -> kernel.Operands:
    key, value = (
        x[:, :, r.keys] if isinstance(r.keys, slice) else x.index_select(2, r.keys) for x in (key_BGTD, value_BGTD)
    )
    return kernel.Operands(query_BHTD[:, :, r.queries], key, value, scaling, r.causal, r.bias_QK)


def _accumulator(x_BHTD: Tensor) -> Tensor:
    """Zeros of the same shape, at least float32, with the heads of a node side by side as the model wants them."""
    B, H, T, D = x_BHTD.shape
    return x_BHTD.new_zeros(B, T, H, D, dtype=torch.promote_types(x_BHTD.dtype, torch.float32)).transpose(1, 2)


def _add_rows(grad_BGTD: Tensor, keys: slice | Tensor, part_BGKD: Tensor) -> None:
    if isinstance(keys, slice):
        grad_BGTD[:, :, keys] += part_BGKD
    else:
        grad_BGTD.index_add_(2, keys, part_BGKD.to(grad_BGTD.dtype))
