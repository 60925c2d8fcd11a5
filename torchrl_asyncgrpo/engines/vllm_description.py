"""What a vLLM server says of itself, and the names under which it serves adapters of policy versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_ADAPTER = re.compile(r"policy-v(0|[1-9]\d*)-(0|[1-9]\d*)")


class PolicyAdapter(NamedTuple):
    """One publication of the adapter of a policy version; the newer one is the greater.

    vLLM knows an adapter by its name alone, and dies of two of one name in the requests that run.

    Args:
        version: policy version.
        publication: when it was published, in nanoseconds since 1970, so that no other one has its name.
    """

    version: int
    publication: int

    @property
    def name(self) -> str:
        """Under which a server serves it."""
        return f"policy-v{self.version}-{self.publication}"


@dataclass(frozen=True)
class AdapterSupport:
    """How a server that was started with ``--enable-lora`` serves adapters.

    Args:
        slots: ``--max-loras``: adapters that the requests of one decoding step may have, all together.
        max_rank: ``--max-lora-rank``.
        dtype: ``"float32"``, ``"bfloat16"``, ...: in which the server holds them.
        target_modules: ``--lora-target-modules``, the only modules on which an adapter is in force; None for all.
    """

    slots: int
    max_rank: int
    dtype: str
    target_modules: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ServerDescription:
    """What a server says of itself; None where it does not tell, because it runs without VLLM_SERVER_DEV_MODE=1.

    Args:
        model: name under which the model is served.
        root: directory or hub name that the weights were read from.
        max_model_len: most tokens of prompt and completion together.
        has_weight_routes: the routes that pause and push weights are open.
        has_generate_route: token-in, token-out generation is open.
        has_adapter_routes: the routes that load and unload adapters are open.
        vllm_version: release of vLLM.
        dtype: ``"float32"``, ``"bfloat16"``, ...: of the served weights.
        logprobs_mode: what reported log-probs are of; ``"processed_logprobs"`` is the sampling distribution.
        returns_sampling_mask: answers carry the ids that top-p, top-k and min-p kept.
        max_num_seqs: most sequences decoded at once.
        transfer_backend: weight-transfer backend; None also where the server was started without one.
        world_size: processes that hold weights, data parallel ones included.
        device: ``"cpu"``, ``"cuda"``, ...
        chunks_prefill: long prompts are read in several steps.
        adapters: None also where the server was started without ``--enable-lora``.
        quantization: how the weights are kept in few bits; None also where they are not.
        replicas: data-parallel copies of the model.
        api_servers: processes that take requests, each with a list of adapters of its own.
    """

    model: str
    root: str
    max_model_len: int
    has_weight_routes: bool
    has_generate_route: bool
    has_adapter_routes: bool = False
    vllm_version: str | None = None
    dtype: str | None = None
    logprobs_mode: str | None = None
    returns_sampling_mask: bool = False
    max_num_seqs: int | None = None
    transfer_backend: str | None = None
    world_size: int | None = None
    device: str | None = None
    chunks_prefill: bool | None = None
    adapters: AdapterSupport | None = None
    quantization: str | None = None
    replicas: int | None = None
    api_servers: int | None = None


def configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`ServerDescription` that vLLM's resolved configuration tells.

    Args:
        config: the configuration, as ``/server_info`` words it; empty where it is not told.
    """
    model: Mapping[str, Any] = config.get("model_config", {})
    scheduler: Mapping[str, Any] = config.get("scheduler_config", {})
    parallel: Mapping[str, Any] = config.get("parallel_config", {})
    lora: Mapping[str, Any] | None = config.get("lora_config")
    return dict(
        dtype=_plain(model["dtype"]) if "dtype" in model else None,
        logprobs_mode=model.get("logprobs_mode"),
        returns_sampling_mask=bool(model.get("return_sampling_mask")),
        quantization=model.get("quantization"),
        max_num_seqs=scheduler.get("max_num_seqs"),
        chunks_prefill=scheduler.get("enable_chunked_prefill"),
        transfer_backend=(config.get("weight_transfer_config") or {}).get("backend"),
        device=config.get("device_config", {}).get("device"),
        replicas=parallel.get("data_parallel_size"),
        api_servers=parallel.get("_api_process_count"),
        adapters=None if lora is None else _adapter_support(lora),
    )


def listed_adapters(models: Iterable[Mapping[str, Any]]) -> list[PolicyAdapter]:
    """The adapters of ours among the models that a server lists, oldest first."""
    names = [_ADAPTER.fullmatch(str(model["id"])) for model in models if model.get("parent")]
    return sorted(PolicyAdapter(int(match[1]), int(match[2])) for match in names if match is not None)


def _adapter_support(lora: Mapping[str, Any]) -> AdapterSupport:
    modules = lora.get("target_modules")
    return AdapterSupport(
        slots=lora["max_loras"],
        max_rank=lora["max_lora_rank"],
        dtype=_plain(lora["lora_dtype"]),
        target_modules=None if modules is None else tuple(modules),
    )


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
