"""Pushes into a real vLLM server, many, and ones that go wrong: the version stays, and the next push starts clean.

Each test begins and ends with the server up and not paused.
"""

import os
import signal
import threading
import time

import pytest
import torch
from fakes import tiny_qwen3
from push_tools import in_background, own_log_probs, perturb, resident_bytes, sample, sampled_tokens, wait_for_tokens

from torchrl_asyncgrpo import VLLMWeightSyncSender
from torchrl_asyncgrpo.engines.vllm_http import ServerFailed
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

pytestmark = pytest.mark.vllm


def served_model():
    """65 MB: large enough that a push which is not freed shows, small enough that it takes a tenth of a second."""
    return tiny_qwen3(
        vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    served_model().save_pretrained(path)
    with VLLMServer(path, max_model_len=128) as server:
        yield server


@pytest.fixture
def policy():
    return served_model()


def test_twenty_pushes_while_requests_run(policy, sender, engine, server, http):
    stop, finished, failures, versions, memory = threading.Event(), [], [], [], []

    def ask(seed):
        try:
            while not stop.is_set():
                completions = sample(engine, n=2, max_tokens=24, seed=seed)
                finished.append([len(c.token_ids) for c in completions])
                seed += 100
        except Exception as failure:  # noqa: BLE001 - looked at below
            failures.append(failure)

    sender.update_weights()  # before the first request, as in a run
    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for asker in askers:
        asker.start()
    try:
        for push in range(20):
            perturb(policy, scale=1e-3, seed=push)
            versions.append(sender.update_weights())  # compares checksums each time
            assert http.weight_version() == versions[-1]
            memory.append((resident_bytes(os.getpid()), resident_bytes(server.pid)))
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    assert versions == list(range(2, 22))
    assert len(finished) >= 20
    assert all(lengths == [24, 24] for lengths in finished)
    assert not failures
    assert engine.counters["retries"] == 0
    for side in zip(*memory[2:], strict=True):  # the first pushes map the memory that the others use
        early, late = side[:9], side[9:]  # the least of each: running requests hold some for a moment
        assert min(late) <= 1.05 * min(early), [round(bytes_ / 1e6) for bytes_ in side]


STEPS = ["prepare", "pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


@pytest.mark.parametrize("step", STEPS)
def test_a_push_that_fails_at_any_step_leaves_the_version_and_the_next_one_starts_clean(
    step, policy, sender, engine, http, monkeypatch
):
    sender.delta = True
    sender.update_weights()
    perturb(policy)

    def fail(*_, **__):
        raise ServerFailed("POST answered 500: injected.")

    holder = {"pause": sender._http, "resume": sender._http, "prepare": sender}.get(step, sender._client)
    with monkeypatch.context() as patch:
        patch.setattr(holder, step, fail)
        with pytest.raises(ServerFailed, match="injected"):
            sender.update_weights()
    assert sender.policy_version == 1
    assert sender.update_weights() == 2
    assert sender.sent_bytes == sum(parameter.nbytes for parameter in policy.parameters())
    assert http.weight_version() == 2
    own_L, sampled_L = own_log_probs(policy, sample(engine, n=2))
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)


def test_weights_that_did_not_arrive_fail_the_push_and_keep_the_server_paused(policy, sender, http, monkeypatch):
    sender.update_weights()
    perturb(policy)
    with monkeypatch.context() as patch:
        patch.setattr(sender._client, "update_weights", lambda *_: None)
        patch.setattr(sender._transfer, "_wait", lambda *_: None)
        with pytest.raises(ValueError, match="are not what was sent"):
            sender.update_weights()
    assert sender.policy_version == 1
    assert http.is_paused()
    assert sender.update_weights() == 2
    assert not http.is_paused()


def test_a_server_that_does_not_answer_is_an_error_within_the_time_out(policy, server, http):
    sender = VLLMWeightSyncSender(policy, server.url, timeout=2, restart_timeout=2)
    sender.update_weights()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer within"):
            sender.update_weights()
        assert time.monotonic() - started < 20
        assert not sender.lost()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert sender.policy_version == 1
    sender.timeout = 60
    assert sender.update_weights() == 2
    sender.destroy()


def test_what_a_trainer_left_half_done_when_it_died_does_not_hinder_the_next(policy, server, http):
    dead = VLLMWeightSyncSender(policy, server.url)
    dead.init_weight_transfer()
    dead.prepare(1)
    dead.pause()
    perturb(policy)
    sender = VLLMWeightSyncSender(policy, server.url, verify="checksum")
    assert sender.update_weights() == 1
    sender.destroy()


def test_a_server_with_another_version_has_lost_the_weights_and_gets_all_of_them(policy, sender, http):
    sender.update_weights()
    assert not sender.lost()
    http.post("/update_weight_version", {"new_version": "default"})  # as after a restart
    assert sender.lost()
    assert sender.update_weights() == 2
    assert sender.counters["server_recoveries"] == 1
    assert not sender.lost()


def test_a_resumed_run_pushes_under_the_version_that_its_weights_had(sender, http):
    sender.next_version = 41
    assert [sender.update_weights(), sender.update_weights()] == [41, 42]
    assert http.weight_version() == 42


def test_the_verbs_by_hand_make_a_push(policy, sender, engine, http):
    perturb(policy)
    sender.init_weight_transfer()
    sender.pause()
    sender.send_weights(sender.named_weights())
    sender.resume(1)
    assert (sender.policy_version, http.weight_version()) == (1, 1)
    own_L, sampled_L = own_log_probs(policy, sample(engine))
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_other_ways_to_pause_lose_no_request(mode, policy, server, engine, http):
    sender = VLLMWeightSyncSender(policy, server.url, pause_mode=mode, clear_cache=False)
    sender.update_weights()
    before = sampled_tokens(server)
    with in_background(lambda: sample(engine, n=2, max_tokens=60)) as request:
        wait_for_tokens(server, before + 5)
        sender.update_weights()
    assert [len(c.token_ids) for c in request.result] == [60, 60]
    sender.destroy()


def test_the_trained_weights_are_the_same_after_a_push_and_one_that_failed(policy, sender, monkeypatch):
    original = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    sender.update_weights()
    with monkeypatch.context() as patch:
        patch.setattr(sender._client, "finish_weight_update", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sender.update_weights()
    sender.update_weights()
    assert all(torch.equal(tensor, original[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            None,
            {"backend": "nccl"},
            r"backend is 'shm' and the sender's 'nccl'.*--weight-transfer-config.*backend='shm'",
        ),
        (None, {"serving_dtype": torch.bfloat16}, r"serves float32 .* --dtype bfloat16, or pass serving_dtype"),
        (tiny_qwen3, {}, r"serves another model.*hidden_size 256 \(here 32\).*--model DIRECTORY"),
    ],
)
def test_a_server_that_cannot_take_the_weights_is_found_at_the_handshake(make, options, message, policy, server, http):
    sender = VLLMWeightSyncSender(make() if make else policy, server.url, **options)
    with pytest.raises(ValueError, match=message):
        sender.update_weights()
    assert sender.policy_version == 0


def test_tensors_that_the_served_model_does_not_have_are_named_by_its_loader(policy, server, http):
    class Renamed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = policy.model
            self.extra = torch.nn.Linear(2, 2)

    sender = VLLMWeightSyncSender(Renamed(), server.url)
    with pytest.raises(ServerFailed, match="extra"):
        sender.update_weights()
    sender = VLLMWeightSyncSender(policy.model.layers, server.url)
    with pytest.raises(ServerFailed):
        sender.update_weights()
