"""Terms, weights and metrics of policy losses over entries, as pure functions of plain tensors.

Shapes: L entries (one loss term each), S rollouts. Log-probs are natural logs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

Aggregation = Literal["token-mean", "sequence-mean", "constant"]

# exp(20) is 4.9e8: far outside every trust region, far inside float32 for the square that ESS takes
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Exponential of log-ratios clamped to ``±MAX_LOG_RATIO``, where its gradient is 0: finite for any two policies."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_by_rollout(value_L: Tensor, rollout_L: Tensor, num_rollouts: int) -> Tensor:
    """Sum the values of each rollout's entries.

    Args:
        value_L: [L] values.
        rollout_L: [L] int64 in [0, ``num_rollouts``), rollout of each entry.
        num_rollouts: S.

    Returns:
        [S] sums, formed in float64 so that they do not depend on the length; 0 for a rollout without entries.
    """
    return torch.zeros(num_rollouts, dtype=torch.float64, device=value_L.device).index_add(
        0, rollout_L, value_L.double()
    )


def mean_by_rollout(value_L: Tensor, rollout_L: Tensor, length_S: Tensor) -> Tensor:
    """Means over each rollout's entries, [S] float64; see :func:`sum_by_rollout`."""
    return sum_by_rollout(value_L, rollout_L, len(length_S)) / length_S.clamp_min(1)


def top_of_rollout(value_L: Tensor, rollout_L: Tensor, length_S: Tensor, share: float) -> Tensor:
    """Mark the highest values of each rollout.

    Args:
        value_L: [L] values.
        rollout_L: [L] int64, rollout of each entry.
        length_S: [S] int64, entries of each rollout.
        share: in (0, 1], of the entries of a rollout that is marked, rounded up; at equal values the first ones.

    Returns:
        [L] bool.
    """
    by_value_L = value_L.argsort(descending=True, stable=True)
    order_L = by_value_L[rollout_L[by_value_L].argsort(stable=True)]
    start_S = length_S.cumsum(0) - length_S
    rank_L = torch.empty_like(rollout_L)
    rank_L[order_L] = torch.arange(len(order_L), device=rollout_L.device) - start_S[rollout_L[order_L]]
    # a hair below: 0.2 * 5 is 1, not the 1.0000000000000002 that would round up
    return rank_L < (length_S.double() * share - 1e-9).ceil().clamp_min(1)[rollout_L]


def clipped_surrogate(ratio_L: Tensor, advantage_L: Tensor, epsilon_low: float, epsilon_high: float) -> Tensor:
    """Pessimistic clipped policy-gradient loss per entry.

    -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A): PPO, arXiv:1707.06347, eq. 7; separate bounds as in DAPO,
    arXiv:2503.14476, eq. 10.

    Args:
        ratio_L: [L] importance ratio.
        advantage_L: [L] advantage of the entry's rollout.
        epsilon_low: in [0, 1), lower clip width.
        epsilon_high: >= 0, upper clip width.

    Returns:
        [L] loss term, to be minimised.
    """
    clipped_L = ratio_L.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.minimum(ratio_L * advantage_L, clipped_L * advantage_L)


