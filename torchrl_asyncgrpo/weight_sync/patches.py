"""Sparse weight updates: the elements of a tensor that changed, as (index, value)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Patch:
    """Elements to write into a tensor.

    Args:
        index: [K] int32, int64 from 2^31 elements on: positions in the flattened tensor, ascending.
        value: [K] in the tensor's dtype.
    """

    index: Tensor
    value: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.index.nbytes + self.value.nbytes


def changed_elements(new: Tensor, served: Tensor) -> Patch:
    """Elements of ``new`` that differ from ``served`` once they are in its dtype, compared bit for bit.

    Args:
        new: of any floating dtype and device.
        served: same shape; contiguous.
    """
    value = new.detach().to(served).reshape(-1)
    bits = _BITS[served.dtype.itemsize]
    index = (value.view(bits) != served.view(-1).view(bits)).nonzero()[:, 0]
    return Patch(index.to(torch.int32 if value.numel() < 2**31 else torch.int64), value[index])


@torch.no_grad()
def apply_patches(tensors: Mapping[str, Tensor], patches: Mapping[str, Patch]) -> None:
    """Write patches into contiguous tensors of the same names, in place."""
    for name, patch in patches.items():
        tensors[name].view(-1)[patch.index.long()] = patch.value
