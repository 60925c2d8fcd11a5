"""Attention over one block with its log-sum-exp, and its gradient under the log-sum-exp of the whole row.

On CPU the aten flash kernels, which share a key head among a group of query heads without repeating it, and matrix
products for large rectangles; elsewhere the same in plain PyTorch.

Suffixes: N tiles, H query heads, G key heads, Q queries, K keys, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_asyncgrpo.kernels import linear
from torchrl_asyncgrpo.modules.tree_attention import rectangle

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Query-key pairs from which matrix products, head by head, beat the flash kernels: where a product of 512 queries and
# 512 keys keeps oneDNN busy longer than calling it takes.
_LARGE = 512 * 512
# Most parts of the queries in the backward: each holds gradients of all keys of its own
_MOST_SPLITS = 4


class Operands(NamedTuple):
    """What a block attends: query [N, H, Q, D], key and value [N, G, K, D]; the bias is added to the scaled logits."""

    query_NHQD: Tensor
    key_NGKD: Tensor
    value_NGKD: Tensor
    bias_N1QK: Tensor | None
    scaling: float


class Rows(NamedTuple):
    """Of the whole rows, over all their blocks: gradient of the output, the output, the log-sum-exp."""

    grad_NHQD: Tensor
    output_NHQD: Tensor
    lse_NHQ: Tensor


Gradients = tuple[Tensor, Tensor, Tensor]


def forward(x: Operands, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax attention within one block.

    Args:
        x: the operands; where a query sees no key its results are finite and to be ignored.
        plain: use plain PyTorch on CPU too.

    Returns:
        Output [N, H, Q, D] in the query's dtype, and log-sum-exp [N, H, Q], at least float32.
    """
    if plain or x.query_NHQD.device.type != "cpu":
        return _plain_forward(x)
    if _suits_products(x):
        output_HQD, lse_HQ = rectangle.forward(x.query_NHQD[0], x.key_NGKD[0], x.value_NGKD[0], x.scaling)
        return output_HQD[None], lse_HQ[None]
    return _flash_forward(x.query_NHQD, x.key_NGKD, x.value_NGKD, attn_mask=x.bias_N1QK, scale=x.scaling)


def backward(x: Operands, rows: Rows, *, plain: bool = False) -> Gradients:
    """This block's share of the gradients.

    Weights are exp(logit - lse) and their gradient is weight * (grad · value - grad · output): with the output and the
    log-sum-exp of the whole row both are exact within any part of it.

    Args:
        x: the operands.
        rows: what is known of the whole rows.
        plain: use plain PyTorch on CPU too.

    Returns:
        Gradients of query, key and value, in their shapes.
    """
    if plain or x.query_NHQD.device.type != "cpu":
        return _plain_backward(x, rows)
    N, H, Q, _ = x.query_NHQD.shape
    splits = _balanced_splits(H, Q, torch.get_num_threads()) if N == 1 else 1
    if _suits_products(x):
        query_HQD, key_GKD, value_GKD = x.query_NHQD[0], x.key_NGKD[0], x.value_NGKD[0]
        grad_HQD, output_HQD, lse_HQ = (r[0] for r in rows)
        grads = rectangle.backward(query_HQD, key_GKD, value_GKD, grad_HQD, output_HQD, lse_HQ, x.scaling, splits)
        return grads[0][None], grads[1][None], grads[2][None]
    if splits == 1:
        return _one_backward(x, rows)
    even = Q // splits * splits
    grads = _split_backward(*_cut(x, rows, slice(even)), splits)
    if even == Q:
        return grads
    rest = _one_backward(*_cut(x, rows, slice(even, None)))
    return torch.cat([grads[0], rest[0]], dim=2), grads[1] + rest[1], grads[2] + rest[2]


def _suits_products(x: Operands) -> bool:
    """Whether matrix products, head by head, beat the flash kernels: on one large tile that hides nothing."""
    N, _, Q, _ = x.query_NHQD.shape
    return N == 1 and x.bias_N1QK is None and Q * x.key_NGKD.shape[2] >= _LARGE and linear.serves(x.query_NHQD)


def _one_backward(x: Operands, rows: Rows) -> Gradients:
    return _flash_backward(
        rows.grad_NHQD,
        x.query_NHQD,
        x.key_NGKD,
        x.value_NGKD,
        rows.output_NHQD,
        rows.lse_NHQ,
        0.0,
        False,
        attn_mask=x.bias_N1QK,
        scale=x.scaling,
    )


