"""What vLLM gets of an adapter: base + B A is peft's own merge; and the adapters that are refused, and why."""

import copy

import pytest
import torch
from adapted import bits_of, lora, merged, quantized, randomize, same_bits
from fakes import tiny_gpt2, tiny_moe, tiny_qwen3
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_asyncgrpo.adapters import LoRATensors, ServedWeights, keep_bits

ADAPTERS = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True),
    "some layers": lambda: lora(target_modules=["v_proj", "down_proj"], layers_to_transform=[1]),
    "ranks": lambda: lora(rank_pattern={"q_proj": 6}, alpha_pattern={"q_proj": 3, "k_proj": 5}),
    "gpt2": lambda: lora(tiny_gpt2(), fan_in_fan_out=True),
    "switched on by name": lambda: second_of_two(),
}


def second_of_two():
    policy = lora()
    policy.add_adapter("second", LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    policy.set_adapter("second")
    return randomize(policy, seed=1)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_base_and_the_tensors_are_what_peft_merges(kind):
    policy = ADAPTERS[kind]()
    before = bits_of(policy)
    tensors = LoRATensors(policy)
    transposed = "gpt2" in kind
    expected = dict(merged(policy).named_parameters())
    base = ServedWeights(policy, merge=False)
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    for name, tensor in base.items():
        total, module = tensor.detach().clone(), name.removesuffix(".weight")
        if module in names:
            a, b = (tensors[f"base_model.model.{module}.lora_{kind}.weight"] for kind in "AB")
            total += (b @ a).T if transposed else b @ a
        torch.testing.assert_close(total, expected[name].detach(), rtol=1e-6, atol=1e-6, msg=name)
    assert names < {name.removesuffix(".weight") for name in base}
    assert len(tensors) == len(list(tensors)) == 2 * len(names)
    assert same_bits(before, bits_of(policy)), "nothing was written"


def test_names_are_those_of_pefts_checkpoints():
    policy = lora()
    assert sorted(LoRATensors(policy)) == sorted(get_peft_model_state_dict(policy))


def test_to_ask_for_a_name_computes_nothing(monkeypatch):
    tensors = LoRATensors(lora())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    for other in (name.format("C"), name.format("A").removeprefix("base_model.model."), name.format("A")[:-7], None):
        assert other not in tensors
        with pytest.raises(KeyError):
            tensors[other]
    monkeypatch.setattr(LoRATensors, "__getitem__", lambda *_: pytest.fail("computed"))
    assert name.format("A") in tensors
    assert name.format("B") in tensors


def test_config_is_of_the_highest_rank_and_leaves_the_scaling_to_the_tensors():
    tensors = LoRATensors(lora(rank_pattern={"q_proj": 6}, target_modules=["q_proj", "up_proj"]))
    config = tensors.config()
    assert tensors.rank == config["r"] == config["lora_alpha"] == 6
    assert tensors.targets == config["target_modules"] == ["q_proj", "up_proj"]
    assert config["bias"] == "none"


def test_tensors_follow_training():
    policy = lora()
    tensors = LoRATensors(policy)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    randomize(policy, seed=5)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_an_adapter_of_smollm2_is_less_than_a_twentieth_of_its_weights():
    smollm2 = AutoConfig.for_model(
        "llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        policy = get_peft_model(
            AutoModelForCausalLM.from_config(smollm2), LoraConfig(r=16, target_modules="all-linear")
        )
    whole = sum(tensor.nbytes for tensor in ServedWeights(policy, merge=False).values())
    assert 134e6 < whole / 4 < 135e6
    assert sum(tensor.nbytes for tensor in LoRATensors(policy).values()) < 0.05 * whole


def off():
    policy = lora()
    policy.base_model.disable_adapter_layers()
    return policy


def both_of_two():
    policy = second_of_two()
    policy.base_model.set_adapter(["default", "second"])
    return policy


def with_trained_norm():
    policy = lora()
    policy.get_base_model().model.norm.requires_grad_(True)
    return policy


UNTIED = dict(tie_word_embeddings=False)
REFUSED = {
    "dora": (lambda: lora(use_dora=True), "q_proj is of the kind Dora, and vLLM serves plain LoRA"),
    "biases": (lambda: lora(tiny_gpt2(), fan_in_fan_out=True, bias="all"), "bias and .* are trained beside the LoRA"),
    "lora_bias": (lambda: lora(tiny_gpt2(), fan_in_fan_out=True, lora_bias=True), "has a trained bias"),
    "trained norm": (with_trained_norm, "model.norm.weight and 0 more parameters are trained beside the LoRA"),
    "modules_to_save": (lambda: lora(modules_to_save=["norm"]), "norm is one of modules_to_save"),
    "head": (
        lambda: lora(tiny_qwen3(**UNTIED), target_modules=["lm_head", "q_proj"]),
        "is on the output head, lm_head",
    ),
    "embedding": (
        lambda: lora(tiny_qwen3(**UNTIED), target_modules=["embed_tokens", "q_proj"]),
        "is on model.embed_tokens, a Embedding; only those on linear layers",
    ),
    "experts": (
        lambda: lora(tiny_moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
        "experts, a Qwen3MoeExperts; only those on linear layers",
    ),
    "pissa": (lambda: lora(init_lora_weights="pissa"), "init_lora_weights='pissa', which takes a part of the weights"),
    "two": (both_of_two, r"has the adapters default, second in use; a request of vLLM has exactly one"),
    "off": (off, "in use"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_vllm_cannot_serve_is_refused_by_name_with_the_merged_push_as_the_other_way(kind):
    make, reason = REFUSED[kind]
    with pytest.raises(ValueError, match=f"{reason}.*[Pp]ush .*merged, with VLLMWeightSyncSender"):
        LoRATensors(make())


def test_a_base_in_few_bits_is_refused(tmp_path):
    model = quantized(tmp_path, 4)
    keep_bits(model)
    with pytest.raises(ValueError, match="kept in 4 or 8 bits.*merged, with VLLMWeightSyncSender"):
        LoRATensors(lora(model))


def test_a_model_without_an_adapter_is_refused():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no adapter to push.*VLLMWeightSyncSender"):
        LoRATensors(tiny_qwen3())


def test_an_adapter_that_transformers_put_on_the_model_is_one_like_any_other():
    wrapped = lora()
    model = copy.deepcopy(wrapped.get_base_model())
    assert sorted(LoRATensors(model)) == sorted(LoRATensors(wrapped))
