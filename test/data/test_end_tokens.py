import pytest
from fakes import tiny_qwen3

from torchrl_asyncgrpo.data.end_tokens import end_token_ids


@pytest.mark.parametrize(("declared", "expected"), [(5, {5}), (0, {0}), ([5, 7], {5, 7}), (None, set())])
def test_every_end_token_that_the_generation_config_declares(declared, expected):
    """T5."""
    model = tiny_qwen3()
    model.generation_config.eos_token_id = declared
    assert end_token_ids(model) == expected


def test_a_model_without_a_generation_config_has_none():
    model = tiny_qwen3()
    model.generation_config = None
    assert end_token_ids(model) == frozenset()


def test_end_tokens_survive_a_save(tmp_path):
    model = tiny_qwen3()
    model.generation_config.eos_token_id = [5, 7]
    model.save_pretrained(tmp_path)
    assert end_token_ids(type(model).from_pretrained(tmp_path)) == {5, 7}
