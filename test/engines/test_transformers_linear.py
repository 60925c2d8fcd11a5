"""The engine's copy multiplies through oneDNN; what the trainer holds is left alone."""

import pytest
import torch
from engines.tiny_models import tiny_model
from torch import nn

from torchrl_asyncgrpo.engines.transformers import TransformersEngine
from torchrl_asyncgrpo.kernels.linear import OneDNNLinear, serves


@pytest.mark.skipif(not serves(torch.zeros(1)), reason="oneDNN does not serve this CPU")
def test_the_engine_uses_it_and_the_model_of_the_trainer_does_not():
    for copy_weights in (True, False):
        model = tiny_model("llama", torch.float32)
        engine = TransformersEngine(model, copy_weights=copy_weights)
        assert type(engine._model.lm_head) is OneDNNLinear
        assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
        engine.shutdown()
