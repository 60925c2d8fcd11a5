"""Which layers have a window."""

import pytest
from torch import nn
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from torchrl_asyncgrpo.data.layer_window import layer_window

KINDS = ["sliding_attention", "full_attention"]
ALTERNATING = Qwen3Config(use_sliding_window=True, sliding_window=3, num_hidden_layers=2, layer_types=KINDS)


@pytest.mark.parametrize(
    ("config", "windows"),
    [(LlamaConfig(), [None, None]), (MistralConfig(sliding_window=5), [5, 5]), (ALTERNATING, [3, None])],
    ids=["none", "all", "alternating"],
)
def test_window_of_each_layer(config, windows):
    for index, window in enumerate(windows):
        layer = nn.Module()
        layer.config, layer.layer_idx = config, index
        assert layer_window(layer) == window
