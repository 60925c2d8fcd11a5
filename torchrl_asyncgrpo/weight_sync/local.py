"""Weight pushes into an engine of this process."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from torchrl_asyncgrpo.engines.base import LocalEngine
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender


class LocalWeightSyncSender(WeightSyncSender):
    """Copy a module's weights into a running engine of this process, between two of its decoding steps.

    Args:
        module: the model being trained, named as the engine's own.
        engine: the engine to push into.
    """

    def __init__(self, module: nn.Module, engine: LocalEngine) -> None:
        super().__init__(module)
        self.engine = engine

    @property
    def policy_version(self) -> int:
        """Version of the last confirmed push: the engine's."""
        return self.engine.policy_version

    def init_weight_transfer(self) -> None:
        """Nothing to shake: the engine is at hand."""

    def pause(self) -> None:
        """Return when no decoding step runs; none starts until ``resume``."""
        self.engine.pause()

    def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors into the engine's own; nothing to copy where the engine shares the module's."""
        if not self.engine.shares_weights:
            self.engine.load_weights(weights)

    def resume(self, policy_version: int | None = None) -> None:
        """Let the engine decode on."""
        self.engine.resume(policy_version)

    def destroy(self) -> None:
        """Nothing is held."""
