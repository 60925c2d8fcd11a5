"""A model's modules, attributes and parameters as they are, to go back to."""

from __future__ import annotations

import torch
from torch import nn


class Snapshot:
    """What a model is now: its modules, their attributes, parameters, hooks and buffers, and which of them are trained.

    Args:
        model: any module; it is not copied.
        weights: keep the values of floating parameters, too, in the memory of the host. Without them, what was written
            to a parameter stays.
    """

    def __init__(self, model: nn.Module, *, weights: bool) -> None:
        self._modules = []
        for module in model.modules():
            contents = [(held, held.copy()) for held in vars(module).values() if isinstance(held, dict)]
            self._modules.append((module, vars(module).copy(), contents))
        self._parameters = []
        for parameter in model.parameters():
            keep = weights and parameter.is_floating_point()
            value = parameter.detach().to("cpu", copy=True) if keep else None
            self._parameters.append((parameter, parameter.requires_grad, value))

    @torch.no_grad()
    def restore(self) -> None:
        """Make the model what it was; the parameters are the same objects."""
        for module, attributes, contents in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
            for held, content in contents:  # in place: handles of hooks hold the dicts themselves
                held.clear()
                held.update(content)
        for parameter, requires_grad, value in self._parameters:
            parameter.requires_grad_(requires_grad)
            if value is not None:
                parameter.copy_(value)
