"""Where transformers changes the frequencies of a whole batch, read off configurations of all forms."""

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig

from torchrl_asyncgrpo.data.rope_length import check_rope_length, rope_limits

LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 32, long_factor=[2.0] * 32)
DYNAMIC = dict(rope_type="dynamic", factor=2.0)
SIZE = dict(hidden_size=64, num_attention_heads=1, max_position_embeddings=64)


class OwnCode(PreTrainedConfig):
    """A configuration that came with its model's code, and knows neither rope_parameters nor rope_type."""

    model_type = "own_code"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.max_position_embeddings, self.original_max_position_embeddings = 64, 8
        self.rope_scaling = dict(type="su", short_factor=[1.0], long_factor=[2.0])


CASES = {
    "none": (LlamaConfig(**SIZE), []),
    "linear": (LlamaConfig(**SIZE, rope_parameters=dict(rope_type="linear", factor=2.0)), []),
    "dynamic": (LlamaConfig(**SIZE, rope_parameters=dict(DYNAMIC)), [("dynamic", 64)]),
    "longrope": (
        LlamaConfig(**SIZE, rope_parameters=dict(LONGROPE, original_max_position_embeddings=16)),
        [("longrope", 16)],
    ),
    "phi3": (
        Phi3Config(**SIZE, original_max_position_embeddings=16, rope_parameters=dict(LONGROPE), pad_token_id=0),
        [("longrope", 16)],
    ),
    "one set of factors": (
        LlamaConfig(
            **SIZE, rope_parameters=dict(LONGROPE, original_max_position_embeddings=16, long_factor=[1.0] * 32)
        ),
        [],
    ),
    "by type of layer": (
        Gemma3TextConfig(
            **SIZE, rope_parameters={"full_attention": dict(DYNAMIC), "sliding_attention": dict(rope_type="default")}
        ),
        [("dynamic", 64)],
    ),
    "own code": (OwnCode(), [("su", 8)]),
}


@pytest.mark.parametrize(("config", "limits"), CASES.values(), ids=CASES)
def test_limits(config, limits):
    assert list(rope_limits(config)) == limits


def test_longer_sequences_are_refused_with_the_remedy():
    config = CASES["phi3"][0]
    check_rope_length(config, torch.tensor(16))
    with pytest.raises(
        ValueError, match=r"17 tokens is longer than the 16 .*'longrope' of model type 'phi3'.*within 16 .*short_factor"
    ):
        check_rope_length(config, torch.tensor(17))
    check_rope_length(CASES["none"][0], 10**6)
