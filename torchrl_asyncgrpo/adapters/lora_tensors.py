"""The tensors of a LoRA adapter as vLLM reads them, and which adapters it can serve.

Shapes: R rank, K and M the inputs and outputs of the layer that an adapter stands on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torchrl_asyncgrpo.adapters.on_demand import TensorsOnDemand
from torchrl_asyncgrpo.adapters.quantized import has_quantized_layers
from torchrl_asyncgrpo.adapters.tuners import (
    adapter_modules,
    changes_its_base,
    plain_layer,
    trained_outside_adapters,
    unwrapped,
)

# peft's, which vLLM strips
_PREFIX = "base_model.model."
_MERGED = "Push base and adapter merged, with VLLMWeightSyncSender, or leave that out."


class LoRATensors(TensorsOnDemand):
    """The tensors of a model's LoRA adapter, under the names of peft's checkpoints.

    They are ``….lora_A.weight``, [R, K], and ``….lora_B.weight``, [M, R], of each layer. The scaling, which peft keeps
    beside them for each layer, is part of B here: the layer's output is that of its base plus B A x. They are computed
    when they are asked for, and nothing of the model is written.

    Args:
        module: a model with one LoRA adapter on linear layers, or a ``PeftModel`` around one.

    Attributes:
        rank: highest of all layers.
        layers: names of the layers in the model.
        targets: last parts of these names, sorted.

    Raises:
        ValueError: if vLLM cannot serve the adapter, naming what it has and what to do instead.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = dict(_checked_layers(module))
        self.rank = max(layer.r[adapter] for layer, adapter in layers.values())
        self.layers = list(layers)
        self.targets = sorted({name.rpartition(".")[2] for name in layers})
        readers: dict[str, Callable[[], Tensor]] = {}
        for path, layer in layers.items():
            readers[f"{_PREFIX}{path}.lora_A.weight"] = partial(_matrix_a, *layer)
            readers[f"{_PREFIX}{path}.lora_B.weight"] = partial(_matrix_b, *layer)
        super().__init__(readers)

    def config(self) -> dict[str, Any]:
        """The content of ``adapter_config.json``."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.rank,  # B has the scaling
            "target_modules": self.targets,
            "bias": "none",
        }


def _matrix_a(layer: Any, adapter: str) -> Tensor:
    return layer.lora_A[adapter].weight.detach()


def _matrix_b(layer: Any, adapter: str) -> Tensor:
    return layer.lora_B[adapter].weight.float() * layer.scaling[adapter]


def _checked_layers(module: nn.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Names of the layers with an adapter, the layers of peft in their places, and the name of the adapter."""
    model = unwrapped(module)
    layers = list(adapter_modules(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no adapter to push; make one with load_policy(..., peft_config=LoraConfig()), "
            "or push whole weights with VLLMWeightSyncSender."
        )
    if has_quantized_layers(model):
        raise ValueError(
            f"{type(model).__name__} is kept in 4 or 8 bits, and vLLM would serve the adapter on other weights than it "
            "is trained on. Push what the bits stand for and the adapter merged, with VLLMWeightSyncSender."
        )
    if kind := changes_its_base(module):
        raise ValueError(
            f"the adapter was initialised with init_lora_weights={kind!r}, which takes a part of the weights out of "
            f"the base, and vLLM's base has them. {_MERGED}"
        )
    if others := trained_outside_adapters(model):
        raise ValueError(
            f"{others[0]} and {len(others) - 1} more parameters are trained beside the LoRA matrices (bias=..., or not "
            f"frozen), and vLLM serves LoRA matrices alone. {_MERGED}"
        )
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for name, peft_layer in layers:
        plain, stacked = plain_layer(peft_layer)
        if not stacked:
            raise ValueError(f"{name} is one of modules_to_save, and vLLM serves LoRA matrices alone. {_MERGED}")
        if peft_layer is head:
            raise ValueError(f"the adapter is on the output head, {name}; vLLM's adapters leave it alone. {_MERGED}")
        if not isinstance(plain, (nn.Linear, Conv1D)):
            raise ValueError(
                f"the adapter is on {name}, a {type(plain).__name__}; only those on linear layers are pushed. {_MERGED}"
            )
        if len(stacked) > 1 or len(peft_layer.active_adapters) != 1 or peft_layer.disable_adapters:
            raise ValueError(
                f"{name} has the adapters {', '.join(peft_layer.active_adapters) or 'none'} in use; a request of vLLM "
                "has exactly one. Activate one, or push base and adapters merged, with VLLMWeightSyncSender."
            )
        adapter = peft_layer.active_adapters[0]
        if adapter not in peft_layer.scaling:  # it is on other layers
            continue
        if adapter in peft_layer.lora_variant:
            kind = type(peft_layer.lora_variant[adapter]).__name__.removesuffix("LinearVariant")
            raise ValueError(f"the adapter on {name} is of the kind {kind}, and vLLM serves plain LoRA. {_MERGED}")
        if peft_layer.lora_bias[adapter]:
            raise ValueError(f"the adapter on {name} has a trained bias (lora_bias), which vLLM lacks. {_MERGED}")
        yield name, (peft_layer, adapter)
