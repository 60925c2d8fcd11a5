import pytest
import torch
from objective_oracle import CURRENT_VERSION
from objective_rollouts import PathActor, random_rollouts, run

from torchrl_asyncgrpo import DecoupledPPOLoss, TreePacker, make_rollout
from torchrl_asyncgrpo.objectives.decoupled import interpolated_log_prob


def one_token(new, old, proximal=None, version=0, advantage=1.0):
    rollout = make_rollout([0, 1], [0, 1], [0.0, old], group_id=0, advantage=advantage, policy_version=version)
    if proximal is not None:
        rollout["proximal_log_prob"] = torch.tensor([0.0, proximal])
    actor = PathActor([rollout])
    with torch.no_grad():
        actor.log_prob.fill_(new)
    return actor, TreePacker()([rollout])


def test_the_proximal_policy_bounds_the_step_and_the_sampler_weighs_it():
    """r = exp(0.5) is clipped to 1.2, w = exp(0.25)."""
    actor, batches = one_token(-0.5, -1.25, -1.0)
    losses, metrics = run(DecoupledPPOLoss(actor), batches)
    weight = torch.tensor(0.25).double().exp().item()
    assert losses["loss_objective"].item() == pytest.approx(-1.2 * weight, rel=1e-12)
    assert metrics["mismatch_ratio"] == metrics["tis_weight"] == pytest.approx(weight, rel=1e-12)
    losses, metrics = run(DecoupledPPOLoss(actor, behaviour_cap=1.1), batches)
    assert losses["loss_objective"].item() == pytest.approx(-1.2 * 1.1, rel=1e-12)
    assert metrics["tis_truncated"] == 1


@pytest.mark.parametrize(("version", "share"), [(5, 1.0), (4, 0.0), (3, 1 / 2), (0, 4 / 5), (6, 1.0)])
def test_interpolation_goes_by_the_versions_of_each_token(version, share):
    actor, batches = one_token(-0.5, -1.25, version=version)
    loss = DecoupledPPOLoss(
        actor, proximal="interpolated", current_version=lambda: CURRENT_VERSION, clip_epsilon=(0.9, 9.0)
    )
    losses, metrics = run(loss, batches)
    assert metrics["mismatch_k1"] == pytest.approx(-share * 0.75, rel=1e-12)
    assert metrics["ratio"] == pytest.approx(torch.tensor((1 - share) * 0.75).double().exp().item(), rel=1e-6)
    (grad,) = torch.autograd.grad(losses["loss_objective"], actor.log_prob)
    assert grad[actor.index[0, 1]].item() == pytest.approx(losses["loss_objective"].item(), rel=1e-12)


def test_interpolated_log_prob_is_a_constant_between_both():
    log_prob = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    value = interpolated_log_prob(log_prob, torch.tensor([-2.0, -2.0]).double(), torch.tensor([4, 0]))
    assert not value.requires_grad
    assert value.tolist() == pytest.approx([-1.25, -3.0], rel=1e-14)


def test_missing_scores_are_named_with_what_writes_them():
    rollouts = random_rollouts(1)
    for rollout in rollouts:
        del rollout["proximal_log_prob"]
    with pytest.raises(KeyError, match="anchor='proximal' needs.*proximal_log_prob.*RolloutScorer"):
        run(DecoupledPPOLoss(PathActor(rollouts, 1)), TreePacker()(rollouts))


def test_missing_versions_are_named():
    rollouts = random_rollouts(1)
    loss = DecoupledPPOLoss(PathActor(rollouts, 1), proximal="interpolated", current_version=lambda: 5)
    (batch,) = TreePacker()(rollouts)
    del batch["entry", "policy_version"]
    with pytest.raises(KeyError, match="interpolated.*policy_version.*TreePacker"):
        loss(batch)


def test_in_keys_are_those_that_the_proximal_policy_needs():
    actor = PathActor([[0]])
    recomputed = DecoupledPPOLoss(actor)
    interpolated = DecoupledPPOLoss(actor, proximal="interpolated", current_version=lambda: 1)
    assert set(recomputed.in_keys) - set(interpolated.in_keys) == {("entry", "proximal_log_prob")}
    assert set(interpolated.in_keys) - set(recomputed.in_keys) == {("entry", "policy_version")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(proximal="ema"), "proximal='ema'.*'recomputed', 'interpolated'"),
        (dict(proximal="interpolated"), "interpolated.*needs current_version"),
        (dict(current_version=lambda: 0), "'recomputed' takes none"),
        (dict(anchor="sample"), "anchor given to DecoupledPPOLoss.*GRPOLoss"),
        (dict(behaviour_cap=0.0), "cap=0.0"),
        (dict(clip_epsilon=-0.2), "clip_epsilon=-0.2"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        DecoupledPPOLoss(PathActor([[0]]), **options)
