"""Dense products through oneDNN, which is 2-3 times faster than the float32 BLAS of PyTorch on AMD CPUs.

Same arithmetic in another order: results differ from ``torch.matmul`` by float32 rounding. Other devices and dtypes
keep PyTorch's own product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def _available() -> bool:
    onednn = torch.backends.mkldnn
    return bool(onednn.enabled) and onednn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def serves(tensor: Tensor) -> bool:
    """Whether oneDNN multiplies this tensor: float32 on an x86 CPU, outside autocast."""
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and _available()
    )


def product_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """``a @ b.T`` without a gradient; transposed views are taken as they are, without a copy.

    Args:
        a_MK: [M, K].
        b_NK: [N, K], of the same dtype.

    Returns:
        [M, N].
    """
    if serves(a_MK) and a_MK.numel() and b_NK.numel():
        return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")
    return a_MK @ b_NK.T


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight_NK)
        return torch.ops.mkldnn._linear_pointwise(input, weight_NK, bias_N, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_NK = ctx.saved_tensors
        grad_MN, input_MK = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        grad_input = product_nt(grad_MN, weight_NK.T).view_as(input) if ctx.needs_input_grad[0] else None
        grad_weight_NK = product_nt(grad_MN.T, input_MK.T) if ctx.needs_input_grad[1] else None
        grad_bias_N = grad_MN.sum(0) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight_NK, grad_bias_N


class OneDNNLinear(nn.Linear):
    """``nn.Linear`` whose products, forward and backward, go through oneDNN where it serves the input.

    The weight stays an ordinary parameter, read anew at each call, so that it may be written in place.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``."""
        fits = input.dtype == self.weight.dtype and input.shape[-1] == self.in_features
        if not fits or not serves(input) or not input.numel():
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Turn the plain ``nn.Linear`` modules of ``model`` into :class:`OneDNNLinear`, where oneDNN serves them.

    Parameters, their names and what ``save_pretrained`` writes stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear and serves(module.weight):
            module.__class__ = OneDNNLinear
