"""GRPO: a clipped surrogate per token, and the variants that differ from it in one argument."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives import functional
from torchrl_asyncgrpo.objectives.base import PolicyLoss, PolicyOptions
from torchrl_asyncgrpo.objectives.entries import Entries


class GRPOLoss(PolicyLoss):
    """Group-relative policy optimisation: PPO's clipped surrogate per token, advantages within the group.

    :Formula: ``-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A)``
    :Aggregation: token-mean; sequence-mean in the paper
    :Reference: DeepSeekMath, arXiv:2402.03300, eq. 3
    :Use: the place to start

    Args:
        actor_network: as in ``PolicyLoss``.
        clip_epsilon: clip width of the ratio, one number or ``(low, high)``; low in [0, 1), high >= 0.
        options: those of :class:`PolicyLoss`.

    Metrics of its own: ``clip_fraction_low`` and ``clip_fraction_high``, shares of tokens whose gradient the clip took.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = 0.2,
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(actor_network, **options)
        self.clip_epsilon_low, self.clip_epsilon_high = functional.check_clip_epsilon(clip_epsilon)

    def policy_term(self, entries: Entries) -> Tensor:
        """The clipped surrogate of every entry, [L]."""
        return functional.clipped_surrogate(
            entries.ratio_L, entries.advantage_L, self.clip_epsilon_low, self.clip_epsilon_high
        )

    def term_metrics(self, entries: Entries) -> dict[str, Tensor]:
        """Where the clip binds, [L] each."""
        return functional.clip_values(
            entries.ratio_L, entries.advantage_L, 1 - self.clip_epsilon_low, 1 + self.clip_epsilon_high
        )
