"""Whether a vLLM server can take the weights of a module: found at start, by asking it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from torchrl_asyncgrpo.adapters import unwrapped
from torchrl_asyncgrpo.engines.vllm_description import AdapterSupport, ServerDescription
from torchrl_asyncgrpo.weight_sync.checksums import NOTHING, compare_checksums, fused_names, missing_layer

# Fields of a configuration that decide names and shapes of the weights
_SHAPE_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "moe_intermediate_size",
    "tie_word_embeddings", "n_embd", "n_layer", "n_head",
)  # fmt: skip
_CLOSED = "its weight routes are closed: start it with VLLM_SERVER_DEV_MODE=1 in its environment"


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
    problems = []
    if not server.has_weight_routes:
        problems.append(_CLOSED)
    else:  # it tells its configuration
        remedy = f'--weight-transfer-config \'{{"backend": "{backend}"}}\''
        if server.transfer_backend is None:
            problems.append(f"it has no weight-transfer backend: add {remedy}")
        elif server.transfer_backend != backend:
            problems.append(
                f"its weight-transfer backend is {server.transfer_backend!r} and the sender's {backend!r}: start it "
                f"with {remedy}, or pass backend={server.transfer_backend!r}"
            )
        if server.adapters is not None:
            problems.append(
                "it was started with --enable-lora, which wraps the layers that weights are loaded into: leave that "
                "out, or push an adapter with VLLMAdapterSyncSender"
            )
    problems += _other_dtype(server, serving_dtype)
    problems += _other_model(server, module)
    if problems:
        raise ValueError(f"the vLLM server at {url} cannot take these weights: " + "; ".join(problems) + ".")


def check_adapter_server(
    server: ServerDescription,
    module: nn.Module,
    *,
    url: str,
    serving_dtype: torch.dtype,
    slots: int,
    rank: int,
    layers: Collection[str],
    held_version: int,
) -> AdapterSupport:
    """Raise ``ValueError`` that names every flag without which the server cannot serve versions of an adapter.

    Args:
        server: what the server says of itself.
        module: the model that is trained, with the adapter.
        url: of the server.
        serving_dtype: of the base.
        slots: adapters that it must have room for.
        rank: of the adapter.
        layers: names of the layers that it is on.
        held_version: version of the whole weights that the server holds; 0 for those it was started with.

    Returns:
        How it serves adapters.
    """
    problems = []
    support = server.adapters
    flags = f"--enable-lora --max-loras {slots} --max-lora-rank {rank}"
    if not server.has_weight_routes:
        problems.append(_CLOSED)
    elif support is None:
        problems.append(f"it takes no adapters: start it with {flags}")
    else:
        if support.slots < slots:
            problems.append(
                f"it has room for {support.slots} adapters at once and max_staleness={slots - 2} needs {slots}: start "
                f"it with --max-loras {slots}, or lower max_staleness"
            )
        if support.max_rank < rank:
            problems.append(
                f"it has room for rank {support.max_rank} and the adapter has {rank}: start it with --max-lora-rank "
                f"{rank}, or the next that it knows"
            )
        if ignored := _ignored(layers, support):
            problems.append(
                f"it puts adapters on {', '.join(support.target_modules or ())} alone and this one is on "
                f"{', '.join(ignored)} too: start it without --lora-target-modules"
            )
        if server.device == "cuda" and server.dtype == "float32":
            problems.append(
                "it serves float32 on a GPU, where vLLM dies of the first adapter: start it with --dtype bfloat16, and "
                "pass serving_dtype=torch.bfloat16; or float16"
            )
    if not server.has_adapter_routes:
        problems.append(
            "its adapter routes are closed: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
    if (server.api_servers or 1) > 1:
        problems.append(
            f"it has {server.api_servers} API servers, each with a list of adapters of its own, and a push reaches the "
            "one that answers: start it with --api-server-count 1"
        )
    if (server.replicas or 1) > 1:
        problems.append(
            f"it has {server.replicas} data-parallel replicas, into which pushes of adapters are not tested: start it "
            "with --data-parallel-size 1"
        )
    if server.quantization is not None:
        problems.append(f"it keeps the base in few bits ({server.quantization}): start it without --quantization")
    if held_version > 0:
        problems.append(
            f"its base is no longer that of its checkpoint, since whole weights of version {held_version} were pushed: "
            "restart it"
        )
    problems += _other_dtype(server, serving_dtype)
    problems += _other_model(server, unwrapped(module))
    if problems or support is None:
        raise ValueError(
            f"the vLLM server at {url} cannot serve this adapter: " + "; ".join(problems) + ". The other way is to "
            "push base and adapter merged, with VLLMWeightSyncSender, into a server without --enable-lora."
        )
    return support


def check_base(
    weights: Mapping[str, Tensor],
    checksums: Mapping[str, str],
    dtype: torch.dtype,
    *,
    layers: Collection[str],
    url: str,
) -> None:
    """Raise ``ValueError`` if the server serves adapters on other layers or other weights than these.

    On a CPU the weights of linear layers cannot be read and are left out.

    Args:
        weights: those below the adapter, by checkpoint name.
        checksums: of the server.
        dtype: that the server keeps floating point in.
        layers: names of the layers that the adapter is on.
        url: of the server.
    """
    if (missing := missing_layer(layers, checksums)) is not None:
        raise ValueError(
            f"the adapter is on {missing}, and the vLLM server at {url} has no layer of that name, so that it would "
            "leave this part of the adapter out and not say so. Start it with --model DIRECTORY of the base, saved by "
            "the class that is trained; or pass verify='none' if you know that vLLM finds the layer under another name."
        )
    readable = {key.replace(".base_layer.", "."): digest for key, digest in checksums.items() if digest != NOTHING}
    if not readable:
        return
    try:
        differ = "are not those below the adapter."
        compare_checksums(weights, readable, dtype, strict=False, unchecked=weights, verdict=differ)
    except ValueError as error:
        raise ValueError(
            f"the vLLM server at {url} serves another base than that of the adapter: {error} Start it with --model "
            "DIRECTORY of the base, in the same dtype. Where it is, and vLLM lays its weights out anew, pass "
            "verify='none'."
        ) from None


def _ignored(layers: Collection[str], support: AdapterSupport) -> list[str]:
    """Last parts of the names of layers on which the server would not put an adapter."""
    allowed = support.target_modules
    if allowed is None:
        return []
    targets = {layer: layer.rpartition(".")[2] for layer in layers}
    return sorted(
        {target for layer, target in targets.items() if not {layer, target, *fused_names(target)} & set(allowed)}
    )


def _other_dtype(server: ServerDescription, serving_dtype: torch.dtype) -> list[str]:
    dtype = str(serving_dtype).removeprefix("torch.")
    if server.dtype is None or server.dtype == dtype:
        return []
    return [
        f"it serves {server.dtype} and the sender sends {dtype}: start it with --dtype {dtype}, or pass "
        f"serving_dtype=torch.{server.dtype}"
    ]


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
