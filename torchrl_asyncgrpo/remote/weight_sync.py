"""Weight pushes that a backend makes itself: no weight comes through the trainer's process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from torchrl_asyncgrpo.remote.actor import RemoteActor
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender


class RemoteWeightSyncSender(WeightSyncSender):
    """Tells the backend of a remote policy to push its weights to the engine, under the version that is next.

    The backend pauses, sends and resumes with a sender of its own, and is asked whether the engine lost its weights.

    Args:
        actor_network: the policy; its backend holds the sender.

    Raises:
        ValueError: if the backend has no engine to push to.
    """

    def __init__(self, actor_network: RemoteActor) -> None:
        super().__init__(actor_network)
        self.backend = actor_network.backend
        if not self.backend.info.has_engine:
            raise ValueError(
                f"the {type(self.backend).__name__} has no engine to push to; build it with make_sender, such as "
                "make_sender=lambda model: VLLMWeightSyncSender(model, url)."
            )
        self.engine_may_restart = self.backend.info.engine_may_restart
        self._policy_version = 0
        self._next = self._pushed = 0

    @property
    def policy_version(self) -> int:
        """Version of the last confirmed push; 0 before the first."""
        return self._policy_version

    def init_weight_transfer(self) -> None:
        """Nothing: the backend's sender shakes hands."""

    def prepare(self, version: int) -> Iterable[tuple[str, Tensor]]:
        """Note the version; no weights are read here.

        Args:
            version: policy version that the push will have.
        """
        self._next = version
        return ()

    def pause(self) -> None:
        """Nothing: the backend's sender pauses the engine."""

    def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Let the backend push.

        Args:
            weights: not read.

        Raises:
            RuntimeError: if the backend does not confirm it.
            Exception: what went wrong there.
        """
        del weights
        if not self._push(self._next):
            raise RuntimeError(
                f"the {type(self.backend).__name__} did not confirm the push of version {self._next}, and raised "
                "nothing either."
            )

    def resume(self, policy_version: int | None = None) -> None:
        """Take note of a push that was confirmed."""
        if policy_version is not None:
            self._policy_version = self._pushed

    def destroy(self) -> None:
        """Nothing is held here."""

    def lost(self) -> bool:
        """Whether the engine is up and no longer holds the last confirmed push, as the backend's sender sees it."""
        return self._policy_version > 0 and not self._push(None)

    def _push(self, version: int | None) -> bool:
        push = self.backend.push_weights(version)
        self._pushed = push.version
        for name, count in push.counters.items():
            self.counters[name] = count
        return push.held

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Not here: the weights are in the backend.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the weights are in the backend; call update_weights, and it pushes them.")
