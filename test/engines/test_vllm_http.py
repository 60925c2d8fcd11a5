"""The HTTP client: every status, every way to lose a connection, and a server that is none of vLLM's."""

import asyncio
import json
import pickle
import socket

import pytest
from engines.fake_vllm import WAIT_S, sampled

from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.engines.vllm_http import (
    VLLMHTTP,
    RequestRefused,
    ServerFailed,
    ServerHung,
    ServerUnreachable,
    normalized_url,
    parse_version,
)

BODY = {"token_ids": [1], "sampling_params": {"n": 1, "max_tokens": 3, "seed": 0}}


@pytest.fixture
def http(fake):
    client = VLLMHTTP(fake.url, timeout=WAIT_S)
    yield client
    client.close()


def generate(fake, *bodies, timeout=WAIT_S):
    """Answers of requests made one after the other."""

    async def ask():
        client = VLLMHTTP(fake.url)
        try:
            return [await client.generate(body, timeout) for body in bodies]
        finally:
            await client.aclose()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        (" http://localhost:8000/ ", "http://localhost:8000"),
        ("https://host", "https://host"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://host/replica-1/", "http://host/replica-1"),
    ],
)
def test_url_is_the_root_without_a_slash(url, normal):
    assert normalized_url(url) == normal


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:8000", "must start with http:// or https://"),
        ("", "must start with"),
        ("http://", "must start with"),
        ("ftp://host", "must start with"),
        ("http://host:abc", "is not a URL"),
        ("http://host:99999", "port lies between"),
        ("http://host:8000/v1", "leave out the path.*'http://host:8000'"),
        ("http://host:8000/v1/", "leave out the path"),
        ("http://host:8000?model=x", "must end after host and port"),
    ],
)
def test_wrong_url_is_refused_before_anything_is_sent(url, reason):
    with pytest.raises(ValueError, match=reason):
        VLLMHTTP(url)


def test_description_is_what_the_server_says(http):
    server = http.describe()
    assert (server.model, server.root, server.max_model_len) == ("policy", "/m", 64)
    assert (server.dtype, server.logprobs_mode) == ("bfloat16", "processed_logprobs")
    assert (server.transfer_backend, server.world_size, server.max_num_seqs) == ("nccl", 2, 8)
    assert server.has_weight_routes and server.has_generate_route and not server.returns_sampling_mask
    assert server.vllm_version == "0.32.0" and server.device == "cpu" and server.chunks_prefill is False


def test_description_of_a_server_without_development_mode_lacks_what_is_not_told(fake, http):
    del fake.routes["/server_info"], fake.routes["/get_world_size"]
    fake.version = None
    server = http.describe()
    assert not server.has_weight_routes and server.has_generate_route
    assert server.dtype is server.logprobs_mode is server.world_size is server.transfer_backend is None
    assert server.max_model_len == 64


@pytest.mark.parametrize(
    "models",
    [None, {"data": []}, {"data": [{"id": "gpt"}]}, {"object": "list"}, [], b"<html></html>"],
)
def test_another_server_is_not_taken_for_vllm(fake, http, models):
    if models is None:
        del fake.routes["/v1/models"]
    else:
        fake.routes["/v1/models"] = models
    with pytest.raises(ValueError, match=r"does not speak vLLM's API.*url must be the root of a vLLM server"):
        http.describe()


def test_adapter_is_not_taken_for_the_model(fake, http):
    base = fake.routes["/v1/models"]["data"][0]
    fake.routes["/v1/models"]["data"].insert(0, {"id": "adapter", "max_model_len": 64, "parent": "policy"})
    assert http.describe().model == base["id"]


def test_adapters_are_listed_loaded_and_unloaded_by_their_names(fake, http):
    data = fake.routes["/v1/models"]["data"]
    names = ("policy-v12-40", "other", "policy-v3-7")
    data += [{"id": name, "max_model_len": None, "parent": "policy"} for name in names]
    third = PolicyAdapter(3, 7)
    assert http.adapters() == [third, (12, 40)]
    fake.post_answers = {f"/v1/{verb}_lora_adapter": (200, b"Success: not JSON") for verb in ("load", "unload")}
    http.load_adapter(PolicyAdapter(13, 41), "/a/b")
    assert http.unload_adapter(third)
    assert fake.posts == [
        ("/v1/load_lora_adapter", {"lora_name": "policy-v13-41", "lora_path": "/a/b"}),
        ("/v1/unload_lora_adapter", {"lora_name": "policy-v3-7"}),
    ]
    fake.post_answers["/v1/unload_lora_adapter"] = (404, {"error": {"message": "cannot be found"}})
    assert not http.unload_adapter(third)
    for status, error in ((404, RequestRefused), (400, RequestRefused), (500, ServerFailed)):
        fake.post_answers["/v1/load_lora_adapter"] = (status, {"error": {"message": "no such path"}})
        with pytest.raises(error, match=f"answered {status}: no such path"):
            http.load_adapter(PolicyAdapter(14, 42), "/a/c")
    fake.post_answers["/v1/unload_lora_adapter"] = (400, {"error": {"message": "no name"}})
    with pytest.raises(RequestRefused, match="no name"):
        http.unload_adapter(third)


