"""The faster linear layer is a linear layer."""

import pytest
import torch
from engines.tiny_models import tiny_model
from torch import nn

from torchrl_asyncgrpo.engines.onednn_linear import OneDNNLinear, use_onednn
from torchrl_asyncgrpo.engines.transformers import TransformersEngine

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="oneDNN is not used on this CPU",
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 24), (5, 1, 24), (2, 3, 24)])
@torch.inference_mode()
def test_it_computes_what_linear_does_from_the_weights_as_they_are(shape, bias):
    plain = nn.Linear(24, 7, bias=bias)
    fast = nn.Sequential(plain)
    use_onednn(fast)
    assert type(fast[0]) is OneDNNLinear
    for _ in range(2):
        x = torch.randn(shape)
        exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
        torch.testing.assert_close(fast(x).double(), exact, rtol=0, atol=1e-5)
        plain.weight.mul_(-2)


def test_other_precisions_are_left_to_pytorch():
    model = nn.Sequential(nn.Linear(24, 7, dtype=torch.float64))
    x = torch.randn(3, 24, dtype=torch.float64)
    expected = model(x)
    use_onednn(model)
    assert torch.equal(model(x), expected)


def test_the_engine_uses_it_and_the_model_of_the_trainer_does_not():
    for copy_weights in (True, False):
        model = tiny_model("llama", torch.float32)
        engine = TransformersEngine(model, copy_weights=copy_weights)
        assert type(engine._model.lm_head) is OneDNNLinear
        assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
        engine.shutdown()
