"""Windows: the rollouts of one optimizer step, from the replay buffer to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import ReplayBuffer
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.replay_buffer import GroupReplayBuffer
from torchrl_asyncgrpo.trainers.phases import PhaseTimer

Packer = Callable[[Sequence[TensorDictBase]], list]


class NoWindow(StopIteration):
    """The epoch has no further window. A type of its own: a packer's or a hook's ``StopIteration`` is a failure."""


class WindowReader(TrainerHookBase):
    """Draw the window of the next optimizer step and fold it into micro-batches.

    Two ``process_optim_batch`` operations: ``draw`` returns the rollouts [R] of a window, ``pack`` the lazy stack [K]
    of its micro-batches. The windows of one item of the collector are drawn in the first epoch and repeated in the
    others. What is interrupted, in this process or at a checkpoint, goes on at the same epoch and window.

    Args:
        replay_buffer: where rollouts wait; None takes the collected batch itself as the window.
        packer: a window's rollouts to its micro-batches.
        groups: groups of a window; None for what the buffer's own batch size says.
        blocking: wait for the groups of a window; otherwise end the epoch when they are not there.
        device: where micro-batches go; None leaves them.

    Attributes:
        exhausted: True when the source has ended and every group was handed out.
        waiting: makes the context in which the reader waits for groups.
        phase: timer of ``"wait"`` and ``"pack"``, and of what else the trainer does with the window.
        epoch: pass over the windows of the item.
        position: windows of the item that were trained in this epoch.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer | None,
        packer: Packer,
        *,
        groups: int | None,
        blocking: bool,
        device: torch.device | str | int | None,
    ) -> None:
        self.replay_buffer = replay_buffer
        self.packer = packer
        self.groups = groups
        self.blocking = blocking
        self.device = device
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.phase = PhaseTimer()
        self.exhausted = False
        self.epoch = 0
        self.position = 0
        self._windows: list[list[TensorDictBase]] = []
        self._begun = False

    @property
    def interrupted(self) -> bool:
        """True while an item, in the buffer or drawn from it, was begun and not ended."""
        return self._begun or bool(self._windows)

    @property
    def window(self) -> list[TensorDictBase]:
        """Rollouts of the window that was drawn last and is not finished."""
        return self._windows[self.position]

    def begin_epoch(self, epoch: int) -> None:
        """Start pass ``epoch`` over the windows of the item; an interrupted one goes on where it was."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def end_item(self) -> None:
        """Forget the windows of the item: all its epochs are over."""
        self.epoch, self.position, self._windows, self._begun = 0, 0, [], False

    def draw(self, batch: TensorDictBase | None) -> TensorDictBase:
        """Return the rollouts of the next window.

        Args:
            batch: the collected batch; the window itself where there is no replay buffer.

        Raises:
            NoWindow: if the epoch has no further window.
        """
        if self.position == len(self._windows):
            if self.epoch > 0:
                raise NoWindow
            self._windows.append(self._draw_new(batch))
        return lazy_stack(self.window)

    def _draw_new(self, batch: TensorDictBase | None) -> list[TensorDictBase]:
        buffer = self.replay_buffer
        if buffer is None:
            if batch is None or self._windows:
                raise NoWindow
            return list(batch.unbind(0))
        if not self.blocking:
            consumed = not isinstance(buffer, GroupReplayBuffer) and bool(self._windows)
            if consumed or not buffer.can_sample(self.groups):
                raise NoWindow
        try:
            with self.phase("wait"), self.waiting():
                if isinstance(buffer, GroupReplayBuffer):
                    rollouts = buffer.sample(self.groups, release=False)
                else:
                    rollouts = buffer.sample(self.groups)
            # of copies, so that what a step before packing writes onto them does not come back with another draw
            return [rollout.copy() for rollout in rollouts.unbind(0)]
        except StopIteration as end:
            self.exhausted = True
            raise NoWindow from end

    def wait_for_each(self, items: Iterable[TensorDictBase | None]) -> Iterator[TensorDictBase | None]:
        """Yield the items of a collector that collects in the trainer's turn."""
        iterator = iter(items)
        end = object()
        while True:
            with self.waiting():
                item: Any = next(iterator, end)
            if item is end:
                return
            self._begun = item is None  # it is in the buffer
            yield item

    def pack(self, window: TensorDictBase) -> TensorDictBase:
        """Fold the rollouts [R] of a window into a lazy stack [K] of micro-batches on the training device."""
        with self.phase("pack"):
            micro_batches = lazy_stack(self.packer(list(window.unbind(0))))
        return micro_batches if self.device is None else micro_batches.to(self.device)

    def finish(self) -> list[TensorDictBase]:
        """Say that the optimizer step on the window was taken or skipped; returns its rollouts."""
        window = self.window
        self.position += 1
        return window

    def release(self, window: Sequence[TensorDictBase]) -> None:
        """Free the slots of a finished window's groups, when the weights have moved on."""
        if isinstance(self.replay_buffer, GroupReplayBuffer):
            self.replay_buffer.release(len({int(rollout[schema.GROUP_ID]) for rollout in window}))

    def register(self, trainer: Trainer, name: str = "window") -> None:
        """Register ``draw`` and ``pack`` at ``process_optim_batch``, and the reader for checkpoints."""
        trainer.register_module(name, self)
        trainer.register_op("process_optim_batch", self.draw)
        trainer.register_op("process_optim_batch", self.pack)

    def state_dict(self) -> dict[str, Any]:
        """Windows of an item that is under way, and how far it came."""
        windows = [[rollout.to_dict() for rollout in window] for window in self._windows]
        return {"windows": windows, "epoch": self.epoch, "position": self.position, "begun": self._begun}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the saved windows first."""
        self._windows = [[TensorDict(row, batch_size=[]) for row in window] for window in state_dict["windows"]]
        self.epoch, self.position = int(state_dict["epoch"]), int(state_dict["position"])
        self._begun = bool(state_dict.get("begun", False))
