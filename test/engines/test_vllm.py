"""VLLMEngine on a real server: a tiny model, a CPU, and whatever can be done to the process."""

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from engines.fake_vllm import WAIT_S, wait_until
from fakes import VOCABULARY, character_tokenizer, tiny_qwen3

from torchrl_asyncgrpo.collectors.group import make_group
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.prompts import PromptDraw
from torchrl_asyncgrpo.engines.base import SamplingParams
from torchrl_asyncgrpo.engines.vllm import VLLMEngine
from torchrl_asyncgrpo.engines.vllm_http import RequestRefused, ServerUnreachable
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

pytestmark = pytest.mark.vllm

END_IDS = [0, 7]
LENGTH = 1500
LONG = SamplingParams(max_tokens=LENGTH, n=3, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    model = tiny_qwen3(head_dim=32, max_position_embeddings=2048)
    model.generation_config.eos_token_id = END_IDS
    model.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


def serve(directory, **options):
    flags = ["--no-enable-chunked-prefill", *options.pop("options", [])]
    return VLLMServer(
        directory, backend=None, device="cpu", kv_cache_gib=0.1, max_model_len=2048, options=flags, **options
    )


@pytest.fixture(scope="module")
def server(model_directory):
    with serve(model_directory, max_restarts=1) as running:
        yield running


@pytest.fixture
def make_engine(server):
    engines = []

    def make(**options):
        engines.append(VLLMEngine(server.url, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture(scope="module")
def client(server):
    """A client of the test's own, beside that of the engine."""
    with httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client:
        yield client


def metric(client, name, label=""):
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{") and label in line)


def sampled_tokens(client):
    return metric(client, "vllm:generation_tokens_total")


def settled(client):
    """Tokens sampled by a paused server, when its front has caught up with what the engine behind it had done."""
    totals = [-1.0, sampled_tokens(client)]
    while totals[-1] != totals[-2]:
        time.sleep(0.3)
        totals.append(sampled_tokens(client))
    return totals[-1]


def ended_requests(client):
    return metric(client, "http_requests_total", 'handler="/inference/v1/generate"')


def pause(client, mode="keep"):
    client.post("/pause", params={"mode": mode, "clear_cache": False}).raise_for_status()


def resume(client):
    client.post("/resume").raise_for_status()


def push(client, version, mode="keep"):
    """What a push does to requests, without weights."""
    pause(client, mode)
    client.post("/update_weight_version", json={"new_version": str(version)}).raise_for_status()
    resume(client)


async def ask_and_pause(client, engine, prompts):
    """The tasks of one group per prompt, with the server paused in the middle of all of them."""
    while True:
        before = sampled_tokens(client)
        groups = [asyncio.ensure_future(engine.generate(prompt, LONG)) for prompt in prompts]
        await asyncio.to_thread(wait_until, lambda: sampled_tokens(client) > before + 20)  # noqa: B023
        await asyncio.to_thread(pause, client)
        if settled(client) < before + LONG.n * LENGTH:
            return groups
        resume(client)  # a busy machine may look too late
        await asyncio.gather(*groups)


def in_the_middle(client, engine, act, prompts=((1, 2, 3),)):
    """A group per prompt; in the middle of their sampling ``act()`` is called once, and ends the server's pause."""

    async def ask():
        groups = await ask_and_pause(client, engine, prompts)
        await asyncio.to_thread(act)
        return await asyncio.gather(*groups)

    return asyncio.run(ask())


def test_log_probs_are_the_models_own_at_the_sampling_temperature(engine, model_directory):
    """T1: those of the trainer's model, on every token."""
    params = SamplingParams(max_tokens=60, n=8, temperature=0.6, seed=0, ignore_eos=True)
    completions = asyncio.run(engine.generate([3, 1, 4], params))
    model = type(tiny_qwen3()).from_pretrained(model_directory).eval()
    sequences = torch.tensor([[3, 1, 4, *c.token_ids] for c in completions])
    with torch.no_grad():
        log_prob_SNV = torch.log_softmax(model(sequences).logits.double() / 0.6, -1)
    expected = log_prob_SNV[:, 2:-1].gather(-1, sequences[:, 3:, None])[..., 0]
    reported = torch.tensor([c.log_probs for c in completions], dtype=torch.float64)
    torch.testing.assert_close(reported, expected, atol=2e-3, rtol=0)
    assert expected.std() > 0.1, "the model tells tokens apart"


def test_description_of_the_server_is_that_of_its_flags(engine, model_directory):
    server = engine.server
    assert engine.max_length == server.max_model_len == 2048
    assert (server.model, server.root, server.dtype) == ("policy", str(model_directory), "float32")
    assert (server.world_size, server.transfer_backend, server.returns_sampling_mask) == (1, None, False)


def test_seed_repeats_a_group_and_no_two_completions_are_alike(engine):
    def sample(**changes):
        params = SamplingParams(**dict(max_tokens=16, n=4, ignore_eos=True) | changes)
        return [c.token_ids for c in asyncio.run(engine.generate([5, 6], params))]

    first = sample(seed=3)
    assert first == sample(seed=3)
    everything = first + sample(seed=4) + sample(seed=None) + sample(seed=None)
    assert len({tuple(tokens) for tokens in everything}) == 16


def test_every_end_token_of_the_model_ends_a_completion_and_is_part_of_it(engine):
    """T5, although the server was started with --generation-config vllm."""
    params = SamplingParams(max_tokens=300, n=64, seed=0)
    completions = asyncio.run(engine.generate([5, 6], params))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in stopped} == set(END_IDS)
    assert all(not set(END_IDS) & set(c.token_ids[:-1]) for c in completions)
    assert all(len(c.token_ids) == len(c.log_probs) == len(c.policy_versions) for c in completions)


def test_further_end_tokens_end_a_completion_and_ignore_eos_ignores_all(engine):
    others = tuple(range(8, VOCABULARY))
    (ended,) = asyncio.run(engine.generate([5], SamplingParams(max_tokens=300, seed=0, stop_token_ids=others)))
    assert ended.finish_reason == "stop" and ended.token_ids[-1] in {*others, *END_IDS}
    params = SamplingParams(max_tokens=100, n=4, seed=0, stop_token_ids=others, ignore_eos=True)
    completions = asyncio.run(engine.generate([5], params))
    assert [(c.finish_reason, len(c.token_ids)) for c in completions] == [("length", 100)] * 4


def test_long_prompt_shortens_the_completion(engine):
    (completion,) = asyncio.run(engine.generate([5] * 2045, SamplingParams(max_tokens=100, ignore_eos=True)))
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


def test_token_outside_the_vocabulary_is_refused_with_the_servers_words(engine):
    with pytest.raises(RequestRefused, match="answered 400.*(?i:vocab)"):
        asyncio.run(engine.generate([5, VOCABULARY + 1000], SamplingParams(max_tokens=4)))
    assert engine.counters["retries"] == 0


def test_push_that_keeps_requests_gives_a_completion_of_two_versions(client, engine):
    """S3: the rollout is as old as its oldest token."""
    push(client, 1)
    ((completion, *_),) = in_the_middle(client, engine, lambda: push(client, 2))
    counts = Counter(completion.policy_versions)
    assert set(counts) == {1, 2} and counts.total() == LENGTH
    assert completion.policy_versions == sorted(completion.policy_versions)
    assert engine.policy_version == 2 and engine.counters["resumed"] == 0
    (rollout,) = make_group(
        PromptDraw(0, "x", {}), [1, 2, 3], [completion], [1.0], torch.ones(1), group_size=1, mask_truncated=False
    )
    assert schema.oldest_version(rollout) == 1


def test_push_that_aborts_requests_is_followed_by_the_rest_of_them(client, engine):
    push(client, 3)
    (completions,) = in_the_middle(client, engine, lambda: push(client, 4, mode="abort"))
    assert engine.counters["resumed"] == 3
    for completion in completions:
        assert completion.finish_reason == "length" and len(completion.token_ids) == LENGTH
        assert set(completion.policy_versions) == {3, 4}
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert not any(map(math.isnan, completion.log_probs))
    assert len({tuple(c.token_ids[-50:]) for c in completions}) == 3, "continuations draw from streams of their own"


def test_cancelled_request_ends_on_the_server(client, engine):
    async def cancelled():
        (task,) = await ask_and_pause(client, engine, [[1]])
        totals, ended = [sampled_tokens(client)], ended_requests(client)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert wait_until(lambda: ended_requests(client) == ended + 1)
        await asyncio.to_thread(resume, client)
        for _ in range(2):  # beside a request that ran on, this one would not be alone
            await engine.generate([1], SamplingParams(max_tokens=100, ignore_eos=True))
            totals.append(sampled_tokens(client))
        return totals

    at_pause, first, second = asyncio.run(cancelled())
    assert second - first == 100
    assert second < at_pause + 200 + 20  # none, or what a step takes


def test_several_loops_and_engines_sample_at_once(make_engine):
    """T9: with one configured seed too, engines that get a seed per request do not repeat each other."""
    engines = [make_engine(max_concurrency=limit) for limit in (3, 256)]
    params = SamplingParams(max_tokens=20, n=5, ignore_eos=True)

    def ask(engine):
        return [c for i in range(3) for c in asyncio.run(engine.generate([i + 1], params))]

    with ThreadPoolExecutor(4) as pool:
        completions = [c for group in pool.map(ask, engines * 2) for c in group]
    assert len(completions) == 60 == len({tuple(c.token_ids) for c in completions})


def test_server_that_is_frozen_is_noticed_and_waited_for(server, client, make_engine):
    engine = make_engine(hang_timeout=3.0, poll_interval=0.05)

    def freeze():
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert wait_until(lambda: engine.counters["retries"] >= 2)
        finally:
            os.kill(server.pid, signal.SIGCONT)
            resume(client)

    groups = in_the_middle(client, engine, freeze, prompts=[(1,), (2,)])
    assert [[len(c.token_ids) for c in group] for group in groups] == [[LENGTH] * 3] * 2
    assert engine.counters["recoveries"] >= 1  # more where a busy machine is slow to answer, too


@pytest.fixture(scope="module")
def wrong_servers(model_directory):
    """One with every route closed, and one with the wrong log-probs; started at once."""
    closed = serve(model_directory, options=["--no-enable-scale-out"], environment={"VLLM_SERVER_DEV_MODE": "0"})
    raw = serve(model_directory, options=["--logprobs-mode", "raw_logprobs", "--enable-chunked-prefill"])
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for server in (closed, raw):
            stack.callback(server.stop)
        yield list(pool.map(VLLMServer.start, (closed, raw)))


def test_flags_that_a_server_lacks_are_named(wrong_servers):
    closed, raw = wrong_servers
    with pytest.raises(ValueError, match="(?s)VLLM_SERVER_DEV_MODE=1.*--enable-scale-out"):
        VLLMEngine(closed.url)
    with pytest.raises(
        ValueError, match="processed_logprobs: it reports raw_logprobs(?s:.*)--no-enable-chunked-prefill"
    ):
        VLLMEngine(raw.url)


def test_wrong_urls_and_lengths_are_refused(server):
    with pytest.raises(ValueError, match="--max-model-len 2100: it takes 2048"):
        VLLMEngine(server.url, required_length=2100)
    with pytest.raises(ValueError, match="leave out the path"):
        VLLMEngine(server.url + "/v1")
    with pytest.raises(ValueError, match="does not speak vLLM's API"):
        VLLMEngine(server.url + "/inference")
    with pytest.raises(ServerUnreachable, match="no vLLM server answers"):
        VLLMEngine("http://127.0.0.1:1")


def test_killed_server_that_restarts_with_old_weights_answers_every_prompt_once(server, client, make_engine):
    """SIGKILL in the middle of a batch; the weights' version is set again, as a sender does that pushes again."""
    engine = make_engine(poll_interval=0.05)
    push(client, 8)
    asyncio.run(engine.generate([1], SamplingParams(max_tokens=2)))
    assert engine.policy_version == 8

    def push_again():
        if wait_until(lambda: server.restarts == 1 and server.running, 120):
            push(client, 9)

    sender = threading.Thread(target=push_again)

    def kill():
        os.kill(server.pid, signal.SIGKILL)
        sender.start()

    prompts = [(i + 1, 2) for i in range(6)]
    groups = in_the_middle(client, engine, kill, prompts)
    sender.join()
    assert [[len(c.token_ids) for c in group] for group in groups] == [[LENGTH] * 3] * 6
    # a group may have been answered before; no token is of the weights that the server restarted with
    versions = [set(c.policy_versions) for group in groups for c in group]
    assert all(spans in ({8}, {9}) for spans in versions) and {9} in versions
    assert engine.counters["recoveries"] == 1 and engine.counters["retries"] >= 1
