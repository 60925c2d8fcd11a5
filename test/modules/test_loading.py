"""What a script gives becomes a policy: the same one from a name, a directory and an instance, or an error by name."""

import copy
import importlib.util
import json

import pytest
import torch
import transformers
from adapted import WIDE, bits_of, randomize, rollouts, same_bits
from fakes import save_as_hub, save_with_own_code, tiny_gpt2, tiny_qwen3
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, BitsAndBytesConfig, Qwen3ForCausalLM

from torchrl_asyncgrpo import (
    GRPOLoss,
    ModelConfig,
    TreeActor,
    TreePacker,
    load_policy,
    model_kwargs,
    peft_config,
    run_name,
)
from torchrl_asyncgrpo.adapters import unwrapped
from torchrl_asyncgrpo.adapters.quantized import is_quantized

NAME = "someone/tiny"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    tiny_qwen3(**WIDE).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def hub(directory, tmp_path_factory):
    """A hub cache that holds the directory as a model, as its files lie after a download."""
    cache = tmp_path_factory.mktemp("hub")
    save_as_hub(cache, NAME, main=directory, v2=directory)
    return cache


def trained(policy, steps=3, lr=1e-2):
    """Losses of a few optimizer steps, and the weights after them."""
    actor = TreeActor(policy)
    (batch,) = TreePacker()(rollouts())
    loss_module = GRPOLoss(actor)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_module(batch.clone())["loss_objective"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach().clone() for name, p in unwrapped(policy).named_parameters()}


def test_name_directory_and_instance_give_the_same_training(directory, hub):
    instance = Qwen3ForCausalLM.from_pretrained(directory)
    results = [
        trained(load_policy(directory)),
        trained(load_policy(str(directory), {"dtype": "float32"})),
        trained(load_policy(NAME, {"cache_dir": str(hub), "revision": "v2"})),
        trained(load_policy(instance)),
    ]
    losses, weights = results[0]
    assert len(set(losses)) == 3
    for other_losses, other_weights in results[1:]:
        assert other_losses == losses
        assert all(torch.equal(other_weights[name], tensor) for name, tensor in weights.items())


def test_models_own_code_is_run_where_it_is_trusted_and_trains_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    same = save_with_own_code(tmp_path / "tiny")
    policy = load_policy(tmp_path / "tiny", model_kwargs(ModelConfig(trust_remote_code=True)))
    assert type(policy).__name__ == "OwnForCausalLM"
    assert policy.config._attn_implementation == "tree_segments"
    (losses, weights), (expected_losses, expected) = trained(policy), trained(load_policy(same.eval()))
    assert losses == expected_losses
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    for kwargs in (None, {"trust_remote_code": None}, model_kwargs(ModelConfig())):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            load_policy(tmp_path / "tiny", kwargs)
    assert not asked, "a job has nobody at its terminal"


def test_instance_is_the_same_object_trains_and_changes_its_weights(directory):
    instance = Qwen3ForCausalLM.from_pretrained(directory)
    before = bits_of(instance)
    policy = load_policy(instance)
    assert policy is instance
    assert policy.config._attn_implementation == "tree_segments"
    assert same_bits(before, bits_of(instance))
    trained(policy)
    assert not same_bits(before, bits_of(instance))


def test_wrapped_instance_is_the_same_object(directory):
    wrapped = get_peft_model(Qwen3ForCausalLM.from_pretrained(directory), LoraConfig(target_modules=["q_proj"]))
    assert load_policy(wrapped) is wrapped
    assert unwrapped(wrapped).config._attn_implementation == "tree_segments"
    with pytest.raises(ValueError, match=r"peft_config=LoraConfig.*has an adapter already"):
        load_policy(wrapped, peft_config=LoraConfig(target_modules=["q_proj"]))


