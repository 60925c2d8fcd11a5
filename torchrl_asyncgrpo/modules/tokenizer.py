"""The tokenizer that belongs to a policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchrl_asyncgrpo.adapters import unwrapped
from torchrl_asyncgrpo.data.pretrained import resolve_model

# Arguments of a model's from_pretrained that say where its files are, and hold for its tokenizer as well
HUB_ARGUMENTS = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip


def load_tokenizer(
    model: str | os.PathLike[str] | nn.Module, model_init_kwargs: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a policy from where its model comes from, with a token to pad with.

    Args:
        model: what ``load_policy`` gets: the name of a model on the hub, a directory, or a model, whose configuration
            says where it was loaded from, but not at which revision.
        model_init_kwargs: arguments of the model's ``from_pretrained``, of which revision and the like are used; pass
            them with an instance, too.

    Returns:
        The tokenizer; one without a padding token pads with its end token.

    Raises:
        ValueError: if the model was not loaded from anywhere, or the tokenizer has no end token to pad with.
        OSError: if there is no tokenizer.
    """
    source = unwrapped(model).config.name_or_path if isinstance(model, nn.Module) else os.fspath(model)
    if not source:
        raise ValueError(
            f"the {type(model).__name__} was built from a configuration, which names no tokenizer "
            "(config.name_or_path is empty); load it with AutoTokenizer.from_pretrained."
        )
    where = {name: value for name, value in (model_init_kwargs or {}).items() if name in HUB_ARGUMENTS}
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(source), **where)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {source!r} has neither pad_token nor eos_token; give it one of them.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
