"""What is loaded, of which class, and what is refused before any weight is read."""

import copy
import json
import shutil

import pytest
import torch
from adapted import quantized
from fakes import save_as_hub, tiny_gpt2, tiny_qwen3
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from torchrl_asyncgrpo.modules.checkpoint import as_dtype, load_model, several_processes

SMALL = dict(
    vocab_size=72, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, pad_token_id=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def hub(directory, tmp_path_factory):
    cache = tmp_path_factory.mktemp("hub")
    save_as_hub(cache, "someone/tiny", main=directory)
    return {"cache_dir": str(cache)}


@pytest.fixture
def no_weights_read(monkeypatch):
    """Fails a test that gets as far as reading weights."""

    def read(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", read)


def edited(directory, target, **fields):
    shutil.copytree(directory, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return target


def test_the_configuration_names_the_class(directory, tmp_path):
    model = load_model(directory)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not model.training
    unnamed = edited(directory, tmp_path / "unnamed", architectures=None)
    assert type(load_model(unnamed)).__name__ == "Qwen3ForCausalLM"
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    assert type(load_model(tmp_path / "gpt2")).__name__ == "GPT2LMHeadModel"


def test_fields_of_the_configuration_may_be_given(directory):
    assert load_model(directory, {"attention_dropout": 0.25}).config.attention_dropout == 0.25


def test_configuration_may_be_given_whole(directory):
    config = Qwen3Config.from_pretrained(directory, use_cache=False)
    kwargs = {"config": config, "dtype": "float64"}
    before = copy.deepcopy(config.to_dict())
    assert load_model(directory, kwargs).config.use_cache is False
    assert kwargs == {"config": config, "dtype": "float64"}
    assert config.to_dict() == before


def test_nested_arguments_are_not_changed(directory, monkeypatch):
    """Whatever transformers does to them."""
    given = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    kwargs, load = copy.deepcopy(given), Qwen3ForCausalLM.from_pretrained

    def spoiling(*args, **own):
        model = load(*args, **own)
        own["quantization_config"].clear()
        return model

    monkeypatch.setattr(Qwen3ForCausalLM, "from_pretrained", spoiling)
    load_model(directory, kwargs)
    assert kwargs == given


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": "float17"}, "dtype='float17'"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype=torch.float32 and torch_dtype=torch.bfloat16"),
        ({"banana": 1}, r"model_init_kwargs has 'banana', which neither.*spelling"),
        ({"load_in_4bit": True}, "model_init_kwargs has 'load_in_4bit'"),
        ({"output_loading_info": True}, "model_init_kwargs has 'output_loading_info'.*leave it out"),
        ({"revision": "v9"}, "revision='v9' and model='.*', a directory, which has no"),
    ],
)
def test_bad_arguments_are_named_before_weights_are_read(directory, kwargs, message, no_weights_read):
    with pytest.raises(ValueError, match=message):
        load_model(directory, kwargs)


def test_unknown_attention_is_named(directory, no_weights_read):
    with pytest.raises(ValueError, match="attention='magic'.*'segments'"):
        load_model(directory, attention="magic")


def test_unknown_revision_and_name_are_named(hub):
    assert load_model("someone/tiny", {**hub, "revision": "main"}) is not None
    with pytest.raises(OSError, match="model='someone/tiny', revision='v9' cannot be loaded"):
        load_model("someone/tiny", {**hub, "revision": "v9"})
    with pytest.raises(OSError, match="model='someone/else' cannot be loaded"):
        load_model("someone/else", hub)
    with pytest.raises(FileNotFoundError, match="'./nowhere' is not a directory"):
        load_model("./nowhere")


def test_main_is_no_revision_of_a_directory_and_does_no_harm(directory):
    assert load_model(directory, {"revision": "main"}) is not None