def test_a_frozen_adapter_is_refused(directory, tmp_path):
    def base():
        return Qwen3ForCausalLM.from_pretrained(directory)

    get_peft_model(base(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    disabled = PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    load_policy(disabled)
    disabled.base_model.disable_adapter_layers()
    inside = base()
    inside.load_adapter(str(tmp_path))
    for model in (PeftModel.from_pretrained(base(), tmp_path), disabled, inside):
        attention = unwrapped(model).config._attn_implementation
        with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has an adapter \(default\).*is_trainable=True.*enable"):
            load_policy(model)
        assert unwrapped(model).config._attn_implementation == attention
    load_policy(base().requires_grad_(False))  # a reference, for instance


@pytest.mark.parametrize("options", [{}, {"load_in_4bit": True}])
def test_an_adapter_is_trained_in_float32_on_a_base_in_float16(directory, options):
    config = ModelConfig(dtype="float16", lora_r=4, **options)
    policy = load_policy(directory, model_kwargs(config), peft_config=peft_config(config))
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert unwrapped(policy).model.norm.weight.dtype == torch.float16
    losses, _ = trained(randomize(policy, std=0.02), steps=8)
    assert losses[-1] < losses[0] - 0.04


def test_a_refused_adapter_leaves_attention_as_it_was(directory):
    model = Qwen3ForCausalLM.from_pretrained(directory)
    for options in (dict(target_modules=["nothing"]), dict(target_modules=["q_proj", "embed_tokens"])):
        with pytest.raises(ValueError, match="nothing|embed"):
            load_policy(model, peft_config=LoraConfig(**options))
        assert model.config._attn_implementation == "sdpa"


def test_a_saved_adapter_names_the_revision_of_its_base(hub, tmp_path):
    kwargs = {"cache_dir": str(hub), "revision": "v2"}
    load_policy(NAME, kwargs, peft_config=LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (saved["base_model_name_or_path"], saved["revision"]) == (NAME, "v2")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_explicit_dtype_wins_and_the_callers_dict_stays(directory, dtype, field):
    """C1."""
    given = {field: dtype, "attention_dropout": 0.0, "device_map": {"": "cpu"}, "use_cache": False}
    kwargs = copy.deepcopy(given)
    policy = load_policy(directory, kwargs)
    assert policy.dtype == torch.bfloat16
    assert policy.config.use_cache is False
    assert kwargs == given


def test_dtype_is_the_checkpoints_by_default(tmp_path):
    tiny_qwen3().bfloat16().save_pretrained(tmp_path)
    assert load_policy(tmp_path).dtype == torch.bfloat16
    assert load_policy(tmp_path, model_kwargs(ModelConfig(dtype="float32"))).dtype == torch.float32


def test_arguments_of_an_instance_are_ignored_with_a_warning(directory):
    """C2."""
    instance = Qwen3ForCausalLM.from_pretrained(directory)
    with pytest.warns(UserWarning, match=r"model_init_kwargs \(dtype, revision\) are ignored.*Qwen3ForCausalLM"):
        assert load_policy(instance, {"dtype": "bfloat16", "revision": "v2"}) is instance
    assert instance.dtype == torch.float32


@pytest.mark.parametrize(
    "kwargs", [{"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, {"load_in_8bit": 1}]
)
def test_quantisation_of_an_instance_is_refused(kwargs):
    """C2."""
    with pytest.raises(ValueError, match=f"{next(iter(kwargs))} was given with an instance of Qwen3ForCausalLM"):
        load_policy(tiny_qwen3(), kwargs)


def test_model_kwargs_can_be_looked_at_and_changed():
    kwargs = model_kwargs(ModelConfig(revision="v2", dtype="bfloat16", attention="reference"))
    assert kwargs == {
        "dtype": torch.bfloat16,
        "trust_remote_code": False,
        "revision": "v2",
        "attn_implementation": "tree_reference",
        "device_map": None,
    }
    assert model_kwargs(ModelConfig()) == {"dtype": "auto", "trust_remote_code": False, "device_map": None}
    kwargs["use_cache"] = False
    assert "use_cache" not in model_kwargs(ModelConfig())
    config = ModelConfig(device_map={"": "cpu"})
    model_kwargs(config)["device_map"][""] = "meta"
    assert config.device_map == {"": "cpu"}


def test_attention_of_the_arguments_is_installed(directory):
    kwargs = model_kwargs(ModelConfig(attention="reference"))
    assert load_policy(directory, kwargs).config._attn_implementation == "tree_reference"
    with pytest.raises(ValueError, match="attention='segments' and attn_implementation='tree_reference'"):
        load_policy(directory, kwargs, attention="segments")


def test_attention_without_trees_is_replaced_with_a_warning_or_kept_where_asked(directory):
    with pytest.warns(UserWarning, match="attn_implementation='eager' is ignored.*tree_segments"):
        policy = load_policy(directory, {"attn_implementation": "eager"})
    assert policy.config._attn_implementation == "tree_segments"
    kept = load_policy(directory, {"attn_implementation": "eager"}, attention=None)
    assert kept.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            dict(load_in_4bit=True),
            dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        ),
        (
            dict(load_in_4bit=True, dtype="bfloat16", bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
            dict(bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
        ),
        (dict(load_in_8bit=True), dict(load_in_8bit=True, load_in_4bit=False)),
    ],
)
def test_quantisation_is_assembled_with_a_device_map_of_one_device(options, expected, monkeypatch):
    kwargs = model_kwargs(ModelConfig(**options))
    for field, value in expected.items():
        assert getattr(kwargs["quantization_config"], field) == value
    assert kwargs["device_map"] == {"": "cpu"}
    assert model_kwargs(ModelConfig(**options, device_map="auto"))["device_map"] == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert model_kwargs(ModelConfig(**options))["device_map"] == {"": 1}


def test_device_map_is_none_under_several_processes(directory, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert model_kwargs(ModelConfig(device_map="auto"))["device_map"] is None
    assert model_kwargs(ModelConfig(load_in_4bit=True))["device_map"] is None
    maps, load = [], Qwen3ForCausalLM.from_pretrained
    monkeypatch.setattr(
        Qwen3ForCausalLM, "from_pretrained", lambda *a, **kw: (maps.append(kw["device_map"]), load(*a, **kw))[1]
    )
    with pytest.warns(UserWarning, match="device_map='auto' is ignored under several processes"):
        load_policy(directory, {"device_map": "auto"})
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert model_kwargs(ModelConfig(device_map="auto"))["device_map"] == "auto"
    load_policy(directory, {"device_map": "auto"})
    assert maps == [None, "auto"]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert model_kwargs(ModelConfig(device_map="auto"))["device_map"] is None


def offloaded(directory, folder):
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    return {"device_map": places | {"model.layers.1": "disk"}, "offload_folder": folder}


def test_layers_that_a_device_map_offloads_are_refused(directory, tmp_path):
    """They are on meta between their forwards, get no gradient, and are not pushed."""
    kwargs = offloaded(directory, tmp_path)
    instance = Qwen3ForCausalLM.from_pretrained(directory, **kwargs)
    message = r"model\.layers\.1\.\S+ is offloaded \(device_map\).*device_map=None.*load_in_4bit"
    for load in (lambda: load_policy(directory, kwargs), lambda: load_policy(instance), lambda: TreeActor(instance)):
        with pytest.raises(ValueError, match=message):
            load()
    assert TreeActor(tiny_qwen3().to("meta")).model.device.type == "meta", "as a whole it is a model without weights"


def test_missing_bitsandbytes_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"load_in_4bit=True and bitsandbytes.*torchrl-asyncgrpo\[bitsandbytes\]"):
        model_kwargs(ModelConfig(load_in_4bit=True))


def test_peft_config_of_the_settings(directory):
    assert peft_config(ModelConfig()) is None
    config = peft_config(
        ModelConfig(
            lora_r=4, lora_alpha=6, lora_target_modules=["q_proj"], use_rslora=True, lora_modules_to_save=["norm"]
        )
    )
    assert (config.r, config.lora_alpha, config.target_modules, config.use_rslora) == (4, 6, {"q_proj"}, True)
    policy = load_policy(directory, peft_config=config)
    assert isinstance(policy, PeftModel)
    assert peft_config(ModelConfig(lora_r=4, lora_modules_to_save="norm")).modules_to_save == ["norm"]
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len([name for name in names if "lora_" in name]) == 2 * 2
    assert "base_model.model.model.norm.modules_to_save.default.weight" in names


def test_adapter_trains_and_its_base_stays(directory):
    policy = load_policy(directory, peft_config=LoraConfig(r=4, target_modules="all-linear"))
    base = {n: p.detach().clone() for n, p in unwrapped(policy).named_parameters() if "lora_" not in n}
    losses, after = trained(randomize(policy, std=0.02), steps=8)
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())


@pytest.mark.parametrize("adapted", [False, True])
def test_gradient_checkpointing_recomputes_layers_and_changes_nothing(directory, adapted):
    (batch,) = TreePacker()(rollouts())
    gradients, calls = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["v_proj"]) if adapted else None
        policy = load_policy(directory, peft_config=config, gradient_checkpointing=checkpointing)
        actor = TreeActor(randomize(policy))
        count = []
        unwrapped(policy).model.layers[1].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        actor(batch.clone())["node", "log_prob"].sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
        calls.append(len(count))
    assert calls == [1, 2]
    assert all(float(g.abs().sum()) > 0 for g in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_attention_dropout_acts_from_gradient_checkpointing_on():
    model = tiny_qwen3(attention_dropout=0.3).eval()
    assert load_policy(model).config._attn_implementation == "tree_segments"
    with pytest.warns(UserWarning, match="dropout"):
        policy = load_policy(model, gradient_checkpointing=True)
    assert policy.config._attn_implementation == "tree_reference", "segments have no dropout"
    with pytest.raises(ValueError, match="'segments' cannot honour attention dropout"):
        load_policy(model.eval(), attention="segments", gradient_checkpointing=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapter_gets_gradients_with_either_kind_of_checkpointing(directory, reentrant):
    """Reentrant checkpointing trains nothing below inputs that need no gradient."""
    config = LoraConfig(r=4, target_modules=["v_proj"])
    policy = load_policy(directory, peft_config=config, gradient_checkpointing=True)
    policy.gradient_checkpointing_enable({"use_reentrant": reentrant})
    (batch,) = TreePacker()(rollouts())
    TreeActor(randomize(policy))(batch)["node", "log_prob"].sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in policy.parameters() if p.requires_grad)


def test_dropout_that_would_act_is_warned_of(directory, tmp_path, recwarn):
    load_policy(directory)
    assert not [w for w in recwarn if "dropout" in str(w.message)]
    with pytest.warns(UserWarning, match=r"dropout \(p=0\.1\).*ratio of unchanged weights"):
        load_policy(directory, peft_config=LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    tiny_gpt2(resid_pdrop=0.2).save_pretrained(tmp_path)
    load_policy(tmp_path)
    with pytest.warns(UserWarning, match=r"dropout \(p=0\.2\)"):
        load_policy(tmp_path, gradient_checkpointing=True)
    with pytest.warns(UserWarning, match=r"dropout \(p=0\.3\)"):  # no module of its own
        load_policy(tiny_qwen3(attention_dropout=0.3).train(), attention=None)
    config = LoraConfig(target_modules=["q_proj"])
    with pytest.warns(UserWarning, match=r"dropout \(p=0\.4\)"):
        load_policy(tiny_qwen3(attention_dropout=0.4).eval(), peft_config=config, attention="reference")


@pytest.mark.parametrize("bits", [4, 8])
def test_qlora_trains_on_a_quantised_base(directory, bits):
    config = ModelConfig(**{f"load_in_{bits}bit": True}, lora_r=4, lora_alpha=16)
    policy = load_policy(directory, model_kwargs(config), peft_config=peft_config(config))
    frozen = {n: p for n, p in policy.named_parameters() if not p.requires_grad}
    assert {p.dtype for n, p in frozen.items() if "_proj" in n} == {torch.uint8 if bits == 4 else torch.int8}
    before = {n: p.detach().clone() for n, p in frozen.items()}
    losses, _ = trained(randomize(policy, std=0.02), steps=8)
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(p, before[n]) for n, p in frozen.items()), "the bits of the base"
    policy.eval()
    with torch.no_grad():
        policy(input_ids=torch.arange(1, 9)[None])
    assert all(torch.equal(p, before[n]) for n, p in frozen.items()), "after an evaluation, too"


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_layers_keep_their_bits_without_an_actor(directory, bits):
    """On some CPUs bitsandbytes would lay 4 bits out anew; here it is told not to, on any."""
    config = ModelConfig(**{f"load_in_{bits}bit": True}, lora_r=4)
    policy = load_policy(directory, model_kwargs(config), peft_config=peft_config(config)).eval()
    layers = [module for module in policy.modules() if is_quantized(module)]
    assert len(layers) == 14
    if bits == 4:
        assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    before = bits_of(policy)
    with torch.no_grad():
        policy(input_ids=torch.arange(1, 9)[None])
    assert same_bits(before, bits_of(policy))
    assert all(layer._forward_pre_hooks for layer in layers if bits == 8)


def test_quantisation_without_an_adapter_is_warned_of(directory):
    with pytest.warns(UserWarning, match="quantization_config without peft_config"):
        load_policy(directory, model_kwargs(ModelConfig(load_in_4bit=True)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dtype="float17"), "dtype='float17'.*'float32', 'bfloat16', 'float16', 'float64'.*'auto'"),
        (dict(dtype=torch.int8), "dtype=torch.int8"),
        (dict(dtype="Tensor"), "dtype='Tensor'"),
        (dict(attention="magic"), "attention='magic'.*'auto', 'reference', 'segments', 'flex'"),
        (dict(attention=None), "attention=None; leave it 'auto' here"),
        (dict(load_in_4bit=True, load_in_8bit=True), "load_in_4bit=True and load_in_8bit=True"),
        (dict(bnb_4bit_quant_type="int4"), "bnb_4bit_quant_type='int4'"),
        (dict(lora_r=0), "lora_r=0.*integer >= 1"),
        (dict(lora_r=2.5), "lora_r=2.5.*integer >= 1"),
        (dict(lora_r="4"), "lora_r='4'"),
        (dict(lora_r=True), "lora_r=True"),
        (dict(lora_r=4, lora_alpha=0), "lora_alpha=0; it must be above 0"),
        (dict(lora_r=4, lora_alpha=-4), "lora_alpha=-4"),
        (dict(lora_r=4, lora_alpha=float("nan")), "lora_alpha=nan"),
        (dict(lora_r=4, lora_dropout=1.0), "lora_dropout=1.0"),
        (dict(lora_r=4, lora_target_modules=[]), r"lora_target_modules=\[\] names no module.*'all-linear'"),
        (dict(lora_alpha=8), "lora_alpha=8 without lora_r, .*set lora_r, to 16 for instance, or leave lora_alpha out"),
        (dict(lora_dropout=0.1), "lora_dropout=0.1 without lora_r"),
        (dict(lora_target_modules=["q_proj"]), r"lora_target_modules=\['q_proj'\] without lora_r"),
        (dict(lora_modules_to_save=["norm"]), r"lora_modules_to_save=\['norm'\] without lora_r"),
        (dict(use_rslora=True), "use_rslora=True without lora_r"),
        (dict(use_dora=True), "use_dora=True without lora_r"),
        (dict(bnb_4bit_use_double_quant=True), "bnb_4bit_use_double_quant=True without load_in_4bit.*to True for"),
        (dict(bnb_4bit_quant_type="fp4", load_in_8bit=True), "bnb_4bit_quant_type='fp4' without load_in_4bit"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_prompt_learning_is_refused(directory):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="peft_config is a PromptTuningConfig"):
        load_policy(directory, peft_config=config)


def test_adapter_on_the_head_is_refused(tmp_path):
    tiny_qwen3(tie_word_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="on the output head.*target_modules"):
        load_policy(tmp_path, peft_config=LoraConfig(target_modules=["q_proj", "lm_head"]))


def test_instances_that_are_no_language_models():
    with pytest.raises(TypeError, match="model is a Linear.*causal language model"):
        load_policy(nn.Linear(2, 2))
    bert = BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16))
    with pytest.raises(ValueError, match="the model, a BertModel, has no language-model head"):
        load_policy(bert)


def test_run_name_is_where_the_weights_come_from(directory, hub):
    assert run_name("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"
    assert run_name(directory) == run_name(f"{directory}/") == "tiny-qwen3"
    instance = AutoModelForCausalLM.from_pretrained(NAME, cache_dir=hub)
    assert run_name(instance) == "tiny"
    assert run_name(get_peft_model(instance, LoraConfig(target_modules=["q_proj"]))) == "tiny"
    assert run_name(tiny_qwen3()) == "qwen3", "built from a configuration: its model type"
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
