"""Log-probs and entropies from hidden states, chunk by chunk, without a logits tensor of the whole batch.

Shapes: P predicting positions, M tokens to score (several may follow one position), D width, V vocabulary,
L entries, K tokens that the sampler kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_asyncgrpo.kernels.linear import product_nt

# Rows of the output embedding whose gradient is formed at a time
WEIGHT_BLOCK = 8192


@dataclass(frozen=True)
class HeadTransform:
    """What turns ``hidden @ weight.T + bias`` into the logits of the sampling distribution.

    logits = softcap · tanh(scale · raw / softcap) / temperature; without a softcap, scale · raw / temperature.

    Args:
        temperature: sampling temperature, > 0.
        scale: factor on the raw logits (Cohere's ``logit_scale``, 1 / Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping``, or None.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def logits_(self, raw_CV: Tensor) -> Tensor:
        """Transform raw logits in place; [C, V] to [C, V]."""
        if self.scale != 1.0:
            raw_CV.mul_(self.scale)
        if self.softcap is not None:
            raw_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return raw_CV.div_(self.temperature) if self.temperature != 1.0 else raw_CV

    def backward_(self, grad_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """Gradient with respect to the raw logits, in place of ``grad_CV``."""
        if self.softcap is not None:
            tanh_CV = logits_CV * (self.temperature / self.softcap)
            grad_CV.mul_(1 - tanh_CV.square_())
        factor = self.scale / self.temperature
        return grad_CV.mul_(factor) if factor != 1.0 else grad_CV


def token_log_prob(
    hidden_PD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    position_M: Tensor,
    token_M: Tensor,
    *,
    transform: HeadTransform,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token after its position, and the entropy of the distribution at each position.

    Logits exist for ``chunk_size`` positions at a time, once in the forward and once more in the backward.

    Args:
        hidden_PD: [P, D] final hidden states of the predicting positions.
        weight_VD: [V, D] output embedding.
        bias_V: [V] or None.
        position_M: [M] int64 in [0, P), non-decreasing: the position that predicts each token.
        token_M: [M] int64 in [0, V).
        transform: temperature, scale and softcap.
        chunk_size: positions per chunk, >= 1.

    Returns:
        log_prob_M [M] and entropy_P [P] in nats, float32 (float64 where ``hidden_PD`` is float64).
    """
    return _TokenLogProb.apply(hidden_PD, weight_VD, bias_V, position_M, token_M, transform, chunk_size)


def log_kept_mass(log_prob_K: Tensor, entry_K: Tensor, num_entries: int) -> Tensor:
    """Log of the probability that the policy gives to the kept set of each entry, log Σ_{v kept} p(v).

    Subtracted from the log-prob of the sampled token it gives the one of the distribution restricted to the kept set,
    exactly 0 where nothing else was kept.

    Args:
        log_prob_K: [K] nats, of every kept token after its entry's position.
        entry_K: [K] int64 in [0, num_entries), the entry of each kept token, in any order.
        num_entries: L.

    Returns:
        [L] nats, <= 0; 0, without a gradient, for an entry of which no token is listed: its whole vocabulary was kept.
    """
    top_L = log_prob_K.new_zeros(num_entries).scatter_reduce_(
        0, entry_K, log_prob_K.detach(), "amax", include_self=False
    )
    share_K = (log_prob_K - top_L[entry_K]).exp()
    # in float64: in float32 the error of a running sum over a large set would pass for a policy that changed
    sum_L = share_K.new_zeros(num_entries, dtype=torch.float64).index_add(0, entry_K, share_K.double())
    # a kept set sums to 1 or more, its most probable token alone being 1
    return (top_L + sum_L.clamp_min(1).log()).clamp_max(0).to(log_prob_K.dtype)


class _TokenLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        position_M: Tensor,
        token_M: Tensor,
        transform: HeadTransform,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(hidden_PD)
        result = torch.float64 if compute == torch.float64 else torch.float32
        log_prob_M = hidden_PD.new_empty(len(position_M), dtype=result)
        log_sum_P = hidden_PD.new_empty(len(hidden_PD), dtype=result)
        entropy_P = torch.empty_like(log_sum_P)
        weight = weight_VD.to(compute)
        for rows, tokens in _chunks(len(hidden_PD), position_M, chunk_size):
            logits_CV = _logits(hidden_PD[rows], weight, bias_V, transform, compute, result)
            log_sum_C = torch.logsumexp(logits_CV, -1)
            local_m = position_M[tokens] - rows.start
            log_prob_M[tokens] = logits_CV[local_m, token_M[tokens]] - log_sum_C[local_m]
            log_sum_P[rows] = log_sum_C
            prob_CV = (logits_CV - log_sum_C[:, None]).exp_()
            entropy_P[rows] = log_sum_C - torch.linalg.vecdot(prob_CV, logits_CV)
        ctx.save_for_backward(hidden_PD, weight_VD, bias_V, position_M, token_M, log_sum_P, entropy_P)
        ctx.settings = (transform, chunk_size, compute, result)
        return log_prob_M, entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob_M: Tensor, grad_entropy_P: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PD, weight_VD, bias_V, position_M, token_M, log_sum_P, entropy_P = ctx.saved_tensors
        transform, chunk_size, compute, result = ctx.settings
        grad_hidden_PD = torch.empty_like(hidden_PD) if ctx.needs_input_grad[0] else None
        # chunks add up in the result's precision, also where the weights are bfloat16
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=result) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=result) if bias_V is not None and ctx.needs_input_grad[2] else None
        weight = weight_VD.to(compute)
        for rows, tokens in _chunks(len(hidden_PD), position_M, chunk_size):
            logits_CV = _logits(hidden_PD[rows], weight, bias_V, transform, compute, result)
            local_m, grad_m = position_M[tokens] - rows.start, grad_log_prob_M[tokens]
            grad_sum_C = torch.zeros_like(log_sum_P[rows]).index_add_(0, local_m, grad_m)
            # d log p(v) = [v] - p, d entropy = -p (log p + entropy)
            log_p_CV = logits_CV - log_sum_P[rows, None]
            grad_CV = log_p_CV.exp()
            log_p_CV.add_(entropy_P[rows, None]).mul_(grad_entropy_P[rows, None]).add_(grad_sum_C[:, None])
            grad_CV.mul_(log_p_CV).neg_()
            del log_p_CV
            grad_CV.index_put_((local_m, token_M[tokens]), grad_m, accumulate=True)
            grad_CV = transform.backward_(grad_CV, logits_CV)
            del logits_CV
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(compute)
            if grad_hidden_PD is not None:
                grad_hidden_PD[rows] = product_nt(grad_CV, weight.T)
            if grad_weight_VD is not None:
                hidden_CD = hidden_PD[rows].to(compute)
                # by blocks of the vocabulary: a second [V, D] beside the gradient would be the peak of the memory
                for start in range(0, len(grad_weight_VD), WEIGHT_BLOCK):
                    columns = slice(start, start + WEIGHT_BLOCK)
                    grad_weight_VD[columns] += product_nt(grad_CV[:, columns].T, hidden_CD.T)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        if grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_hidden_PD, grad_weight_VD, grad_bias_V, None, None, None, None


def _compute_dtype(hidden_PD: Tensor) -> torch.dtype:
    device = hidden_PD.device.type
    if hidden_PD.dtype == torch.float64:  # as autocast itself leaves it
        return hidden_PD.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_PD.dtype


def _logits(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    transform: HeadTransform,
    compute: torch.dtype,
    result: torch.dtype,
) -> Tensor:
    with torch.autocast(hidden_CD.device.type, enabled=False):
        raw_CV = product_nt(hidden_CD.to(compute), weight_VD)
    if bias_V is not None:
        raw_CV += bias_V
    return transform.logits_(raw_CV.to(result))


def _chunks(num_positions: int, position_M: Tensor, chunk_size: int) -> list[tuple[slice, slice]]:
    """Cut the positions into chunks, each with the range of tokens that follow them."""
    starts = list(range(0, num_positions, chunk_size))
    bounds = torch.searchsorted(position_M, torch.tensor([*starts, num_positions], device=position_M.device)).tolist()
    return [
        (slice(start, min(start + chunk_size, num_positions)), slice(bounds[i], bounds[i + 1]))
        for i, start in enumerate(starts)
    ]
