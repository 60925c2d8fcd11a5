"""Attention over one rectangle with its log-sum-exp, and its gradient under the log-sum-exp of the whole row.

On CPU the aten flash kernels, which share a key head among a group of query heads without repeating it; elsewhere
the same in plain PyTorch. Suffixes: B batch (1), H query heads, G key heads, Q queries, K keys, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Operands(NamedTuple):
    """What a rectangle attends: query [B, H, Q, D], key and value [B, G, K, D], and how.

    ``bias_QK`` is added to the scaled logits; ``causal`` lets query i see keys 0..i.
    """

    query_BHQD: Tensor
    key_BGKD: Tensor
    value_BGKD: Tensor
    scaling: float
    causal: bool
    bias_QK: Tensor | None


def forward(x: Operands, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax attention within one rectangle.

    Args:
        x: the operands; every query sees some key, or its results are finite and to be ignored.
        plain: use plain PyTorch on CPU too.

    Returns:
        Output [B, H, Q, D] in the query's dtype, and log-sum-exp [B, H, Q], at least float32.
    """
    if plain or x.query_BHQD.device.type != "cpu":
        return _plain_forward(x)
    output_BHQD, lse_BHQ = _flash_forward(
        x.query_BHQD, x.key_BGKD, x.value_BGKD, 0.0, x.causal, attn_mask=x.bias_QK, scale=x.scaling
    )
    return output_BHQD, lse_BHQ


