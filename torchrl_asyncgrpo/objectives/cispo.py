"""CISPO: the importance weight is clipped, the gradient of no token is."""

from __future__ import annotations

import math

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives import functional
from torchrl_asyncgrpo.objectives.base import PolicyLoss, PolicyOptions
from torchrl_asyncgrpo.objectives.entries import Entries


def cispo_term(
    log_prob_L: Tensor, log_ratio_L: Tensor, advantage_L: Tensor, epsilon_low: float | None, epsilon_high: float
) -> Tensor:
    """REINFORCE term under a clipped, constant importance weight.

    -sg[clip(r, 1 - ε_low, 1 + ε_high)] A log p: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.

    Args:
        log_prob_L: [L] nats, under the policy being trained.
        log_ratio_L: [L] nats, log-ratio to the anchor.
        advantage_L: [L] advantage.
        epsilon_low: in [0, 1), or None for no lower bound.
        epsilon_high: >= 0.

    Returns:
        [L] loss terms.
    """
    low = 0.0 if epsilon_low is None else 1 - epsilon_low
    weight_L = functional.bounded_exp(log_ratio_L.detach()).clamp(low, 1 + epsilon_high)
    return -weight_L * advantage_L * log_prob_L


class CISPOLoss(PolicyLoss):
    """Clipped importance-sampling weights: tokens beyond the clip go on learning, at a bounded weight.

    :Formula: ``-sg[clip(r, 1 - ε_low, 1 + ε_high)] A log p``
    :Aggregation: token-mean
    :Reference: MiniMax-M1, arXiv:2506.13585, eq. 4-5
    :Use: when rare tokens that matter ("wait", "however") are clipped away by PPO

    Args:
        actor_network: as in ``PolicyLoss``.
        epsilon_high: the weight is at most 1 + this, >= 0.
        epsilon_low: the weight is at least 1 - this, in [0, 1); None for no lower bound, as in the paper.
        options: those of :class:`PolicyLoss`.

    Metrics of its own: ``clip_fraction_low`` and ``clip_fraction_high``, shares of tokens whose weight is clipped.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        epsilon_high: float = 0.28,
        epsilon_low: float | None = None,
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(actor_network, **options)
        if not 0 <= epsilon_high < math.inf or not 0 <= (epsilon_low or 0.0) < 1:
            raise ValueError(
                f"epsilon_low={epsilon_low}, epsilon_high={epsilon_high}; the low width lies in [0, 1) or is None for "
                "no lower bound, the high one is finite and >= 0, such as 0.28."
            )
        self.epsilon_low = None if epsilon_low is None else float(epsilon_low)
        self.epsilon_high = float(epsilon_high)

    def policy_term(self, entries: Entries) -> Tensor:
        """The weighted REINFORCE term of every entry, [L]."""
        return cispo_term(
            entries.log_prob_L, entries.log_ratio_L, entries.advantage_L, self.epsilon_low, self.epsilon_high
        )

    def term_metrics(self, entries: Entries) -> dict[str, Tensor]:
        """Where the weight is clipped, [L] each."""
        values = {"clip_fraction_high": entries.ratio_L > 1 + self.epsilon_high}
        if self.epsilon_low is not None:
            values["clip_fraction_low"] = entries.ratio_L < 1 - self.epsilon_low
        return values
