"""A replay buffer that hands out whole groups, each once, oldest first, never staler than allowed."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Transform

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.group_filters import GroupFilter
from torchrl_asyncgrpo.data.group_sampler import WaitingGroup, WholeGroupSampler


class GroupReplayBuffer(ReplayBuffer):
    """The replay buffer between collector and trainer; made by ``make_replay_buffer``.

    ``extend`` takes the rollouts of whole groups. ``sample`` blocks until ``batch_size`` groups wait, drops stale
    ones, and returns their rollouts as one lazy stack. A group that was handed out counts as ``occupied`` until
    ``release``: the next ``sample`` releases it, or the trainer does as soon as it moved on. Storage, and a checkpoint,
    hold the rollouts of the groups that wait and no others; their indices change whenever groups leave. Thread-safe
    for many writers and one reader.

    Attributes:
        dropped: groups that were not handed out, by reason: ``"stale"``, ``"emptied"``, the reasons of filters, and
            ``"transform"`` for those that other transforms left out as they were written.
        cut: rollouts that filters took out of groups that stayed, by reason.
    """

    _sampler: WholeGroupSampler

    def __init__(
        self,
        *,
        sampler: WholeGroupSampler,
        batch_size: int,
        capacity: int,
        timeout: float | None,
        transform: Transform | Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(
            storage=LazyStackStorage(capacity),
            sampler=sampler,
            batch_size=batch_size,
            collate_fn=lambda rows: rows,
            transform=transform,
        )
        self.timeout = timeout
        self.capacity = capacity
        self.dropped: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self._handed_out = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())
        self._listeners: list[Callable[[], None]] = []

    # --- writing ---------------------------------------------------------------------------------
    def extend(self, data: Sequence[TensorDictBase] | TensorDictBase, *, update_priority: bool | None = None) -> Any:
        """Add the rollouts of one or more whole groups, or what the transforms leave of them.

        Args:
            data: rollouts; those of one group come in one call.
            update_priority: not used; here for the signature of torchrl.

        Returns:
            Storage indices of the rollouts that were written, good until groups leave.

        Raises:
            RuntimeError: if they do not fit beside the rollouts that wait, or a filter gives up. Nothing is written or
                counted then.
        """
        del update_priority
        rollouts = list(data.unbind(0)) if isinstance(data, TensorDictBase) else list(data)
        if not rollouts:
            return torch.empty(0, dtype=torch.long)
        with self._changed:
            rollouts, dropped, cut = self._transformed(rollouts)
            if len(self) + len(rollouts) > self.capacity:
                raise RuntimeError(
                    f"{len(rollouts)} rollouts do not fit: {len(self)} wait and the capacity is {self.capacity}. Raise "
                    "capacity in make_replay_buffer, or let the collector's slots hold the groups back."
                )
            index = self._extend(rollouts) if rollouts else torch.empty(0, dtype=torch.long)
            self.dropped += dropped
            self.cut += cut
            groups: dict[int, WaitingGroup] = {}
            for i, rollout in zip(torch.as_tensor(index).flatten().tolist(), rollouts, strict=True):
                group_id, oldest = int(rollout[schema.GROUP_ID]), schema.oldest_version(rollout)
                group = groups.setdefault(group_id, WaitingGroup(group_id, [], oldest))
                group.indices.append(i)
                group.oldest_version = min(group.oldest_version, oldest)
            self._sampler.groups.extend(groups.values())
            self._changed.notify_all()
        return index

    def _transformed(self, rollouts: list[TensorDictBase]) -> tuple[list[TensorDictBase], Counter[str], Counter[str]]:
        """Apply the transforms; also counts groups that they dropped and rollouts that they cut, by reason."""
        if not len(self._transform):
            return rollouts, Counter(), Counter()
        filters = [module for module in self._transform.modules() if isinstance(module, GroupFilter)]
        before = [(each.dropped, each.cut) for each in filters]
        # of copies, so that a transform may change rollouts that the caller has
        kept = self._transform._inv_call([rollout.copy() for rollout in rollouts]) or []
        dropped: Counter[str] = Counter()
        cut: Counter[str] = Counter()
        for each, (dropped_before, cut_before) in zip(filters, before, strict=True):
            dropped[each.reason] += each.dropped - dropped_before
            cut[each.reason] += each.cut - cut_before
        gone = {int(rollout[schema.GROUP_ID]) for rollout in rollouts} - {int(row[schema.GROUP_ID]) for row in kept}
        dropped["transform"] = len(gone) - sum(dropped.values())
        return kept, +dropped, +cut

    def close(self, failure: BaseException | None = None) -> None:
        """Say that nothing will be written any more.

        Args:
            failure: why; a reader that waits, or comes later, raises it. None: the source is exhausted, readers get
                the groups that are left and then ``StopIteration``.
        """
        with self._changed:
            self._closed, self._failure = True, failure
            self._changed.notify_all()

    def reopen(self) -> None:
        """Undo ``close`` for another start of the collector."""
        with self._changed:
            self._closed, self._failure = False, None

    # --- reading ---------------------------------------------------------------------------------
    def sample(self, batch_size: int | None = None, return_info: bool = False, *, release: bool = True) -> Any:
        """Wait for ``batch_size`` groups (default: the buffer's own) and return their rollouts.

        Args:
            batch_size: groups, >= 1.
            return_info: return ``(rollouts, info)``.
            release: asking for the next groups says that those handed out before are done with, and frees their
                slots; False leaves that to ``release``.

        Returns:
            A lazy stack of rollouts, group by group, oldest group first; fewer groups when the source is exhausted.

        Raises:
            TimeoutError: if the groups do not arrive within ``timeout`` seconds.
            StopIteration: if the source is exhausted and no group is left.
            BaseException: the failure that closed the buffer, itself; or what a transform raised, and its groups wait
                as before.
        """
        groups = self._batch_size if batch_size is None else batch_size
        if groups < 1:
            raise ValueError(f"batch_size={groups}; it counts groups and must be at least 1.")
        if release:
            self.release()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready(groups), self.timeout):
                raise TimeoutError(
                    f"waited {self.timeout} s for {groups} groups and {len(self._sampler.groups)} are there. Raise "
                    "timeout in make_replay_buffer if generation is slow; otherwise see what holds up the collector."
                )
            if self._failure is not None:
                raise self._failure
            if not self._sampler.groups:
                raise StopIteration("the prompt source is exhausted and every group was handed out.")
            data, info = self._hand_out(groups)
            return (data, info) if return_info else data

    def _hand_out(self, groups: int) -> tuple[Any, dict[str, Any]]:
        """Draw the next groups and free their rows; where a transform raises, they wait on as they were."""
        waiting = self._sampler.groups
        drawn = [i for group in itertools.islice(waiting, groups) for i in group.indices]
        rows = [self._storage[i].copy() for i in drawn]
        self._sampler.groups = waiting.copy()
        try:
            data, info = self._sample(groups)
        except BaseException as failure:
            self._sampler.groups = waiting
            self._storage[drawn] = rows
            if isinstance(failure, StopIteration):  # to a reader, the end of the source
                raise RuntimeError("a transform of the replay buffer raised StopIteration.") from failure
            raise
        self._handed_out += len(waiting) - len(self._sampler.groups)
        self._free_rows()
        return data, info

    def _free_rows(self) -> None:
        """Keep the rows of the waiting groups alone, and write behind them."""
        rows: list[TensorDictBase] = []
        for group in self._sampler.groups:
            first = len(rows)
            rows += [self._storage[i] for i in group.indices]
            group.indices = list(range(first, len(rows)))
        self._storage[:] = rows
        self._writer._cursor = len(rows) % self.capacity

    def _ready(self, groups: int) -> bool:
        self._drop_stale()
        return self._closed or self._sampler.can_sample(self._storage, groups)

    def _drop_stale(self) -> None:
        if stale := self._sampler.drop_stale():
            self._free_rows()
            self._drop("stale", len(stale))

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield full windows of what waits now, and the shorter last one when the source is exhausted."""
        while self.can_sample():
            yield self.sample()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would return, or raise a failure, at once; drops what became too stale."""
        with self._changed:
            if self._failure is not None:
                return True
            self._drop_stale()
            waiting = len(self._sampler.groups)
            return waiting >= (self._batch_size if batch_size is None else batch_size) or (self._closed and waiting > 0)

    @property
    def max_staleness(self) -> int | None:
        """Highest staleness that is handed out; None for no limit."""
        return self._sampler.max_staleness

    # --- slots -----------------------------------------------------------------------------------
    @property
    def occupied(self) -> int:
        """Groups that wait or were handed out and not released."""
        with self._changed:
            return len(self._sampler.groups) + self._handed_out

    @property
    def waiting_group_ids(self) -> list[int]:
        """Ids of the groups that wait, oldest first."""
        with self._changed:
            return [group.group_id for group in self._sampler.groups]

    def release(self, groups: int | None = None) -> None:
        """Say that groups handed out before are done with, and the weights moved on.

        Args:
            groups: how many; None for all.
        """
        with self._changed:
            released = self._handed_out if groups is None else min(groups, self._handed_out)
            self._handed_out -= released
        if released:
            self._notify()

    def empty(self, empty_write_count: bool = True) -> None:
        """Drop every waiting group; they are counted in ``dropped`` under ``"emptied"``."""
        with self._changed:
            waiting = len(self._sampler.groups)
            super().empty(empty_write_count)
            if waiting:
                self._drop("emptied", waiting)

    def on_free(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever groups are released or dropped; from any thread, so it must not block."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Undo ``on_free``."""
        self._listeners.remove(listener)

    def _drop(self, reason: str, count: int) -> None:
        self.dropped[reason] += count
        self._notify()

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    def state_dict(self) -> dict[str, Any]:
        """State of storage, sampler and counters; groups that were handed out belong to the reader."""
        with self._changed:
            return {**super().state_dict(), "dropped": dict(self.dropped), "cut": dict(self.cut)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        with self._changed:
            super().load_state_dict(state_dict)
            self._free_rows()  # those of version 0.1 held what was handed out too
            self.dropped = Counter(state_dict["dropped"])
            self.cut = Counter(state_dict.get("cut", {}))
            self._handed_out = 0

    def dumps(self, path: str | Path) -> None:
        """Write ``state_dict`` below ``path``: ragged rollouts have no memory-mapped format in torchrl."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "group_replay_buffer.pt")

    def loads(self, path: str | Path) -> None:
        """Restore what ``dumps`` wrote below ``path``."""
        self.load_state_dict(torch.load(Path(path) / "group_replay_buffer.pt", weights_only=True))


def make_replay_buffer(
    *,
    batch_size: int,
    current_version: Callable[[], int],
    max_staleness: int | None = 1,
    capacity: int = 65536,
    timeout: float | None = None,
    transform: Transform | Callable[[Any], Any] | None = None,
) -> GroupReplayBuffer:
    """Make the replay buffer of asynchronous GRPO: whole groups, version gate, each group once, oldest first.

    Args:
        batch_size: groups per draw, >= 1: the groups of one optimizer step.
        current_version: returns the current policy version, for example ``lambda: engine.policy_version``.
        max_staleness: highest staleness that is trained on, >= 0, measured on the oldest token of a group; staler
            groups are dropped and counted in ``dropped["stale"]``. None for no limit.
        capacity: most rollouts that wait, >= 1.
        timeout: seconds that ``sample`` waits, > 0; None for ever.
        transform: acts on the list of a group's rollouts when they are written, and on the lazy stack of a window's
            when they are handed out; see ``group_filters``.

    Returns:
        A torchrl ``ReplayBuffer`` over a ``LazyStackStorage``.

    Raises:
        ValueError: if an argument is out of range.
    """
    for name, value in (("batch_size", batch_size), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name}={value}; it must be at least 1.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout}; give seconds above 0, or None to wait for ever.")
    sampler = WholeGroupSampler(max_staleness, current_version)
    return GroupReplayBuffer(
        sampler=sampler, batch_size=batch_size, capacity=capacity, timeout=timeout, transform=transform
    )
