"""W3: the engine gets base + delta, and the trained weights are never written."""

import pytest
import torch
from adapted import bits_of, lora, merged, quantized, randomize, rollouts, same_bits
from fakes import tiny_gpt2, tiny_qwen3
from peft import IA3Config, LoraConfig, get_peft_model

from torchrl_asyncgrpo import GRPOLoss, LocalWeightSyncSender, TransformersEngine, TreeActor, TreePacker, load_policy
from torchrl_asyncgrpo.adapters import keep_bits


def kept(model):
    keep_bits(model)
    return model


POLICIES = {
    "lora": lambda _: lora(),
    "dora": lambda _: lora(use_dora=True),
    "gpt2 biases": lambda _: lora(tiny_gpt2(), fan_in_fan_out=True, bias="all"),
    "modules_to_save": lambda _: lora(modules_to_save=["norm"]),
    "4 bits": lambda path: lora(kept(quantized(path, 4))),
    "8 bits": lambda path: lora(kept(quantized(path, 8))),
}


@pytest.fixture(params=POLICIES)
def parts(request, tmp_path):
    policy = POLICIES[request.param](tmp_path)
    engine = TransformersEngine(policy)
    yield policy, engine, LocalWeightSyncSender(policy, engine)
    engine.shutdown()


def test_trained_weights_are_bit_identical_after_a_hundred_pushes(parts):
    policy, engine, sender = parts
    before = bits_of(policy)
    tensors = [*policy.parameters(), *policy.buffers()]
    trained = [p.requires_grad for p in policy.parameters()]
    for version in range(1, 101):
        assert sender.update_weights() == version
    assert same_bits(before, bits_of(policy))
    now = [*policy.parameters(), *policy.buffers()]
    assert all(a is b for a, b in zip(tensors, now, strict=True)), "the very same tensors"
    assert [p.requires_grad for p in policy.parameters()] == trained
    assert not any(p.requires_grad for p in engine._model.parameters())


@pytest.mark.parametrize("broken_after", [0, 1, 9])
def test_trained_weights_are_bit_identical_after_a_push_that_raised(parts, broken_after, monkeypatch):
    policy, engine, sender = parts
    sender.update_weights()
    before = bits_of(policy)
    load = engine.load_weights

    def breaks(weights):
        def some():
            for i, item in enumerate(weights):
                if i == broken_after:
                    raise ConnectionError("gone")
                yield item

        load(some())

    monkeypatch.setattr(engine, "load_weights", breaks)
    with pytest.raises(ConnectionError, match="gone"):
        sender.update_weights()
    assert same_bits(before, bits_of(policy))
    assert sender.policy_version == 1
    monkeypatch.setattr(engine, "load_weights", load)
    randomize(policy, seed=7)
    assert sender.update_weights() == 2
    served = engine._model.state_dict()
    assert all(torch.equal(served[name], tensor) for name, tensor in sender.named_weights())


def test_engine_gets_base_plus_delta_under_the_names_of_the_base():
    policy = lora()
    engine = TransformersEngine(tiny_qwen3(seed=5))  # built from another model of the same shape
    sender = LocalWeightSyncSender(policy, engine)
    sender.update_weights()
    expected = merged(policy).state_dict()
    served = engine._model.state_dict()
    assert served.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(served[name], tensor, rtol=0, atol=1e-6, msg=name)
    engine.shutdown()


def test_pushes_follow_training():
    policy = load_policy(tiny_qwen3(), peft_config=LoraConfig(r=4, target_modules="all-linear"))
    engine = TransformersEngine(policy)
    sender = LocalWeightSyncSender(policy, engine)
    loss_module = GRPOLoss(TreeActor(policy))
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    (batch,) = TreePacker()(rollouts())
    base = {n: p.clone() for n, p in policy.named_parameters() if not p.requires_grad}
    for _ in range(3):
        loss_module(batch.clone())["loss_objective"].backward()
        optimizer.step()
        optimizer.zero_grad()
        sender.update_weights()
        x = torch.arange(1, 9)[None]
        with torch.no_grad():
            theirs = merged(policy)(input_ids=x).logits
        own = merged_logits(engine, x)
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-6)
    assert all(torch.equal(p, base[n]) for n, p in policy.named_parameters() if n in base)
    engine.shutdown()


@torch.no_grad()
def merged_logits(engine, x):
    """Logits of the engine's weights in a plain model."""
    model = tiny_qwen3(seed=9)
    model.load_state_dict(engine._model.state_dict())
    return model.eval()(input_ids=x).logits


def test_adapter_that_cannot_be_merged_is_refused_at_construction():
    policy = get_peft_model(tiny_qwen3(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    engine = TransformersEngine(policy, copy_weights=False)
    with pytest.raises(ValueError, match="ia3.*LoRA, rsLoRA and DoRA"):
        LocalWeightSyncSender(policy, engine)
    engine.shutdown()
