import pytest
import torch
from objective_rollouts import PathActor, random_rollouts, run

from torchrl_asyncgrpo import ReinforceLoss, TreePacker, TruncatedImportanceSampling


def test_gradient_of_every_token_is_its_advantage_whatever_the_sampler_said():
    rollouts = random_rollouts(1)
    actor = PathActor(rollouts, 1)
    slopes = []
    for shift in (0.0, 0.7):
        for rollout in rollouts:
            rollout["sample_log_prob"] -= shift
        losses, _ = run(ReinforceLoss(actor), TreePacker()(rollouts))
        slopes.append(torch.autograd.grad(losses["loss_objective"], actor.log_prob)[0])
    assert torch.equal(*slopes)
    entries = sum(int(r["loss_mask"].sum()) for r in rollouts)
    total = -sum(float(r["advantage"]) * int(r["loss_mask"].sum()) for r in rollouts) / entries
    assert slopes[0].sum().item() == pytest.approx(total, rel=1e-12)


def test_full_importance_sampling_is_the_gradient_of_the_ratio():
    """p / q · grad log p = grad p / q: what it means that the estimate is unbiased."""
    rollouts = random_rollouts(2)
    actor = PathActor(rollouts, 2)
    losses, _ = run(ReinforceLoss(actor, correction=TruncatedImportanceSampling(None)), TreePacker()(rollouts))
    (slope,) = torch.autograd.grad(losses["loss_objective"], actor.log_prob)
    total, entries = 0.0, sum(int(r["loss_mask"].sum()) for r in rollouts)
    for rollout in rollouts:
        for n in rollout["loss_mask"].nonzero().flatten().tolist():
            p = actor.alone(rollout)[n][0].exp()
            total = total - p / rollout["sample_log_prob"][n].double().exp() * rollout["advantage"].double() / entries
    torch.testing.assert_close(slope, torch.autograd.grad(total, actor.log_prob)[0], rtol=1e-12, atol=1e-14)


def test_defaults():
    assert ReinforceLoss(PathActor([[0]])).aggregation == "token-mean"
    assert not ReinforceLoss.uses_ratio
