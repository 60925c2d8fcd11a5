"""Adapters put in place, switched off and on, and refused where tree batches could not train them."""

import contextlib
import copy
import sys

import pytest
import torch
from adapted import bits_of, lora, quantized, randomize, same_bits
from fakes import tiny_gpt2, tiny_qwen3
from peft import (
    AdaptionPromptConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.tuners.lora.config import KasaConfig, MontecloraConfig, VeloraConfig
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from torchrl_asyncgrpo.adapters import (
    ServedWeights,
    adapters_off,
    add_adapter,
    changes_its_base,
    check_adapters,
    has_adapters,
    lora_config,
    trained_outside_adapters,
    unwrapped,
)

TOKENS = torch.arange(1, 9)[None]
UNTIED = dict(tie_word_embeddings=False)


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS).logits


def test_add_adapter_wraps_the_same_model_and_trains_the_adapter_alone():
    model, config = tiny_qwen3(), LoraConfig(r=4, target_modules="all-linear")
    given = copy.deepcopy(config)
    before = logits(model)
    policy = add_adapter(model, config)
    assert isinstance(policy, PeftModel)
    assert unwrapped(policy) is model
    assert config == given, "the caller's configuration is not changed"
    assert policy.active_peft_config.task_type == "CAUSAL_LM"
    assert {name.split(".")[-3] for name, p in policy.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert torch.equal(logits(policy), before), "an adapter begins as nothing"


def test_a_second_adapter_is_refused():
    for model in (lora(), unwrapped(lora())):
        with pytest.raises(ValueError, match=r"peft_config=LoraConfig.*has an adapter already \(default\)"):
            add_adapter(model, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (tiny_qwen3(**UNTIED), dict(target_modules=["q_proj", "lm_head"]), "on the output head of Qwen3ForCausalLM"),
        (
            tiny_qwen3(**UNTIED),
            dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
            "output head.*modules_to_s",
        ),
        (tiny_qwen3(), dict(target_modules=["q_proj", "embed_tokens"]), "input embedding.*tie_word_embeddings"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), "input embedding"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], trainable_token_indices=[1]), "output head.*trainable_token_in"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], alora_invocation_tokens=[1]), "of the kind ALoraLinear"),
        # these have written the base by then, OLoRA in place
        (tiny_qwen3(**UNTIED), dict(target_modules=["q_proj", "lm_head"], init_lora_weights="pissa"), "output head"),
        (tiny_qwen3(), dict(target_modules=["q_proj", "embed_tokens"], init_lora_weights="olora"), "input embedding"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], kasa_config=KasaConfig()), "of the kind KasaLinear"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], velora_config=VeloraConfig(num_groups=8)), "kind VeloraLinear"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], monteclora_config=MontecloraConfig()), "kind MontecloraLinear"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], init_lora_weights="mica"), "kind MiCALinear.*rsLoRA and DoRA"),
        # peft's own errors
        (tiny_qwen3(), dict(target_modules=["q_proj", "input_layernorm"]), "not supported"),
        (tiny_qwen3(), dict(target_modules=["q_proj"], init_lora_weights="pissa_twice"), "pissa_twice"),
        (tiny_qwen3(), dict(target_modules=["nothing"]), "nothing"),
    ],
)
def test_refused_adapter_leaves_the_model_as_it_was(model, options, message):
    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    before, trained = bits_of(model), [p.requires_grad for p in model.parameters()]
    modules, attributes = dict(model.named_modules()), set(vars(model))
    with pytest.raises(ValueError, match=message):
        add_adapter(model, LoraConfig(**options))
    assert not has_adapters(model)
    assert same_bits(before, bits_of(model))
    assert [p.requires_grad for p in model.parameters()] == trained
    assert dict(model.named_modules()) == modules
    assert set(vars(model)) == attributes
    handle.remove()
    assert not model.model.layers[0].self_attn.q_proj._forward_hooks
    policy = add_adapter(model, LoraConfig(target_modules=["v_proj"]))
    assert changes_its_base(policy) is None


