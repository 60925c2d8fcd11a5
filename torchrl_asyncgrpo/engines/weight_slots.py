"""Where pushed weights go: the tensors of the engine's model by name, and which of them a push has covered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class WeightSlots:
    """Parameters and persistent buffers of a model, written in place by one push after the other.

    A tied weight is one slot with several names: any of them covers it. Buffers may be left out of a push.

    Args:
        model: names are those of its ``state_dict()``, of which ``named_parameters()`` has a part.
        shared: the model holds the pusher's own tensors; a push then writes nothing and only checks that.
    """

    def __init__(self, model: nn.Module, *, shared: bool) -> None:
        self._slots: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shared = shared
        self._covered: set[int] = set()
        self._torn = False

    def start(self) -> None:
        """Begin a push: nothing is covered yet, and what an earlier one left half written is still to be."""
        self._covered = set()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor into its slot, casting to the slot's dtype and device.

        Raises:
            ValueError: unknown name, other shape, or a tensor other than the shared one. Nothing of that tensor was
                written; those before it were.
        """
        for name, source in weights:
            slot = self._slot(name)
            if source.shape != slot.shape:
                raise ValueError(
                    f"weight {name!r} has shape {tuple(source.shape)}; the engine's has {tuple(slot.shape)}. "
                    "Engine and trainer must be built from the same configuration."
                )
            if self._shared:
                if source.data_ptr() != slot.data_ptr():
                    raise ValueError(
                        f"weight {name!r} is not the tensor that this engine shares with the trainer; an engine with "
                        "copy_weights=False takes no other weights. Use copy_weights=True to push some."
                    )
            else:
                self._torn = True
                with torch.no_grad():
                    slot.copy_(source)
            self._covered.add(id(slot))

    def finish(self, *, new_version: bool) -> None:
        """End a push, or a pause without one.

        Raises:
            RuntimeError: if weights are half written, or a new version was announced without all its parameters.
        """
        missing = [name for slot, name in self._parameters.items() if slot not in self._covered]
        needed = self._torn or (new_version and not self._shared)
        if missing and needed:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(
                f"{len(missing)} of {len(self._parameters)} parameters were not pushed ({shown}): the engine stays "
                "paused at the version before. Push all parameters, then resume."
            )
        self._torn = False

    def _slot(self, name: str) -> Tensor:
        if name not in self._slots:
            close = difflib.get_close_matches(name, self._slots, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(
                f"weight {name!r} is not in the engine's model: names are those of model.state_dict(){hint}"
            )
        return self._slots[name]
