"""Requests to vLLM and its answers: every token with its own log-prob and its own version, or none."""

import math

import pytest
import torch

from torchrl_asyncgrpo.collectors.group import make_group
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.prompts import PromptDraw
from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
from torchrl_asyncgrpo.engines.vllm_answer import joined, read_answer, request_body, stream_seed
from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.engines.vllm_http import ServerFailed


def choice(token_ids, content="whole", spans=None, reason="stop", **fields):
    if content == "whole":
        content = [{"token_id": token, "logprob": -0.5 * (j + 1)} for j, token in enumerate(token_ids)]
    if spans is None:
        spans = [("3", 0, len(token_ids))] if token_ids else []
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return dict(
        index=0,
        token_ids=token_ids,
        finish_reason=reason,
        logprobs=None if content is None else {"content": content},
        weight_versions=versions,
        **fields,
    )


def read_one(*arguments, with_mask=False, **fields):
    (completion,) = read_answer({"choices": [choice(*arguments, **fields)]}, 1, with_mask=with_mask)
    return completion


def test_log_prob_is_that_of_the_sampled_token():
    """T3: the engine answers {512: −.10, 880: −2.30} and sampled 880."""
    reported = {"token_id": 512, "logprob": -0.10, "top_logprobs": [{"token_id": 512, "logprob": -0.10}]}
    reported["top_logprobs"].append({"token_id": 880, "logprob": -2.30})
    assert read_one([880], [reported]).log_probs == [-2.30]
    reported = {"token_id": 880, "logprob": -2.30, "top_logprobs": [{"token_id": 512, "logprob": -0.10}]}
    assert read_one([880], [reported]).log_probs == [-2.30]


@pytest.mark.parametrize(
    "entry",
    [
        {"token_id": 7, "logprob": None},
        {"token_id": 7, "logprob": math.nan},
        {"token_id": 7, "logprob": -9999.0},
        {"token_id": 7, "logprob": -math.inf},
        {"token_id": 8, "logprob": -0.5, "top_logprobs": None},
        {"token_id": 8, "logprob": -0.5, "top_logprobs": [{"token_id": 9, "logprob": -0.6}]},
    ],
)
def test_token_without_a_log_prob_is_not_trained(entry):
    """T4: never 0.0."""
    completion = read_one([5, 7], [{"token_id": 5, "logprob": -1.5}, entry])
    assert completion.log_probs[0] == -1.5 and math.isnan(completion.log_probs[1])
    (rollout,) = make_group(
        PromptDraw(0, "x", {}), [1], [completion], [1.0], torch.ones(1), group_size=1, mask_truncated=False
    )
    assert rollout[schema.LOSS_MASK].tolist() == [False, True, False]


@pytest.mark.parametrize("content", [None, [], [{"token_id": 5, "logprob": -1.5}]])
def test_log_probs_that_cannot_be_told_apart_are_none(content):
    assert all(math.isnan(value) for value in read_one([5, 7], content).log_probs)


def test_every_token_has_the_version_of_its_span():
    completion = read_one([5, 6, 7, 8], spans=[("default", 0, 1), ("4", 1, 1), ("5", 1, 4)])
    assert completion.policy_versions == [0, 5, 5, 5]
    assert read_one([], [], reason="abort").policy_versions == []


@pytest.mark.parametrize(
    "spans",
    [[], [("1", 0, 2)], [("1", 0, 1), ("2", 2, 3)], [("1", 0, 2), ("2", 1, 3)], [("1", 1, 3)], [("1", 0, 4)]],
)
def test_spans_that_do_not_cover_the_tokens_are_an_error(spans):
    with pytest.raises(RuntimeError, match="do not cover the 3 tokens") as failure:
        read_one([5, 6, 7], spans=spans)
    assert not isinstance(failure.value, ServerFailed), "asking again would not help"


@pytest.mark.parametrize("name", ["epoch-3", "-1", "3.0", "", "٣"])
def test_version_of_another_trainer_is_an_error(name):
    with pytest.raises(ValueError, match="another trainer pushes to this server"):
        read_one([5], spans=[(name, 0, 1)])


