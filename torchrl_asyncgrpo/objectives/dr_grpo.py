"""Dr. GRPO: GRPO without its two biases, towards long answers and towards easy or hard prompts."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict.nn import TensorDictModuleBase
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives.base import PolicyOptions
from torchrl_asyncgrpo.objectives.grpo import GRPOLoss


class DrGRPOLoss(GRPOLoss):
    """GRPO done right: the sum over a rollout divided by a constant, so that length does not weigh mistakes.

    :Formula: ``-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A)``, A without a standard deviation
    :Aggregation: constant
    :Reference: Dr. GRPO, arXiv:2503.20783, section 3.2
    :Use: when wrong answers grow longer during training

    Its other half are advantages that are not divided by the spread of the group: ``group_advantages(scale="none")``.

    Args:
        actor_network: as in ``PolicyLoss``.
        clip_epsilon: as in ``GRPOLoss``.
        options: those of :class:`PolicyLoss`; ``constant``, usually the most tokens of a completion, is needed.

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
        options.setdefault("aggregation", "constant")
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **options)
