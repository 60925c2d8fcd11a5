"""The tokens that end a completion."""

from __future__ import annotations

from transformers import PreTrainedModel


def end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Every token that ends a completion: all that the model's generation config declares; none where it has none."""
    end = None if model.generation_config is None else model.generation_config.eos_token_id
    return frozenset([end] if isinstance(end, int) else end or ())
