"""Merged and dequantised weights against peft's own merge, against the formula in float64, and against logits."""

import copy
import weakref

import pytest
import torch
from adapted import bits_of, lora, merged, quantized, quantized_gpt2, randomize, same_bits
from fakes import tiny_gpt2, tiny_moe, tiny_qwen3
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from torch import nn

from torchrl_asyncgrpo.adapters import ServedWeights, has_adapters, plain_copy

TOKENS = torch.arange(1, 9)[None]


def two_adapters():
    policy = lora()
    policy.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    policy.base_model.set_adapter(["default", "second"])
    return randomize(policy, seed=1)


ADAPTERS = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora(use_dora=True),
    "some layers": lambda: lora(target_modules=["v_proj"], layers_to_transform=[1]),
    "ranks": lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3}),
    "two adapters": two_adapters,
    "embedding": lambda: lora(tiny_qwen3(tie_word_embeddings=False), target_modules=["embed_tokens", "o_proj"]),
    "modules_to_save": lambda: lora(modules_to_save=["norm"]),
    "gpt2": lambda: lora(tiny_gpt2(), fan_in_fan_out=True),
    "gpt2 dora": lambda: lora(tiny_gpt2(), fan_in_fan_out=True, use_dora=True),
    "gpt2 lora_bias": lambda: lora(tiny_gpt2(), fan_in_fan_out=True, lora_bias=True),
    "trained biases": lambda: lora(tiny_gpt2(), fan_in_fan_out=True, bias="all"),
    "experts": lambda: lora(
        tiny_moe(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
}


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS).logits.double()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_served_weights_are_those_of_pefts_own_merge(kind):
    policy = ADAPTERS[kind]()
    before = bits_of(policy)
    served, own = dict(ServedWeights(policy)), merged(policy)
    expected = dict(own.named_parameters())
    assert list(served) == list(expected), "names of the base checkpoint, in its order, tied weights once"
    for name, tensor in expected.items():
        torch.testing.assert_close(served[name], tensor.detach(), rtol=1e-6, atol=1e-6, msg=name)
    assert same_bits(before, bits_of(policy)), "nothing was written"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_plain_copy_computes_what_the_policy_computes(kind):
    policy = ADAPTERS[kind]()
    copied = plain_copy(policy)
    assert not has_adapters(copied)
    assert type(copied) is type(policy.get_base_model())
    torch.testing.assert_close(logits(copied), logits(policy), rtol=0, atol=2e-6)
    base = plain_copy(merged(policy))
    assert [n for n, _ in copied.named_parameters()] == [n for n, _ in base.named_parameters()], "ties are kept"


def test_merged_weight_is_base_plus_scaled_product_in_float64():
    policy = lora(tiny_qwen3().double(), r=3)
    (layer,) = [m for n, m in policy.named_modules() if n.endswith("layers.1.mlp.up_proj")]
    A, B = (getattr(layer, name)["default"].weight.detach().double() for name in ("lora_A", "lora_B"))
    expected = layer.base_layer.weight.detach() + 8 / 3 * B @ A
    served = ServedWeights(policy)["model.layers.1.mlp.up_proj.weight"]
    assert served.dtype == torch.float64
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-7)  # the adapter itself is float32


def exact_sum(layer, *adapters):
    """Base and what adapters add, in float64."""
    total = layer.base_layer.weight.double()
    for name in adapters:
        A, B = (getattr(layer, kind)[name].weight.double() for kind in ("lora_A", "lora_B"))
        total = total + layer.scaling[name] * (B @ A)
    return total


def is_rounded_once(served, exact):
    """Whether bfloat16 numbers are at most half a unit in the last place from exact ones, float32 noise aside."""
    unit = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)
    return served.dtype == torch.bfloat16 and bool(((served.double() - exact).abs() <= 0.501 * unit).all())


