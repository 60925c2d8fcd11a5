"""GSPO: one importance ratio per rollout, the geometric mean of those of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives import functional
from torchrl_asyncgrpo.objectives.base import PolicyLoss, PolicyOptions
from torchrl_asyncgrpo.objectives.entries import Entries

GSPOLevel = Literal["sequence", "token"]


def sequence_ratio(log_ratio_L: Tensor, rollout_L: Tensor, length_S: Tensor, level: GSPOLevel) -> Tensor:
    """Length-normalised importance ratio of each entry's rollout.

    s = exp(mean of the log-ratios of the rollout): arXiv:2507.18071, eq. 7. Level ``"token"`` has the same value, and
    the gradient of the entry's own log-prob alone: s_t = sg[s] · p_t / sg[p_t], eq. 14.

    Args:
        log_ratio_L: [L] nats, log-ratio to the anchor; carries the gradient.
        rollout_L: [L] int64, rollout of each entry.
        length_S: [S] int64, entries of each rollout.
        level: ``"sequence"`` or ``"token"``.

    Returns:
        [L] ratios; those of one rollout are equal.
    """
    log_s_L = functional.mean_by_rollout(log_ratio_L, rollout_L, length_S)[rollout_L].to(log_ratio_L.dtype)
    if level == "token":
        log_s_L = log_s_L.detach() + (log_ratio_L - log_ratio_L.detach())
    return functional.bounded_exp(log_s_L)


class GSPOLoss(PolicyLoss):
    """Group sequence policy optimisation: rollouts are clipped as a whole, as they are rewarded.

    :Formula: ``-min(s A, clip(s, 1 - ε_low, 1 + ε_high) A)``, ``s = exp(mean_t log r_t)``
    :Aggregation: sequence-mean
    :Reference: GSPO, arXiv:2507.18071, eq. 5-7; eq. 13-14 for ``level="token"``
    :Use: mixtures of experts, whose token ratios are noise

    Args:
        actor_network: as in ``PolicyLoss``.
        clip_epsilon: clip width of the sequence ratio, one number or ``(low, high)``; far smaller than for tokens.
        level: ``"sequence"``; ``"token"`` takes advantages that differ within a rollout.
        options: those of :class:`PolicyLoss`.

    Metrics of its own: ``clip_fraction_low`` and ``clip_fraction_high``, shares of tokens in clipped rollouts.

    Raises:
        ValueError: if an argument is out of range; at level ``"sequence"``, if one chooses tokens, or in ``forward`` if
            a rollout has several advantages.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = (3e-4, 4e-4),
        level: GSPOLevel = "sequence",
        **options: Unpack[PolicyOptions],
    ) -> None:
        options.setdefault("aggregation", "sequence-mean")
        super().__init__(actor_network, **options)
        self.clip_epsilon_low, self.clip_epsilon_high = functional.check_clip_epsilon(clip_epsilon)
        if level not in get_args(GSPOLevel):
            raise ValueError(f"level={level!r}; choose one of {', '.join(map(repr, get_args(GSPOLevel)))}.")
        self.level: GSPOLevel = level
        if level == "sequence":
            self._check_one_term_per_rollout()

    def policy_term(self, entries: Entries) -> Tensor:
        """The clipped surrogate of every entry's rollout, [L]."""
        advantage_L = entries.one_advantage("GSPOLoss") if self.level == "sequence" else entries.advantage_L
        return functional.clipped_surrogate(
            self._ratio(entries), advantage_L, self.clip_epsilon_low, self.clip_epsilon_high
        )

    def term_metrics(self, entries: Entries) -> dict[str, Tensor]:
        """Where the clip binds, [L] each."""
        return functional.clip_values(
            self._ratio(entries), entries.advantage_L, 1 - self.clip_epsilon_low, 1 + self.clip_epsilon_high
        )

    def _ratio(self, entries: Entries) -> Tensor:
        return sequence_ratio(entries.log_ratio_L, entries.rollout_L, entries.length_S, self.level)
