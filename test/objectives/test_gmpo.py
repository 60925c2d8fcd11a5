import math

import pytest
import torch
from objective_rollouts import PathActor, random_rollouts, run

from torchrl_asyncgrpo import GMPOLoss, TreePacker
from torchrl_asyncgrpo.objectives.gmpo import gmpo_term


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped", "slopes"),
    [
        ([0.1, 0.7], 2.0, [0.1, 0.4], [1, 0]),  # the upper bound holds the second token
        ([0.1, -0.7], 2.0, [0.1, -0.7], [1, 1]),  # the lower one does not at a positive advantage
        ([0.1, -0.7], -2.0, [0.1, -0.4], [1, 0]),
        ([0.1, 0.7], -2.0, [0.1, 0.7], [1, 1]),
    ],
)
def test_the_side_that_binds_is_clipped_token_by_token(log_ratio, advantage, clipped, slopes):
    log_ratio = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    advantages, one = torch.full((2,), advantage, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    term = gmpo_term(log_ratio, advantages, one, torch.tensor([2]), 0.4, 0.4)
    value = -advantage * math.exp(sum(clipped) / 2)
    assert term.tolist() == pytest.approx([value, value], rel=1e-12)
    (grad,) = torch.autograd.grad(term[0], log_ratio)
    assert grad.tolist() == pytest.approx([value / 2 * slope for slope in slopes], rel=1e-12)


def test_one_outlier_moves_a_rollout_little():
    log_ratio = torch.cat([torch.zeros(99), torch.tensor([1e4])])
    one = torch.zeros(100, dtype=torch.long)
    term = gmpo_term(log_ratio, torch.ones(100), one, torch.tensor([100]), 0.4, 0.4)
    assert term[0].item() == pytest.approx(-math.exp(0.004))


def test_advantages_that_differ_within_a_rollout_are_refused():
    rollouts = random_rollouts(1, per_token=True)
    with pytest.raises(ValueError, match="GMPOLoss judges a rollout as a whole"):
        run(GMPOLoss(PathActor(rollouts, 1)), TreePacker()(rollouts))


def test_defaults():
    loss = GMPOLoss(PathActor([[0]]))
    assert (loss.clip_epsilon_low, loss.clip_epsilon_high, loss.aggregation) == (0.4, 0.4, "sequence-mean")
    assert GMPOLoss(PathActor([[0]]), clip_epsilon=[2.0, 3.0]).clip_epsilon_high == 3.0, "nats, not a share of 1"


@pytest.mark.parametrize("widths", [-0.1, (0.4, -0.1), math.nan, (0.1,), (0.1, 0.2, 0.3)])
def test_bad_clip_widths(widths):
    with pytest.raises(ValueError, match="clip_epsilon=.*log-ratio"):
        GMPOLoss(PathActor([[0]]), clip_epsilon=widths)
