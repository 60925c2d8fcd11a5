import pytest
import torch
from objective_rollouts import PathActor, run

from torchrl_asyncgrpo import DrGRPOLoss, TreePacker, make_rollout


def test_a_token_weighs_the_same_in_a_short_rollout_and_in_a_long_one():
    rows = [make_rollout([0, *[1] * n], [0] + [1] * n, [-1.0] * (n + 1), group_id=0, advantage=1.0) for n in (2, 8)]
    actor = PathActor(rows)
    losses, _ = run(DrGRPOLoss(actor, constant=16, clip_epsilon=(0.9, 9.0)), TreePacker()(rows))
    (grad,) = torch.autograd.grad(losses["loss_objective"], actor.log_prob)
    ratio = (actor.log_prob.detach() + 1).exp()
    entries = [0 if len(path) == 1 else 2 if len(path) <= 3 else 1 for path in actor.index]
    torch.testing.assert_close(grad, -ratio * torch.tensor(entries).double() / (16 * 2), rtol=1e-12, atol=0)


def test_the_constant_is_needed():
    with pytest.raises(ValueError, match="needs constant=C"):
        DrGRPOLoss(PathActor([[0]]))
    assert DrGRPOLoss(PathActor([[0]]), aggregation="token-mean").constant is None


@pytest.mark.parametrize("constant", [0, -3.0, float("nan")])
def test_bad_constant(constant):
    with pytest.raises(ValueError, match=f"constant={constant}"):
        DrGRPOLoss(PathActor([[0]]), constant=constant)
