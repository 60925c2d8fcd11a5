"""Whether a vLLM server can take the weights of a module: found at start, by asking it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from torchrl_asyncgrpo.engines.vllm_http import ServerDescription

# Fields of a configuration that decide names and shapes of the weights
_SHAPE_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "moe_intermediate_size",
    "tie_word_embeddings", "n_embd", "n_layer", "n_head",
)  # fmt: skip


def check_server(
    server: ServerDescription, module: nn.Module, *, url: str, backend: str, serving_dtype: torch.dtype
) -> None:
    """Raise ``ValueError`` that names every flag the server lacks, and every field in which it serves another model.

    Args:
        server: what the server says of itself.
        module: whose weights will be pushed.
        url: of the server.
        backend: of the sender.
        serving_dtype: of the sender.
    """
    dtype = str(serving_dtype).removeprefix("torch.")
    problems = []
    if not server.has_weight_routes:
        problems.append("its weight routes are closed: start it with VLLM_SERVER_DEV_MODE=1 in its environment")
    else:  # it tells its configuration
        remedy = f'--weight-transfer-config \'{{"backend": "{backend}"}}\''
        if server.transfer_backend is None:
            problems.append(f"it has no weight-transfer backend: add {remedy}")
        elif server.transfer_backend != backend:
            problems.append(
                f"its weight-transfer backend is {server.transfer_backend!r} and the sender's {backend!r}: start it "
                f"with {remedy}, or pass backend={server.transfer_backend!r}"
            )
        if server.dtype is not None and server.dtype != dtype:
            problems.append(
                f"it serves {server.dtype} and the sender sends {dtype}: start it with --dtype {dtype}, or pass "
                f"serving_dtype=torch.{server.dtype}"
            )
    problems += _other_model(server, module)
    if problems:
        raise ValueError(f"the vLLM server at {url} cannot take these weights: " + "; ".join(problems) + ".")


def _other_model(server: ServerDescription, module: nn.Module) -> list[str]:
    """Fields in which the served model differs; none where its configuration cannot be read here.

    A server on another machine, with a directory of its own, is found out by its loader at the first push.
    """
    if not isinstance(module, PreTrainedModel) or not Path(server.root).is_dir():
        return []
    own, served = module.config.get_text_config(), AutoConfig.from_pretrained(server.root).get_text_config()
    differing = [
        f"{field} {getattr(served, field, None)} (here {getattr(own, field, None)})"
        for field in _SHAPE_FIELDS
        if getattr(served, field, None) != getattr(own, field, None)
    ]
    if not differing:
        return []
    return [
        f"it serves another model, {server.root}, with {', '.join(differing)}: start it with --model DIRECTORY of the "
        "model that is trained"
    ]
