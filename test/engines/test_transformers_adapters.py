"""The engine over policies with adapters and quantised bases: it samples from what the trainer computes."""

import pytest
import torch
from adapted import bits_of, lora, quantized, randomize, same_bits
from engines.tiny_models import naive_log_probs, prompts_of, sample, tiny_model
from fakes import tiny_gpt2
from peft import LoHaConfig, LoraConfig, get_peft_model

from torchrl_asyncgrpo import LocalWeightSyncSender, SamplingParams, TransformersEngine, load_policy
from torchrl_asyncgrpo.adapters import ServedWeights, has_adapters, has_quantized_layers, keep_bits, unwrapped

PARAMS = SamplingParams(n=3, max_tokens=8, seed=3, ignore_eos=True)


@pytest.fixture
def engine_of():
    engines = []

    def build(policy, **options):
        engines.append(TransformersEngine(policy, **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.shutdown()


def differences(engine, policy, tolerance):
    """The largest distance of the engine's log-probs from the policy's own, which must be within a tolerance."""
    worst = 0.0
    for prompt, completions in zip(PROMPTS, sample(engine, PROMPTS, PARAMS), strict=True):
        for completion in completions:
            own = naive_log_probs(policy.eval(), prompt, completion)
            worst = max(worst, float((own - torch.tensor(completion.log_probs)).abs().max()))
    assert worst <= tolerance
    return worst


PROMPTS = prompts_of(5, 3)
POLICIES = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "gpt2": lambda: lora(tiny_gpt2(), fan_in_fan_out=True, lora_bias=True),
    "modules_to_save": lambda: lora(modules_to_save=["norm"]),
    "gemma2": lambda: lora(tiny_model("gemma2", dtype=torch.float32)),
}


@pytest.mark.parametrize("copy_weights", [True, False])
@pytest.mark.parametrize("kind", POLICIES)
def test_engine_samples_from_base_and_adapter(kind, copy_weights, engine_of):
    policy = POLICIES[kind]()
    before = bits_of(policy)
    engine = engine_of(policy, copy_weights=copy_weights)
    assert has_adapters(engine._model) is not copy_weights
    differences(engine, policy, 2e-5)
    with policy.disable_adapter():
        worst = max(
            float((naive_log_probs(policy, p, c) - torch.tensor(c.log_probs)).abs().max())
            for p, cs in zip(PROMPTS, sample(engine, PROMPTS, PARAMS), strict=True)
            for c in cs
        )
    assert worst > 1e-3, "the base alone is another policy"
    assert same_bits(before, bits_of(policy))


@pytest.mark.parametrize(("bits", "tolerance"), [(4, 2e-5), (8, 0.02)])
def test_engine_of_a_quantised_base_serves_what_it_stands_for(tmp_path, bits, tolerance, engine_of):
    model = quantized(tmp_path, bits)
    keep_bits(model)
    policy = lora(model)
    engine = engine_of(policy)
    assert not has_quantized_layers(engine._model)
    differences(engine, policy, tolerance)
    sender = LocalWeightSyncSender(policy, engine)
    randomize(policy, seed=2)
    assert sender.update_weights() == 1
    differences(engine, policy, tolerance)


@pytest.mark.parametrize("first", ["policy", "policy beside the engine", "engine"])
@pytest.mark.parametrize(("bits", "tolerance"), [(4, 2e-5), (8, 0.02)])
def test_shared_quantised_base_stays_what_it_is_whoever_runs_first(tmp_path, bits, tolerance, first, engine_of):
    """bitsandbytes moves the scales of 8 bits into the layer that runs first, and repacks 4 bits in eval mode."""
    policy = lora(quantized(tmp_path, bits)).train()
    expected = dict(ServedWeights(policy))
    if first == "policy":
        policy(input_ids=torch.tensor(PROMPTS[:1]))
    before = bits_of(policy)
    engine = engine_of(policy, copy_weights=False)
    if first == "policy beside the engine":
        policy(input_ids=torch.tensor(PROMPTS[:1]))
    assert has_quantized_layers(engine._model)
    assert memory_of(engine._model) == memory_of(unwrapped(policy)), "nothing is held twice"
    differences(engine, policy, tolerance)
    differences(engine, policy, tolerance)
    assert same_bits(before, bits_of(policy))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ServedWeights(policy).items())


def memory_of(model):
    """Addresses of all tensors that a model's layers hold, in or outside parameters."""
    beside = [t for layer in model.modules() if hasattr(layer, "state") for t in (layer.state.CB, layer.state.SCB)]
    return {t.data_ptr() for t in [*model.parameters(), *beside]}


def test_engine_keeps_shared_bits_from_the_policys_own_evaluation(tmp_path, engine_of):
    policy = lora(quantized(tmp_path, 4)).eval()
    engine = engine_of(policy, copy_weights=False)
    before = bits_of(policy)
    with torch.no_grad():
        policy(input_ids=torch.tensor(PROMPTS[:1]))
    assert same_bits(before, bits_of(policy))
    differences(engine, policy, 2e-5)


def test_shared_adapter_is_read_as_it_is_trained(engine_of):
    policy = lora()
    engine = engine_of(policy, copy_weights=False)
    randomize(policy, seed=4)
    differences(engine, policy, 2e-5)
    assert LocalWeightSyncSender(policy, engine).update_weights() == 1


def test_policy_with_gradient_checkpointing_is_sampled_from(engine_of):
    """Its embedding has a hook that asks for gradients, and the engine's copy of it, too."""
    policy = load_policy(lora().merge_and_unload(), peft_config=LoraConfig(target_modules=["q_proj"]))
    checkpointed = load_policy(policy, gradient_checkpointing=True)
    for copy_weights in (True, False):
        differences(engine_of(checkpointed, copy_weights=copy_weights), policy, 2e-5)


def test_adapter_that_cannot_be_merged_can_be_shared(engine_of):
    model = get_peft_model(tiny_model("qwen3", dtype=torch.float32), LoHaConfig(r=2, target_modules=["q_proj"]))
    policy = randomize(model)
    with pytest.raises(ValueError, match=r"loha.*copy_weights=False"):
        engine_of(policy)
    differences(engine_of(policy, copy_weights=False), policy, 2e-5)