def backward(
    x: Operands, grad_BHQD: Tensor, output_BHQD: Tensor, lse_BHQ: Tensor, *, plain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """This rectangle's share of the gradients.

    Weights are exp(logit - lse) and their gradient is weight * (grad · value - grad · output): with the output and the
    log-sum-exp of the whole row both are exact within any part of it.

    Args:
        x: the operands.
        grad_BHQD: gradient of the output.
        output_BHQD, lse_BHQ: of the whole row, over all its rectangles.
        plain: use plain PyTorch on CPU too.

    Returns:
        Gradients of query, key and value, in their shapes.
    """
    if plain or x.query_BHQD.device.type != "cpu":
        return _plain_backward(x, grad_BHQD, output_BHQD, lse_BHQ)
    splits = 1 if x.causal else _balanced_splits(x.query_BHQD.shape[1], x.query_BHQD.shape[2], torch.get_num_threads())
    if splits == 1:
        return _one_backward(x, grad_BHQD, output_BHQD, lse_BHQ)
    even = x.query_BHQD.shape[2] // splits * splits
    grads = _split_backward(*_rows(slice(even), x, grad_BHQD, output_BHQD, lse_BHQ), splits)
    if even == x.query_BHQD.shape[2]:
        return grads
    rest = _one_backward(*_rows(slice(even, None), x, grad_BHQD, output_BHQD, lse_BHQ))
    return torch.cat([grads[0], rest[0]], dim=2), grads[1] + rest[1], grads[2] + rest[2]


def _one_backward(
    x: Operands, grad_BHQD: Tensor, output_BHQD: Tensor, lse_BHQ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _flash_backward(
        grad_BHQD,
        x.query_BHQD,
        x.key_BGKD,
        x.value_BGKD,
        output_BHQD,
        lse_BHQ,
        0.0,
        x.causal,
        attn_mask=x.bias_QK,
        scale=x.scaling,
    )


def _balanced_splits(num_heads: int, num_queries: int, num_threads: int) -> int:
    """In how many parts to cut the queries: the flash backward gives each thread whole heads, 9 heads to 2 threads 5 and 4.

    The fewest parts, of 128 queries or more, that keep the threads busy for as much of the time as any number does.
    """

    def busy(splits: int) -> float:
        tasks = splits * num_heads
        return tasks / (-(-tasks // num_threads) * num_threads)

    return max(
        range(1, min(num_threads, num_queries // 128) + 1), key=lambda splits: (busy(splits), -splits), default=1
    )


def _rows(rows: slice, x: Operands, grad_BHQD: Tensor, output_BHQD: Tensor, lse_BHQ: Tensor) -> tuple:
    bias_QK = None if x.bias_QK is None else x.bias_QK[rows]
    part = x._replace(query_BHQD=x.query_BHQD[:, :, rows], bias_QK=bias_QK)
    return part, grad_BHQD[:, :, rows], output_BHQD[:, :, rows], lse_BHQ[:, :, rows]


def _split_backward(
    x: Operands, grad_BHQD: Tensor, output_BHQD: Tensor, lse_BHQ: Tensor, splits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the parts of the queries side by side as a batch."""

    def as_batch(x_1HQ: Tensor) -> Tensor:
        return x_1HQ[0].unflatten(1, (splits, -1)).transpose(0, 1)

    parts = x._replace(
        query_BHQD=as_batch(x.query_BHQD),
        key_BGKD=x.key_BGKD.expand(splits, -1, -1, -1),
        value_BGKD=x.value_BGKD.expand(splits, -1, -1, -1),
        bias_QK=None if x.bias_QK is None else x.bias_QK.unflatten(0, (splits, -1))[:, None],
    )
    grad_query, grad_key, grad_value = _one_backward(parts, *map(as_batch, (grad_BHQD, output_BHQD, lse_BHQ)))
    grad_query_1HQD = grad_query.transpose(0, 1).flatten(1, 2)[None]
    return grad_query_1HQD, grad_key.sum(0, keepdim=True), grad_value.sum(0, keepdim=True)


def _plain_logits(x: Operands, query_BGNQD: Tensor) -> Tensor:
    """[B, G, H / G, Q, K], at least float32."""
    logit_BGNQK = query_BGNQD @ x.key_BGKD[:, :, None].transpose(-1, -2)
    logit_BGNQK = logit_BGNQK.to(torch.promote_types(logit_BGNQK.dtype, torch.float32)) * x.scaling
    if x.bias_QK is not None:
        logit_BGNQK = logit_BGNQK + x.bias_QK
    if x.causal:
        future_QK = torch.ones(logit_BGNQK.shape[-2:], dtype=torch.bool, device=logit_BGNQK.device).triu(1)
        logit_BGNQK = logit_BGNQK.masked_fill(future_QK, -torch.inf)
    return logit_BGNQK


def _by_group(x_BH: Tensor, x: Operands) -> Tensor:
    return x_BH.unflatten(1, (x.key_BGKD.shape[1], -1))


def _plain_forward(x: Operands) -> tuple[Tensor, Tensor]:
    logit_BGNQK = _plain_logits(x, _by_group(x.query_BHQD, x))
    lse_BGNQ = logit_BGNQK.logsumexp(-1)
    lse_BGNQ = lse_BGNQ.masked_fill(lse_BGNQ.isinf(), 0.0)
    weight_BGNQK = (logit_BGNQK - lse_BGNQ[..., None]).exp()
    output_BGNQD = weight_BGNQK.to(x.value_BGKD.dtype) @ x.value_BGKD[:, :, None]
    return output_BGNQD.flatten(1, 2), lse_BGNQ.flatten(1, 2)


def _plain_backward(
    x: Operands, grad_BHQD: Tensor, output_BHQD: Tensor, lse_BHQ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query_BGNQD, grad_BGNQD = _by_group(x.query_BHQD, x), _by_group(grad_BHQD, x)
    weight_BGNQK = (_plain_logits(x, query_BGNQD) - _by_group(lse_BHQ, x)[..., None]).exp()
    mean_BGNQ1 = (grad_BGNQD * _by_group(output_BHQD, x)).sum(-1, keepdim=True)
    grad_weight_BGNQK = grad_BGNQD @ x.value_BGKD[:, :, None].transpose(-1, -2) - mean_BGNQ1
    grad_logit_BGNQK = (weight_BGNQK * grad_weight_BGNQK * x.scaling).to(query_BGNQD.dtype)
    grad_query_BGNQD = grad_logit_BGNQK @ x.key_BGKD[:, :, None]
    grad_key_BGKD = (grad_logit_BGNQK.transpose(-1, -2) @ query_BGNQD).sum(2)
    grad_value_BGKD = (weight_BGNQK.to(grad_BGNQD.dtype).transpose(-1, -2) @ grad_BGNQD).sum(2)
    return grad_query_BGNQD.flatten(1, 2), grad_key_BGKD, grad_value_BGKD
