"""Command line and environment of a vLLM server that training needs."""

from __future__ import annotations

import json
import os

# Ranks that vLLM reserves room for
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def check_adapters(backend: str | None, max_loras: int | None, max_lora_rank: int, *, dtype: str, on_cpu: bool) -> None:
    """Raise ``ValueError`` unless a server can be started so.

    Args:
        backend: how weights reach the server; None for not at all.
        max_loras: adapters that may be in use at once; None for a server without.
        max_lora_rank: highest rank of an adapter; of no matter without adapters.
        dtype: precision of the served weights, as vLLM names it.
        on_cpu: the server runs on a CPU.
    """
    if max_loras is None:
        return
    if not 1 <= max_lora_rank <= _RANKS[-1]:
        raise ValueError(f"max_lora_rank={max_lora_rank}; it must be from 1 to {_RANKS[-1]}.")
    if max_loras < 1:
        raise ValueError(f"max_loras={max_loras}; it must be at least 1, or None for a server without adapters.")
    if backend is not None:
        raise ValueError(
            f"max_loras={max_loras} with backend={backend!r}: vLLM wraps the layers that adapters may stand on, and "
            "loads no whole weights into them. Pass backend=None, and push adapters with VLLMAdapterSyncSender."
        )
    if not on_cpu and dtype in ("float32", "float"):
        raise ValueError(
            f"max_loras={max_loras} with dtype={dtype!r}: on a GPU, vLLM dies of the first adapter in float32. Pass "
            "dtype='bfloat16' or 'float16'."
        )


def flags_for_training(backend: str | None, max_model_len: int | None, cpu_cache_gib: float | None) -> list[str]:
    """Flags without which the server's answers cannot be trained on.

    Args:
        backend: how weights reach the server; None for not at all.
        max_model_len: most tokens of prompt and completion together; None for the model's own limit.
        cpu_cache_gib: memory for keys and values of a server on a CPU; None on a GPU.
    """
    # Log-probs at the sampling temperature of what was sampled, and none of the model's own sampling defaults.
    flags = ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enable-scale-out"]
    flags += ["--disable-uvicorn-access-log"]
    if max_model_len is not None:
        flags += ["--max-model-len", str(max_model_len)]
    if backend is not None:
        flags += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if cpu_cache_gib is not None:
        flags += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(cpu_cache_gib * 2**30))]
        flags += ["--no-enable-chunked-prefill"]  # vLLM 0.32 dies of a seeded request that it prefills in parts
    return flags


def adapter_flags(max_loras: int, max_lora_rank: int) -> list[str]:
    """Flags of a server that serves adapters; the rank is the next that vLLM reserves room for."""
    rank = next(rank for rank in _RANKS if rank >= max_lora_rank)
    return ["--enable-lora", "--max-loras", str(max_loras), "--max-lora-rank", str(rank)]


def server_environment(backend: str | None, *, on_cpu: bool, is_directory: bool, adapters: bool) -> dict[str, str]:
    """Environment variables of the server, those of this process included.

    Args:
        backend: how weights reach the server; None for not at all.
        on_cpu: the server runs on a CPU.
        is_directory: the model is a directory of this machine.
        adapters: the server takes adapters while it runs.
    """
    environment = {"VLLM_NO_USAGE_STATS": "1"} | os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    if is_directory:
        environment["HF_HUB_OFFLINE"] = "1"
    if backend == "ipc":  # its handles travel pickled
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if adapters:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if on_cpu:
        # The trainer has the same cores: threads that spin while they wait would take them from it.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over --kv-cache-memory-bytes
    return environment
