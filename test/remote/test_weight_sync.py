"""Pushes that the backend makes: versions, failures, and no weights through the trainer's process."""

import pytest
import torch
from fakes import tiny_qwen3
from remote.windows import ACTORS

from torchrl_asyncgrpo import LocalWeightSyncSender, TransformersEngine
from torchrl_asyncgrpo.remote.actor import RemoteActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.remote.protocol import Push
from torchrl_asyncgrpo.remote.weight_sync import RemoteWeightSyncSender


@pytest.fixture
def parts():
    engine = TransformersEngine(tiny_qwen3(seed=1), max_length=32)
    backend = HostedPolicy(ACTORS["tree"], make_sender=lambda model: LocalWeightSyncSender(model, engine))
    yield engine, backend, RemoteWeightSyncSender(RemoteActor(backend))
    engine.shutdown()


def served(engine):
    return {name: value.clone() for name, value in engine._model.named_parameters()}


def test_the_engine_gets_the_backend_s_weights_and_the_next_version(parts):
    engine, backend, sender = parts
    assert sender.policy_version == 0
    assert sender.update_weights() == 1
    assert sender.policy_version == engine.policy_version == 1
    own = dict(backend.model.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in served(engine).items())
    assert sender.update_weights() == 2
    assert engine.policy_version == 2


def test_nothing_is_read_here(parts, monkeypatch):
    _, _, sender = parts
    monkeypatch.setattr(sender.module.model, "get_extra_state", lambda: pytest.fail("weights were fetched"))
    handed = []
    send = sender.send_weights
    monkeypatch.setattr(sender, "send_weights", lambda weights: (handed.append(weights), send(weights)))
    sender.update_weights()
    assert handed == [()]
    with pytest.raises(RuntimeError, match="in the backend"):
        sender.named_weights()


class RestartedSender(LocalWeightSyncSender):
    """Of an engine that may lose its weights, and did if the test says so."""

    engine_may_restart = True
    is_lost = False

    def lost(self):
        return self.is_lost


def test_the_backend_s_sender_says_whether_the_engine_lost_its_weights(parts):
    engine, _, plain = parts
    backend = HostedPolicy(ACTORS["tree"], make_sender=lambda model: RestartedSender(model, engine))
    sender = RemoteWeightSyncSender(RemoteActor(backend))
    assert (sender.engine_may_restart, plain.engine_may_restart) == (True, False)
    backend.sender.is_lost = True
    assert not sender.lost(), "nothing was pushed yet"
    sender.update_weights()
    assert sender.lost()
    assert engine.policy_version == 1, "asking pushes nothing"
    backend.sender.is_lost = False
    assert not sender.lost()


def test_a_resumed_run_pushes_under_its_own_version(parts):
    engine, _, sender = parts
    sender.next_version = 7
    assert sender.update_weights() == 7
    assert engine.policy_version == sender.policy_version == 7
    assert sender.update_weights() == 8


def test_a_failed_push_raises_leaves_the_version_and_the_next_is_clean(parts):
    engine, backend, sender = parts
    sender.update_weights()
    send = backend.sender.send_weights

    def breaks(weights):
        raise ConnectionError("engine gone")

    backend.sender.send_weights = breaks
    with pytest.raises(ConnectionError, match="engine gone"):
        sender.update_weights()
    assert sender.policy_version == engine.policy_version == 1
    backend.sender.send_weights = send
    assert sender.update_weights() == engine.policy_version == 2


def test_a_push_that_is_not_confirmed_is_none(parts):
    engine, backend, sender = parts
    backend.push_weights = lambda version: Push(False, 0, {})
    with pytest.raises(RuntimeError, match="HostedPolicy did not confirm the push of version 1"):
        sender.update_weights()
    assert sender.policy_version == engine.policy_version == 0


def test_a_version_that_the_backends_sender_skipped_is_skipped_here(parts):
    engine, backend, sender = parts
    sender.update_weights()
    backend.sender._version_to_push = lambda: 4
    assert sender.update_weights() == sender.policy_version == engine.policy_version == 4
    del backend.sender._version_to_push
    assert sender.update_weights() == engine.policy_version == 5


def test_what_the_backends_sender_counted_is_counted_here(parts):
    _, backend, sender = parts
    backend.sender.counters["server_recoveries"] = 2
    sender.update_weights()
    assert sender.counters == {"server_recoveries": 2}
    backend.sender.counters["server_recoveries"] = 3
    sender.lost()
    assert sender.counters == {"server_recoveries": 3}


def test_backend_without_a_sender_is_refused():
    with pytest.raises(ValueError, match="HostedPolicy has no engine to push to.*make_sender"):
        RemoteWeightSyncSender(RemoteActor(HostedPolicy(ACTORS["tree"])))
