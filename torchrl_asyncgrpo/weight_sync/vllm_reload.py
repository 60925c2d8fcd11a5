"""Load checkpoint tensors into a model that a vLLM worker serves, through the model's own loader.

Two ways, both on vLLM's layerwise reload (``vllm.model_executor.model_loader.reload``):

- :class:`StagedReload` builds the new tensors of every layer beside the old ones while the model goes on serving, and
  ``commit`` swaps them in: a pause of milliseconds, and a failure leaves the model as it was. For a CPU, where memory
  is plentiful and nothing (such as a CUDA graph) holds on to the addresses of tensors.
- :func:`reload_in_place` writes into the tensors that are there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
    initialize_online_processing,
    is_deferred_attention_layer,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

# Attributes of a module that hold its place in the tree and its tensors; a commit goes through them one by one.
_STRUCTURE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def _check_complete(parameters: Mapping[str, int], loaded: Iterable[str] | None) -> None:
    """Raise ``ValueError`` if a loader that reports what it loaded left a parameter out.

    Args:
        parameters: identity of each parameter by name; tied ones have one.
        loaded: names that the loader reports, or None where it does not.
    """
    if loaded is None:
        return
    written = {parameters[name] for name in loaded if name in parameters}
    missing = sorted(name for name, identity in parameters.items() if identity not in written)
    if missing:
        raise ValueError(
            f"the push has no tensor for {missing[0]} and {len(missing) - 1} more parameters of the served model: push "
            "every weight, under the names of the base checkpoint, and serve the architecture that is trained."
        )


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterable[str] | None:
    load_weights: Any = model.load_weights
    loaded: Iterable[str] | None = load_weights(iter(weights.items()))
    return loaded


def _identities(model: nn.Module) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


def reload_in_place(model: nn.Module, weights: Mapping[str, Tensor], model_config: Any) -> None:
    """Write checkpoint tensors into the model's own, taking back first what an earlier call left half-way.

    Args:
        model: the served model.
        weights: tensors by checkpoint name, on any device.
        model_config: vLLM's.

    Raises:
        Exception: of the model's loader. Some layers then hold new weights and others old ones.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()
    parameters = _identities(model)
    initialize_layerwise_reload(model)
    _check_complete(parameters, _load(model, weights))
    finalize_layerwise_reload(model, model_config)


