import math

import pytest
import torch
from objective_rollouts import PathActor, random_rollouts, run

from torchrl_asyncgrpo import GSPOLoss, TreePacker, make_rollout
from torchrl_asyncgrpo.objectives.gspo import sequence_ratio


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("masked_log_ratio", [9.0, -9.0, math.nan])
def test_masked_token_has_no_part_in_the_ratio(level, masked_log_ratio):
    """L8: log-ratios [0.2, 0.4, 9] and mask [1, 1, 0] give exp(0.3), and the masked token no gradient."""
    sample = [0.0, -1.2, -1.4, -1.0 - masked_log_ratio]
    rollout = make_rollout([0, 1, 2, 3], [0, 1, 1, 0], sample, group_id=0, advantage=1.0)
    actor = PathActor([rollout])
    with torch.no_grad():
        actor.log_prob.fill_(-1.0)
    losses, _ = run(GSPOLoss(actor, clip_epsilon=(0.5, 0.5), level=level), TreePacker()([rollout]))
    assert losses["loss_objective"].item() == pytest.approx(-1.34986, abs=5e-6)
    (grad,) = torch.autograd.grad(losses["loss_objective"], actor.log_prob)
    paths = [actor.index[path] for path in ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3))]
    assert grad[paths].tolist() == pytest.approx([0.0, -math.exp(0.3) / 2, -math.exp(0.3) / 2, 0.0], abs=1e-7)


def test_a_masked_token_between_trained_ones_has_no_gradient_either():
    rollout = make_rollout([0, 1, 2, 3], [0, 1, 0, 1], [0.0, -1.2, -9.0, -1.4], group_id=0, advantage=-1.0)
    actor = PathActor([rollout])
    losses, _ = run(GSPOLoss(actor, clip_epsilon=(0.99, 9.0)), TreePacker()([rollout]))
    (grad,) = torch.autograd.grad(losses["loss_objective"], actor.log_prob)
    assert [bool(grad[actor.index[path]] != 0) for path in ((0, 1), (0, 1, 2), (0, 1, 2, 3))] == [True, False, True]


def test_levels_have_one_value_and_different_gradients():
    """In float32, too, where log-ratios are far larger than the clip widths of 3e-4."""
    log_ratio = (torch.randn(60) * 20).clamp(-19, 19).requires_grad_()
    length = torch.tensor([10, 49, 1])
    rollout = torch.arange(3).repeat_interleave(length)
    weights = torch.randn(60)
    values, slopes = {}, {}
    for level in ("sequence", "token"):
        values[level] = sequence_ratio(log_ratio, rollout, length, level)
        (slopes[level],) = torch.autograd.grad((weights * values[level]).sum(), log_ratio)
    assert torch.equal(values["sequence"], values["token"])
    s = values["sequence"].detach()
    torch.testing.assert_close(slopes["token"], weights * s, rtol=1e-6, atol=0)
    mean = torch.stack([weights[rollout == r].mean() for r in range(3)])[rollout]
    torch.testing.assert_close(slopes["sequence"], mean * s, rtol=1e-4, atol=1e-6)


def test_ratios_of_a_rollout_are_equal_and_do_not_grow_with_its_length():
    length = torch.tensor([10_000, 1])
    rollout = torch.arange(2).repeat_interleave(length)
    log_ratio = torch.full((10_001,), 0.01, dtype=torch.float64)
    ratio = sequence_ratio(log_ratio, rollout, length, "sequence")
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(0.01)), rtol=1e-12, atol=0)


def test_advantages_that_differ_within_a_rollout_need_the_token_level():
    rollouts = random_rollouts(1, per_token=True)
    actor, batches = PathActor(rollouts, 1), TreePacker()(rollouts)
    with pytest.raises(ValueError, match=r"GSPOLoss judges a rollout as a whole.*GSPOLoss\(level='token'\)"):
        run(GSPOLoss(actor), batches)
    run(GSPOLoss(actor, level="token"), batches)


def test_defaults():
    loss = GSPOLoss(PathActor([[0]]))
    assert (loss.clip_epsilon_low, loss.clip_epsilon_high) == (3e-4, 4e-4)
    assert (loss.level, loss.aggregation) == ("sequence", "sequence-mean")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(level="rollout"), "level='rollout'.*'sequence', 'token'"),
        (dict(clip_epsilon=1.0), r"clip_epsilon=1.0.*\[0, 1\)"),
        (dict(clip_epsilon=(0.1, -0.1)), "clip_epsilon"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        GSPOLoss(PathActor([[0]]), **options)
