"""The ``shm`` weight-transfer backend of vLLM: trainer and server of one machine share the memory of the weights.

vLLM loads :func:`register` in every process, through the entry point group ``vllm.general_plugins``. The file needs
torch and vLLM alone, so that a server's environment may lack everything else this package depends on.

One push::

    trainer                                       server's workers
    write the weights into the free slot
    start_weight_update                           -
    update_weights(stage)                         CPU: a thread builds the new tensors beside the old ones
    ... generation goes on ...                    marks in shared memory that they are ready
    pause
    update_weights(commit)                        CPU: swaps them in; CUDA: loads from the slot
    finish_weight_update(version), resume         -
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from torchrl_asyncgrpo.weight_sync.patches import Patch, apply_patches
from torchrl_asyncgrpo.weight_sync.shared_memory import SharedTensors, TensorSpec

BACKEND = "shm"
# Seconds that a decoding thread keeps the interpreter while another one stages weights
SWITCH_INTERVAL = 2e-4
TRAINER_MODULE = "torchrl_asyncgrpo.weight_sync.vllm_shm"


def register() -> None:
    """Make the backend known to vLLM, on both sides; may be called several times in a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SharedMemoryWeightTransferEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, TRAINER_MODULE, "SharedMemoryTrainerWeightTransferEngine")


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """What a worker learns at the handshake.

    Args:
        tensors: name, dtype and shape of every tensor of a push.
        control: path of the control words, see :func:`control_spec`.
        workers: number of workers.
        keep_unpacked: on a CPU, keep the weights that vLLM packs readable for checksums.
    """

    tensors: list[tuple[str, str, list[int]]]
    control: str
    workers: int
    keep_unpacked: bool = True


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One of the calls that make a push.

    Args:
        phase: ``"stage"`` prepares the push while the server goes on generating, ``"commit"`` puts it in force,
            ``"discard"`` drops it, and raises what staging failed with.
        push: number of the push, counted by the trainer.
        slot: path of all tensors.
        patches: path of the elements to write into the slot first, or None.
        counts: with ``patches``: names of the tensors that change, and of how many elements each.
    """

    phase: Literal["stage", "commit", "discard"]
    push: int
    slot: str = ""
    patches: str | None = None
    counts: list[tuple[str, int]] = field(default_factory=list)


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """The worker's side: map the trainer's memory, and load from it through the model's own loader."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots: dict[str, SharedTensors] = {}
        self._pending: SharedMemoryUpdateInfo | None = None
        # one thread for all pushes: what its allocator and its OpenMP threads hold is used again
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="weight staging")
        self._staging: Future[Any] | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Map the control words; forget the memory of a trainer that was here before."""
        self.shutdown()
        self._specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in init_info.tensors]
        self._keep_unpacked = init_info.keep_unpacked
        parallel = self.parallel_config
        self._worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._control = control_words(init_info.control, init_info.workers)

    def start_weight_update(self) -> None:
        """Nothing: both calls of a push are whole in themselves, so that a trainer that died leaves nothing open."""

    def finish_weight_update(self) -> None:
        """Nothing, see :meth:`start_weight_update`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Carry out one call; without the device synchronization of the base class where there is no device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Stage, commit or discard a push."""
        if update_info.phase == "stage":
            self._begin(update_info)
        elif update_info.phase == "commit":
            self._commit(update_info.push)
        elif (failure := self._discard()) is not None:
            raise failure

    def shutdown(self) -> None:
        """Let go of the trainer's memory."""
        self._discard()
        self._slots.clear()

    def _begin(self, update_info: SharedMemoryUpdateInfo) -> None:
        self._discard()
        self._pending = update_info
        if self.device.type == "cpu":
            self._staging = self._stager.submit(self._stage, update_info)
        else:
            self._write_patches(update_info)
            self._control[self._worker] = update_info.push

    def _commit(self, push: int) -> None:
        pending, self._pending = self._pending, None
        staging, self._staging = self._staging, None
        if pending is None or pending.push != push:
            raise RuntimeError(f"push {push} is committed but was not staged; stage it first.")
        if staging is not None:
            staging.result().commit(self.model_config)
        else:
            from torchrl_asyncgrpo.weight_sync.vllm_reload import reload_in_place

            reload_in_place(self.model, self._slot(pending.slot), self.model_config)

    def _discard(self) -> BaseException | None:
        """Drop a push that was staged and never committed; returns what staging it failed with."""
        staging, self._staging, self._pending = self._staging, None, None
        if staging is None:
            return None
        if (failure := staging.exception()) is None:
            staging.result().release()
        return failure

    def _stage(self, pending: SharedMemoryUpdateInfo) -> Any:
        from torchrl_asyncgrpo.weight_sync.vllm_reload import StagedReload

        # Between two of its many small operations this thread would wait a whole interval for the one that decodes.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            self._write_patches(pending)
            staged = StagedReload(self.model, self._slot(pending.slot), keep_unpacked=self._keep_unpacked)
        except BaseException:
            self._control[self._worker] = -pending.push  # the trainer asks what it was
            raise
        finally:
            sys.setswitchinterval(interval)
        self._control[self._worker] = pending.push
        return staged

    def _slot(self, path: str) -> SharedTensors:
        if path not in self._slots:
            self._slots[path] = SharedTensors(path, self._specs)
        return self._slots[path]

    def _write_patches(self, pending: SharedMemoryUpdateInfo) -> None:
        if pending.patches is not None:
            slot = self._slot(pending.slot)
            apply_patches(slot, patch_views(pending.patches, pending.counts, slot))


def control_spec(workers: int) -> TensorSpec:
    """One word per worker: the number of the push that it has staged, negative where staging failed."""
    return TensorSpec("control", "int64", (workers,))


def control_words(path: str, workers: int) -> Tensor:
    """The words of all workers, [workers] int64, in memory that trainer and workers share."""
    return SharedTensors(path, [control_spec(workers)])["control"]


def patch_specs(counts: Iterable[tuple[str, int]], slot: Mapping[str, Tensor]) -> list[TensorSpec]:
    """What lies in the memory of a push's patches: index and value of each tensor that changes."""
    specs = []
    for name, count in counts:
        index = "int32" if slot[name].numel() < 2**31 else "int64"
        specs += [
            TensorSpec(f"{name}/index", index, (count,)),
            TensorSpec(f"{name}/value", str(slot[name].dtype).removeprefix("torch."), (count,)),
        ]
    return specs


def patch_views(path: str, counts: Iterable[tuple[str, int]], slot: Mapping[str, Tensor]) -> dict[str, Patch]:
    """The patches that lie in shared memory."""
    counts = list(counts)
    tensors = SharedTensors(path, patch_specs(counts, slot))
    return {name: Patch(tensors[f"{name}/index"], tensors[f"{name}/value"]) for name, _ in counts}
