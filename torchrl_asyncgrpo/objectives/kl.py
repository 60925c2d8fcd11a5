"""Estimates of the divergence from a reference policy, one value per trained token.

Shapes: L entries. Log-probs are natural logs, d = log p - log p_ref.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from torchrl_asyncgrpo.objectives.functional import bounded_exp, k3_kl

KLEstimator = Literal["k1", "k2", "k3", "unbiased"]


def kl_term(log_prob_L: Tensor, ref_log_prob_L: Tensor, sample_log_prob_L: Tensor, *, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) from each sampled token, as a term of the loss.

    =============== ====================== =====================================================================
    estimator       value                  expected gradient, tokens sampled from the current policy
    =============== ====================== =====================================================================
    ``"k1"``        d                      0: it has the right value, and trains nothing
    ``"k2"``        d² / 2                 that of KL(policy || reference); the value is biased
    ``"k3"``        exp(-d) - 1 + d        that of KL(reference || policy), the other direction; the value is right
    ``"unbiased"``  r · (exp(-d) - 1 + d)  that of KL(policy || reference); value and gradient are right for any sampler
    =============== ====================== =====================================================================

    k1 to k3: http://joschu.net/blog/kl-approx.html. ``"unbiased"`` weighs k3 by the importance ratio r of the current
    policy to the sampler, *with* its gradient: DeepSeek-V3.2, arXiv:2512.02556, section 3.1. It wants the sampler's
    log-probs to be of the whole vocabulary.

    Args:
        log_prob_L: [L] nats, under the policy being trained.
        ref_log_prob_L: [L] nats, under the frozen reference.
        sample_log_prob_L: [L] nats, as sampled; read by ``"unbiased"`` alone.
        estimator: one of the above.

    Returns:
        [L] nats. Log-ratios in exponents are clamped to ``±MAX_LOG_RATIO``.
    """
    difference_L = log_prob_L - ref_log_prob_L
    if estimator == "k1":
        return difference_L
    if estimator == "k2":
        return difference_L.square() / 2
    kl_L = k3_kl(log_prob_L, ref_log_prob_L)
    return kl_L if estimator == "k3" else bounded_exp(log_prob_L - sample_log_prob_L) * kl_L


def check_estimator(estimator: str) -> None:
    """Raise ``ValueError`` unless the estimator is known."""
    if estimator not in get_args(KLEstimator):
        known = ", ".join(map(repr, get_args(KLEstimator)))
        raise ValueError(f"kl_estimator={estimator!r} is unknown; choose one of {known}.")