def vision_language(**text):
    """A Qwen2.5-VL, whose head is its embedding where the configuration of the whole says so, not that of its text."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=dict(
                vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}, **text,
            ),
            vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32),
            tie_word_embeddings=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("text", [{}, {"tie_word_embeddings": False}], ids=["unsaid", "contradicted"])
def test_head_that_is_the_embedding_is_known_by_its_weight(text):
    model = vision_language(**text)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with pytest.raises(ValueError, match="input embedding of Qwen2_5_VLForConditionalGeneration"):
        add_adapter(model, LoraConfig(target_modules=["embed_tokens"]))
    assert has_adapters(add_adapter(model, LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("bits", [4, 8])
def test_refused_adapter_leaves_a_quantised_model_as_it_was(tmp_path, bits):
    model = quantized(tmp_path, bits)
    before = dict(ServedWeights(model))
    options = dict(target_modules=["q_proj", "embed_tokens"], init_lora_weights="olora")
    with pytest.raises(ValueError, match="input embedding"):
        add_adapter(model, LoraConfig(**options))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ServedWeights(model).items())


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1),
    ],
)
def test_prompt_learning_is_refused(config):
    model = tiny_qwen3()
    with pytest.raises(ValueError, match=f"peft_config is a {type(config).__name__}.*LoraConfig"):
        add_adapter(model, config)
    if config.is_prompt_learning:
        with pytest.raises(ValueError, match=f"peft_config is a {type(config).__name__}"):
            unwrapped(get_peft_model(model, config))


def test_what_is_no_configuration_is_refused():
    with pytest.raises(ValueError, match="peft_config is a dict.*LoraConfig"):
        add_adapter(tiny_qwen3(), {"r": 4})


def test_adapter_that_is_merged_gets_no_gradient_and_is_refused():
    policy = lora()
    check_adapters(policy)
    policy.merge_adapter()
    with pytest.raises(ValueError, match=r"q_proj is merged.*unmerge_adapter"):
        check_adapters(policy)


def test_adapters_off_is_the_base_and_changes_nothing_else():
    model = tiny_qwen3()
    base = logits(model)
    policy = lora(model, modules_to_save=["norm"])
    policy.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"].weight.requires_grad_(False)
    on, trained = logits(policy), [p.requires_grad for p in policy.parameters()]
    assert not torch.equal(on, base)
    with adapters_off(policy):
        assert torch.equal(logits(policy), base)
    assert torch.equal(logits(policy), on)
    assert [p.requires_grad for p in policy.parameters()] == trained
    with contextlib.suppress(RuntimeError), adapters_off(unwrapped(policy)):
        assert torch.equal(logits(policy), base)
        raise RuntimeError("inside")
    assert torch.equal(logits(policy), on)
    assert [p.requires_grad for p in policy.parameters()] == trained


def test_adapter_that_was_off_stays_off():
    policy = lora()
    with policy.disable_adapter():
        off = logits(policy)
        with adapters_off(policy):
            pass
        assert torch.equal(logits(policy), off)


def test_weights_that_are_trained_beside_the_adapter_are_named():
    assert trained_outside_adapters(lora(modules_to_save=["norm"])) == []
    names = trained_outside_adapters(lora(tiny_gpt2(), fan_in_fan_out=True, bias="lora_only"))
    assert "transformer.h.0.attn.c_attn.base_layer.bias" in names
    assert not any("lora_" in name for name in names)
    policy = lora()
    policy.get_base_model().model.norm.weight.requires_grad_(True)
    assert trained_outside_adapters(policy) == ["model.norm.weight"]


def test_models_without_peft():
    model = tiny_qwen3()
    assert unwrapped(model) is model
    assert not has_adapters(nn.Linear(2, 2))
    check_adapters(model)
    with adapters_off(model):
        assert logits(model) is not None


def test_missing_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert unwrapped(tiny_qwen3()) is not None
    with pytest.raises(ImportError, match=r"peft_config was given.*torchrl-asyncgrpo\[peft\]"):
        add_adapter(tiny_qwen3(), object())
    with pytest.raises(ImportError, match="lora_r was given"):
        lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")


def test_lora_config_takes_all_linear_layers_but_the_head():
    config = lora_config(r=4, alpha=12, dropout=0.0, target_modules="all-linear", use_rslora=True)
    policy = randomize(add_adapter(tiny_qwen3(**UNTIED), config))
    adapted = {name.split(".")[-1] for name, module in policy.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert config.lora_alpha == 12