class StagedReload:
    """New tensors for every layer of a served model, made by its own loader on a twin of its module tree.

    vLLM packs the linear layers of a CPU into a form that only its kernels read. ``keep_unpacked`` keeps the tensors
    they were packed from as well, so that checksums of the model's parameters cover them.

    Args:
        model: the served model; not touched before :meth:`commit`.
        weights: tensors by checkpoint name.
        keep_unpacked: keep packed layers' weights readable, for the memory of one more copy.

    Raises:
        Exception: of the model's loader.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor], *, keep_unpacked: bool = False) -> None:
        self._keep_unpacked = keep_unpacked
        self._twins: dict[Any, Any] = {}  # layers of vLLM, with attributes that nn.Module does not have
        self._before: dict[Any, dict[str, Any]] = {}
        self._loaded: list[Any] = []
        twin_of_model = self._twin(model)
        try:
            _check_complete(_identities(model), _load(twin_of_model, weights))
            self._loaded += [live for live, twin in self._twins.items() if _finish_layer(twin)]
            self._repack_tied()
        except BaseException:
            self.release()
            raise
        self._forget_loaders()

    def commit(self, model_config: Any) -> None:
        """Swap the new tensors in; no forward may run.

        Args:
            model_config: vLLM's.
        """
        for live in self._loaded:
            twin = self._twins[live]
            for own, new in ((live._parameters, twin._parameters), (live._buffers, twin._buffers)):
                for name, tensor in new.items():
                    if own.get(name) is None:
                        own[name] = tensor
                    elif tensor is not None:
                        own[name].data = tensor.data
            live.__dict__.update(self._made(live))
        for live in self._twins:
            if is_deferred_attention_layer(live):  # such as the projections that MLA absorbs
                live.process_weights_after_loading(model_config.dtype)
        self.release()

    def release(self) -> None:
        """Let go of the tensors; modules and loaders refer to each other, and the collector of a worker runs rarely."""
        self._forget_loaders()
        for live, twin in self._twins.items():
            twin.__dict__.update(dict.fromkeys(self._made(live)))
            twin._parameters.clear()
            twin._buffers.clear()
        self._twins.clear()
        self._before.clear()
        self._loaded.clear()

    def _made(self, live: Any) -> dict[str, Any]:
        """Attributes that loading gave the twin of a layer, such as the function that holds its packed weight."""
        before = self._before.get(live, {})
        return {
            name: value
            for name, value in self._twins[live].__dict__.items()
            if name not in _STRUCTURE and before.get(name, before) is not value
        }

    def _forget_loaders(self) -> None:
        for twin in self._twins.values():
            LAYERWISE_INFO.pop(twin, None)

    def _twin(self, live: Any) -> Any:
        """A module with the children's twins, whose tensors are empty and wait for the loader."""
        if live in self._twins:
            return self._twins[live]
        twin = live.__class__.__new__(live.__class__)
        twin.__dict__.update(live.__dict__)
        twin._parameters = dict(live._parameters)
        twin._non_persistent_buffers_set = set(live._non_persistent_buffers_set)
        twin._modules = {name: None if child is None else self._twin(child) for name, child in live._modules.items()}
        self._twins[live] = twin
        known = get_layerwise_info(live)
        # the loaders that are bound to these tensors are the twin's own, gone with it
        empty = {name: _own_copy(parameter) for name, parameter in known.restore_metadata[0].items()}
        LAYERWISE_INFO[twin] = info = LayerReloadingInfo((empty, {}), known.restore_device)
        twin._buffers = {}
        restore_layer_on_meta(twin, info)
        # where a push has nothing for a buffer, it keeps its value
        twin._buffers = {name: None if buffer is None else _own_copy(buffer) for name, buffer in live._buffers.items()}
        for name, parameter in twin._parameters.items():
            if parameter is not None and not parameter.is_meta:
                twin._parameters[name] = _own_copy(parameter)
        self._before[live] = dict(twin.__dict__)
        if self._keep_unpacked and type(getattr(twin, "quant_method", None)) is UnquantizedLinearMethod:
            twin.quant_method = _KeepsWeight()
        initialize_online_processing(twin)
        return twin

    def _repack_tied(self) -> None:
        """Process the layers anew that share a parameter with a loaded one: their packed form is of its old value."""
        new = {
            id(live._parameters.get(name)): parameter
            for live in self._loaded
            for name, parameter in self._twins[live]._parameters.items()
            if parameter is not None
        }
        loaded = set(self._loaded)
        for live, twin in self._twins.items():
            tied = {name: new[id(p)] for name, p in live._parameters.items() if p is not None and id(p) in new}
            if tied and live not in loaded:
                twin._parameters.update(tied)
                twin.quant_method.process_weights_after_loading(twin)
                self._loaded.append(live)


def _finish_layer(layer: nn.Module) -> bool:
    """Finish a layer whose elements were not all loaded, such as padding; False where it got none at all."""
    info = LAYERWISE_INFO[layer]
    if info.can_load() and info.load_numel > 0:
        _layerwise_process(layer, info)
    return not info.can_load()


class _KeepsWeight(UnquantizedLinearMethod):
    """Packs a layer's weight and keeps it; for good, because vLLM's own reload goes by the size of the weight."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight
        super().process_weights_after_loading(layer)
        layer.weight = weight


def _own_copy(tensor: Tensor) -> Tensor:
    clone = tensor.detach().clone()
    clone.__class__ = tensor.__class__
    clone.__dict__ = copy.copy(tensor.__dict__)
    return clone
