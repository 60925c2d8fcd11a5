"""Windows: the rollouts of one optimizer step, from the replay buffer to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import ReplayBuffer
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_asyncgrpo.data.replay_buffer import GroupReplayBuffer
from torchrl_asyncgrpo.trainers.phases import PhaseTimer

Packer = Callable[[Sequence[TensorDictBase]], list]


class WindowReader(TrainerHookBase):
    """Draw the window of the next optimizer step and fold it into micro-batches.

    Two ``process_optim_batch`` operations: ``draw`` returns the rollouts [R] of a window, ``pack`` the lazy stack [K]
    of its micro-batches. The windows of one collected batch are drawn in the first epoch and repeated in the others.
    A window stays "under way" until ``finish``: what is interrupted in between, in this process or at a checkpoint, is
    drawn again first.

    Attributes:
        exhausted: True when the source has ended and every group was handed out.
        phase: timer of ``"wait"`` and ``"pack"``, and of what else the trainer does with the window.

    Args:
        replay_buffer: where rollouts wait; None takes the collected batch itself as the window.
        packer: a window's rollouts to its micro-batches.
        groups: groups of a window; None for what the buffer's own batch size says.
        blocking: wait for the groups of a window; otherwise end the epoch when they are not there.
        device: where micro-batches go; None leaves them.
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
        self.phase = PhaseTimer()
        self.exhausted = False
        self.under_way: list[TensorDictBase] | None = None
        self._windows: list[list[TensorDictBase]] = []
        self._epoch = 0
        self._next = 0

    @property
    def interrupted(self) -> bool:
        """True while a window waits that was drawn and not finished, in this run or in the one that was saved."""
        return self.under_way is not None

    def begin_epoch(self, epoch: int) -> None:
        """Start pass ``epoch`` over the windows of the collected batch."""
        self._epoch, self._next = epoch, 0
        if epoch == 0:
            self._windows = []

    def draw(self, batch: TensorDictBase | None) -> TensorDictBase:
        """Return the rollouts of the next window.

        Args:
            batch: the collected batch; the window itself where there is no replay buffer.

        Raises:
            StopIteration: if the epoch has no further window.
        """
        if self._epoch > 0:
            if self._next >= len(self._windows):
                raise StopIteration
            self.under_way = self._windows[self._next]
        else:
            if self.under_way is None:
                self.under_way = self._draw_new(batch)
            self._windows.append(self.under_way)
        self._next += 1
        return lazy_stack(self.under_way)

    def _draw_new(self, batch: TensorDictBase | None) -> list[TensorDictBase]:
        buffer = self.replay_buffer
        if buffer is None:
            if batch is None or self._windows:
                raise StopIteration
            return list(batch.unbind(0))
        if not self.blocking:
            consumed = not isinstance(buffer, GroupReplayBuffer) and bool(self._windows)
            if consumed or not buffer.can_sample(self.groups):
                raise StopIteration
        try:
            with self.phase("wait"):
                return list(buffer.sample(self.groups).unbind(0))
        except StopIteration:
            self.exhausted = True
            raise

    def pack(self, window: TensorDictBase) -> TensorDictBase:
        """Fold the rollouts [R] of a window into a lazy stack [K] of micro-batches on the training device."""
        with self.phase("pack"):
            micro_batches = lazy_stack(self.packer(list(window.unbind(0))))
        return micro_batches if self.device is None else micro_batches.to(self.device)

    def finish(self, *, last_epoch: bool) -> int:
        """Say that the optimizer step on the window is over.

        Args:
            last_epoch: the window is not used again: its groups' slots are released.

        Returns:
            Rollouts that are done with: those of the window in the last epoch, else 0.
        """
        assert self.under_way is not None
        done, self.under_way = len(self.under_way), None
        if not last_epoch:
            return 0
        if isinstance(self.replay_buffer, GroupReplayBuffer):
            self.replay_buffer.release()
        return done

    def register(self, trainer: Trainer, name: str = "window") -> None:
        """Register ``draw`` and ``pack`` at ``process_optim_batch``, and the reader for checkpoints."""
        trainer.register_module(name, self)
        trainer.register_op("process_optim_batch", self.draw)
        trainer.register_op("process_optim_batch", self.pack)

    def state_dict(self) -> dict[str, Any]:
        """Rollouts of the window under way, if there is one."""
        return {"under_way": [rollout.to_dict() for rollout in self.under_way or []]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Train the saved window first."""
        self.under_way = [TensorDict(row, batch_size=[]) for row in state_dict["under_way"]] or None
