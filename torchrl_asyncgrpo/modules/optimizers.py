"""Optimizers that the dtype of the weights does not bear."""

from __future__ import annotations

import torch


def check_eps(optimizer: torch.optim.Optimizer) -> None:
    """Check that the ``eps`` of PyTorch's own optimizers, which keep their state in the weights' dtype, is not 0 there.

    Args:
        optimizer: of any kind; others than PyTorch's own are left alone, since they may keep state in float32.

    Raises:
        ValueError: naming ``eps`` and the dtype.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        eps, dtypes = group.get("eps"), {parameter.dtype for parameter in group["params"]}
        if eps and torch.float16 in dtypes and torch.tensor(eps, dtype=torch.float16) == 0:
            raise ValueError(
                f"{type(optimizer).__name__} with eps={eps:g} on weights in float16, where that is 0: one step makes "
                "NaN of them. Load the policy with dtype='float32' or 'bfloat16'; float16 is for a base that is frozen "
                "under an adapter in float32."
            )