def test_whether_adapters_are_taken_is_described(fake, http):
    assert http.describe().has_adapter_routes
    fake.post_answers["/v1/load_lora_adapter"] = (404, {"detail": "Not Found"})
    assert not http.describe().has_adapter_routes
    fake.post_answers["/v1/load_lora_adapter"] = (400, {"error": {"message": "lora_name: Field required"}})
    assert http.describe().has_adapter_routes


def test_versions_before_the_first_push_after_it_and_of_another_trainer(fake, http):
    assert http.weight_version() == 0
    fake.version = "57"
    assert http.weight_version() == 57 == parse_version("57")
    fake.version = "step-57"
    with pytest.raises(ValueError, match="'step-57'.*another trainer"):
        http.weight_version()


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        ((500, {"error": {"message": "out of blocks"}}), ServerFailed, "answered 500: out of blocks"),
        ((503, b"overloaded"), ServerFailed, "answered 503: overloaded"),
        ((400, {"error": {"message": "n is too large"}}), RequestRefused, "answered 400: n is too large"),
        ((403, {"error": "no key"}), RequestRefused, "answered 403: no key"),
        ((404, {"detail": "Not Found"}), RequestRefused, "answered 404: Not Found"),
        ((307, b""), RequestRefused, "answered 307"),
        ((200, b"<html>"), ServerFailed, "not JSON"),
        (None, ServerUnreachable, "disconnected"),
        ("half", ServerUnreachable, "peer closed connection"),
    ],
)
def test_every_status_and_loss_has_its_error(fake, answer, error, reason):
    fake.script = [answer]
    with pytest.raises(error, match=f"(?s)/inference/v1/generate.*{reason}") as failure:
        generate(fake, BODY)
    sent = pickle.loads(pickle.dumps(failure.value))  # as a backend sends it from another process
    assert (type(sent), str(sent)) == (error, str(failure.value))
    if error is RequestRefused:
        assert sent.status == failure.value.status == answer[0]


def test_no_answer_in_time_is_a_server_that_hangs(fake, http):
    fake.script = ["hang"]
    with pytest.raises(ServerHung, match=r"no answer within 0\.2 s"):
        generate(fake, BODY, timeout=0.2)
    fake.gate.clear()
    assert not http.health(timeout=0.2)


def test_health_never_raises(fake, http):
    assert http.health()
    fake.health = [503]
    assert not http.health()
    fake.kill()
    assert not http.health()


def test_nothing_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ServerUnreachable, match="refused|attempts failed"):
        VLLMHTTP(url).weight_version()


def test_connections_of_requests_are_used_again_and_control_calls_get_a_new_one_each(fake, http):
    for _ in range(5):
        http.weight_version()
    assert fake.connections == 5
    http.close()
    http.weight_version()
    assert fake.connections == 6
    answers = generate(fake, BODY, BODY, BODY)
    assert len(answers) == 3 and fake.connections == 7


def test_cancelled_request_hangs_up(fake):
    async def ask():
        client = VLLMHTTP(fake.url)
        call = asyncio.ensure_future(client.generate(BODY, WAIT_S))
        await asyncio.to_thread(fake.arrived.acquire)
        call.cancel()
        hung_up = await asyncio.to_thread(fake.disconnected.acquire, timeout=WAIT_S)
        await client.aclose()
        return hung_up

    fake.script = ["hang"]
    assert asyncio.run(ask())


def test_coroutines_belong_to_one_loop_until_they_are_closed(fake):
    client = VLLMHTTP(fake.url)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.run_until_complete(client.probe(WAIT_S))
    with pytest.raises(RuntimeError, match="one event loop"):
        second.run_until_complete(client.probe(WAIT_S))
    first.run_until_complete(client.aclose())
    assert second.run_until_complete(client.probe(WAIT_S)) == 0
    second.run_until_complete(client.aclose())
    first.close()
    second.close()


def test_key_is_sent_and_its_lack_is_named(fake, http):
    fake.routes["/v1/models"] = (401, {"error": "Unauthorized"})
    with pytest.raises(ValueError, match="Unauthorized.*--api-key as api_key"):
        http.describe()
    keyed = VLLMHTTP(fake.url, api_key="secret")
    keyed.health()
    keyed.close()
    assert fake.headers[-1]["Authorization"] == "Bearer secret"
    http.health()
    assert "Authorization" not in fake.headers[-1]


def test_pause_says_what_becomes_of_what_runs_and_of_the_cache(fake, http, monkeypatch):
    sent = []
    monkeypatch.setattr(http, "_call", lambda *call, **options: sent.append((call, options)) or {"is_paused": True})
    http.pause("keep", False)
    assert sent.pop() == (("POST", "/pause"), {"query": {"mode": "keep", "clear_cache": "false"}, "timeout": None})
    http.resume(timeout=3.0)
    assert sent.pop() == (("POST", "/resume"), {"timeout": 3.0})
    assert http.is_paused()


def test_answer_of_a_generate_call_is_its_json(fake):
    assert generate(fake, BODY) == [json.loads(json.dumps(sampled(BODY)))]
