"""Whether a vLLM server holds exactly the weights that were sent, from the checksums it reports."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor
from torchrl._utils import logger as torchrl_logger

# Parameters that vLLM concatenates from several of the checkpoint's
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# The experts of a layer, which vLLM stacks
_EXPERTS = re.compile(r"(.+\.experts)\.(?:\w+\.)*(w13|w2)_weight")
_EXPERT_PROJECTIONS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
# vLLM pads the rows of an embedding to a multiple of this, with zeros
VOCABULARY_PADDING = 64
_KEY = re.compile(r"dp(\d+):pp(\d+):pcp(\d+):tp(\d+):(.+)")
# Of a layer on a CPU, whose weights vLLM has packed in a form of its own
NOTHING = hashlib.sha256(b"").hexdigest()


def compare_checksums(
    weights: Mapping[str, Tensor],
    checksums: Mapping[str, str],
    dtype: torch.dtype,
    *,
    strict: bool = True,
    unchecked: Collection[str] = (),
    verdict: str = "are not what was sent. Push again; if it persists, restart the server.",
) -> None:
    """Compare what a server holds with what it should hold.

    Every digest of the server must be that of the tensor, of the tensors it is fused from, or of the part that a
    tensor-parallel rank keeps of them; and every tensor must be found.

    Args:
        weights: tensors by checkpoint name, tied ones once.
        checksums: SHA-256 of each parameter of each worker, of vLLM's ``/weight_checker``.
        dtype: that the server keeps floating point in.
        strict: raise, rather than warn, where some cannot be compared because the server renamed or quantised them.
        unchecked: names of tensors that need not be found.
        verdict: what the message says of parameters that differ.

    Raises:
        ValueError: naming the first tensors that differ, or that cannot be compared.
    """
    shards = 1 + max(int(_parts(key)[0]) for key in checksums)
    with ThreadPoolExecutor() as pool:  # hashing does not hold the interpreter's lock
        results = list(pool.map(lambda key: _check(key, checksums[key], weights, dtype, shards), checksums))
    differing = [key for key, (state, _) in zip(checksums, results, strict=True) if state == "differs"]
    unknown = [key for key, (state, _) in zip(checksums, results, strict=True) if state == "unknown"]
    found = {part for _, parts in results for part in parts}
    missing = sorted(set(weights) - found - set(unchecked))
    if differing:
        raise ValueError(
            f"the server's {differing[0]} and {len(differing) - 1} more of {len(checksums)} parameters {verdict}"
        )
    if unknown or missing:
        message = (
            f"checksums cannot be compared: {len(unknown)} of the server's parameters have no counterpart or no "
            f"readable value ({', '.join(unknown[:2])}), and {len(missing)} of the tensors sent were not found "
            f"({', '.join(missing[:2])}). Use verify='none' for a server that quantises or renames its weights."
        )
        if strict:
            raise ValueError(message)
        torchrl_logger.warning(message)


def missing_layer(layers: Iterable[str], checksums: Iterable[str]) -> str | None:
    """The first layer that a server does not have under its name, alone or fused with others; None if it has all.

    Args:
        layers: names in the checkpoint, such as ``"model.layers.0.self_attn.q_proj"``.
        checksums: keys of the server's checksums.
    """
    served = {_parts(key)[1].replace(".base_layer.", ".").rpartition(".")[0] for key in checksums}
    return next((layer for layer in layers if not served & {layer, *fused_names(layer)}), None)


def fused_names(name: str) -> list[str]:
    """Names, of layers or of their last parts, under which vLLM may have fused a layer with others."""
    prefix, dot, last = name.rpartition(".")
    return [f"{prefix}{dot}{fused}" for fused, parts in FUSED.items() if last in parts]


def _check(
    key: str, digest: str, weights: Mapping[str, Tensor], dtype: torch.dtype, shards: int
) -> tuple[Literal["same", "differs", "unknown"], set[str]]:
    """Whether one of the server's parameters is what it should be, and the tensors that it consists of."""
    rank, name = _parts(key)
    sources = [source for source in _sources(name, weights) if all(part in weights for part in source)]
    if not sources or digest == NOTHING:
        return "unknown", set()
    parts = {part for source in sources for part in source}
    for source in sources:
        tensors = [weights[part].detach() for part in source]
        per_expert = _EXPERTS.fullmatch(name)
        layouts = (
            _layouts(tensors, int(rank), shards)
            if per_expert is None
            else _expert_layouts(tensors, per_expert[2], int(rank), shards)
        )
        if any(_digest(layout, dtype) == digest for layout in layouts):
            return "same", parts
    return "differs", parts


def _parts(key: str) -> tuple[str, str]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"the server's checksum {key!r} does not name its worker; is this vLLM 0.32 or newer?")
    return match[4], match[5]


def _sources(name: str, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, ...]]:
    """The tensors, by checkpoint name, that a parameter of the server may consist of."""
    yield (name,)
    if experts := _EXPERTS.fullmatch(name):
        prefix, projections = experts[1], _EXPERT_PROJECTIONS[experts[2]]
        count = next(i for i in itertools.count() if f"{prefix}.{i}.{projections[0]}.weight" not in weights)
        if count:
            yield tuple(f"{prefix}.{i}.{projection}.weight" for i in range(count) for projection in projections)
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            yield tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)


def _layouts(parts: list[Tensor], rank: int, shards: int) -> Iterator[Tensor]:
    """The forms in which rank ``rank`` of ``shards`` may hold the concatenation of ``parts``, likeliest first."""
    if shards == 1:
        yield torch.cat(parts) if len(parts) > 1 else parts[0]
    for dim in (0, 1):
        if shards > 1 and all(part.ndim > dim and part.shape[dim] % shards == 0 for part in parts):
            yield torch.cat([part.chunk(shards, dim)[rank] for part in parts])
    if shards > 1:
        if len(parts) == 3:  # fewer heads of keys and values than ranks: each is held by several
            query, key, value = parts
            for heads in (d for d in range(1, shards) if shards % d == 0):
                own = rank * heads // shards
                yield torch.cat([query.chunk(shards)[rank], key.chunk(heads)[own], value.chunk(heads)[own]])
        yield torch.cat(parts)
    if len(parts) == 1:
        (whole,) = parts
        if whole.ndim == 2:
            yield whole.T
            padding = -len(whole) % VOCABULARY_PADDING
            yield torch.cat([whole, whole.new_zeros(padding, whole.shape[1])]).chunk(shards)[rank]


def _expert_layouts(parts: list[Tensor], kind: str, rank: int, shards: int) -> Iterator[Tensor]:
    """The stack of all experts, each cut between the ranks, or of the experts that are a rank's own."""
    width = len(_EXPERT_PROJECTIONS[kind])
    experts = [parts[i : i + width] for i in range(0, len(parts), width)]
    dim = 0 if kind == "w13" else 1
    yield torch.stack([torch.cat([part.chunk(shards, dim)[rank] for part in expert]) for expert in experts])
    if shards > 1 and len(experts) % shards == 0:
        own = len(experts) // shards
        yield torch.stack([torch.cat(expert) for expert in experts[rank * own : (rank + 1) * own]])


def _digest(tensor: Tensor, dtype: torch.dtype) -> str:
    tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
