"""What all pushes into a vLLM server share: one that is down is waited for, and gets everything again."""

from __future__ import annotations

import abc
import time

import torch
from torch import nn
from torchrl._utils import logger as torchrl_logger

from torchrl_asyncgrpo.adapters import ServedWeights
from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP, ServerFailed
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender

# Seconds that a look at the server may take, and between two looks while it is away
PROBE_TIMEOUT = 5.0
POLL_INTERVAL = 0.5


def served_dtype(weights: ServedWeights, given: torch.dtype | None) -> torch.dtype:
    """The dtype that a server holds weights in: ``given``, or the one that all of them have.

    Raises:
        ValueError: if nothing is given and they have several.
    """
    if given is not None:
        return given
    if len(weights.dtypes) > 1:
        raise ValueError(
            f"the module has parameters of {', '.join(map(str, sorted(weights.dtypes, key=str)))}; pass serving_dtype, "
            "the dtype that the server was started with (--dtype)."
        )
    return next(iter(weights.dtypes))


class VLLMSender(WeightSyncSender):
    """Push into a vLLM server that may be restarted.

    Args:
        module: whose weights are sent.
        url: the server's root, such as ``"http://localhost:8000"``.
        timeout: seconds that each step of a push may take.
        restart_timeout: seconds that a server which is down is waited for.
        api_key: that of the server's ``--api-key``.

    Attributes:
        counters: ``server_recoveries``, pushes that were made because the server had lost its weights.
        sent_bytes: bytes that the last push carried; 0 before the first.
    """

    engine_may_restart = True

    def __init__(
        self, module: nn.Module, url: str, *, timeout: float, restart_timeout: float, api_key: str | None
    ) -> None:
        super().__init__(module)
        self.url = url
        self.timeout = timeout
        self.restart_timeout = restart_timeout
        self.counters["server_recoveries"] = 0
        self.sent_bytes = 0
        self._http = VLLMHTTP(url, timeout=timeout, api_key=api_key)
        self._policy_version = 0
        self._met = False  # whether the server ever took a handshake

    @property
    def policy_version(self) -> int:
        """Version of the last confirmed push; 0 before the first."""
        return self._policy_version

    @abc.abstractmethod
    def lost(self) -> bool:
        """Whether the server answers and no longer holds the last confirmed push."""

    def update_weights(self) -> int:
        """Push all weights, and advance the policy version when the server confirmed them.

        A server that is down or was restarted is waited for, and gets a full push.

        Returns:
            The new policy version.

        Raises:
            ValueError: if the server cannot take the weights, or its checksums differ.
            ConnectionError: if the server is gone and does not come back within ``restart_timeout``.
            TimeoutError: if a step takes longer than ``timeout``.
            RuntimeError: if the server failed, with its message.
        """
        if self.lost():
            self._start_over()
        try:
            return super().update_weights()
        except (ConnectionError, TimeoutError, ServerFailed):
            if not self._met or not self._came_back():
                raise
        self._start_over()
        return super().update_weights()

    def _start_over(self) -> None:
        """Forget what the server held before it was restarted."""
        torchrl_logger.warning(f"the vLLM server at {self.url} lost its weights; it gets all of them again.")
        self.counters["server_recoveries"] += 1
        self._initialized = False

    def _came_back(self) -> bool:
        """Wait for a server that is down; False if it was up all the time, or does not come back."""
        deadline = time.monotonic() + self.restart_timeout
        away = False
        while time.monotonic() < deadline:
            if self._http.health(timeout=PROBE_TIMEOUT):
                return away or self.lost()
            if not away:
                torchrl_logger.warning(
                    f"the vLLM server at {self.url} is down; waiting up to {self.restart_timeout:g} s for its restart."
                )
            away = True
            time.sleep(POLL_INTERVAL)
        return False