def k3_kl(log_prob_L: Tensor, ref_log_prob_L: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) per entry that is never negative.

    exp(d) - d - 1 with d = log p_ref - log p: estimator k3 of http://joschu.net/blog/kl-approx.html, used by
    DeepSeekMath, arXiv:2402.03300, eq. 4.

    Args:
        log_prob_L: [L] nats, under the policy being trained.
        ref_log_prob_L: [L] nats, under the frozen reference.

    Returns:
        [L] nats, >= 0.
    """
    difference_L = (ref_log_prob_L - log_prob_L).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_L.expm1() - difference_L


def entry_weights(
    rollout_L: Tensor,
    length_S: Tensor,
    num_entries: Tensor,
    num_rollouts: Tensor,
    *,
    aggregation: Aggregation,
    constant: float | None = None,
) -> Tensor:
    """Weight of every loss term, from totals of the whole window and the entry's rollout alone.

    The loss of a window is the weighted sum of its terms, so its gradient does not depend on how the window is
    packed, ordered or split.

    Args:
        rollout_L: [L] int64, rollout of each entry.
        length_S: [S] int64, trained tokens of each rollout.
        num_entries: [] int64, trained tokens of the window.
        num_rollouts: [] int64, rollouts of the window that train at least one token.
        aggregation: ``"token-mean"`` 1 / num_entries; ``"sequence-mean"`` 1 / (length_r · num_rollouts);
            ``"constant"`` 1 / (constant · num_rollouts), Dr. GRPO, arXiv:2503.20783.
        constant: C of ``"constant"``, usually the most tokens of a completion.

    Returns:
        [L] float64 weights; none where the window trains nothing.
    """
    rollouts = num_rollouts.clamp_min(1).double()
    if aggregation == "token-mean":
        return (1.0 / num_entries.clamp_min(1).double()).expand(len(rollout_L))
    if aggregation == "sequence-mean":
        return 1.0 / (length_S[rollout_L].double() * rollouts)
    assert constant is not None
    return (1.0 / (constant * rollouts)).expand(len(rollout_L))


def check_aggregation(aggregation: str, constant: float | None) -> None:
    """Raise ``ValueError`` unless ``aggregation`` is known and ``constant`` is given exactly where it is used."""
    if aggregation not in get_args(Aggregation):
        known = ", ".join(map(repr, get_args(Aggregation)))
        raise ValueError(f"aggregation={aggregation!r} is unknown; choose one of {known}.")
    if (aggregation == "constant") != (constant is not None):
        raise ValueError(
            f"aggregation={aggregation!r} with constant={constant}; 'constant' needs constant=C (for example the most "
            "tokens of a completion), the other aggregations take none."
        )
    if constant is not None and not 0 < constant < math.inf:
        raise ValueError(f"constant={constant}; it divides the loss and must be finite and above 0.")


def ratio_values(log_ratio_L: Tensor) -> dict[str, Tensor]:
    """Diagnostics of the importance ratio whose means over the window are reported.

    Args:
        log_ratio_L: [L] nats, log-ratio of the current policy to the anchor.

    Returns:
        [L] each: ``kl_approx``, the k3 estimate of KL(anchor || policy) in nats; ``ratio`` and ``ratio_squared``, from
        which the effective sample size follows.
    """
    ratio_L = bounded_exp(log_ratio_L)
    return {"kl_approx": ratio_L - 1 - ratio_L.log(), "ratio": ratio_L, "ratio_squared": ratio_L.square()}


def clip_values(ratio_L: Tensor, advantage_L: Tensor, low: float | None, high: float | None) -> dict[str, Tensor]:
    """Where a clip of the ratio takes the gradient away: the low bound at negative advantages, the high at positive.

    Args:
        ratio_L: [L] importance ratio.
        advantage_L: [L] advantage.
        low: lower bound of the ratio; None for none.
        high: upper bound; None for none.

    Returns:
        [L] bool each: ``clip_fraction_low`` and ``clip_fraction_high``, for the bounds that there are.
    """
    values = {}
    if low is not None:
        values["clip_fraction_low"] = (ratio_L < low) & (advantage_L < 0)
    if high is not None:
        values["clip_fraction_high"] = (ratio_L > high) & (advantage_L > 0)
    return values


def mismatch_values(log_gap_L: Tensor) -> dict[str, Tensor]:
    """Diagnostics of the gap between the trainer's policy p and the sampler's q whose means are reported.

    Args:
        log_gap_L: [L] nats, log p - log q of tokens drawn from q.

    Returns:
        [L] each: ``mismatch_ratio``, p / q, whose mean is 1 for equal policies; ``mismatch_k1`` and ``mismatch_k3``,
        estimates of KL(q || p) in nats: -log p/q, and p/q - 1 - log p/q, which is never negative.
    """
    ratio_L = bounded_exp(log_gap_L)
    return {"mismatch_ratio": ratio_L, "mismatch_k1": -log_gap_L, "mismatch_k3": ratio_L - 1 - ratio_L.log()}


def check_clip_epsilon(clip_epsilon: float | Sequence[float]) -> tuple[float, float]:
    """Low and high clip width from one number or a pair.

    Raises:
        ValueError: unless low lies in [0, 1) and high is >= 0.
    """
    widths = tuple(clip_epsilon) if isinstance(clip_epsilon, Sequence) else (clip_epsilon, clip_epsilon)
    low, high = widths if len(widths) == 2 else (math.nan, math.nan)
    if not 0 <= low < 1 or not high >= 0:
        raise ValueError(
            f"clip_epsilon={clip_epsilon}; the low width lies in [0, 1), the high one is >= 0: give one number "
            "such as 0.2 or a pair such as (0.2, 0.28)."
        )
    return float(low), float(high)


def reduce_window(outputs: Sequence[TensorDictBase]) -> TensorDict:
    """Combine the loss outputs of all micro-batches of a window into those of the window.

    Every output is a micro-batch's share of a window mean, so shares are added. The effective sample size,
    (Σ w)² / (n Σ w²) in (0, 1], is not additive and is formed from the added ``ratio`` and ``ratio_squared``.

    Args:
        outputs: one output of a loss module per micro-batch, scalars only.

    Returns:
        A ``TensorDict`` of detached scalars.
    """
    total: dict[str, Tensor] = {}
    for output in outputs:
        for key, value in output.items():
            total[key] = total[key] + value.detach() if key in total else value.detach()
    if "ratio_squared" in total:
        squared = total["ratio_squared"]
        total["ESS"] = torch.where(squared > 0, total["ratio"].square() / squared.clamp_min(1e-300), 0.0)
    return TensorDict(total, batch_size=[])
