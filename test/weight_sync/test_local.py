"""Pushes into an engine of this process: what is sent, when the version moves, and what a failure leaves."""

import copy

import pytest
import torch
from fakes import tiny_qwen3

from torchrl_asyncgrpo import LocalWeightSyncSender, TransformersEngine


@pytest.fixture
def parts():
    model = tiny_qwen3()
    engine = TransformersEngine(model)
    yield model, engine, LocalWeightSyncSender(model, engine)
    engine.shutdown()


def weights_of(engine):
    return dict(engine._model.state_dict())


def test_push_copies_every_weight_and_advances_the_version(parts):
    model, engine, sender = parts
    assert sender.policy_version == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    assert sender.update_weights() == 1
    assert engine.policy_version == 1
    theirs = weights_of(engine)
    assert all(torch.equal(theirs[name], value) for name, value in model.state_dict().items())
    assert sender.update_weights() == 2


def test_tied_weights_are_sent_once(parts):
    model, _, sender = parts
    sent = [name for name, _ in sender.named_weights()]
    assert len(sent) == len(set(sent)) == len(list(model.parameters()))
    assert "model.embed_tokens.weight" in sent
    assert "lm_head.weight" not in sent


def test_persistent_buffers_are_sent_and_others_not(parts):
    model, _, sender = parts
    model.register_buffer("running", torch.zeros(1))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    names = {name for name, _ in sender.named_weights()}
    assert "running" in names
    assert "scratch" not in names


def test_trained_weights_are_never_written(parts):
    """W3."""
    model, _, sender = parts
    before = copy.deepcopy(model.state_dict())
    for _ in range(100):
        sender.update_weights()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("broken_after", [0, 3])
def test_failed_push_raises_keeps_the_version_and_the_next_starts_clean(parts, broken_after, monkeypatch):
    """W2."""
    model, engine, sender = parts
    sender.update_weights()
    whole = sender.named_weights

    def breaks():
        for i, item in enumerate(whole()):
            if i == broken_after:
                raise ConnectionError("gone")
            yield item

    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    monkeypatch.setattr(sender, "named_weights", breaks)
    with pytest.raises(ConnectionError, match="gone"):
        sender.update_weights()
    assert sender.policy_version == 1
    monkeypatch.setattr(sender, "named_weights", whole)
    assert sender.update_weights() == 2
    assert torch.equal(weights_of(engine)["model.norm.weight"], model.model.norm.weight)


def test_verbs_come_in_order_and_once_per_push(parts, monkeypatch):
    """W4."""
    _, _engine, sender = parts
    calls = []
    for verb in ("init_weight_transfer", "pause", "send_weights", "resume"):
        original = getattr(sender, verb)
        monkeypatch.setattr(sender, verb, lambda *a, v=verb, f=original: (calls.append(v), f(*a))[1])
    sender.update_weights()
    sender.update_weights()
    push = ["pause", "send_weights", "resume"]
    assert calls == ["init_weight_transfer", *push, *push]
    sender.destroy()


def test_shared_weights_move_the_version_and_copy_nothing():
    model = tiny_qwen3()
    engine = TransformersEngine(model, copy_weights=False)
    assert LocalWeightSyncSender(model, engine).update_weights() == 1
    engine.shutdown()


def test_next_version_restores_a_version_once(parts):
    _, _engine, sender = parts
    sender.next_version = 7
    assert [sender.update_weights(), sender.update_weights()] == [7, 8]
