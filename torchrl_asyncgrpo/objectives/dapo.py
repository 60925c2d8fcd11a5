"""DAPO: clip-higher and token-mean, and the soft punishment of overlong answers."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.nn import TensorDictModuleBase
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives.base import PolicyOptions
from torchrl_asyncgrpo.objectives.grpo import GRPOLoss


class DAPOLoss(GRPOLoss):
    """Decoupled clip and dynamic sampling: a wider upper clip lets unlikely tokens grow.

    :Formula: ``-min(r A, clip(r, 1 - 0.2, 1 + 0.28) A)``
    :Aggregation: token-mean
    :Reference: DAPO, arXiv:2503.14476, eq. 8-12
    :Use: long answers, when entropy collapses under GRPO

    Its other parts: ``DropFlatGroups`` is dynamic sampling, ``soft_overlong_punishment`` the length reward.

    Args:
        actor_network: as in ``PolicyLoss``.
        clip_epsilon: as in ``GRPOLoss``.
        options: those of :class:`PolicyLoss`.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = (0.2, 0.28),
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **options)
