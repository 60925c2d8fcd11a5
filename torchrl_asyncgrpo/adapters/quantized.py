"""Linear layers that bitsandbytes keeps in 4 or 8 bits: their values, and that these stay what they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def is_quantized(module: nn.Module) -> bool:
    """Whether a layer keeps its weight in 4 or 8 bits of bitsandbytes."""
    bnb: Any = sys.modules.get("bitsandbytes")
    if bnb is None:  # a layer of its can only be there if it was imported
        return False
    if isinstance(module, bnb.nn.Linear4bit):
        return True
    return isinstance(module, bnb.nn.Linear8bitLt) and module.weight.dtype == torch.int8


def has_quantized_layers(model: nn.Module) -> bool:
    """Whether any layer of a model is kept in 4 or 8 bits."""
    return any(is_quantized(module) for module in model.modules())


@torch.no_grad()
def dequantized(module: nn.Module) -> Tensor:
    """The weight that a quantised layer stands for; the layer is not changed.

    Args:
        module: a layer for which :func:`is_quantized`.

    Returns:
        [out_features, in_features], new: in the dtype that was quantised for 4 bits, float32 for 8 bits.
    """
    bnb: Any = sys.modules["bitsandbytes"]
    layer: Any = module
    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    # a weight that replaced another has its own until the next forward
    scale = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return bnb.functional.int8_vectorwise_dequant(layer.weight.data, scale.to(layer.weight.device))


def as_stored(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight of a quantised layer as its checkpoint lays it out: transposed for GPT-2 and its kin."""
    return weight.T.contiguous() if _was_conv1d(module) else weight


def unquantized_layer(module: nn.Module) -> nn.Module:
    """The plain layer in whose place a quantised one stands, on the meta device but for its bias."""
    layer: Any = module
    bias = layer.bias
    with torch.device("meta"):
        if _was_conv1d(layer):
            plain: Any = Conv1D(layer.out_features, layer.in_features)
        else:
            plain = nn.Linear(layer.in_features, layer.out_features, bias=bias is not None)
    plain.bias = bias
    return plain.train(module.training)


def keep_bits(model: nn.Module) -> None:
    """Keep the quantised layers of a model from being changed by their own forward.

    On a CPU with AVX512-BF16, bitsandbytes repacks a 4-bit weight in place in eval mode, for faster inference, and
    rounds its scales to bfloat16: the policy would be another one after the first evaluation. The scales of 8 bits it
    moves from the weight to the layer in the first forward; they are moved here, so that copies of the layer that share
    the weight have them, too. And it casts the bias of 8 bits to the dtype of the input, which autocast sets, for good;
    the input is cast instead.

    Raises:
        ValueError: if 4 bits have been laid out anew already.
    """
    bnb: Any = sys.modules.get("bitsandbytes")
    if bnb is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            if vars(module.weight.quant_state).get("packing_format_for_cpu", False):
                raise ValueError(
                    f"bitsandbytes laid {name} out anew in a forward in eval mode and rounded its scales to bfloat16, "
                    "so that it is no longer the weight that was loaded. Load the model with load_policy, or pass it "
                    "on before it is run."
                )
            module.support_avx512bf16_for_cpu = False
        elif is_quantized(module):
            if module.weight.SCB is not None:
                module.init_8bit_state()
            if _before_8_bits not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_before_8_bits)


def bits_outside_parameters(model: nn.Module) -> Iterator[Tensor]:
    """What 8-bit layers hold beside their parameters: the same bits again, without further memory, and the scales."""
    bnb: Any = sys.modules.get("bitsandbytes")
    for module in model.modules():
        if bnb is not None and isinstance(module, bnb.nn.Linear8bitLt):
            yield from (tensor for tensor in (module.state.CB, module.state.SCB) if tensor is not None)


def leave_out_of_state(owner: nn.Module) -> None:
    """Leave the weights of the quantised layers below a module out of its state dicts, from now on.

    They are frozen, and come back by loading the model; bitsandbytes itself cannot load what it saves of them into
    layers that are quantised already. Biases, which may be trained, stay in the state.
    """
    owner.register_state_dict_post_hook(_drop_quantized)
    owner.register_load_state_dict_post_hook(_miss_no_quantized)


def _before_8_bits(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if layer.weight.CB is not None and layer.weight.SCB is None:
        layer.weight.CB = None  # peft's DoRA made it a new parameter without its scales, which the layer has
    if layer.bias is None or not args:
        return args
    x, *others = args
    return x.to(layer.bias.dtype), *others


def _drop_quantized(owner: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    layers = tuple(f"{prefix}{name}." for name, module in owner.named_modules() if is_quantized(module))
    for key in [key for key in state_dict if key.startswith(layers) and not key.endswith(".bias")]:
        del state_dict[key]


def _miss_no_quantized(owner: nn.Module, incompatible_keys: Any) -> None:
    # missing keys begin with the owner's own name, which is not told here
    left_out = tuple(f".{name}.weight" for name, module in owner.named_modules() if is_quantized(module))
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not f".{key}".endswith(left_out)]


def _was_conv1d(layer: Any) -> bool:
    """Whether transformers transposed the weight before it was quantised, as it does for GPT-2 and its kin."""
    return issubclass(vars(layer).get("source_cls", nn.Linear), Conv1D)