def test_other_type_errors_are_not_mistaken_for_arguments(directory, monkeypatch):
    def load(*_, **__):
        raise TypeError("f() got an unexpected keyword argument 'banana'")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", load)
    with pytest.raises(TypeError, match=r"f\(\) got"):
        load_model(directory)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Qwen3ForSequenceClassification(Qwen3Config(**SMALL)),
            r"architectures=\['Qwen3ForSequenceClassification'\] in the configuration.* has no language-model head",
        ),
        (
            lambda: BertForMaskedLM(
                BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
            ),
            r"architectures=\['BertForMaskedLM'\].* has no language-model head",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=72, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            "model='.*' cannot be trained over prefix trees: .*encoder-decoder attention|bypasses",
        ),
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=72, hidden_size=16, num_hidden_layers=1, state_size=4)),
            "model='.*' cannot be trained over prefix trees: .*recurrent layers.*'mamba'",
        ),
    ],
)
def test_models_that_trees_cannot_train_are_refused_before_weights_are_read(build, message, tmp_path, no_weights_read):
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_feature_of_the_asked_for_backend_is_named(directory, tmp_path, no_weights_read):
    softcapped = edited(directory, tmp_path / "m", attn_logit_softcapping=2.0)
    with pytest.raises(ValueError, match="'segments' cannot honour logit softcapping.*'reference' or 'flex'"):
        load_model(softcapped, attention="segments")


def test_unknown_architecture_is_named(directory, tmp_path):
    with pytest.raises(ValueError, match=r"architectures=\['NoSuchForCausalLM'\].*trust_remote_code=True"):
        load_model(edited(directory, tmp_path / "m", architectures=["NoSuchForCausalLM"]))


def test_an_adapter_is_told_from_a_model_alone_or_beside_one(directory, tmp_path, no_weights_read):
    """transformers would load it frozen."""
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    shutil.copytree(directory, beside)
    for target in (alone, beside, beside / "inside"):
        get_peft_model(tiny_qwen3(), LoraConfig(target_modules=["q_proj"])).save_pretrained(target)
    save_as_hub(tmp_path / "hub", "someone/adapter", main=alone)
    save_as_hub(tmp_path / "hub", "someone/both", main=beside)
    hub = {"cache_dir": str(tmp_path / "hub")}
    sources = [(alone, {}), (beside, {}), (beside, {"subfolder": "inside"})]
    for source, kwargs in [*sources, ("someone/adapter", hub), ("someone/both", hub)]:
        with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config\.json\).*is_trainable=True.*move the"):
            load_model(source, kwargs)


def without(directory, target, *names):
    """A copy of a checkpoint that lacks some tensors."""
    shutil.copytree(directory, target)
    weights = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if name not in names}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_weights_that_a_checkpoint_lacks_are_named(directory, tmp_path):
    tiny_qwen3(tie_word_embeddings=False).save_pretrained(tmp_path / "untied")
    headless = without(tmp_path / "untied", tmp_path / "headless", "lm_head.weight")
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the Qwen3ForCausalLM \(lm_head\.weight\).*instance"):
        load_model(headless)
    assert load_model(headless, {"tie_word_embeddings": True}) is not None
    names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(2) for part in ("up", "down")]
    with pytest.raises(ValueError, match="lacks 4 tensors"):
        load_model(without(directory, tmp_path / "holes", *names))


def test_weights_that_are_tied_quantised_or_in_shards_are_not_lacking(directory, tmp_path):
    """The head that is the embedding is not in the file, and few bits come with tensors of their own."""
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    model = load_model(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for bits in (4, 8):
        quantized(tmp_path, bits).save_pretrained(tmp_path / f"{bits}")
        assert load_model(tmp_path / f"{bits}") is not None
    tiny_qwen3().save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert load_model(tmp_path / "shards") is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "auto"), ("auto", "auto"), ("float16", torch.float16), ("torch.float64", torch.float64)],
)
def test_dtype_names(given, expected):
    assert as_dtype(given) == expected
    assert as_dtype(expected) == expected


def test_one_process_is_not_several(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not several_processes()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not several_processes()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert several_processes()
