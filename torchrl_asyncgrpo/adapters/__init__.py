"""Models whose weights are not simply their parameters: adapters of peft, and layers that bitsandbytes quantised.

``unwrapped(model)`` is the transformers model inside, ``ServedWeights(model)`` the weights that an engine is to serve.
"""

from torchrl_asyncgrpo.adapters.lora_tensors import LoRATensors
from torchrl_asyncgrpo.adapters.quantized import (
    bits_outside_parameters,
    has_quantized_layers,
    keep_bits,
    leave_out_of_state,
)
from torchrl_asyncgrpo.adapters.served_weights import ServedWeights, is_plain, plain_copy
from torchrl_asyncgrpo.adapters.tuners import (
    adapters_off,
    add_adapter,
    changes_its_base,
    check_adapters,
    check_trained,
    has_adapters,
    lora_config,
    trained_outside_adapters,
    unwrapped,
)

__all__ = [
    "LoRATensors",
    "ServedWeights",
    "adapters_off",
    "add_adapter",
    "bits_outside_parameters",
    "changes_its_base",
    "check_adapters",
    "check_trained",
    "has_adapters",
    "has_quantized_layers",
    "is_plain",
    "keep_bits",
    "leave_out_of_state",
    "lora_config",
    "plain_copy",
    "trained_outside_adapters",
    "unwrapped",
]
