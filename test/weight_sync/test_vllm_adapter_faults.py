"""Adapter pushes that fail half-way: one version stands for one set of weights, whatever the server did and said."""

import asyncio

import pytest
from adapted import lora, randomize
from engines.fake_vllm import FakeVLLM
from safetensors import safe_open

from torchrl_asyncgrpo import (
    RemoteActor,
    RemoteWeightSyncSender,
    SamplingParams,
    TreeActor,
    VLLMAdapterSyncSender,
    VLLMEngine,
)
from torchrl_asyncgrpo.engines.vllm_http import ServerFailed
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
FAILS = (500, {"error": {"message": "injected"}})


class AdapterServer(FakeVLLM):
    """Keeps a list of adapters as vLLM does, and the weights that it read."""

    def __init__(self):
        super().__init__()
        config = self.routes["/server_info"]["vllm_config"]
        config["lora_config"] = {"max_loras": 3, "max_lora_rank": 8, "lora_dtype": "torch.float32"}
        config["model_config"]["dtype"] = "torch.float32"
        self.base = self.routes["/v1/models"]["data"]
        self.held, self.read = {}, {}
        self.works()

    def works(self):
        self.post_answers = {LOAD: self.load, UNLOAD: self.unload}

    def load(self, body):
        if not body:
            return 400, {"error": {"message": "lora_name: Field required"}}
        name, path = body["lora_name"], body["lora_path"]
        with safe_open(f"{path}/adapter_model.safetensors", "pt") as file:
            self.read[name] = float(file.get_tensor(sorted(file.keys())[0]).sum())
        self.held[name] = path
        self.list()
        return 200, b"Success"

    def unload(self, body):
        if self.held.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": "cannot be found"}}
        self.list()
        return 200, b"Success"

    def list(self):
        cards = [
            {"id": name, "root": path, "max_model_len": None, "parent": "policy"} for name, path in self.held.items()
        ]
        self.routes["/v1/models"] = {"data": self.base + cards}

    @property
    def listed(self):
        return [int(name.split("-")[1].removeprefix("v")) for name in self.held]

    def weights_of(self, version):
        """All that were ever in force under a version."""
        return {value for name, value in self.read.items() if name.startswith(f"policy-v{version}-")}


@pytest.fixture
def server():
    server = AdapterServer()
    yield server
    server.stop()


@pytest.fixture
def policy():
    return lora()


@pytest.fixture
def sender(server, policy):
    sender = VLLMAdapterSyncSender(policy, server.url, max_staleness=1, verify="none", restart_timeout=0.1)
    assert sender.update_weights() == 1
    yield sender
    sender.destroy()


def fails_late(act):
    """A route that does what it is asked for, and answers that it failed."""

    def route(body):
        act(body)
        return FAILS

    return route


def failing(sender):
    with pytest.raises(ServerFailed, match="injected"):
        sender.update_weights()


def test_a_push_that_may_have_been_named_does_not_leave_its_version_to_other_weights(server, sender, policy):
    """The answer to the load is lost, and so is the withdrawal: requests name what nobody confirmed."""
    engine = VLLMEngine(server.url)
    server.post_answers = {LOAD: fails_late(server.load), UNLOAD: FAILS}
    failing(sender)
    assert sender.policy_version == 1
    assert server.listed == [1, 2]
    (completion,) = asyncio.run(engine.generate([1, 2], SamplingParams(max_tokens=3, seed=1)))
    engine.shutdown()
    assert completion.policy_versions == [2] * 3
    server.works()
    randomize(policy, seed=1)
    assert sender.update_weights() == sender.policy_version == 3
    assert server.listed == [1, 3], "what could not be withdrawn is withdrawn now"
    assert len(server.weights_of(2)) == 1


def test_nor_does_one_that_was_withdrawn_after_requests_could_name_it(server, sender, policy):
    server.post_answers[LOAD] = fails_late(server.load)
    failing(sender)
    assert server.listed == [1]
    server.works()
    randomize(policy, seed=1)
    assert [sender.update_weights(), sender.update_weights()] == [3, 4]


def test_nor_does_one_of_a_policy_in_a_backend(server, policy):
    backend = HostedPolicy(
        lambda: TreeActor(policy),
        make_sender=lambda _: VLLMAdapterSyncSender(
            policy, server.url, max_staleness=1, verify="none", restart_timeout=0.1
        ),
    )
    sender = RemoteWeightSyncSender(RemoteActor(backend))
    assert sender.update_weights() == 1
    server.post_answers = {LOAD: fails_late(server.load), UNLOAD: FAILS}
    failing(sender)
    assert sender.policy_version == 1
    server.works()
    randomize(policy, seed=1)
    assert sender.update_weights() == sender.policy_version == backend.sender.policy_version == 3
    assert len(server.weights_of(2)) == 1
    backend.shutdown()


def test_a_push_that_no_request_could_name_leaves_its_version_to_the_next(server, sender):
    server.post_answers[LOAD] = FAILS
    failing(sender)
    server.works()
    assert sender.update_weights() == 2


def test_a_withdrawal_waits_as_long_as_a_step_may_take(server, sender, monkeypatch):
    timeouts = []
    unload = sender._http.unload_adapter

    def recorded(adapter, timeout):
        timeouts.append(timeout)
        return unload(adapter, timeout=timeout)

    monkeypatch.setattr(sender._http, "unload_adapter", recorded)
    server.post_answers[LOAD] = FAILS
    failing(sender)
    assert timeouts == [sender.timeout]


def test_a_version_that_is_pushed_again_is_served_until_the_new_publication_is_confirmed(server, sender, policy):
    (first,) = server.held
    sender.next_version = 1
    server.post_answers[LOAD] = FAILS
    failing(sender)
    assert list(server.held) == [first]
    server.works()
    assert sender.update_weights() == 1
    (second,) = server.held
    assert second != first and len({first, second, *server.read}) == 2, "vLLM dies of two adapters of one name"
    assert not sender.lost()


def test_a_server_that_lists_another_publication_of_the_version_has_lost_ours(server, sender):
    server.held = {"policy-v1-5": "/elsewhere"}
    server.list()
    assert sender.lost()


def test_refused_arguments(policy):
    with pytest.raises(ValueError, match="max_staleness=-1"):
        VLLMAdapterSyncSender(policy, "http://server", max_staleness=-1)
    with pytest.raises(ValueError, match="verify='all'"):
        VLLMAdapterSyncSender(policy, "http://server", max_staleness=0, verify="all")
    with pytest.raises(ValueError, match="DoRA|Dora"):
        VLLMAdapterSyncSender(lora(use_dora=True), "http://server", max_staleness=0)