def _balanced_splits(num_heads: int, num_queries: int, num_threads: int) -> int:
    """In how many parts to cut the queries: the fewest, of 128 or more, that keep the threads nearly as busy as any do.

    The backward gives whole heads to each thread: of 9 heads on 2 threads 5 and 4.
    """

    def busy(splits: int) -> float:
        tasks = splits * num_heads
        return tasks / (-(-tasks // num_threads) * num_threads)

    possible = range(1, max(min(num_threads, num_queries // 128, _MOST_SPLITS), 1) + 1)
    enough = 0.95 * max(busy(splits) for splits in possible)
    return next(splits for splits in possible if busy(splits) >= enough)


def _cut(x: Operands, rows: Rows, part: slice) -> tuple[Operands, Rows]:
    bias_N1QK = None if x.bias_N1QK is None else x.bias_N1QK[:, :, part]
    return x._replace(query_NHQD=x.query_NHQD[:, :, part], bias_N1QK=bias_N1QK), Rows(*(r[:, :, part] for r in rows))


def _split_backward(x: Operands, rows: Rows, splits: int) -> Gradients:
    """The same for one tile, with parts of its queries side by side."""

    def parts(x_1HQ: Tensor) -> Tensor:
        return x_1HQ[0].unflatten(1, (splits, -1)).transpose(0, 1)

    x = Operands(
        parts(x.query_NHQD),
        x.key_NGKD.expand(splits, -1, -1, -1),
        x.value_NGKD.expand(splits, -1, -1, -1),
        None if x.bias_N1QK is None else parts(x.bias_N1QK),
        x.scaling,
    )
    grad_query, grad_key, grad_value = _one_backward(x, Rows(*map(parts, rows)))
    return (
        grad_query.transpose(0, 1).flatten(1, 2)[None],
        grad_key.sum(0, keepdim=True),
        grad_value.sum(0, keepdim=True),
    )


def _by_group(x_NHQ: Tensor, x: Operands) -> Tensor:
    return x_NHQ.unflatten(1, (x.key_NGKD.shape[1], -1))


def _plain_logits(x: Operands) -> Tensor:
    """[N, G, H / G, Q, K], at least float32."""
    logit_NGMQK = _by_group(x.query_NHQD, x) @ x.key_NGKD[:, :, None].transpose(-1, -2)
    logit_NGMQK = logit_NGMQK.to(torch.promote_types(logit_NGMQK.dtype, torch.float32)) * x.scaling
    return logit_NGMQK if x.bias_N1QK is None else logit_NGMQK + x.bias_N1QK[:, :, None]


def _plain_forward(x: Operands) -> tuple[Tensor, Tensor]:
    logit_NGMQK = _plain_logits(x)
    lse_NGMQ = logit_NGMQK.logsumexp(-1)
    lse_NGMQ = lse_NGMQ.masked_fill(lse_NGMQ.isinf(), 0.0)
    weight_NGMQK = (logit_NGMQK - lse_NGMQ[..., None]).exp()
    output_NGMQD = weight_NGMQK.to(x.value_NGKD.dtype) @ x.value_NGKD[:, :, None]
    return output_NGMQD.flatten(1, 2), lse_NGMQ.flatten(1, 2)


def _plain_backward(x: Operands, rows: Rows) -> Gradients:
    query_NGMQD, grad_NGMQD, output_NGMQD, lse_NGMQ = (_by_group(r, x) for r in (x.query_NHQD, *rows))
    weight_NGMQK = (_plain_logits(x) - lse_NGMQ[..., None]).exp()
    mean_NGMQ1 = (grad_NGMQD * output_NGMQD).sum(-1, keepdim=True)
    grad_weight_NGMQK = grad_NGMQD @ x.value_NGKD[:, :, None].transpose(-1, -2) - mean_NGMQ1
    grad_logit_NGMQK = (weight_NGMQK * grad_weight_NGMQK * x.scaling).to(query_NGMQD.dtype)
    grad_query_NGMQD = grad_logit_NGMQK @ x.key_NGKD[:, :, None]
    grad_key_NGKD = (grad_logit_NGMQK.transpose(-1, -2) @ query_NGMQD).sum(2)
    grad_value_NGKD = (weight_NGMQK.to(grad_NGMQD.dtype).transpose(-1, -2) @ grad_NGMQD).sum(2)
    return grad_query_NGMQD.flatten(1, 2), grad_key_NGKD, grad_value_NGKD
