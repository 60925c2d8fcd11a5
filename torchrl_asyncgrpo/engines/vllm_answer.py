"""Between requests of this package and those of vLLM's ``/inference/v1/generate``: pure functions, both ways."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.engines.vllm_http import ServerFailed, parse_version

# What vLLM reports for a log-prob that it has not: it stands for -inf, NaN and a missing one alike
_NO_LOG_PROB = -9999.0
# "repetition" is an end that only a request of another kind can ask for.
_FINISH: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


def stream_seed(*entropy: int) -> int:
    """Seed of a random stream of its own, below 2**62: the children of a request have the seeds that follow it."""
    words = [value % 2**64 for value in entropy]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 2)


def request_body(prompt_ids: Sequence[int], params: SamplingParams, *, n: int, max_tokens: int, seed: int) -> dict:
    """Body of a request for ``n`` completions, the i-th of which vLLM seeds with ``seed + i``.

    The model's own end tokens, all of its generation config, end a completion without being named here.
    """
    sampling: dict[str, Any] = dict(
        n=n,
        max_tokens=max_tokens,
        temperature=params.temperature,
        seed=seed,
        ignore_eos=params.ignore_eos,
        stop_token_ids=[] if params.ignore_eos else list(params.stop_token_ids),
        logprobs=0,  # of the sampled token and no other
        detokenize=False,
    )
    if not params.keeps_whole_vocabulary:
        sampling |= dict(top_p=params.top_p, top_k=params.top_k, min_p=params.min_p)
    return {"token_ids": list(prompt_ids), "sampling_params": sampling}


def naming(body: Mapping[str, Any], adapter: PolicyAdapter | None) -> Mapping[str, Any]:
    """A request's body that names an adapter; None for the model without one."""
    return body if adapter is None else {**body, "model": adapter.name}


def read_answer(
    answer: Mapping[str, Any], n: int, *, with_mask: bool, adapter: PolicyAdapter | None = None
) -> list[Completion]:
    """The ``n`` completions of an answer, or what there is of them where it was aborted.

    Args:
        answer: the JSON object.
        n: completions asked for.
        with_mask: the distribution was truncated, so that each token needs the ids that were kept.
        adapter: that the request named: its version is that of all tokens, whatever vLLM says of the weights below it.

    Raises:
        ServerFailed: if this is no answer to the request, or one of another model than it named.
        RuntimeError: if a token has no weight version or no sampling mask.
    """
    try:
        if adapter is not None and answer["model"] != adapter.name:
            raise ServerFailed(
                f"the server answered with {answer['model']!r}, and {adapter.name!r} was asked for. Start it without "
                "VLLM_SKIP_MODEL_NAME_VALIDATION in its environment."
            )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise ServerFailed(f"the server answered {len(choices)} of {n} completions.")
        return [_completion(choice, with_mask, adapter) for choice in choices]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerFailed(
            f"the server's answer is not what vLLM says it is: {error!r} in {str(answer)[:300]}"
        ) from None


def joined(start: Completion, rest: Completion) -> Completion:
    """One completion of an aborted one and its continuation; every token keeps its version and log-prob."""
    masks = (start.sampling_mask, rest.sampling_mask)
    return Completion(
        token_ids=[*start.token_ids, *rest.token_ids],
        log_probs=[*start.log_probs, *rest.log_probs],
        policy_versions=[*start.policy_versions, *rest.policy_versions],
        finish_reason=rest.finish_reason,
        sampling_mask=None if masks == (None, None) else [kept for mask in masks for kept in mask or ()],
    )


def _completion(choice: Mapping[str, Any], with_mask: bool, adapter: PolicyAdapter | None) -> Completion:
    token_ids: list[int] = choice["token_ids"] or []
    reason = choice["finish_reason"]
    if reason not in _FINISH:
        raise ServerFailed(f"a completion ended with finish_reason={reason!r}, which is none of {', '.join(_FINISH)}.")
    mask = choice.get("sampling_mask") or []
    if with_mask and len(mask) != len(token_ids):
        raise RuntimeError(
            f"the server kept a part of the vocabulary and reported it for {len(mask)} of {len(token_ids)} tokens: "
            "their importance ratios cannot be known. Start it with --return-sampling-mask, or set top_p=1, top_k=0 "
            "and min_p=0."
        )
    return Completion(
        token_ids=token_ids,
        log_probs=_log_probs(choice.get("logprobs"), token_ids),
        policy_versions=(
            _versions(choice.get("weight_versions"), len(token_ids))
            if adapter is None
            else [adapter.version] * len(token_ids)
        ),
        finish_reason=_FINISH[reason],
        sampling_mask=mask if with_mask else None,
    )


def _log_probs(reported: Mapping[str, Any] | None, token_ids: Sequence[int]) -> list[float]:
    content = (reported or {}).get("content") or []
    if len(content) != len(token_ids):  # nothing says which of the tokens the entries belong to
        return [math.nan] * len(token_ids)
    return [_log_prob(entry, token) for entry, token in zip(content, token_ids, strict=True)]


def _log_prob(entry: Mapping[str, Any], token: int) -> float:
    """Log-prob of ``token`` itself, wherever among the reported ones it stands; NaN if it is not there."""
    for candidate in (entry, *(entry.get("top_logprobs") or ())):
        if candidate["token_id"] == token:
            value = candidate["logprob"]
            return math.nan if value is None or not value > _NO_LOG_PROB else float(value)
    return math.nan


def _versions(spans: Sequence[Mapping[str, Any]] | None, tokens: int) -> list[int]:
    versions: list[int] = []
    for span in spans or ():
        if span["start"] != len(versions) or span["end"] < span["start"]:
            break
        versions += [parse_version(span["version"])] * (span["end"] - span["start"])
    if len(versions) != tokens:
        raise RuntimeError(
            f"the server's weight_versions {spans} do not cover the {tokens} tokens of its answer one by one, so that "
            "nobody knows which weights sampled them. vLLM reports them since release 0.28."
        )
    return versions