@pytest.mark.parametrize("wide_adapter", [True, False])
@pytest.mark.parametrize("adapters", [["default"], ["default", "second"]])
def test_sum_is_rounded_once_to_the_dtype_of_the_base(wide_adapter, adapters):
    """peft itself rounds each delta to the dtype of the adapter."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False)
    policy = get_peft_model(tiny_qwen3().bfloat16(), config, autocast_adapter_dtype=wide_adapter)
    policy.add_adapter("second", config, autocast_adapter_dtype=wide_adapter)
    policy.base_model.set_adapter(adapters)
    name = "model.layers.0.self_attn.q_proj"
    layer = policy.get_base_model().get_submodule(name)
    assert layer.lora_A["second"].weight.dtype == (torch.float32 if wide_adapter else torch.bfloat16)
    assert is_rounded_once(ServedWeights(policy)[f"{name}.weight"], exact_sum(layer, *adapters))
    assert ServedWeights(policy).dtypes == {torch.bfloat16}


def test_embeddings_and_trained_biases_in_half_precision_are_rounded_once():
    def adapted(target, **options):
        config = LoraConfig(r=4, target_modules=[target], init_lora_weights=options.get("lora_bias", False), **options)
        model = tiny_gpt2(tie_word_embeddings=False).bfloat16()
        policy = randomize(get_peft_model(model, config, autocast_adapter_dtype=False))
        return ServedWeights(policy), policy.get_base_model().transformer

    served, model = adapted("wte")
    layer = model.wte
    delta = (layer.lora_embedding_B["default"].double() @ layer.lora_embedding_A["default"].double()).T
    exact = layer.base_layer.weight.double() + delta * layer.scaling["default"]
    assert is_rounded_once(served["transformer.wte.weight"], exact)
    served, model = adapted("c_attn", lora_bias=True, lora_alpha=5, fan_in_fan_out=True)
    layer = model.h[0].attn.c_attn
    exact = layer.base_layer.bias.double() + layer.lora_B["default"].bias.double() * layer.scaling["default"]
    assert is_rounded_once(served["transformer.h.0.attn.c_attn.bias"], exact)


def test_merged_tensors_are_made_when_asked_for_and_not_kept():
    policy = lora()
    served = ServedWeights(policy)
    adapted, frozen = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    first = served[adapted].clone()
    assert served[frozen] is policy.get_base_model().model.norm.weight
    previous = None
    for name, tensor in served.items():
        assert previous is None or previous() is None, "one merged tensor at a time"
        previous = weakref.ref(tensor) if "_proj" in name else None
        del tensor
    randomize(policy, seed=5)
    assert not torch.equal(served[adapted], first), "read anew each time"
    assert not served[adapted].requires_grad


def test_to_ask_for_a_name_computes_nothing(monkeypatch):
    served = ServedWeights(lora())
    monkeypatch.setattr(ServedWeights, "__getitem__", lambda *_: pytest.fail("computed"))
    assert "model.layers.0.self_attn.q_proj.weight" in served
    assert "model.layers.0.self_attn.q_proj.bias" not in served
    assert None not in served


def test_switched_off_adapter_serves_the_base():
    policy = lora()
    base = policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    with policy.disable_adapter():
        assert torch.equal(ServedWeights(policy)["model.layers.0.self_attn.q_proj.weight"], base)
    assert not torch.equal(ServedWeights(policy)["model.layers.0.self_attn.q_proj.weight"], base)


def test_adapter_that_is_merged_already_is_not_added_twice():
    policy = lora()
    expected = dict(merged(policy).named_parameters())
    policy.merge_adapter()
    for name, tensor in ServedWeights(policy).items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=1e-6)


def test_adapters_that_transformers_put_in_place_are_merged_too():
    model = tiny_qwen3()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    randomize(model)
    torch.testing.assert_close(logits(plain_copy(model)), logits(model), rtol=0, atol=2e-6)


def test_plain_model_serves_its_own_tensors():
    model = tiny_qwen3()
    model.register_buffer("running", torch.zeros(1))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    served = ServedWeights(model)
    expected = {**dict(model.named_parameters()), "running": model.running}
    assert list(served) == list(expected)
    assert all(served[name] is tensor for name, tensor in expected.items())
    assert served.buffers == {"running"}
    assert served.dtypes == {torch.float32}


def test_buffers_of_a_wrapped_model_have_the_names_of_the_base():
    model = tiny_qwen3()
    model.model.layers[0].self_attn.q_proj.register_buffer("scale", torch.ones(1))
    assert ServedWeights(lora(model)).buffers == {"model.layers.0.self_attn.q_proj.scale"}


def test_any_module_is_served():
    assert list(ServedWeights(nn.Sequential(nn.Linear(2, 2, bias=False)))) == ["0.weight"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoHaConfig(r=2, target_modules=["q_proj"]), "loha.layer.Linear.*LoRA, rsLoRA and DoRA"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "ia3.layer.Linear.*copy_weights=False"),
        (LoraConfig(target_modules=["embed_tokens"], use_dora=True), "Embedding with DoraEmbeddingVariant"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "TrainableTokensWrapper"),
    ],
)
def test_what_cannot_be_merged_is_named(config, message):
    policy = get_peft_model(tiny_qwen3(tie_word_embeddings=False), config)
    for make in (ServedWeights, plain_copy):
        with pytest.raises(ValueError, match=message):
            make(policy)


@pytest.mark.parametrize(("bits", "tolerance"), [(4, 2e-6), (8, 0.02)])
@pytest.mark.parametrize("load", [quantized, quantized_gpt2])
@pytest.mark.parametrize("dora", [False, True])
def test_quantised_base_is_served_dequantised(tmp_path, bits, tolerance, load, dora):
    """8 bits: the policy quantises its activations, too, so that only what the weights stand for is the same."""
    from torchrl_asyncgrpo.adapters import keep_bits

    model = load(tmp_path, bits)
    keep_bits(model)
    policy = lora(model, use_dora=dora, fan_in_fan_out=load is quantized_gpt2)
    before, names = bits_of(policy), [name for name, _ in type(model)(model.config).named_parameters()]
    served = ServedWeights(policy)
    assert list(served) == names
    assert {tensor.dtype for tensor in served.values()} == served.dtypes == {torch.float32}
    copied = plain_copy(policy)
    original = type(model).from_pretrained(tmp_path)
    assert {n: p.shape for n, p in copied.named_parameters()} == {n: p.shape for n, p in original.named_parameters()}
    torch.testing.assert_close(logits(copied), logits(policy), rtol=0, atol=tolerance)
    assert same_bits(before, bits_of(policy))


def test_quantised_base_alone_is_close_to_what_was_quantised(tmp_path):
    served = ServedWeights(quantized(tmp_path, 4))
    original = type(quantized(tmp_path, 4)).from_pretrained(tmp_path)
    for name, tensor in original.named_parameters():
        error = (served[name] - tensor).abs().max() / tensor.abs().max()
        assert error < (0.2 if "_proj" in name else 1e-9), name


def test_plain_copy_has_tensors_of_its_own():
    policy = lora()
    copied = plain_copy(policy)
    theirs = {tensor.data_ptr() for tensor in [*policy.parameters(), *policy.buffers()]}
    assert not theirs & {tensor.data_ptr() for tensor in [*copied.parameters(), *copied.buffers()]}
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    again = copy.deepcopy(copied)
    assert torch.equal(logits(again), logits(copied))
