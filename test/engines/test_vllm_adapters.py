"""VLLMEngine and a server of adapters: which one a request names, and what becomes of one that is gone."""

import asyncio
import threading

import pytest
from engines.fake_vllm import WAIT_S, sampled, wait_until

from torchrl_asyncgrpo.engines.base import SamplingParams
from torchrl_asyncgrpo.engines.vllm import VLLMEngine
from torchrl_asyncgrpo.engines.vllm_http import RequestRefused, ServerFailed

PARAMS = SamplingParams(max_tokens=6, n=2, seed=3)
GONE = (404, {"error": {"message": "The model `policy-v1-7` does not exist."}})


@pytest.fixture
def served(fake):
    """Have the server list adapters of these names."""
    base = fake.routes["/v1/models"]["data"]
    fake.routes["/server_info"]["vllm_config"]["lora_config"] = {
        "max_loras": 3, "max_lora_rank": 8, "lora_dtype": "torch.float32",
    }  # fmt: skip

    def serve(*names):
        cards = [{"id": name, "root": "/a", "max_model_len": None, "parent": "policy"} for name in names]
        fake.routes["/v1/models"] = {"data": base + cards}

    return serve


@pytest.fixture
def engine(fake, served):
    engine = VLLMEngine(fake.url, poll_interval=0.01, restart_timeout=WAIT_S, retries=2)
    yield engine
    engine.shutdown()


def sample(engine, params=PARAMS):
    return asyncio.run(engine.generate((1, 2), params))


def versions(completions):
    return {version for completion in completions for version in completion.policy_versions}


def test_each_request_names_the_newest_adapter_and_its_tokens_have_that_version(fake, engine, served):
    served("policy-v9-9", "policy-v10-7", "policy-v2-8")
    assert versions(sample(engine)) == {10}
    served("policy-v10-7", "policy-v11-7")
    assert versions(sample(engine)) == {11}
    assert [body["model"] for body in fake.bodies] == ["policy-v10-7", "policy-v11-7"]
    assert engine.policy_version == 11


def test_of_two_publications_of_a_version_the_newer_one_is_named(fake, engine, served):
    served("policy-v3-100", "policy-v3-20", "policy-v2-400")
    assert versions(sample(engine)) == {3}
    assert fake.bodies[0]["model"] == "policy-v3-100"


def test_the_base_in_the_place_of_an_adapter_is_no_answer(fake, engine, served):
    served("policy-v3-7")
    fake.script = [lambda body: sampled(body) | {"model": "policy"}]
    assert versions(sample(engine)) == {3}
    assert engine.counters["retries"] == 1


def test_adapters_of_others_and_models_of_such_names_are_not_ours(fake, engine, served):
    served("sql", "policy-v03-1", "policy-v5", "my-policy-v6-1")
    fake.routes["/v1/models"]["data"].append({"id": "policy-v7-7", "max_model_len": 64, "parent": None})
    assert versions(sample(engine)) == {0}
    assert "model" not in fake.bodies[0]


def test_without_adapters_the_weights_have_the_versions_that_the_server_says(fake, engine):
    fake.script = [lambda body: sampled(body, versions=((4, 2), (5, None)))]
    assert versions(sample(engine)) == {4, 5}


def test_a_server_that_takes_no_adapters_is_not_asked_for_them(fake):
    engine = VLLMEngine(fake.url)
    fake.paths.clear()
    sample(engine)
    assert "/v1/models" not in fake.paths
    engine.shutdown()


def test_what_is_aborted_is_continued_under_the_newest_adapter(fake, engine, served):
    served("policy-v1-7")

    def aborted(body):
        served("policy-v1-7", "policy-v2-7")
        return sampled(body, reason="abort", tokens=2)

    fake.script = [aborted]
    (completion,) = sample(engine, SamplingParams(max_tokens=6, seed=3))
    assert completion.policy_versions == [1, 1, 2, 2, 2, 2]


def test_a_request_whose_adapter_is_gone_is_asked_again_under_the_newest(fake, engine, served):
    served("policy-v1-7")

    def unloaded(body):
        served("policy-v3-7")
        return GONE

    fake.script = [unloaded]
    assert versions(sample(engine)) == {3}
    assert engine.counters["retries"] == 1 and engine.counters["recoveries"] == 0


def test_an_adapter_that_is_listed_and_never_there_is_an_error(fake, engine, served):
    served("policy-v1-7")
    fake.script = [GONE] * 3
    with pytest.raises(ServerFailed, match="failed 3 times in a row.*`policy-v1-7` does not exist"):
        sample(engine)


def test_refusals_of_another_kind_are_raised_at_once(fake, engine, served):
    served("policy-v1-7")
    fake.script = [(400, {"error": {"message": "bad"}})]
    with pytest.raises(RequestRefused, match="bad"):
        sample(engine)
    served()
    fake.script = [GONE]
    with pytest.raises(RequestRefused, match="does not exist"):
        sample(engine)


def test_a_server_that_lost_its_adapters_is_back_when_the_newest_is(fake, engine, served):
    served("policy-v3-7", "policy-v4-7")
    sample(engine)
    served()
    results = []
    asker = threading.Thread(target=lambda: results.append(sample(engine)))
    asker.start()
    assert wait_until(lambda: engine.counters["retries"] == 1), "an answer of the base alone is not accepted"
    served("policy-v3-7")
    asker.join(0.2)
    assert asker.is_alive(), "an older one is not it, either"
    served("policy-v3-7", "policy-v4-7")
    asker.join(WAIT_S)
    assert versions(results[0]) == {4}
    assert engine.counters["recoveries"] == 1


def test_the_newest_adapter_is_seen_before_the_first_request(fake, engine, served):
    """So that a server which restarts under the first request is noticed."""
    served("policy-v4-7")

    def restarted(body):
        served()  # and the connection is lost

    fake.script = [restarted]
    asker = threading.Thread(target=lambda: sample(engine))
    asker.start()
    assert wait_until(lambda: engine.counters["retries"] >= 1)
    asker.join(0.2)
    assert asker.is_alive()
    served("policy-v5-7")
    asker.join(WAIT_S)
    assert engine.policy_version == 5
