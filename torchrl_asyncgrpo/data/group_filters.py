"""Which groups, and which of their rollouts, are worth training: transforms of a replay buffer that act on writing."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_asyncgrpo.data import schema


class GroupFilter(Transform):
    """Base of the filters: judges whole groups as they are written to a replay buffer.

    For ``make_replay_buffer(transform=...)`` or ``buffer.append_transform``. What a filter takes never occupies a slot,
    so that the collector draws a further prompt in place of a group that is dropped, beside the trainer and in turn. Of
    several filters torchrl applies the last one first. A filter of your own is this class with ``select``, and a
    ``reason``, the word under which the buffer counts what it took:

        >>> class Solvable(GroupFilter):
        ...     reason = "unsolved"
        ...     def select(self, group):
        ...         return group if any(rollout["reward"] > 0 for rollout in group) else []

    Attributes:
        dropped: groups taken whole, since this object was made.
        cut: rollouts taken out of groups that stayed.
    """

    reason: str

    def __init__(self) -> None:
        super().__init__()
        self.dropped = 0
        self.cut = 0

    @abstractmethod
    def select(self, group: list[TensorDictBase]) -> Sequence[TensorDictBase]:
        """Return the rollouts of a group that are written, in their order; none drops the group.

        Args:
            group: all rollouts of one group; changes to them are written.
        """

    def _inv_call(self, rollouts: Any) -> list[TensorDictBase] | None:
        if rollouts is None:
            return None
        groups: dict[int, list[TensorDictBase]] = {}
        for rollout in rollouts.unbind(0) if isinstance(rollouts, TensorDictBase) else rollouts:
            groups.setdefault(int(rollout[schema.GROUP_ID]), []).append(rollout)
        left: list[TensorDictBase] = []
        for group in groups.values():
            selected = self.select(group)
            self.dropped += not selected
            self.cut += len(group) - len(selected) if selected else 0
            left += selected
        return left or None


class DropFlatGroups(GroupFilter):
    """Drop groups without signal: those whose rewards are all equal.

    Dynamic sampling: DAPO, arXiv:2503.14476, section 3.2. Dropped groups are counted in ``buffer.dropped["flat"]``.

    Args:
        tolerance: largest difference of rewards, or largest advantage, that counts as none, >= 0.
        give_up_after: raise after so many dropped groups in a row, >= 1; None goes on for ever.
        key: ``"reward"``; or ``"advantage"``, which drops groups in which every advantage is 0, for estimators that see
            more, or less, than the reward: GDPO, pass@k.

    Raises:
        ValueError: if an argument is out of range.
        RuntimeError: while groups are written, by ``give_up_after``; whoever reads the buffer gets it.
    """

    reason = "flat"
    in_a_row: Tensor

    def __init__(
        self,
        tolerance: float = 0.0,
        give_up_after: int | None = None,
        *,
        key: Literal["reward", "advantage"] = "reward",
    ) -> None:
        super().__init__()
        if not 0 <= tolerance < math.inf:
            raise ValueError(f"tolerance={tolerance}; a difference of rewards that counts as none is finite and >= 0.")
        if give_up_after is not None and give_up_after < 1:
            raise ValueError(f"give_up_after={give_up_after}; give a number of groups >= 1, or None to go on for ever.")
        if key not in (schema.REWARD, schema.ADVANTAGE):
            raise ValueError(f"key={key!r}; choose 'reward' or 'advantage'.")
        self.tolerance = tolerance
        self.give_up_after = give_up_after
        self.key = key
        # a buffer of the module, so that checkpoints have it
        self.register_buffer("in_a_row", torch.zeros((), dtype=torch.int64))

    def select(self, group: list[TensorDictBase]) -> Sequence[TensorDictBase]:
        """The group, or nothing where it is flat; rewards that are NaN count as not scored."""
        if self._spread(group) > self.tolerance:
            self.in_a_row = torch.zeros_like(self.in_a_row)
            return group
        if self.give_up_after is not None and self.in_a_row + 1 >= self.give_up_after:
            raise RuntimeError(
                f"{self.give_up_after} groups in a row have no signal, the last one with the rewards "
                f"{_rewards(group).tolist()}: the task is too easy or too hard for the policy, or the reward function "
                "does not tell answers apart. Change prompts or reward, sample more completions per prompt, or raise "
                "give_up_after."
            )
        self.in_a_row = self.in_a_row + 1
        return []

    def _spread(self, group: Sequence[TensorDictBase]) -> float:
        if self.key == schema.ADVANTAGE:
            of_trained = [
                rollout[self.key].expand_as(rollout[schema.LOSS_MASK])[rollout[schema.LOSS_MASK]] for rollout in group
            ]
            values = torch.cat(of_trained).abs()
            return float(values.nan_to_num(0.0).max()) if len(values) else 0.0
        rewards = _rewards(group)
        scored = rewards[~rewards.isnan()]
        return float(scored.max() - scored.min()) if len(scored) else 0.0


class KeepInformative(GroupFilter):
    """Cut an oversampled group to the rollouts whose rewards differ most.

    The subset with the largest variance of rewards, which is made of some of the lowest and some of the highest ones:
    max-variance down-sampling, PODS, arXiv:2504.13818. Sample more completions per prompt than are trained, for example
    ``SamplingParams(n=16)`` with ``keep=8``. Rollouts that are cut are counted in ``buffer.cut["uninformative"]``.

    Args:
        keep: rollouts of a group that stay, >= 2; groups that are no larger are left as they are. Rollouts that were
            not scored go first.
        advantage: rewards of the rollouts that stay, [keep], to their advantages: what the collector was given, such as
            ``group_advantages``; None leaves the advantages within the whole group, and those of tokens or turns.

    Raises:
        ValueError: if ``keep`` is below 2.
    """

    reason = "uninformative"

    def __init__(self, keep: int, advantage: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        if keep < 2:
            raise ValueError(f"keep={keep}; rewards differ within 2 or more rollouts.")
        self.keep = keep
        self.advantage = advantage

    def select(self, group: list[TensorDictBase]) -> Sequence[TensorDictBase]:
        """The rollouts that stay, with advantages among themselves."""
        if len(group) <= self.keep:
            return group
        rewards_G = _rewards(group)
        chosen = max_variance_subset(rewards_G, self.keep)
        kept = [group[i] for i in chosen]
        if self.advantage is not None:
            for rollout, advantage in zip(kept, self.advantage(rewards_G[chosen]), strict=True):
                rollout[schema.ADVANTAGE] = torch.as_tensor(advantage, dtype=torch.float32)
        return kept


def max_variance_subset(rewards_G: Tensor, keep: int) -> list[int]:
    """Find the subset of rewards with the largest variance: PODS, arXiv:2504.13818.

    Args:
        rewards_G: [G] float; NaN marks a rollout that was not scored.
        keep: size of the subset, >= 1.

    Returns:
        ``keep`` positions in ascending order, or all scored ones where there are fewer. Of subsets with one variance
        that with more of the lowest rewards.
    """
    scored = (~rewards_G.isnan()).nonzero().flatten()
    order = scored[rewards_G[scored].sort(stable=True).indices]
    if len(order) <= keep:
        return sorted(order.tolist())
    subsets = [torch.cat([order[:low], order[len(order) - keep + low :]]) for low in range(keep, -1, -1)]
    variances = [float(rewards_G[subset].double().var(correction=0)) for subset in subsets]
    return sorted(subsets[variances.index(max(variances))].tolist())


def _rewards(group: Sequence[TensorDictBase]) -> Tensor:
    return torch.stack([rollout[schema.REWARD] for rollout in group]).double()
