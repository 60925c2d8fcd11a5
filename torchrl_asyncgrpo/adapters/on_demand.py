"""Named tensors that are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


class TensorsOnDemand(Mapping[str, Tensor]):
    """A mapping that computes a tensor each time it is asked for, without gradient, and keeps none.

    Args:
        readers: what computes each tensor, by its name.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = readers

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __contains__(self, name: object) -> bool:  # Mapping's own would compute the tensor
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)
