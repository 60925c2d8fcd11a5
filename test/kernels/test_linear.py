import copy

import pytest
import torch
from fakes import tiny_qwen3
from torch import nn

from torchrl_asyncgrpo.kernels.linear import OneDNNLinear, product_nt, serves, use_onednn

needs_onednn = pytest.mark.skipif(not serves(torch.zeros(1)), reason="oneDNN does not serve this CPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 5, 3), (64, 48, 96), (0, 5, 3), (1, 1, 1)])
def test_product_equals_matmul_for_plain_and_transposed_operands(shape, dtype):
    m, k, n = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    at, bt = a.T.contiguous().T, b.T.contiguous().T
    for left, right in ((a, b), (at, b), (a, bt), (at, bt)):
        torch.testing.assert_close(product_nt(left, right), a @ b.T)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)])
def test_layer_equals_linear_forward_and_gradient(shape, bias):
    plain = nn.Linear(6, 5, bias=bias)
    fast = copy.deepcopy(plain)
    fast.__class__ = OneDNNLinear
    x = torch.randn(shape)
    results = []
    for layer in (plain, fast):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@needs_onednn
def test_model_keeps_parameters_outputs_and_files(tmp_path):
    model = tiny_qwen3()
    inputs = torch.randint(0, 50, (2, 9))
    before = model(inputs).logits
    names = list(model.state_dict())
    use_onednn(model)
    assert type(model.model.layers[0].mlp.up_proj) is OneDNNLinear
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(inputs).logits, before, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1.0)
    assert not torch.allclose(model(inputs).logits, before)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(inputs).logits, model(inputs).logits, rtol=1e-5, atol=1e-5)


def test_input_of_another_dtype_or_width_gets_the_error_of_linear():
    layer = nn.Linear(4, 4)
    use_onednn(layer)
    with pytest.raises(RuntimeError, match="dtype"):
        layer.to(torch.bfloat16)(torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer.to(torch.float32)(torch.zeros(2, 5))


def test_switched_off_onednn_is_not_used():
    with torch.backends.mkldnn.flags(enabled=False):
        assert not serves(torch.zeros(1))


def test_other_dtypes_keep_their_own_product():
    layer = nn.Linear(4, 4).double()
    use_onednn(layer)
    assert type(layer) is nn.Linear
    assert not serves(torch.zeros(1, dtype=torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not serves(torch.zeros(1))


@needs_onednn
def test_frozen_weight_needs_no_gradient_product():
    layer = nn.Linear(4, 4)
    use_onednn(layer)
    layer.requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 4))
