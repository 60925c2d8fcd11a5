"""How long a sequence may be before the rotary embedding of a model depends on what else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig


def rope_limits(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """The RoPE types of a model that change their frequencies with the length of a batch.

    transformers takes the frequencies of these types from the largest position of a batch. Within the original length
    they are always the same; with one longer sequence they are others, for the whole batch.

    Args:
        config: of a model; of one of several modalities, that of its text counts.

    Yields:
        RoPE type, and the most tokens with which nothing changes; one for each kind of layer that has such a type.
    """
    config = config.get_text_config()
    # rope_scaling is what the configurations of models with their own code call it
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *rope.values()):  # of all layers, or by the type of layer
        if not isinstance(parameters, dict):
            continue
        rope_type = parameters.get("rope_type") or parameters.get("type") or ""
        if "dynamic" in rope_type:
            yield rope_type, config.max_position_embeddings
        elif rope_type in ("longrope", "su") and _changes(parameters):
            by_default = getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
            yield rope_type, parameters.get("original_max_position_embeddings", by_default)


def check_rope_length(config: PreTrainedConfig, length: int | Tensor) -> None:
    """Refuse sequences so long that the log-probs of others in their batch would change with them.

    Args:
        config: of the model.
        length: tokens of the longest sequence; a tensor is read only where the model has such a RoPE type.

    Raises:
        ValueError: naming RoPE type, length, limit and remedy.
    """
    for rope_type, limit in rope_limits(config):
        if length > limit:
            raise ValueError(
                f"a sequence of {int(length)} tokens is longer than the {limit} up to which RoPE of type {rope_type!r} "
                f"of model type {config.model_type!r} has one set of frequencies: with a longer one in the batch "
                "transformers takes others for all of them, so that log-probs would depend on what is scored together. "
                f"Keep prompt and completion within {limit} tokens (max_length=, or --max-model-len of vLLM)"
                + ("." if "dynamic" in rope_type else ", or load the model with long_factor as its short_factor, too.")
            )


def _changes(parameters: dict[str, Any]) -> bool:
    """Whether LongRoPE has other factors for long sequences than for short ones."""
    return any(parameters.get(f"short_{name}") != parameters.get(f"long_{name}") for name in ("factor", "mscale"))
