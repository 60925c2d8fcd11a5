"""The sender's side of a weight transfer: five verbs, and the one call that a trainer makes."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger

from torchrl_asyncgrpo.adapters import ServedWeights


class WeightSyncSender(abc.ABC):
    """Push the weights of a module into an inference engine.

    A trainer calls ``update_weights`` and knows nothing of the transfer behind it. The policy version advances by
    one only when the engine confirmed the whole push; a push that fails raises, and the next one starts clean.

    Args:
        module: whose weights are sent; a ``PeftModel``'s adapter is sent merged into its base. They are read when they
            are sent, and never written.

    Raises:
        ValueError: if the module has an adapter that cannot be merged.

    Attributes:
        next_version: version of the next push; None for one more than the last. A resumed run sets it, so that
            weights which were pushed before keep their version.
        counters: what happened, by name; the trainer logs them.
        engine_may_restart: True where the engine may lose its weights, so that :meth:`lost` is worth asking.
    """

    engine_may_restart = False

    def __init__(self, module: nn.Module) -> None:
        ServedWeights(module)  # raises where they cannot be sent
        self.module = module
        self.next_version: int | None = None
        self.counters: Counter[str] = Counter()
        self._initialized = False

    @property
    @abc.abstractmethod
    def policy_version(self) -> int:
        """Version of the last confirmed push; 0 before the first."""

    @abc.abstractmethod
    def init_weight_transfer(self) -> None:
        """Shake hands with the engine; called once, before the first push."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Hold generation, so that no decoding step sees half of a push."""

    @abc.abstractmethod
    def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Transfer named tensors; only while paused.

        Args:
            weights: names of the base checkpoint and tensors; tied weights come once.
        """

    @abc.abstractmethod
    def resume(self, policy_version: int | None = None) -> None:
        """Go on generating: under ``policy_version`` after a push, or as before (None) after one that failed."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Close the transfer and free what it holds."""

    def update_weights(self) -> int:
        """Push all weights and advance the policy version.

        Returns:
            The new policy version.

        Raises:
            Exception: whatever the transfer raised; the version is unchanged.
        """
        if not self._initialized:
            self.init_weight_transfer()
            self._initialized = True
        version = self._version_to_push()
        weights = self.prepare(version)
        self.pause()
        try:
            self.send_weights(weights)
        except BaseException:
            try:
                self.resume()
            except Exception as held:  # noqa: BLE001 - the failure of the push is what the caller needs to see
                torchrl_logger.warning(f"Generation stays paused until a push succeeds: {held}")
            raise
        self.resume(version)
        self.next_version = None
        return self.policy_version

    def _version_to_push(self) -> int:
        return self.policy_version + 1 if self.next_version is None else self.next_version

    def prepare(self, version: int) -> Iterable[tuple[str, Tensor]]:
        """Do what needs no pause yet, and return what :meth:`send_weights` gets: the module's weights.

        Args:
            version: policy version that the push will have.
        """
        del version
        return self.named_weights()

    def lost(self) -> bool:
        """Whether the engine is up and no longer holds the last confirmed push, because it was restarted."""
        return False

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers under the names of the base checkpoint, tied ones once.

        What adapters add and what quantised layers stand for is computed when a tensor is asked for.
        """
        return ServedWeights(self.module)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what :meth:`weights` holds, one tensor at a time."""
        yield from self.weights().items()
