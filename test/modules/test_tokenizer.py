import pytest
import torch
from fakes import character_tokenizer, tiny_qwen3
from peft import LoraConfig, get_peft_model

from torchrl_asyncgrpo import load_tokenizer
from torchrl_asyncgrpo.modules import tokenizer as module


@pytest.fixture
def directory(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    tiny_qwen3().save_pretrained(tmp_path)
    return tmp_path


def test_tokenizer_of_a_directory_and_of_the_model_loaded_from_it(directory):
    model = type(tiny_qwen3()).from_pretrained(directory)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    for source in (directory, str(directory), model, wrapped):
        tokenizer = load_tokenizer(source, {"dtype": torch.float32, "quantization_config": None})
        assert tokenizer("1+2")["input_ids"] == character_tokenizer()("1+2")["input_ids"]
        assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0


def test_padding_token_of_its_own_is_kept(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.pad_token = "?"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == "?"


def test_revision_and_the_like_are_the_models(directory, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        module.AutoTokenizer, "from_pretrained", lambda path, **kw: (seen.update(kw), character_tokenizer())[1]
    )
    load_tokenizer("someone/tiny", {"revision": "v2", "token": "t", "dtype": "auto", "device_map": None})
    assert seen == {"revision": "v2", "token": "t"}


def test_model_built_from_a_configuration_names_no_tokenizer():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM was built from a configuration"):
        load_tokenizer(tiny_qwen3())


def test_nothing_to_pad_with_is_an_error(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither pad_token nor eos_token"):
        load_tokenizer(tmp_path)
