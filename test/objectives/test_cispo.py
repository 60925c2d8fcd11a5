import pytest
import torch
from objective_rollouts import PathActor, run

from torchrl_asyncgrpo import CISPOLoss, TreePacker, make_rollout
from torchrl_asyncgrpo.objectives.cispo import cispo_term


def gradient(new, old, advantage, **options):
    """Of the loss of one token, through a batch and the loss module."""
    rollout = make_rollout([0, 1], [0, 1], [0.0, old], group_id=0, advantage=advantage)
    actor = PathActor([rollout])
    with torch.no_grad():
        actor.log_prob.fill_(new)
    losses, metrics = run(CISPOLoss(actor, **options), TreePacker()([rollout]))
    (grad,) = torch.autograd.grad(losses["loss_objective"], actor.log_prob)
    return grad[actor.index[0, 1]].item(), metrics


@pytest.mark.parametrize(
    ("new", "old", "advantage", "low", "expected", "fraction"),
    [
        (-0.3, -1.0, 1.0, None, -1.28, (None, 1)),  # ratio 2.01375
        (-0.3, -1.0, -2.0, None, 2.56, (None, 1)),  # the other sign is not left free either
        (-1.0, -0.3, 1.0, None, -0.4965853, (None, 0)),  # no lower bound: the ratio itself
        (-1.0, -0.3, 1.0, 0.2, -0.8, (1, 0)),
        (-1.0, -0.9, 1.0, 0.2, -0.9048374, (0, 0)),
    ],
)
def test_the_weight_is_clipped_and_the_gradient_is_not(new, old, advantage, low, expected, fraction):
    """L7."""
    slope, metrics = gradient(new, old, advantage, epsilon_low=low)
    assert slope == pytest.approx(expected, abs=1e-7)
    assert (metrics.get("clip_fraction_low"), metrics["clip_fraction_high"]) == fraction


def test_the_weight_is_a_constant():
    log_prob = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    term = cispo_term(log_prob, log_prob + 0.1, torch.tensor([1.0, -3.0]).double(), None, 0.28)
    (slope,) = torch.autograd.grad(term.sum(), log_prob)
    weight = (log_prob.detach() + 0.1).exp()
    torch.testing.assert_close(slope, -weight * torch.tensor([1.0, -3.0]).double(), rtol=1e-12, atol=0)


def test_defaults():
    loss = CISPOLoss(PathActor([[0]]))
    assert (loss.epsilon_low, loss.epsilon_high, loss.aggregation) == (None, 0.28, "token-mean")


@pytest.mark.parametrize("options", [dict(epsilon_high=-0.1), dict(epsilon_low=1.0), dict(epsilon_low=-0.2)])
def test_bad_arguments(options):
    with pytest.raises(ValueError, match=rf"{next(iter(options.values()))}.*\[0, 1\)"):
        CISPOLoss(PathActor([[0]]), **options)
