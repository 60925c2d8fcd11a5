"""Terms, weights and metrics of policy losses over entries, as pure functions of plain tensors.

Shapes: L entries (one loss term each), S rollouts. Log-probs are natural logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

Aggregation = Literal["token-mean", "sequence-mean", "constant"]

# exp(20) is 4.9e8: far outside every trust region, far inside float32 for the square that ESS takes
MAX_LOG_RATIO = 20.0


def importance_ratio(log_prob_L: Tensor, sample_log_prob_L: Tensor) -> Tensor:
    """Ratio of the current policy to the one that sampled, exp(log p - log q), per entry.

    Args:
        log_prob_L: [L] nats, under the policy being trained.
        sample_log_prob_L: [L] nats, as the sampler recorded them.

    Returns:
        [L] ratio. The log-ratio is clamped to ``±MAX_LOG_RATIO``, where its gradient is 0, so that value and
        gradient stay finite for any two policies.
    """
    return (log_prob_L - sample_log_prob_L).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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
    if constant is not None and not constant > 0:
        raise ValueError(f"constant={constant}; it divides the loss and must be above 0.")


@torch.no_grad()
def ratio_metrics(
    log_prob_L: Tensor,
    sample_log_prob_L: Tensor,
    advantage_L: Tensor,
    num_entries: Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> dict[str, Tensor]:
    """Diagnostics of the importance ratio, as shares of the window's means.

    Every value is a sum over these entries divided by ``num_entries`` of the window, so that the values of all
    micro-batches add up to the window's (``reduce_window``).

    Args:
        log_prob_L: [L] nats, under the policy being trained.
        sample_log_prob_L: [L] nats, as sampled.
        advantage_L: [L] advantage.
        num_entries: [] trained tokens of the window.
        epsilon_low: lower clip width; clips only where the advantage is negative.
        epsilon_high: upper clip width; clips only where it is positive.

    Returns:
        ``clip_fraction_low``, ``clip_fraction_high``; ``kl_approx``, the k3 estimate of KL(sampler || policy) in
        nats; ``ratio`` and ``ratio_squared``, from which the effective sample size follows.
    """
    ratio_L = importance_ratio(log_prob_L, sample_log_prob_L)
    log_ratio_L = ratio_L.log()
    low_L = (ratio_L < 1 - epsilon_low) & (advantage_L < 0)
    high_L = (ratio_L > 1 + epsilon_high) & (advantage_L > 0)
    values = {
        "clip_fraction_low": low_L,
        "clip_fraction_high": high_L,
        "kl_approx": ratio_L - 1 - log_ratio_L,
        "ratio": ratio_L,
        "ratio_squared": ratio_L.square(),
    }
    count = num_entries.clamp_min(1)
    return {name: value_L.double().sum() / count for name, value_L in values.items()}


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
