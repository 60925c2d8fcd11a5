"""The weights that an engine serves for a model: adapters merged into them, nothing left in few bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_asyncgrpo.adapters.on_demand import TensorsOnDemand
from torchrl_asyncgrpo.adapters.quantized import (
    as_stored,
    bits_outside_parameters,
    dequantized,
    has_quantized_layers,
    is_quantized,
    unquantized_layer,
)
from torchrl_asyncgrpo.adapters.tuners import has_adapters, merged, plain_layer, unwrapped


class ServedWeights(TensorsOnDemand):
    """Parameters and persistent buffers of a model without adapters and quantised layers, by their names in it.

    What adapters add, and what 4 or 8 bits stand for, is computed when a tensor is asked for, each time anew, so that
    walking through the mapping holds one such tensor at a time. The model's own tensors are handed out as they are,
    and nothing of the model is ever written. Tied weights come once.

    Args:
        module: any module, or a ``PeftModel`` around one.
        merge: add what adapters add; False gives the weights below them.

    Attributes:
        dtypes: of the parameters.
        buffers: names of the buffers among them.

    Raises:
        ValueError: if the module has an adapter that cannot be merged.
    """

    def __init__(self, module: nn.Module, *, merge: bool = True) -> None:
        places = list(_places(unwrapped(module), "", set()))
        plain = [parameter.dtype for _, layer, name, parameter, _ in places if not _in_few_bits(layer, name)]
        floating = [dtype for dtype in plain if dtype.is_floating_point]
        readers: dict[str, Callable[[], Tensor]] = {}
        for prefix, layer, name, parameter, adapters in places:
            if _in_few_bits(layer, name):
                read = partial(
                    _read, layer, name, adapters if merge else [], floating[0] if floating else torch.float32
                )
            elif adapters and merge:
                read = partial(_read, layer, name, adapters, parameter.dtype)
            else:
                read = partial(_same, parameter)
            readers[prefix + name] = read
        self.dtypes = {*plain} or {torch.float32}
        self.buffers = set()
        for name, buffer in _persistent_buffers(unwrapped(module), "", set()):
            readers[name] = partial(_same, buffer)
            self.buffers.add(name)
        super().__init__(readers)


def is_plain(module: nn.Module) -> bool:
    """Whether the weights that are served for a model are its own parameters: no adapters, nothing in few bits."""
    return not has_adapters(module) and not has_quantized_layers(module)


@torch.no_grad()
def plain_copy(module: nn.Module) -> Any:
    """A copy of a model without adapters and quantised layers, with tensors of its own.

    Args:
        module: a model, or a ``PeftModel`` around one; it is not changed.

    Returns:
        A model of the same class that computes the same, up to the rounding of merged and dequantised weights.

    Raises:
        ValueError: if the module has an adapter that cannot be merged.
    """
    model = unwrapped(module)
    weights = ServedWeights(model)
    # modules are copied, parameters are not: each is replaced below
    kept = [*model.parameters(), *bits_outside_parameters(model)]
    own = _replaced(copy.deepcopy(model, {id(tensor): tensor for tensor in kept}))
    made: dict[int, nn.Parameter] = {}
    for name, parameter in own.named_parameters():
        value = weights[name]
        made[id(parameter)] = nn.Parameter(value.clone() if value is parameter else value, requires_grad=False)
    for layer in own.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(layer, name, made[id(parameter)])
    return own


def _replaced(module: nn.Module) -> nn.Module:
    """The module with every layer of an adapter, and every quantised one, replaced by the plain one of its place."""
    module, _ = plain_layer(module)
    if is_quantized(module):
        return unquantized_layer(module)
    for name, child in list(module._modules.items()):
        if child is not None and (plain := _replaced(child)) is not child:
            setattr(module, name, plain)
    return module


def _places(
    module: nn.Module, prefix: str, seen: set[int]
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter, list[Any]]]:
    """Every parameter of the plain model: prefix, layer and name, the parameter, and the adapters that add to it.

    In the order of ``named_parameters``.
    """
    module, adapters = plain_layer(module)
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield prefix, module, name, parameter, adapters
    for name, child in module.named_children():
        yield from _places(child, f"{prefix}{name}.", seen)


def _persistent_buffers(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    module, _ = plain_layer(module)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
            seen.add(id(buffer))
            yield prefix + name, buffer
    for name, child in module.named_children():
        yield from _persistent_buffers(child, f"{prefix}{name}.", seen)


def _in_few_bits(layer: nn.Module, name: str) -> bool:
    return name == "weight" and is_quantized(layer)


def _read(layer: nn.Module, name: str, adapters: list[Any], dtype: torch.dtype) -> Tensor:
    if _in_few_bits(layer, name):
        return as_stored(layer, merged(adapters, name, dequantized(layer))).to(dtype)
    return merged(adapters, name, getattr(layer, name)).to(dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor
