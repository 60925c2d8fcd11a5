"""GMPO: the geometric mean of a rollout's clipped token ratios."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives import functional
from torchrl_asyncgrpo.objectives.base import PolicyLoss, PolicyOptions
from torchrl_asyncgrpo.objectives.entries import Entries


def gmpo_term(
    log_ratio_L: Tensor,
    advantage_L: Tensor,
    rollout_L: Tensor,
    length_S: Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> Tensor:
    """Geometric mean of the pessimistically clipped token ratios of each entry's rollout, times -A.

    -A · (Π_t min or max of r_t and clip(r_t, e^-ε_low, e^ε_high))^(1/|o|), the minimum where A > 0 and the maximum
    elsewhere: arXiv:2507.20673, eq. 4.

    Args:
        log_ratio_L: [L] nats, log-ratio to the anchor; carries the gradient.
        advantage_L: [L] advantage, one value per rollout.
        rollout_L: [L] int64, rollout of each entry.
        length_S: [S] int64, entries of each rollout.
        epsilon_low: >= 0, in nats.
        epsilon_high: >= 0, in nats.

    Returns:
        [L] loss terms; those of one rollout are equal.
    """
    clipped_L = log_ratio_L.clamp(-epsilon_low, epsilon_high)
    pessimistic_L = torch.where(
        advantage_L > 0, torch.minimum(log_ratio_L, clipped_L), torch.maximum(log_ratio_L, clipped_L)
    )
    mean_L = functional.mean_by_rollout(pessimistic_L, rollout_L, length_S)[rollout_L].to(log_ratio_L.dtype)
    return -functional.bounded_exp(mean_L) * advantage_L


class GMPOLoss(PolicyLoss):
    """Geometric-mean policy optimisation: one outlier among the token ratios moves a rollout little.

    :Formula: ``-A exp(mean_t clip(log r_t, -ε_low, ε_high))``, clipped on the side that binds
    :Aggregation: sequence-mean
    :Reference: GMPO, arXiv:2507.20673, eq. 4
    :Use: wide clips without instability

    Args:
        actor_network: as in ``PolicyLoss``.
        clip_epsilon: clip width of the *log*-ratio in nats, one number or ``(low, high)``, each >= 0.
        options: those of :class:`PolicyLoss`.

    Metrics of its own: ``clip_fraction_low`` and ``clip_fraction_high``, shares of tokens whose gradient the clip took.

    Raises:
        ValueError: if an argument is out of range or chooses tokens; in ``forward``, if a rollout has several
            advantages.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = 0.4,
        **options: Unpack[PolicyOptions],
    ) -> None:
        options.setdefault("aggregation", "sequence-mean")
        super().__init__(actor_network, **options)
        widths = tuple(clip_epsilon) if isinstance(clip_epsilon, Sequence) else (clip_epsilon, clip_epsilon)
        if len(widths) != 2 or not all(width >= 0 for width in widths):
            raise ValueError(
                f"clip_epsilon={clip_epsilon}; it clips the log-ratio, in nats: give one number >= 0 such as 0.4, or a "
                "pair."
            )
        self.clip_epsilon_low, self.clip_epsilon_high = map(float, widths)
        self._check_one_term_per_rollout()

    def policy_term(self, entries: Entries) -> Tensor:
        """The term of every entry's rollout, [L]."""
        return gmpo_term(
            entries.log_ratio_L,
            entries.one_advantage("GMPOLoss"),
            entries.rollout_L,
            entries.length_S,
            self.clip_epsilon_low,
            self.clip_epsilon_high,
        )

    def term_metrics(self, entries: Entries) -> dict[str, Tensor]:
        """Where the clip binds, [L] each."""
        return functional.clip_values(
            entries.log_ratio_L, entries.advantage_L, -self.clip_epsilon_low, self.clip_epsilon_high
        )
