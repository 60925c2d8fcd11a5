"""One large rectangle without a mask as plain matrix products, for CPUs where oneDNN beats the BLAS.

The flash kernels multiply through the BLAS of PyTorch, which leaves half of an AMD core idle. Here the products are
oneDNN's, and what a softmax adds to them is two passes over each tile: the log-sum-exp and the row's mean gradient
ride along as one more column of the products. Parts of heads run side by side.

Suffixes: H query heads, G key heads, Q queries, K keys, D head width, E = D + 1, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from torchrl_asyncgrpo.kernels.linear import product_nt
from torchrl_asyncgrpo.modules.tree_attention.workers import run_all

# Queries and keys of one tile: it should stay in the cache, and be worth several calls.
TILE = 1024


def forward(query_HQD: Tensor, key_GKD: Tensor, value_GKD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of all queries to all keys.

    Args:
        query_HQD: [H, Q, D] float.
        key_GKD, value_GKD: [G, K, D], G divides H.
        scaling: factor on the dot products.

    Returns:
        Output [H, Q, D], laid out as [Q, H, D], and log-sum-exp [H, Q].
    """
    H, Q, D = query_HQD.shape
    output_QHD, lse_QH = query_HQD.new_empty(Q, H, D), query_HQD.new_empty(Q, H)
    key_GKD, value_GKE = key_GKD.contiguous(), _with_column(value_GKD, 1.0)

    def attend(h: int, q: slice) -> None:
        g = h * len(key_GKD) // H
        output_QHD[q, h], lse_QH[q, h] = _attend(query_HQD[h, q] * scaling, key_GKD[g], value_GKE[g])

    run_all([partial(attend, h, q) for h in range(H) for q in _tiles(Q)])
    return output_QHD.transpose(0, 1), lse_QH.T


def _attend(query_QD: Tensor, key_KD: Tensor, value_KE: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a tile of queries of one head: the softmax of one tile of keys after another."""
    Q, D = query_QD.shape
    peak_Q1, sum_QE = query_QD.new_full((Q, 1), -torch.inf), query_QD.new_zeros(Q, D + 1)
    for k in _tiles(len(key_KD)):
        logit_QK = product_nt(query_QD, key_KD[k])
        higher_Q1 = torch.maximum(peak_Q1, logit_QK.amax(1, keepdim=True))
        weight_QK = logit_QK.sub_(higher_Q1).exp_()
        sum_QE.mul_((peak_Q1 - higher_Q1).exp_()).add_(product_nt(weight_QK, value_KE[k].T))
        peak_Q1 = higher_Q1
    total_Q1 = sum_QE[:, D:]
    return sum_QE[:, :D] / total_Q1, (peak_Q1 + total_Q1.log())[:, 0]


def backward(
    query_HQD: Tensor,
    key_GKD: Tensor,
    value_GKD: Tensor,
    grad_HQD: Tensor,
    output_HQD: Tensor,
    lse_HQ: Tensor,
    scaling: float,
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rectangle's share of the gradients, given the output and log-sum-exp of the whole rows.

    Args:
        query_HQD, key_GKD, value_GKD, scaling: as of :func:`forward`.
        grad_HQD: gradient of the output.
        output_HQD, lse_HQ: of the whole rows, over all that they attend to.
        parts: in how many parts of its queries to cut each head.

    Returns:
        Gradients of query [H, Q, D], key and value [G, K, D].
    """
    H, Q, D = query_HQD.shape
    G, K, _ = key_GKD.shape
    query_HDQ, grad_HDQ = (query_HQD.transpose(1, 2) * scaling).contiguous(), grad_HQD.transpose(1, 2).contiguous()
    query_HQE = _with_column(query_HDQ.transpose(1, 2), -lse_HQ)
    grad_HQE = _with_column(grad_HQD, -(grad_HQD * output_HQD).sum(-1))
    key_GKD = key_GKD.contiguous()
    key_GKE, value_GKE = _with_column(key_GKD, 1.0), _with_column(value_GKD, 1.0)
    grad_query_QHD = query_HQD.new_zeros(Q, H, D)
    grad_key_HPDK, grad_value_HPDK = (query_HQD.new_zeros(H, parts, D, K) for _ in range(2))

    def differentiate(h: int, p: int) -> None:
        g = h * G // H
        for q in _tiles((p + 1) * Q // parts, p * Q // parts):
            for k in _tiles(K):
                weight_QK = product_nt(query_HQE[h, q], key_GKE[g, k]).exp_()
                grad_value_HPDK[h, p, :, k] += product_nt(grad_HDQ[h, :, q], weight_QK.T)
                grad_logit_QK = product_nt(grad_HQE[h, q], value_GKE[g, k]).mul_(weight_QK)
                grad_key_HPDK[h, p, :, k] += product_nt(query_HDQ[h, :, q], grad_logit_QK.T)
                grad_query_QHD[q, h] += product_nt(grad_logit_QK, key_GKD[g, k].T)

    run_all([partial(differentiate, h, p) for h in range(H) for p in range(parts)])
    grad_key_GKD, grad_value_GKD = (
        x_HPDK.unflatten(0, (G, -1)).sum((1, 2)).transpose(1, 2) for x_HPDK in (grad_key_HPDK, grad_value_HPDK)
    )
    return grad_query_QHD.mul_(scaling).transpose(0, 1), grad_key_GKD, grad_value_GKD


def _tiles(last: int, first: int = 0) -> Iterator[slice]:
    """Cuts of rows, never of columns: oneDNN falls to its reference code on a second operand cut by columns."""
    return (slice(start, min(start + TILE, last)) for start in range(first, last, TILE))


def _with_column(x_HKD: Tensor, column: Tensor | float) -> Tensor:
    """[H, K, D + 1], contiguous."""
    x_HKE = x_HKD.new_empty(*x_HKD.shape[:2], x_HKD.shape[2] + 1)
    x_HKE[..., :-1] = x_HKD
    x_HKE[..., -1] = column
    return x_HKE
