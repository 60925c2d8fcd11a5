"""Which groups of a replay buffer wait, and which of them come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_asyncgrpo.data import schema


@dataclass
class WaitingGroup:
    """A group in storage that was not handed out yet."""

    group_id: int
    indices: list[int]
    oldest_version: int


class WholeGroupSampler(Sampler):
    """Draw whole groups in the order they were written, each once; drop those that became too stale.

    Staleness is the current policy version minus that of the oldest trained token of the group, checked for the
    group as a whole when it is drawn.

    Args:
        max_staleness: highest staleness that is handed out, >= 0; None for no limit.
        current_version: returns the policy version that staleness is measured from.
    """

    def __init__(self, max_staleness: int | None, current_version: Callable[[], int]) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}; use 0 for on-policy, a positive number, or None.")
        self.max_staleness = max_staleness
        self.current_version = current_version
        self.groups: deque[WaitingGroup] = deque()

    def drop_stale(self) -> list[WaitingGroup]:
        """Remove and return the waiting groups that may no longer be handed out."""
        if self.max_staleness is None:
            return []
        oldest = self.current_version() - self.max_staleness
        stale = [group for group in self.groups if group.oldest_version < oldest]
        if stale:
            self.groups = deque(group for group in self.groups if group.oldest_version >= oldest)
        return stale

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw up to ``batch_size`` groups; returns the storage indices of their rollouts and the groups' ids."""
        drawn = [self.groups.popleft() for _ in range(min(batch_size, len(self.groups)))]
        index = torch.tensor([i for group in drawn for i in group.indices], dtype=torch.long)
        return index, {schema.GROUP_ID: torch.tensor([group.group_id for group in drawn])}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether ``batch_size`` groups wait."""
        return len(self.groups) >= batch_size

    def state_dict(self) -> dict[str, Any]:
        """Waiting groups as plain lists."""
        return {"groups": [[group.group_id, group.oldest_version, *group.indices] for group in self.groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the waiting groups."""
        self.groups = deque(
            WaitingGroup(int(group_id), [int(i) for i in indices], int(oldest))
            for group_id, oldest, *indices in state_dict["groups"]
        )

    def dumps(self, path: str | Path) -> None:
        """Nothing to do: the buffer saves the state of its sampler together with the storage."""

    def loads(self, path: str | Path) -> None:
        """Nothing to do, like ``dumps``."""

    def _empty(self) -> None:
        self.groups.clear()
