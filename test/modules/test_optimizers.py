"""Dtypes that an optimizer turns into NaN are refused, and only they."""

import pytest
import torch
from fakes import tiny_qwen3

from torchrl_asyncgrpo import TreeActor
from torchrl_asyncgrpo.modules.optimizers import check_eps
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.trainers.stepper import WindowOptimizationStepper


def weights(dtype):
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype))]


def stepped(optimizer):
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.full_like(weight, 1e-5)
    optimizer.step()
    return weight


def test_eps_that_is_0_in_float16_is_refused():
    optimizer = torch.optim.AdamW(weights(torch.float16), lr=1e-5)
    with pytest.raises(ValueError, match=r"AdamW with eps=1e-08 on weights in float16.*'float32' or 'bfloat16'"):
        check_eps(optimizer)
    assert not stepped(optimizer).isfinite().all(), "as the error says"


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW(weights(torch.float16), lr=1e-5, eps=1e-4),
        torch.optim.SGD(weights(torch.float16), lr=1e-5),
        torch.optim.AdamW(weights(torch.bfloat16), lr=1e-5),
        torch.optim.AdamW(weights(torch.float32), lr=1e-5),
    ],
)
def test_what_trains_is_not(optimizer):
    check_eps(optimizer)
    assert stepped(optimizer).isfinite().all()


def test_is_found_when_trainer_or_backend_is_built():
    model = tiny_qwen3().half()
    with pytest.raises(ValueError, match="eps=1e-08 on weights in float16"):
        WindowOptimizationStepper(torch.optim.AdamW(model.parameters(), lr=1e-5))
    with pytest.raises(ValueError, match="eps=1e-08 on weights in float16"):
        HostedPolicy(lambda: TreeActor(model))
