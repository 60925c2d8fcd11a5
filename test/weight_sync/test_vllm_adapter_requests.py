"""What requests of a real vLLM server see of adapters that are pushed beside them."""

import asyncio
import contextlib
import copy
import threading
import time
import urllib.request

import pytest
import torch
from adapted import lora, randomize
from adapter_tools import MAX_STALENESS, assert_served, listed, served_model
from push_tools import PROMPT, in_background, own_log_probs, sample, sampled_tokens

from torchrl_asyncgrpo import (
    SamplingParams,
    VLLMAdapterSyncSender,
    VLLMEngine,
)
from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
LONG = 800  # tokens


@pytest.fixture
def server(adapter_server):
    return adapter_server


@pytest.fixture
def policy():
    return lora(served_model())


@pytest.fixture
def sender(policy, server):
    sender = VLLMAdapterSyncSender(policy, server.url, max_staleness=MAX_STALENESS, timeout=60)
    yield sender
    sender.destroy()


@pytest.fixture
def engine(server):
    engine = VLLMEngine(server.url, restart_timeout=30)
    yield engine
    engine.shutdown()


@contextlib.contextmanager
def held_in_the_middle(server, http, engine, n):
    """A request of which some tokens are sampled and not all, and that stands still, so that the test can be sure."""

    def pause():
        http.pause("keep", clear_cache=False)

    for _ in range(10):  # this process may get no turn until the server has ended it
        before = sampled_tokens(server)
        pause()
        with in_background(lambda: sample(engine, n=n, max_tokens=LONG)) as request:
            try:
                while sampled_tokens(server) == before:
                    assert request.failure is None
                    with in_background(http.resume):  # answered late while the server is busy
                        time.sleep(0.01)
                        pause()
                pause()
                if sampled_tokens(server) < before + n * LONG:
                    yield request
                    return
            finally:
                http.resume()
    raise AssertionError("the server was faster each time")


def test_a_request_keeps_the_version_that_it_named_and_the_next_one_names_the_new(policy, sender, engine, server, http):
    sender.update_weights()
    old = copy.deepcopy(policy)
    with held_in_the_middle(server, http, engine, n=2) as request:
        randomize(policy, seed=3)
        sender.update_weights()
        http.resume()
        assert_served(policy, engine, 2)
    assert [completion.policy_versions for completion in request.result] == [[1] * LONG, [1] * LONG]
    own_L, sampled_L = own_log_probs(old, request.result)
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)


def test_a_request_whose_adapter_had_to_leave_the_servers_memory_ends_and_is_too_stale_to_be_trained(
    policy, sender, engine, server, http
):
    """vLLM reads its path again, which stands for the newest version: from then on its tokens are of other weights."""
    sender.update_weights()
    old = copy.deepcopy(policy)
    with held_in_the_middle(server, http, engine, n=1) as request:
        for version in range(2, MAX_STALENESS + 6):  # more than there are slots, and older than any that stays
            randomize(policy, seed=version)
            sender.update_weights()
    (completion,) = request.result
    assert completion.policy_versions == [1] * LONG
    assert sender.policy_version - 1 > sender.max_staleness, "what the replay buffer drops"
    own_L, sampled_L = own_log_probs(old, [completion])
    different_L = (own_L - sampled_L).abs() > 0.05
    assert not different_L[0]
    assert different_L.any(), "else it never had to leave"
    assert http.health()


def test_a_version_that_is_pushed_again_is_another_adapter(policy, sender, engine, server, http):
    sender.update_weights()
    old = copy.deepcopy(policy)
    with held_in_the_middle(server, http, engine, n=1) as request:
        randomize(policy, seed=3)
        sender.next_version = 1
        sender.update_weights()
        http.resume()
        assert_served(policy, engine, 1)
    assert listed(http) == [1]
    own_L, sampled_L = own_log_probs(old, request.result)
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)


def test_two_publications_of_a_version_run_beside_each_other_and_may_leave_the_servers_memory(
    policy, sender, engine, server, http, monkeypatch
):
    """vLLM dies of two adapters of one name in the requests of one step, once one of them has left its slot."""
    sender.update_weights()
    named = threading.Event()
    newest = engine._watch.newest_adapter

    async def noted():
        adapter = await newest()
        named.set()
        return adapter

    with held_in_the_middle(server, http, engine, n=1) as first:
        sender.next_version = 1
        sender.update_weights()
        monkeypatch.setattr(engine._watch, "newest_adapter", noted)
        monkeypatch.setattr(sender, "_unload", lambda *_: True)  # before the request is there, it would be asked again
        with in_background(lambda: sample(engine, max_tokens=LONG, seed=4)) as second:
            assert named.wait(30)
            for _ in range(MAX_STALENESS + 4):
                sender.update_weights()
            http.resume()
    assert {v for request in (first, second) for v in request.result[0].policy_versions} == {1}
    assert http.health()


def test_no_version_reads_the_prefix_cache_of_another_one(policy, sender, engine, server):
    long = (PROMPT * 7)[:70]
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)

    def hits():
        asyncio.run(engine.generate(long, params))
        return prefix_hits(server)

    sender.update_weights()
    start = hits()
    assert hits() - start >= 32, "the same version reads its own"
    start = prefix_hits(server)
    sender.update_weights()
    assert hits() == start
    sender.next_version = 2  # the same version once more, as of a trainer that went back
    sender.update_weights()
    assert hits() == start


def prefix_hits(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))


def test_pushes_beside_running_requests_cost_none_of_them(policy, sender, server):
    engine = VLLMEngine(server.url, retries=0)
    sender.update_weights()
    stop, failures, versions_of = threading.Event(), [], [[], [], []]

    def ask(versions):
        try:
            while not stop.is_set():
                completions = sample(engine, n=2, max_tokens=24, seed=None)
                versions.append([sorted(set(completion.policy_versions)) for completion in completions])
        except BaseException as failure:  # noqa: BLE001 - looked at below
            failures.append(failure)

    askers = [threading.Thread(target=ask, args=(versions,)) for versions in versions_of]
    for asker in askers:
        asker.start()
    for version in range(2, 14):
        assert sender.update_weights() == version
        done = [len(versions) for versions in versions_of]
        # nobody may be so late that the adapter which it named is gone before its request is there
        while any(len(versions) == n for versions, n in zip(versions_of, done, strict=True)) and not failures:
            time.sleep(0.01)
    stop.set()
    for asker in askers:
        asker.join()
    assert not failures
    versions = [versions_ for versions in versions_of for versions_ in versions]
    assert all(len(one) == 1 and one == versions_[0] for versions_ in versions for one in versions_)
    assert len({version for versions_ in versions for one in versions_ for version in one}) > 6
    assert engine.counters["retries"] == 0
    engine.shutdown()


def test_a_request_that_names_an_adapter_which_is_gone_is_asked_again(policy, sender, engine, monkeypatch):
    sender.update_weights()
    found = engine._watch.newest_adapter
    answers = [PolicyAdapter(99, 1)]

    async def late():
        return answers.pop() if answers else await found()

    monkeypatch.setattr(engine._watch, "newest_adapter", late)
    assert sample(engine)[0].policy_versions == [1] * 16
    assert engine.counters["retries"] == 1
