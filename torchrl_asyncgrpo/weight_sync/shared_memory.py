"""Weights in memory that two processes of one machine map: what the trainer writes, the server reads."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64


class TensorSpec(NamedTuple):
    """Name, dtype (``"float32"``) and shape of one tensor, as JSON carries them."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.torch_dtype.itemsize


def layout(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Byte offset of each tensor, and the size of them all: aligned, in the order given, the same in every process."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)


class SharedTensors(Mapping[str, Tensor]):
    """Named tensors that lie one behind the other in a shared mapping of a file.

    Args:
        path: of a file that is large enough.
        specs: the tensors.
    """

    def __init__(self, path: str, specs: Iterable[TensorSpec]) -> None:
        specs = list(specs)
        offsets, nbytes = layout(specs)
        memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._tensors = {
            spec.name: memory[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape)
            for spec, offset in zip(specs, offsets, strict=True)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class SharedFile:
    """Memory of this process that another process of the same user can map through ``path``, for as long as this lives.

    An anonymous file: it needs no space on a file system, such as the few MB of ``/dev/shm`` in a container, and
    nothing remains of it however its processes end.

    Args:
        nbytes: size; the memory is reserved at once.

    Raises:
        MemoryError: if there is not so much memory.
    """

    def __init__(self, nbytes: int) -> None:
        available = _available_bytes()
        if nbytes > available:  # reserving would not fail, but bring the machine down
            raise MemoryError(
                f"no {nbytes / 1e9:.2f} GB of shared memory for the weights, only {available / 1e9:.2f} GB are free; "
                "push in a smaller serving_dtype, or free some memory."
            )
        self._descriptor = os.memfd_create("torchrl_asyncgrpo")
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            os.close(self._descriptor)
            raise MemoryError(f"no {nbytes / 1e9:.2f} GB of shared memory for the weights: {error}") from error
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def close(self) -> None:
        """Give the path up; mappings that exist stay good."""
        self._close()


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
