"""Pushes of a LoRA adapter into a running vLLM server: a new version beside the old ones, and nothing else travels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger

from torchrl_asyncgrpo.adapters import LoRATensors, ServedWeights
from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.engines.vllm_http import RequestRefused, ServerFailed, ServerHung, ServerUnreachable
from torchrl_asyncgrpo.weight_sync.adapter_files import AdapterFiles
from torchrl_asyncgrpo.weight_sync.vllm_checks import check_adapter_server, check_base
from torchrl_asyncgrpo.weight_sync.vllm_sender import PROBE_TIMEOUT, VLLMSender, served_dtype


class VLLMAdapterSyncSender(VLLMSender):
    """Push a LoRA adapter into a running vLLM server, which keeps the base model that it was started with.

    Each push is a new adapter, ``policy-v7-...`` for version 7, and pauses nothing. A ``VLLMEngine`` names the newest
    one that the server lists in each request, and a request keeps its adapter to the end: all tokens of a completion
    have one version. Those older than ``max_staleness`` can be named no more. The server keys its prefix cache on the
    adapter, so that no version reads what another one wrote.

    A push that fails raises, leaves the version, and the next one starts clean. Where requests may have named what had
    failed, the next one skips its number: a version stands for one set of weights. A server that was restarted is
    waited for, and gets the newest adapter again. vLLM itself is not needed here.

    The server is started with ``--enable-lora --max-loras N --max-lora-rank R``, N at least ``max_staleness + 2``, and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``: ``VLLMServer(model, backend=None, max_loras=N, max_lora_rank=R)``.

    Args:
        module: the model being trained, with one LoRA adapter of peft on linear layers: no DoRA, no trained biases, no
            ``modules_to_save``, and neither on the head nor on an embedding.
        url: the server's root, such as ``"http://localhost:8000"``.
        max_staleness: pushes that a rollout may be behind when it is trained, >= 0: that of the replay buffer.
        serving_dtype: dtype that the server holds the base in; None is the module's own.
        directory: where the server finds adapters, too; None for ``/dev/shm`` of this machine, or its temporary
            directory where there is none, which are this user's alone. A server on another machine, or of another user,
            needs one on a file system that both have and may read. What a killed run leaves there stays.
        verify: ``"checksum"`` compares the server's base with the module's, as far as the server's parameters can be
            read, at the first push and the first to a restarted server; ``"none"`` does not.
        timeout: seconds that each step of a push may take.
        restart_timeout: seconds that a server which is down is waited for.
        api_key: that of the server's ``--api-key``.

    Attributes:
        counters: ``server_recoveries``, pushes that were made because the server had lost its adapters.
        sent_bytes: bytes that the last push carried; 0 before the first.

    Raises:
        ValueError: if vLLM cannot serve the adapter, or an argument is outside its range.
    """

    def __init__(
        self,
        module: nn.Module,
        url: str,
        *,
        max_staleness: int,
        serving_dtype: torch.dtype | None = None,
        directory: str | Path | None = None,
        verify: Literal["checksum", "none"] = "checksum",
        timeout: float = 300.0,
        restart_timeout: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        self._tensors = LoRATensors(module)  # whose refusals say more than those of a merge
        super().__init__(module, url, timeout=timeout, restart_timeout=restart_timeout, api_key=api_key)
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}; it must be at least 0.")
        if verify not in ("checksum", "none"):
            raise ValueError(f"verify={verify!r}; it is one of 'checksum', 'none'.")
        self.max_staleness = max_staleness
        self.serving_dtype = served_dtype(ServedWeights(module, merge=False), serving_dtype)
        self.directory = directory
        self.verify = verify
        self._files: AdapterFiles | None = None
        self._served: dict[PolicyAdapter, Path] = {}  # oldest first; requests may name these
        self._unconfirmed: tuple[PolicyAdapter, Path] | None = None
        self._confirmed: PolicyAdapter | None = None
        self._skipped: set[int] = set()  # versions of pushes that failed when requests could name them
        self._adapter_dtype = self.serving_dtype

    # --- the verbs of a transfer ------------------------------------------------------------------
    def init_weight_transfer(self) -> None:
        """Check that the server can serve this module's adapter on its base.

        Raises:
            ValueError: naming every flag that the server lacks and every way in which it serves another base.
            ConnectionError: if nothing answers at the URL.
            OSError: if ``directory`` cannot be written.
        """
        server = self._http.describe()
        held = self._http.weight_version(timeout=self.timeout) if server.has_weight_routes else 0
        support = check_adapter_server(
            server,
            self.module,
            url=self.url,
            serving_dtype=self.serving_dtype,
            slots=self.max_staleness + 2,
            rank=self._tensors.rank,
            layers=self._tensors.layers,
            held_version=held,
        )
        if self.verify == "checksum":
            base = ServedWeights(self.module, merge=False)
            checksums = self._http.checksums(timeout=self.timeout)
            check_base(base, checksums, self.serving_dtype, layers=self._tensors.layers, url=self.url)
        self._adapter_dtype = getattr(torch, support.dtype)
        if self._files is None:
            self._files = AdapterFiles(self.directory)
        self._served.clear()
        self._met = True

    def pause(self) -> None:
        """Nothing: a new adapter is published beside those in use."""

    def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write the adapter where the server sees it, and have the server load it under its version.

        Args:
            weights: names and tensors of the adapter, as :meth:`weights` has them.

        Raises:
            ConnectionError: if the server is gone.
            TimeoutError: if it does not answer within ``timeout``.
            RuntimeError: if it failed, with its message.
            OSError: if there is no room for the files.
        """
        assert self._files is not None
        version = self._version_to_push()
        for other in self._http.adapters(timeout=self.timeout):
            # of a push that failed, of an earlier trainer or state
            if other not in self._served or other.version > version:
                self._http.unload_adapter(other, timeout=self.timeout)
                self._served.pop(other, None)
        adapter = PolicyAdapter(version, time.time_ns())
        path, self.sent_bytes = self._files.publish(adapter, weights, self._tensors.config(), self._adapter_dtype)
        self._unconfirmed = adapter, path
        try:
            self._http.load_adapter(adapter, str(path), timeout=self.timeout)
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            raise ServerFailed(
                f"the server at {self.url} does not find the adapter in {path}. Pass directory=..., a directory on a "
                f"file system that this process and the server have under one path. ({refused})"
            ) from None

    def resume(self, policy_version: int | None = None) -> None:
        """After a push: take away what no request need name any more. After a failure: what was to be pushed."""
        if policy_version is None:
            self._withdraw()
            return
        assert self._files is not None
        assert self._unconfirmed is not None
        adapter, path = self._unconfirmed
        self._unconfirmed = None
        self._confirmed = adapter
        self._policy_version = policy_version
        older = [other for other in self._served if other.version != adapter.version]
        kept = [*older, adapter][-(self.max_staleness + 1) :]
        for other in set(self._served) - set(kept):
            self._unload(other, PROBE_TIMEOUT)
        self._served[adapter] = path
        self._served = {other: self._served[other] for other in kept}
        self._files.keep(list(self._served.values()))

    def destroy(self) -> None:
        """Delete the files. The server, where it is still there, goes on with the newest adapter alone."""
        for adapter in list(self._served)[:-1]:
            self._unload(adapter, PROBE_TIMEOUT)
        self._served.clear()
        if self._files is not None:
            self._files.remove()
            self._files = None
        self._initialized = False
        self._http.close()

    # --- what travels, and whether it is still there -------------------------------------------------
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors of the adapter, under the names of peft's checkpoints; the scaling is part of B."""
        return self._tensors

    def lost(self) -> bool:
        """Whether the server answers, and does not list the adapter of the last confirmed push any more."""
        if self._policy_version == 0:
            return False
        try:
            return self._confirmed not in self._http.adapters(timeout=PROBE_TIMEOUT)
        except (ServerUnreachable, ServerHung, ServerFailed):
            return False

    def _version_to_push(self) -> int:
        version = super()._version_to_push()
        while version in self._skipped and version != self._policy_version:  # a repeat has the weights of its version
            version += 1
        return version

    def _withdraw(self) -> None:
        """Take the adapter of a push that failed away, if it got as far as the server."""
        if self._unconfirmed is None:
            return
        adapter, _ = self._unconfirmed
        self._unconfirmed = None
        listed = True
        try:
            listed = self._unload(adapter, self.timeout)  # the whole of it: a load may be under way, and ends first
        finally:
            if listed:
                self._skipped.add(adapter.version)

    def _unload(self, adapter: PolicyAdapter, timeout: float) -> bool:
        """Let no request name an adapter any more; the next push makes up for it where the server does not answer.

        Returns:
            Whether requests could name it, as far as is known.
        """
        try:
            return self._http.unload_adapter(adapter, timeout=timeout)
        except (ServerUnreachable, ServerHung, ServerFailed) as error:
            torchrl_logger.warning(f"the vLLM server at {self.url} may list the adapter {adapter.name}: {error}")
            return True
