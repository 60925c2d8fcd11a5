"""What a model asks of its attention, and which backend can honour it.

A feature that a backend cannot honour is refused by name: never approximated, never switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

BACKENDS = ("reference", "segments", "flex")

# What a backend can be asked for and by whom it is honoured; features of models not listed here by nobody.
HONOURED_BY = {
    "logit softcapping": ("reference", "flex"),
    "attention dropout in training": ("reference",),
}

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}


def refuse(feature: str, model_type: str, backend: str) -> NoReturn:
    """Raise the error for a feature that ``backend`` cannot honour.

    Raises:
        ValueError: always, naming the feature, the model type and the backends that can.
    """
    able = HONOURED_BY.get(feature.split(":")[0], ())
    remedy = f"use backend {' or '.join(map(repr, able))}" if able else "no tree attention backend can"
    raise ValueError(
        f"Tree attention backend {backend!r} cannot honour {feature} of model type {model_type!r}: {remedy}."
    )


def check_features(model: PreTrainedModel, backend: str) -> None:
    """Check everything a model asks of its attention against a backend.

    Args:
        model: a transformers ``PreTrainedModel``, bare or wrapped by peft.
        backend: one of ``BACKENDS``.

    Raises:
        ValueError: naming the first feature that the backend cannot honour.
    """
    for feature in demanded_features(model):
        if backend not in HONOURED_BY.get(feature.split(":")[0], ()):
            refuse(feature, model.config.model_type, backend)


def demanded_features(model: PreTrainedModel) -> Iterator[str]:
    """The features of a model that some backend cannot honour, those that none can first.

    Sinks and sliding windows are not listed: every backend honours them.
    """
    config = model.config.get_text_config()
    yield from beyond_attention(model)
    if not model._supports_attention_backend:
        yield "attention that bypasses transformers' AttentionInterface"
    if model.config.is_encoder_decoder or getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder attention"
    if _is_bidirectional(model, config):
        yield "bidirectional attention"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        yield "ALiBi position biases"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield "logit softcapping"
    if model.training and attention_dropout(config) > 0:
        yield f"attention dropout in training: {attention_dropout(config)} (or set it to 0, or call model.eval())"


def attention_dropout(config: PreTrainedConfig) -> float:
    """Probability of the dropout of attention weights; GPT-2 and its kin call it ``attn_pdrop``."""
    return getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None) or 0.0


def beyond_attention(model: PreTrainedModel) -> Iterator[str]:
    """Layers that carry state along the storage order, or attend by another rule than a path."""
    config = model.config.get_text_config()
    layer_types: set[str] = set()
    for key in ("layer_types", "layers_block_type", "block_types"):
        layer_types |= set(getattr(config, key, None) or ())
    other = layer_types - _ATTENTION_LAYERS
    if model._is_stateful:
        yield f"recurrent layers: {', '.join(sorted(other)) or config.model_type}"
    if "chunked_attention" in other or getattr(config, "attention_chunk_size", None):
        yield "chunked attention"
    if other:
        yield f"layers of type {', '.join(sorted(other))}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            yield f"convolution over the sequence ({name})"
            return


def _is_bidirectional(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return True
    return any(
        getattr(module, "is_causal", True) is False and getattr(module, "config", None) is config
        for module in model.modules()
    )
