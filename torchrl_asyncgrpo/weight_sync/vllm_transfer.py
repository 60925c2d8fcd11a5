"""The trainer's end of vLLM's weight transfer: its client over our HTTP calls, and its engine for each backend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.ipc_engine import DEFAULT_PACKED_BUFFER_SIZE_BYTES, IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo, SparseWeightPatch
from vllm.utils.network_utils import get_open_port

from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP, ServerFailed
from torchrl_asyncgrpo.weight_sync import vllm_plugin
from torchrl_asyncgrpo.weight_sync.patches import changed_elements
from torchrl_asyncgrpo.weight_sync.vllm_shm import SharedMemoryTrainerInitInfo

Backend = Literal["shm", "nccl", "ipc", "sparse_nccl"]


class PushClient(HTTPVLLMWeightSyncClient):
    """vLLM's client, with every status and time-out checked as everywhere in this package.

    Attributes:
        version: weight version that the next push is finished with.
        closed: True after a push was given up; what still runs of it then reaches the server no more.
    """

    def __init__(self, http: VLLMHTTP, timeout: float) -> None:
        super().__init__(http.url, timeout)
        self._http = http
        self.version: str | None = None
        self.closed = False

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        if self.closed:
            raise RuntimeError("this push was given up.")
        self._http.post(f"/{path}", json, timeout=self.timeout)

    def start_weight_update(self) -> None:
        """Start an update; one that a trainer began and did not live to finish is finished first."""
        try:
            super().start_weight_update()
        except ServerFailed:
            super().finish_weight_update()
            super().start_weight_update()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish an update under :attr:`version`."""
        super().finish_weight_update(self.version if weight_version is None else weight_version)


class PushSource(WeightSource):
    """The tensors of the push under way, in the dtype that travels.

    Args:
        metadata: name, dtype and shape of what every push consists of.

    Attributes:
        weights: the tensors of this push, in any dtype.
    """

    def __init__(self, metadata: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> None:
        self._metadata = [ParamMeta(*tensor) for tensor in metadata]
        self.weights: Iterable[tuple[str, Tensor]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(_nbytes, self._metadata))

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(map(_nbytes, self._metadata), default=0)

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of the tensors."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for meta, (name, tensor) in zip(self._metadata, self.weights, strict=True):
            if name != meta.name or tuple(tensor.shape) != meta.shape:
                raise ValueError(
                    f"the push has {name!r} of shape {tuple(tensor.shape)} where the first one had {meta.name!r} of "
                    f"{meta.shape}; every push of a sender holds the same tensors in the same order."
                )
            yield name, materialize_full_tensor(tensor.detach()).to(meta.dtype)


def _nbytes(meta: ParamMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def open_transfer(
    client: PushClient,
    source: PushSource,
    *,
    backend: Backend,
    workers: int,
    delta: bool,
    keep_unpacked: bool,
    sends_own: bool,
    master_address: str,
    master_port: int | None,
) -> Any:
    """Shake hands with the server, and return the trainer-side engine of a backend.

    Args:
        client: of the server.
        source: of the pushes.
        backend: name of the backend.
        workers: processes of the server that hold weights.
        delta: send changed elements only.
        keep_unpacked: see ``vllm_plugin``; ``shm``.
        sends_own: the tensors that travel are the module's own, and not made for a push; ``ipc``.
        master_address: host of the trainer, as the server's workers reach it; NCCL.
        master_port: a free port there, None for any; NCCL.
    """
    info: Any
    if backend == "shm":
        vllm_plugin.register()
        info = SharedMemoryTrainerInitInfo(
            rank=0, workers=workers, delta=delta, keep_unpacked=keep_unpacked, timeout=client.timeout
        )
    elif backend == "ipc":
        # What is made for a push goes through one buffer: unpacked, all of it would be alive until the push ends.
        buffer = max(source.largest, min(source.nbytes, DEFAULT_PACKED_BUFFER_SIZE_BYTES))
        info = IPCTrainerInitInfo(rank=0, packed=not sends_own, packed_buffer_size_bytes=buffer)
    else:
        kind = NCCLTrainerInitInfo if backend == "nccl" else SparseNCCLTrainerInitInfo
        port = get_open_port() if master_port is None else master_port
        info = kind(rank=0, master_address=master_address, master_port=port, world_size=workers + 1)
    if backend == "sparse_nccl":
        return SparseTransfer(info, client, source, delta=delta)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class SparseTransfer:
    """vLLM's sparse NCCL engine, which takes patches: the changed elements, or all of them in a full push.

    Attributes:
        sent_bytes: bytes that the last push carried.
    """

    def __init__(self, info: SparseNCCLTrainerInitInfo, client: PushClient, source: PushSource, *, delta: bool) -> None:
        self._source = source
        self._client = client
        self._delta = delta
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=client)
        self._served: dict[str, Tensor] | None = None
        for meta in source.metadata():
            if math.prod(meta.shape) >= 2**31:
                raise ValueError(
                    f"{meta.name} has 2^31 elements or more, which vLLM's sparse transfer cannot index; use "
                    "backend='nccl'."
                )
        self.sent_bytes = 0

    @torch.no_grad()
    def send_weights(self) -> None:
        """Push; the next one is a full one if this fails."""
        served, self._served = self._served, None
        now: dict[str, Tensor] = {}
        self.sent_bytes = 0
        self._client.start_weight_update()
        for name, tensor in self._source:
            if served is None:
                index, value = torch.arange(tensor.numel(), dtype=torch.int32, device=tensor.device), tensor.reshape(-1)
            else:
                patch = changed_elements(tensor, served[name])
                index, value = patch.index, patch.value
            if len(index):  # tensor by tensor: either side holds no more than one patch
                self._engine.send_weight_chunk([SparseWeightPatch(name, index, value, tuple(tensor.shape))])
                self.sent_bytes += index.nbytes + value.nbytes
            if self._delta:
                now[name] = tensor.clone()
        self._client.finish_weight_update()
        self._served = now if self._delta else None

    def shutdown(self) -> None:
        """Close the communicator."""
        self._engine.shutdown()
