"""The coefficient follows Ziegler's rule and is what the loss uses; runs with it are in test_trainer_advantages.py."""

import math

import pytest
import torch
from fakes import tiny_qwen3
from tensordict import TensorDict

from torchrl_asyncgrpo import GRPOLoss, TreeActor
from torchrl_asyncgrpo.trainers.kl_control import AdaptiveKLControl


def loss(coeff=0.5):
    return GRPOLoss(TreeActor(tiny_qwen3()), kl_to_ref_coeff=coeff)


def ziegler(coeff, divergence, target, horizon):
    """arXiv:1909.08593, section 2.2."""
    return coeff * (1 + max(-0.2, min(0.2, divergence / target - 1)) / horizon)


def metrics(divergence):
    return TensorDict({"kl_to_ref": torch.tensor(divergence, dtype=torch.float64)})


@pytest.mark.parametrize("divergences", [[0.0], [0.021, 0.019, 0.02], [5.0, 5.0], [-0.1, 0.5, 0.0, 0.022]])
def test_follows_the_rule_step_by_step(divergences):
    module = loss()
    control = AdaptiveKLControl(module, target=0.02, horizon=4)
    expected = 0.5
    for step, divergence in enumerate(divergences, 1):
        expected = ziegler(expected, divergence, 0.02, 4)
        logged = control(step, metrics(divergence))
        assert module.kl_to_ref_coeff == pytest.approx(expected, rel=1e-6)
        assert logged == {"kl_to_ref_coeff": module.kl_to_ref_coeff}
        assert type(module.kl_to_ref_coeff) is float


def test_direction():
    for divergence, sign in ((0.1, 1), (0.001, -1)):
        module = loss()
        AdaptiveKLControl(module, target=0.02)(1, metrics(divergence))
        assert math.copysign(1, module.kl_to_ref_coeff - 0.5) == sign


def test_every_optimizer_step_of_an_item_counts():
    """Also where they are more than the horizon: the coefficient stays above 0."""
    module = loss()
    AdaptiveKLControl(module, target=0.02, horizon=1)(7, metrics(0.0))
    assert module.kl_to_ref_coeff == pytest.approx(0.5 * 0.8**7, rel=1e-6)


@pytest.mark.parametrize("average", [None, metrics(0.5), metrics(math.nan), TensorDict()])
def test_no_step_no_change(average):
    """W7: skipped windows are no optimizer step; their metrics need not be finite, or there."""
    module = loss()
    control = AdaptiveKLControl(module, target=0.02)
    control.steps = 3
    assert control(3, average) == {"kl_to_ref_coeff": 0.5}


def test_divergence_that_is_not_finite_changes_nothing():
    module = loss()
    control = AdaptiveKLControl(module, target=0.02, horizon=1)
    control(1, metrics(math.nan))
    assert module.kl_to_ref_coeff == 0.5
    control(2, metrics(5.0))
    assert module.kl_to_ref_coeff == pytest.approx(0.6)


def test_loss_that_reports_no_divergence_is_named():
    with pytest.raises(KeyError, match=r"\['loss_objective'\] have no 'kl_to_ref'.*GRPOLoss"):
        AdaptiveKLControl(loss(), target=0.02)(1, TensorDict({"loss_objective": torch.tensor(0.0)}))


@pytest.mark.parametrize(
    ("coeff", "options", "message"),
    [
        (0.0, dict(target=0.02), "kl_to_ref_coeff=0.0 of GRPOLoss.*stays 0"),
        (0.5, dict(target=0.0), "target=0.0"),
        (0.5, dict(target=math.nan), "target=nan"),
        (0.5, dict(target=0.02, horizon=0), "horizon=0"),
    ],
)
def test_bad_input(coeff, options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveKLControl(loss(coeff), **options)


def test_state_goes_to_loss_and_controller():
    control = AdaptiveKLControl(loss(), target=0.02)
    control(5, metrics(0.1))
    other = AdaptiveKLControl(loss(), target=0.02)
    other.load_state_dict(control.state_dict())
    assert other.loss_module.kl_to_ref_coeff == control.loss_module.kl_to_ref_coeff
    assert other(7, metrics(0.1)) == control(7, metrics(0.1))
