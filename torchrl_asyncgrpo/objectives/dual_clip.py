"""Dual-clip PPO: a bound on what one token of negative advantage can do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives import functional
from torchrl_asyncgrpo.objectives.base import PolicyOptions
from torchrl_asyncgrpo.objectives.entries import Entries
from torchrl_asyncgrpo.objectives.grpo import GRPOLoss


def dual_clipped_surrogate(
    ratio_L: Tensor, advantage_L: Tensor, epsilon_low: float, epsilon_high: float, bound: float
) -> Tensor:
    """Clipped surrogate whose loss at negative advantages is at most ``-bound · A``.

    -max(min(r A, clip(r) A), c A) where A < 0: arXiv:1912.09729, eq. 5.

    Args:
        ratio_L: [L] importance ratio.
        advantage_L: [L] advantage.
        epsilon_low: in [0, 1), lower clip width.
        epsilon_high: >= 0, upper clip width.
        bound: c > 1.

    Returns:
        [L] loss terms.
    """
    term_L = functional.clipped_surrogate(ratio_L, advantage_L, epsilon_low, epsilon_high)
    return torch.where(advantage_L < 0, torch.minimum(term_L, -bound * advantage_L), term_L)


class DualClipPPOLoss(GRPOLoss):
    """PPO with a second clip: where the advantage is negative, ratios above c have no gradient.

    :Formula: ``-max(min(r A, clip(r) A), c A)`` where A < 0, else ``-min(r A, clip(r) A)``
    :Aggregation: token-mean
    :Reference: dual-clip PPO, arXiv:1912.09729, eq. 5
    :Use: stale rollouts, when single tokens of huge ratio dominate the gradient

    Args:
        actor_network: as in ``PolicyLoss``.
        clip_epsilon: as in ``GRPOLoss``.
        dual_clip: c, above 1 + the high width.
        options: those of :class:`PolicyLoss`.

    Metrics of its own: those of ``GRPOLoss``, and ``clip_fraction_dual``, the share of tokens the second clip holds.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = 0.2,
        dual_clip: float = 3.0,
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **options)
        if not dual_clip > 1 + self.clip_epsilon_high:
            raise ValueError(
                f"dual_clip={dual_clip} with clip_epsilon={clip_epsilon}; it bounds the ratio beyond the first clip "
                f"and must be above {1 + self.clip_epsilon_high}, usually 3."
            )
        self.dual_clip = float(dual_clip)

    def policy_term(self, entries: Entries) -> Tensor:
        """The doubly clipped surrogate of every entry, [L]."""
        return dual_clipped_surrogate(
            entries.ratio_L, entries.advantage_L, self.clip_epsilon_low, self.clip_epsilon_high, self.dual_clip
        )

    def term_metrics(self, entries: Entries) -> dict[str, Tensor]:
        """Where the clips bind, [L] each."""
        dual_L = (entries.ratio_L > self.dual_clip) & (entries.advantage_L < 0)
        return {**super().term_metrics(entries), "clip_fraction_dual": dual_L}
