"""The segments backend: a tree as a few blocks of rectangles, merged by log-sum-exp. The default on CPU.

Time grows with the visible pairs, memory with T. Suffixes: B batch (1), H query heads, G key heads, T nodes, D head
width; N tiles of one block, Q queries of each, M = N·Q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchrl_asyncgrpo.modules.tree_attention import kernel
from torchrl_asyncgrpo.modules.tree_attention.blocks import Block, Plan, plan_blocks
from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout

# Pairs × heads × head width that take as long as one more kernel call, forward and backward: about 100 µs on two cores.
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
    """Attention over a tree, block by block.

    The partial softmaxes are merged exactly (as in FlashAttention, arXiv:2205.14135, section 3.1), and the backward
    gives each block the output and log-sum-exp of the whole row.

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
    overhead = call_overhead(query_BHTD.shape[1], query_BHTD.shape[3])
    window = tree.effective_window(sliding_window)
    plan = tree.built(
        ("segments", window, overhead, query_BHTD.dtype),
        lambda: plan_blocks(tree, window, overhead, query_BHTD.dtype),
    )
    width = value_BGTD.shape[-1]
    wider = max(width, query_BHTD.shape[-1])
    if width != query_BHTD.shape[-1]:
        query_BHTD, key_BGTD, value_BGTD = (
            F.pad(x, (0, wider - x.shape[-1])) for x in (query_BHTD, key_BGTD, value_BGTD)
        )
    by_node = (x[0].transpose(0, 1) for x in (query_BHTD, key_BGTD, value_BGTD))
    output_THD = _Segments.apply(*by_node, sinks_H, plan, scaling, plain)
    return output_THD.transpose(0, 1)[None, ..., :width]


def call_overhead(num_heads: int, width: int) -> int:
    """What one more kernel call costs, in query-key pairs of attention with heads of ``width``."""
    return max(_CALL_WIDTH // (num_heads * width), 1)


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        sinks_H: Tensor | None,
        plan: Plan,
        scaling: float,
        plain: bool,
    ) -> Tensor:
        output_THD, lse_TH = _merge(query_THD, key_TGD, value_TGD, plan, scaling, plain)
        if sinks_H is not None:
            with_sink_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
            output_THD *= (lse_TH - with_sink_TH).exp_()[..., None]
            lse_TH = with_sink_TH
        output_THD = output_THD.to(query_THD.dtype)
        ctx.save_for_backward(query_THD, key_TGD, value_TGD, sinks_H, output_THD, lse_TH)
        ctx.plan, ctx.scaling, ctx.plain = plan, scaling, plain
        return output_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_TGD, value_TGD, sinks_H, output_THD, lse_TH = ctx.saved_tensors
        sums = [torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (query_THD, key_TGD, value_TGD)]
        for block in ctx.plan.squares + ctx.plan.rectangles:
            x = _operands(block, query_THD, key_TGD, value_TGD, ctx.scaling)
            rows = kernel.Rows(*(_take(r, block.queries, block.size) for r in (grad_THD, output_THD, lse_TH)))
            parts = kernel.backward(x, rows, plain=ctx.plain)
            for total, nodes, part in zip(sums, (block.queries, block.keys, block.keys), parts, strict=True):
                _add(total, nodes, _flat(part))
        grad_sinks_H = None
        if sinks_H is not None:
            # A sink is a key whose value is 0: its weight is exp(sink - lse), whose gradient is -grad · output.
            weight_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()
            grad_sinks_H = -(weight_TH * (grad_THD * output_THD).sum(-1)).sum(0).to(sinks_H.dtype)
        return *(total.to(query_THD.dtype) for total in sums), grad_sinks_H, None, None, None


def _merge(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, plan: Plan, scaling: float, plain: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of every row over all its blocks."""
    T, H, D = query_THD.shape
    wide = _wide(query_THD.dtype)
    # Row T takes what padding computes.
    output_THD, lse_TH = query_THD.new_zeros(T + 1, H, D, dtype=wide), query_THD.new_zeros(T + 1, H, dtype=wide)
    for square in plan.squares:
        part_NHQD, part_lse_NHQ = kernel.forward(_operands(square, query_THD, key_TGD, value_TGD, scaling), plain=plain)
        _set(output_THD, square.rows, _flat(part_NHQD).to(wide))
        _set(lse_TH, square.rows, _flat(part_lse_NHQ))
    for block in plan.rectangles:
        part_NHQD, part_lse_NHQ = kernel.forward(_operands(block, query_THD, key_TGD, value_TGD, scaling), plain=plain)
        if block.blind_N1Q is not None:
            part_lse_NHQ = part_lse_NHQ.masked_fill(block.blind_N1Q, -torch.inf)
        part_MHD, part_lse_MH = _flat(part_NHQD).to(wide), _flat(part_lse_NHQ)
        whole_MHD, whole_lse_MH = _rows(output_THD, block.rows), _rows(lse_TH, block.rows)
        share_MH1 = (part_lse_MH - whole_lse_MH).sigmoid_()[..., None]
        _set(output_THD, block.rows, whole_MHD.lerp_(part_MHD, share_MH1))
        _set(lse_TH, block.rows, torch.logaddexp(whole_lse_MH, part_lse_MH))
    return output_THD[:T], lse_TH[:T]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results are summed in."""
    return torch.promote_types(dtype, torch.float32)


def _operands(block: Block, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, scaling: float) -> kernel.Operands:
    key, value = (_take(x, block.keys, block.size) for x in (key_TGD, value_TGD))
    return kernel.Operands(_take(query_THD, block.queries, block.size), key, value, block.bias_N1QK, scaling)


def _take(x_THD: Tensor, nodes: slice | Tensor, size: int) -> Tensor:
    """The rows of a block, [N, H, Q, D]."""
    return _rows(x_THD, nodes).unflatten(0, (size, -1)).transpose(1, 2)


def _flat(x_NHQD: Tensor) -> Tensor:
    """Back to one row after the other, [N·Q, H, D]."""
    return x_NHQD.transpose(1, 2).flatten(0, 1)


def _rows(x_THD: Tensor, nodes: slice | Tensor) -> Tensor:
    return x_THD[nodes] if isinstance(nodes, slice) else x_THD.index_select(0, nodes)


def _set(x_THD: Tensor, nodes: slice | Tensor, rows_MHD: Tensor) -> None:
    if isinstance(nodes, slice):
        x_THD[nodes] = rows_MHD
    else:
        x_THD.index_copy_(0, nodes, rows_MHD)


def _add(x_THD: Tensor, nodes: slice | Tensor, rows_MHD: Tensor) -> None:
    if isinstance(nodes, slice):
        x_THD[nodes] += rows_MHD
    else:
        x_THD.index_add_(0, nodes, rows_MHD.to(x_THD.dtype))
