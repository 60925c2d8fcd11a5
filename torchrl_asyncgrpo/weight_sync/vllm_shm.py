"""The trainer's side of the ``shm`` backend; the protocol is in ``vllm_plugin``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from torchrl_asyncgrpo.weight_sync.patches import Patch, apply_patches, changed_elements
from torchrl_asyncgrpo.weight_sync.shared_memory import SharedFile, SharedTensors, TensorSpec, layout
from torchrl_asyncgrpo.weight_sync.vllm_plugin import (
    BACKEND,
    SharedMemoryInitInfo,
    SharedMemoryUpdateInfo,
    control_spec,
    control_words,
    patch_specs,
    patch_views,
)

# Seconds between two looks at whether the workers have staged a push
POLL_INTERVAL = 0.002


@dataclass
class SharedMemoryTrainerInitInfo(TrainerInitInfo):
    """The trainer's settings.

    Args:
        rank: of this trainer process; 0 sends.
        workers: processes of the server that hold weights, from its ``/get_world_size``.
        delta: send only the elements that changed since the last confirmed push, where that is fewer bytes.
        keep_unpacked: see :class:`SharedMemoryInitInfo`.
        timeout: seconds that the workers may take to stage a push.
    """

    backend: ClassVar[str] = BACKEND

    workers: int = 1
    delta: bool = False
    keep_unpacked: bool = True
    timeout: float = 300.0


class SharedMemoryTrainerWeightTransferEngine(TrainerWeightTransferEngine[SharedMemoryTrainerInitInfo]):
    """The trainer's side.

    Two slots take turns, so that a worker which still reads a push that was given up does not read the next one. A
    push of changed elements changes the slot that is served.

    Attributes:
        sent_bytes: bytes that the last push carried.
    """

    init_info_cls = SharedMemoryTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, settings: SharedMemoryTrainerInitInfo
    ) -> None:
        super().__init__(client=client, source=source, is_sender=settings.is_sender)
        self._settings = settings
        self._specs = [
            TensorSpec(meta.name, str(meta.dtype).removeprefix("torch."), tuple(meta.shape))
            for meta in source.metadata()
        ]
        self._full_bytes = sum(spec.nbytes for spec in self._specs)
        self.sent_bytes = 0
        self._slots: dict[int, tuple[SharedFile, SharedTensors]] = {}
        self._served: int | None = None  # index of the slot that holds what the server serves, where that is known
        self._staged: int | None = None
        self._written = 1  # slot that was written last; the other one is next
        self._push = 0
        self._patches: SharedFile | None = None
        self._control_file = SharedFile(layout([control_spec(settings.workers)])[1])
        self._control = control_words(self._control_file.path, settings.workers)

    @classmethod
    def trainer_init(
        cls,
        init_info: SharedMemoryTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> SharedMemoryTrainerWeightTransferEngine:
        """Reserve the memory and shake hands."""
        if source is None:
            raise ValueError("shared-memory weight transfer needs a WeightSource.")
        engine = cls(client=client, source=source, settings=init_info)
        worker_info = SharedMemoryInitInfo(
            tensors=[(spec.name, spec.dtype, list(spec.shape)) for spec in engine._specs],
            control=engine._control_file.path,
            workers=init_info.workers,
            keep_unpacked=init_info.keep_unpacked,
        )
        client.init_weight_transfer_engine(asdict(worker_info))
        return engine

    @torch.no_grad()
    def stage(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Write the source's weights, and wait until the workers have prepared them; they go on generating.

        Args:
            waiting: called while the workers prepare, to raise where they are gone.

        Raises:
            TimeoutError: if they did not within the time-out.
        """
        served, self._served = self._served, None  # nothing is known of the server until the push is confirmed
        self._push += 1
        if self._settings.delta and served is not None:
            info = self._write_patches_of(served)
        else:
            info = self._write_all(iter(self._weights()))
        self.client.start_weight_update()
        self.client.update_weights(asdict(info))
        self._wait(waiting)

    def send_weights(self) -> None:
        """Put the staged weights in force, staging them first where that was not done; the server should be paused."""
        if self._staged is None:
            self.stage()
        staged, self._staged = self._staged, None
        self.client.update_weights(asdict(SharedMemoryUpdateInfo("commit", self._push)))
        self.client.finish_weight_update()
        self._served = staged

    def shutdown(self) -> None:
        """Give the memory back; the server keeps what it loaded."""
        for file, _ in self._slots.values():
            file.close()
        self._slots.clear()
        self._control_file.close()
        if self._patches is not None:
            self._patches.close()

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        assert self.source is not None
        return self.source

    def _write_all(self, weights: Iterable[tuple[str, Tensor]]) -> SharedMemoryUpdateInfo:
        """Write ``weights`` into the free slot; what they leave out is there already."""
        self._written = self._staged = 1 - self._written
        file, slot = self._slot(self._staged)
        for name, tensor in weights:
            slot[name].copy_(tensor)
        self.sent_bytes = self._full_bytes
        return SharedMemoryUpdateInfo("stage", self._push, file.path)

    def _slot(self, index: int) -> tuple[SharedFile, SharedTensors]:
        if index not in self._slots:
            file = SharedFile(layout(self._specs)[1])
            self._slots[index] = file, SharedTensors(file.path, self._specs)
        return self._slots[index]

    def _write_patches_of(self, served: int) -> SharedMemoryUpdateInfo:
        """Write the elements that differ from the served ones into memory of their own; all, where that is less."""
        file, slot = self._slot(served)
        patches: dict[str, Patch] = {}
        nbytes = 0
        weights = iter(self._weights())
        for name, tensor in weights:
            patches[name] = patch = changed_elements(tensor, slot[name])
            nbytes += patch.nbytes
            if nbytes >= self._full_bytes:
                _, free = self._slot(1 - self._written)
                for done in patches:
                    free[done].copy_(slot[done])
                apply_patches(free, patches)
                return self._write_all(weights)
        counts = [(name, len(patch.index)) for name, patch in patches.items() if len(patch.index)]
        if self._patches is not None:
            self._patches.close()
        self._patches = SharedFile(layout(patch_specs(counts, slot))[1])
        for name, view in patch_views(self._patches.path, counts, slot).items():
            view.index.copy_(patches[name].index)
            view.value.copy_(patches[name].value)
        self._staged = served
        self.sent_bytes = nbytes
        return SharedMemoryUpdateInfo("stage", self._push, file.path, self._patches.path, counts)

    def _wait(self, waiting: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._settings.timeout
        while not bool((self._control == self._push).all()):
            if bool((self._control == -self._push).any()):
                self.client.update_weights(asdict(SharedMemoryUpdateInfo("discard", self._push)))
                raise RuntimeError("the server's workers could not load the weights; see the server's log.")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the server's workers did not prepare a push within {self._settings.timeout:g} s; raise timeout "
                    "if the machine is busy, and look at the server's log."
                )
            waiting()
            time.sleep(POLL_INTERVAL)
