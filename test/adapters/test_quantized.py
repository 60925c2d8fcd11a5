"""Quantised layers: read without being changed, and kept from being changed by bitsandbytes itself."""

import bitsandbytes as bnb
import pytest
import torch
from adapted import bits_of, lora, quantized, quantized_gpt2, same_bits
from fakes import tiny_qwen3
from torch import nn

from torchrl_asyncgrpo.adapters.quantized import (
    as_stored,
    dequantized,
    has_quantized_layers,
    is_quantized,
    keep_bits,
    unquantized_layer,
)

TOKENS = torch.arange(1, 9)[None]


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantised_weight_is_what_the_layer_multiplies_with(tmp_path, bits):
    model = quantized(tmp_path, bits)
    keep_bits(model)
    layer = model.model.layers[0].mlp.up_proj
    assert is_quantized(layer)
    before = bits_of(model)
    weight = dequantized(layer)
    assert weight.shape == (64, 64)
    assert same_bits(before, bits_of(model))
    x = torch.eye(64).requires_grad_()
    torch.testing.assert_close(layer(x).detach(), weight.T, rtol=0, atol=1e-6 if bits == 4 else 2e-3)
    assert torch.equal(dequantized(layer), weight), "the same after a forward, which moves the scales of 8 bits"


def test_weight_that_replaced_another_is_read_with_its_own_scales(tmp_path):
    """As OLoRA does, after scales have been moved to the layer."""
    model = quantized(tmp_path, 8)
    keep_bits(model)
    layer, weight = model.model.layers[0].mlp.up_proj, 3 * torch.randn(64, 64)
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
    for _ in range(2):
        torch.testing.assert_close(dequantized(layer), weight, rtol=0, atol=0.1)
        layer(torch.eye(64))


def test_8_bits_go_on_under_pefts_dora(tmp_path):
    """On a CPU it replaces the weight in each forward, and leaves the scales of the replaced one behind."""
    model = quantized(tmp_path, 8)
    keep_bits(model)
    policy = lora(model, use_dora=True)
    first, second = (policy(input_ids=TOKENS).logits for _ in range(2))
    assert torch.equal(first, second)
    before = dequantized(model.model.layers[0].mlp.up_proj.base_layer)
    second.sum().backward()
    assert torch.equal(dequantized(model.model.layers[0].mlp.up_proj.base_layer), before)


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), (8, torch.float32), (8, torch.bfloat16)])
def test_biases_keep_dtype_and_value_under_autocast(tmp_path, bits, dtype):
    model = quantized_gpt2(tmp_path, bits)
    keep_bits(model)
    keep_bits(model)
    bias = model.transformer.h[0].attn.c_attn.bias
    bias.data = torch.randn(bias.shape).to(dtype)
    before = bits_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=TOKENS).logits.sum().backward()
    assert same_bits(before, bits_of(model))
    assert bias.dtype == bias.grad.dtype == dtype
    assert len(model.transformer.h[0].attn.c_attn._forward_pre_hooks) == (bits == 8)


def test_double_quantised_scales_are_read_too(tmp_path):
    layer = quantized(tmp_path, 4, bnb_4bit_use_double_quant=True).model.layers[0].mlp.up_proj
    keep_bits(layer)
    assert layer.weight.quant_state.nested
    torch.testing.assert_close(layer(torch.eye(64).requires_grad_()).detach(), dequantized(layer).T, rtol=0, atol=1e-6)


def test_conv1d_is_laid_out_as_its_checkpoint(tmp_path):
    model = quantized_gpt2(tmp_path, 4)
    layer = model.transformer.h[0].attn.c_attn
    assert dequantized(layer).shape == (192, 64)
    assert as_stored(layer, dequantized(layer)).shape == (64, 192)
    plain = unquantized_layer(layer)
    assert type(plain).__name__ == "Conv1D"
    assert plain.weight.shape == (64, 192)
    assert plain.bias is layer.bias


def test_linear_is_laid_out_as_it_is(tmp_path):
    layer = quantized(tmp_path, 8).model.layers[0].mlp.up_proj
    weight = torch.randn(64, 64)
    assert as_stored(layer, weight) is weight
    assert type(unquantized_layer(layer)) is nn.Linear
    assert unquantized_layer(layer).bias is None


@pytest.mark.parametrize("bits", [4, 8])
def test_forward_in_eval_mode_leaves_the_bits(tmp_path, bits):
    """bitsandbytes repacks 4-bit weights in place on some CPUs, and rounds their scales to bfloat16."""
    model = quantized(tmp_path, bits).requires_grad_(False).eval()
    keep_bits(model)
    before, weight = bits_of(model), dequantized(model.model.layers[0].self_attn.q_proj)
    with torch.no_grad():
        model(input_ids=TOKENS)
    assert same_bits(before, bits_of(model))
    assert torch.equal(dequantized(model.model.layers[0].self_attn.q_proj), weight)


def test_weight_that_was_repacked_already_is_refused(tmp_path):
    model = quantized(tmp_path, 4)
    model.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"laid model\.layers\.1\.mlp\.up_proj out anew.*load_policy"):
        keep_bits(model)


def test_plain_layers_are_not_quantised():
    assert not has_quantized_layers(tiny_qwen3())
    assert not is_quantized(nn.Linear(2, 2))
    assert not is_quantized(bnb.nn.Linear8bitLt(4, 4, has_fp16_weights=True)), "weights of full precision"
