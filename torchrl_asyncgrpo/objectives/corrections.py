"""Corrections of the gap between the policy that sampled and the one that trains, as weights of loss terms.

The gap is log p - log q per token: p the trainer's policy (the loss module's anchor, or the current policy where the
sampler is the anchor), q the sampler's record. It is not 0 because the weights were newer or older, and because two
implementations of one model differ. All is computed in log space and finite for any two policies and any length.

Shapes: L entries, S rollouts.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from torchrl_asyncgrpo.objectives.entries import Entries
from torchrl_asyncgrpo.objectives.functional import bounded_exp

Level = Literal["token", "sequence"]
Measure = Literal["mean", "max", "geometric"]


@runtime_checkable
class Correction(Protocol):
    """One correction; give an objective one or several.

    Attributes:
        weighs: whether the weights hold the importance ratio of the gap, and do not only mask.
    """

    weighs: bool

    def __call__(self, entries: Entries, log_gap_L: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weigh every entry.

        Args:
            entries: the trained tokens of a micro-batch, without a gradient; its rollouts are whole.
            log_gap_L: [L] nats, log p - log q.

        Returns:
            [L] finite weights >= 0 of the loss terms, and diagnostics, [L] values each, whose mean over the window is
            reported.
        """
        ...


class TruncatedImportanceSampling:
    """Weigh every term by min(p / q, cap).

    Level ``"token"``: each token by its own ratio, truncated as in IMPALA, arXiv:1802.01561, and for the gap to an
    inference engine in https://fengyao.notion.site/off-policy-rl. ``"sequence"``: all tokens of a rollout by the
    product of their ratios, which leaves the gradient unbiased where the cap does not bind, at a high variance.

    Args:
        cap: highest weight, > 0; None does not truncate: full importance sampling, up to the
            e^20 at which every ratio ends.
        level: ``"token"`` or ``"sequence"``.

    Metrics: ``tis_truncated``, the share of tokens whose ratio was above the cap; ``tis_weight``, the mean weight.

    Raises:
        ValueError: if an argument is out of range.
    """

    weighs = True

    def __init__(self, cap: float | None = 2.0, *, level: Level = "token") -> None:
        if cap is not None and not cap > 0:
            raise ValueError(f"cap={cap}; the highest weight is above 0, usually 2 to 10, or None for no limit.")
        _check_level(level)
        self.cap = cap
        self.level: Level = level

    def __call__(self, entries: Entries, log_gap_L: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and metrics; see ``Correction``."""
        ratio_L = _ratio(entries, log_gap_L, self.level)
        weight_L = ratio_L if self.cap is None else ratio_L.clamp_max(self.cap)
        return weight_L, {"tis_truncated": ratio_L > weight_L, "tis_weight": weight_L}


class MaskedImportanceSampling:
    """Weigh every term by p / q where that lies in [low, high], and drop it elsewhere.

    IcePop, https://ringtech.notion.site/icepop: tokens whose two probabilities differ by more than noise are left out
    instead of being weighed down to the bound.

    Args:
        low: lowest ratio that is trained, in [0, 1].
        high: highest one, >= 1; IcePop's are 0.5 and 5.
        level: ``"token"`` or ``"sequence"``, where the product over a rollout decides and weighs.

    Metrics: ``icepop_masked``, the share of tokens that were dropped; ``icepop_weight``, the mean weight.

    Raises:
        ValueError: if an argument is out of range.
    """

    weighs = True

    def __init__(self, low: float = 0.5, high: float = 5.0, *, level: Level = "token") -> None:
        _check_bounds(low, high)
        _check_level(level)
        self.low, self.high = float(low), float(high)
        self.level: Level = level

    def __call__(self, entries: Entries, log_gap_L: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and metrics; see ``Correction``."""
        ratio_L = _ratio(entries, log_gap_L, self.level)
        inside_L = (ratio_L >= self.low) & (ratio_L <= self.high)
        weight_L = torch.where(inside_L, ratio_L, 0.0)
        return weight_L, {"icepop_masked": ~inside_L, "icepop_weight": weight_L}


class SequenceRejection:
    """Drop whole rollouts whose ratios p / q say that the sampler was another policy.

    Args:
        low: lowest value of the measure that is trained, in [0, 1].
        high: highest one, >= 1.
        measure: of the token ratios of a rollout. ``"mean"``: their mean. ``"max"``: every one of them must lie in
            [low, high]. ``"geometric"``: exp of the mean log-ratio, which does not grow with the length.

    Metrics: ``rejected``, the share of tokens in dropped rollouts.

    Raises:
        ValueError: if an argument is out of range.
    """

    weighs = False

    def __init__(self, low: float = 0.0, high: float = 2.0, *, measure: Measure = "geometric") -> None:
        _check_bounds(low, high)
        if measure not in get_args(Measure):
            raise ValueError(f"measure={measure!r}; choose one of {', '.join(map(repr, get_args(Measure)))}.")
        self.low, self.high = float(low), float(high)
        self.measure: Measure = measure

    def __call__(self, entries: Entries, log_gap_L: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and metrics; see ``Correction``."""
        if self.measure == "max":
            ratio_L = bounded_exp(log_gap_L)
            outside_S = entries.sum_by_rollout(((ratio_L < self.low) | (ratio_L > self.high)).to(log_gap_L.dtype))
            rejected_S = outside_S > 0
        else:
            if self.measure == "mean":
                value_S = entries.mean_by_rollout(bounded_exp(log_gap_L))
            else:
                value_S = bounded_exp(entries.mean_by_rollout(log_gap_L))
            rejected_S = (value_S < self.low) | (value_S > self.high)
        rejected_L = rejected_S[entries.rollout_L]
        return (~rejected_L).to(log_gap_L.dtype), {"rejected": rejected_L}


class OffPolicySequenceMask:
    """Drop rollouts of negative advantage that the trained policy would hardly have sampled.

    Mean log q - log p over the rollout above ``max_kl``: DeepSeek-V3.2, arXiv:2512.02556, eq. 9. The model learns most
    from mistakes of its own, and mistakes that are not its own mislead it.

    Args:
        max_kl: nats per token, >= 0.

    Metrics: ``off_policy_masked``, the share of tokens in dropped rollouts.

    Raises:
        ValueError: if ``max_kl`` is negative; in ``forward`` of the loss, if a rollout has several advantages.
    """

    weighs = False

    def __init__(self, max_kl: float) -> None:
        if not max_kl >= 0:
            raise ValueError(f"max_kl={max_kl}; it is a divergence in nats per token, >= 0.")
        self.max_kl = float(max_kl)

    def __call__(self, entries: Entries, log_gap_L: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and metrics; see ``Correction``."""
        advantage_L = entries.one_advantage(type(self).__name__)
        far_S = -entries.mean_by_rollout(log_gap_L) > self.max_kl
        masked_L = far_S[entries.rollout_L] & (advantage_L < 0)
        return (~masked_L).to(log_gap_L.dtype), {"off_policy_masked": masked_L}


def _ratio(entries: Entries, log_gap_L: Tensor, level: Level) -> Tensor:
    if level == "token":
        return bounded_exp(log_gap_L)
    return bounded_exp(entries.sum_by_rollout(log_gap_L))[entries.rollout_L].to(log_gap_L.dtype)


def _check_level(level: str) -> None:
    if level not in get_args(Level):
        raise ValueError(f"level={level!r}; choose one of {', '.join(map(repr, get_args(Level)))}.")


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 or not high >= 1 or math.isinf(low):
        raise ValueError(f"low={low}, high={high}; a ratio of 1 must pass: low lies in [0, 1], high is >= 1.")