def test_sampling_mask_belongs_to_its_tokens():
    completion = read_one([5, 6], sampling_mask=[[5, 9], [6]], with_mask=True)
    assert completion.sampling_mask == [[5, 9], [6]]
    assert read_one([5, 6], sampling_mask=[[5, 9], [6]]).sampling_mask is None, "nothing was cut"
    for mask in (None, [[5, 9]]):
        with pytest.raises(RuntimeError, match="of 2 tokens.*--return-sampling-mask"):
            read_one([5, 6], sampling_mask=mask, with_mask=True)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, "KeyError"),
        ({"choices": None}, "TypeError"),
        ({"choices": []}, "answered 0 of 1"),
        ({"choices": [choice([5]), choice([5]) | {"index": 1}]}, "answered 2 of 1"),
        ({"choices": [choice([5]) | {"index": 3}]}, "answered 1 of 1"),
        ({"choices": [{"index": 0}]}, "KeyError"),
        ({"choices": [choice([5], reason="error")]}, "finish_reason='error'"),
        ([1], "TypeError"),
    ],
)
def test_what_is_no_answer_fails_the_request(answer, reason):
    with pytest.raises(ServerFailed, match=reason):
        read_answer(answer, 1, with_mask=False)


def test_an_answer_is_that_of_the_adapter_which_was_asked_for():
    adapter = PolicyAdapter(9, 4)
    answer = {"choices": [choice([5, 6])], "model": "policy-v9-4"}
    (completion,) = read_answer(answer, 1, with_mask=False, adapter=adapter)
    assert completion.policy_versions == [9, 9], "whatever version the base has"
    for model in ("policy", "policy-v9-3", None):
        with pytest.raises(
            ServerFailed, match=f"answered with {model!r}, and 'policy-v9-4'.*VLLM_SKIP_MODEL_NAME_VALI"
        ):
            read_answer(answer | {"model": model}, 1, with_mask=False, adapter=adapter)
    del answer["model"]
    with pytest.raises(ServerFailed, match="KeyError"):
        read_answer(answer, 1, with_mask=False, adapter=adapter)


def test_completions_come_in_the_order_of_their_streams():
    choices = [choice([10 + i]) | {"index": i} for i in (2, 0, 1)]
    assert [c.token_ids for c in read_answer({"choices": choices}, 3, with_mask=False)] == [[10], [11], [12]]


def test_joined_parts_keep_what_each_token_had():
    start = Completion([1, 2], [-0.1, math.nan], [3, 4], "abort", [[1], [2, 3]])
    rest = Completion([5], [-0.3], [6], "stop", [[5, 6]])
    whole = joined(start, rest)
    assert (whole.token_ids, whole.policy_versions, whole.finish_reason) == ([1, 2, 5], [3, 4, 6], "stop")
    assert whole.log_probs[0] == -0.1 and math.isnan(whole.log_probs[1]) and whole.log_probs[2] == -0.3
    assert whole.sampling_mask == [[1], [2, 3], [5, 6]]
    start.sampling_mask = rest.sampling_mask = None
    assert joined(start, rest).sampling_mask is None


def test_body_asks_for_the_sampling_distribution_itself():
    params = SamplingParams(max_tokens=9, n=4, temperature=0.7, stop_token_ids=(3,))
    body = request_body([1, 2], params, n=2, max_tokens=5, seed=11)
    assert body["token_ids"] == [1, 2]
    sampling = body["sampling_params"]
    assert (sampling["n"], sampling["max_tokens"], sampling["temperature"], sampling["seed"]) == (2, 5, 0.7, 11)
    assert sampling["logprobs"] == 0 and sampling["stop_token_ids"] == [3] and not sampling["ignore_eos"]
    assert not {"top_p", "top_k", "min_p"} & sampling.keys()
    truncated = request_body([1], SamplingParams(max_tokens=9, top_k=5, min_p=0.1), n=1, max_tokens=9, seed=0)
    assert {"top_p": 1.0, "top_k": 5, "min_p": 0.1}.items() <= truncated["sampling_params"].items()


def test_ignore_eos_ignores_the_further_end_tokens_too():
    params = SamplingParams(max_tokens=9, stop_token_ids=(3,), ignore_eos=True)
    sampling = request_body([1], params, n=1, max_tokens=9, seed=0)["sampling_params"]
    assert sampling["ignore_eos"] and sampling["stop_token_ids"] == []


def test_streams_have_seeds_of_their_own_that_vllm_takes():
    seeds = [stream_seed(seed, *path) for seed in (0, 1, -1, 2**63, 2**70) for path in ((), (0,), (0, 1), (1, 0))]
    assert all(0 <= seed < 2**62 for seed in seeds), "children count on from it, below 2**63"
    distinct = {stream_seed(seed, *path) for seed in (0, 1, -1, 2**63) for path in ((), (0, 1), (1, 1), (0, 2))}
    assert len(distinct) == 16
