"""When weights are pushed, and which version they carry after a resume."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchrl._utils import logger as torchrl_logger
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender

# Seconds between two looks at whether the engine lost its weights
WATCH_INTERVAL = 1.0


class WeightPush(TrainerHookBase):
    """Push weights before the first rollout, after a resume, and whenever enough optimizer steps were taken.

    Skipped steps and micro-batches do not count. A checkpoint keeps the policy version: weights that were pushed
    before it was taken keep theirs when they are pushed again, so that rollouts which wait stay as fresh as they were.

    Args:
        sender: makes the push.
        steps_taken: returns the optimizer steps taken so far.
        frequency: optimizer steps between pushes, >= 1.
        stage: trainer stage that checks whether a push is due.
        after: called after every push but the first; None for nothing.
    """

    def __init__(
        self,
        sender: WeightSyncSender,
        steps_taken: Callable[[], int],
        *,
        frequency: int,
        stage: str,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.sender = sender
        self.steps_taken = steps_taken
        self.frequency = frequency
        self.stage = stage
        self.after = after
        self._pushed_at: int | None = None

    def start(self, *, under_way: bool = False) -> None:
        """Push before the first request of this process or of a resumed run, and what an interrupted run did not.

        Args:
            under_way: whether the steps between two pushes are not all taken, so that the next push is still to come.
        """
        if self._pushed_at is None:
            self._push()
        elif not under_way:
            self()

    def __call__(self) -> None:
        """Push if ``frequency`` optimizer steps were taken since the last push."""
        if self._pushed_at is not None and self.steps_taken() - self._pushed_at >= self.frequency:
            self._push()
            if self.after is not None:
                self.after()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Push again when the engine was restarted and lost its weights, while the trainer waits and they stand still.

        Weights that were pushed keep their version; steps taken since then make a new one.
        """
        if not self.sender.engine_may_restart or self._pushed_at is None:
            yield
            return
        leave = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(leave,), name="weight watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            leave.set()
            watcher.join()  # a push that has begun is finished before the weights change

    def _watch(self, leave: threading.Event) -> None:
        while not leave.wait(WATCH_INTERVAL):
            try:
                if not self.sender.lost():
                    continue
                if self.steps_taken() == self._pushed_at:
                    self.sender.next_version = self.sender.policy_version
                self._push()
            except Exception as failure:  # noqa: BLE001 - tried again, until whoever waits for the engine gives up
                self.sender.next_version = None  # not of the weights that are next, if these are not pushed any more
                torchrl_logger.warning(f"The engine was restarted, and a push of its weights failed: {failure}")

    def _push(self) -> None:
        self.sender.update_weights()
        self._pushed_at = self.steps_taken()

    def register(self, trainer: Trainer, name: str = "weight_push") -> None:
        """Register at the stage, and for checkpoints."""
        trainer.register_module(name, self)
        trainer.register_op(self.stage, self)

    def state_dict(self) -> dict[str, Any]:
        """Policy version that the weights of this moment have, or will have when they are pushed."""
        if self.sender.next_version is not None:  # of a checkpoint that was loaded and not pushed yet
            return {"policy_version": self.sender.next_version}
        ahead = self._pushed_at is None or self.steps_taken() > self._pushed_at
        return {"policy_version": self.sender.policy_version + int(ahead)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next push, which is due, restore the version."""
        self.sender.next_version = int(state_dict["policy_version"])
        self._pushed_at = None
