import math

import pytest
import torch
from objective_rollouts import PathActor

from torchrl_asyncgrpo import SAPOLoss
from torchrl_asyncgrpo.objectives.sapo import sapo_term


def slope(ratio, advantage, positive=1.0, negative=1.05):
    ratio = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    term = sapo_term(ratio, torch.tensor([advantage], dtype=torch.float64), positive, negative)
    return torch.autograd.grad(term.sum(), ratio)[0].item()


@pytest.mark.parametrize("advantage", [-2.0, 0.5])
def test_at_ratio_one_the_slope_is_that_of_the_policy_gradient(advantage):
    assert slope(1.0, advantage, 3.0, 7.0) == pytest.approx(-advantage, rel=1e-12)


@pytest.mark.parametrize("ratio", [0.3, 1.7, 4.0])
def test_the_slope_falls_off_on_both_sides_and_sooner_at_negative_advantages(ratio):
    gate = 1 / (1 + math.exp(-1.05 * (ratio - 1)))
    assert slope(ratio, -1.0) == pytest.approx(4 * gate * (1 - gate), rel=1e-12)
    assert abs(slope(ratio, -1.0)) < abs(slope(ratio, 1.0)) < 1


def test_temperatures_are_exact_in_float64():
    term = sapo_term(*(torch.tensor([v], dtype=torch.float64) for v in (1.5, -1.0)), 1.0, 1.05)
    assert term.item() == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05 * 0.5)), rel=1e-14)


def test_defaults():
    loss = SAPOLoss(PathActor([[0]]))
    assert (loss.temperature_positive, loss.temperature_negative, loss.aggregation) == (1.0, 1.05, "sequence-mean")


@pytest.mark.parametrize("name", ["temperature_positive", "temperature_negative"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_bad_temperatures(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SAPOLoss(PathActor([[0]]), **{name: value})
