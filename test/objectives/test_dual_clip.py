import math

import pytest
import torch
from objective_rollouts import PathActor

from torchrl_asyncgrpo import DualClipPPOLoss
from torchrl_asyncgrpo.objectives.dual_clip import dual_clipped_surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (2.9, -1.0, 2.9, 1.0),
        (3.1, -1.0, 3.0, 0.0),  # the second clip
        (3.1, 1.0, -1.2, 0.0),  # the first one at a positive advantage
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -1.0),
        (math.exp(20), -2.0, 6.0, 0.0),
    ],
)
def test_loss_of_a_negative_advantage_is_bounded(ratio, advantage, expected, slope):
    ratio = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    term = dual_clipped_surrogate(ratio, torch.tensor([advantage], dtype=torch.float64), 0.2, 0.2, 3.0)
    assert term.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.grad(term.sum(), ratio)[0].item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dual_clip=1.2), "dual_clip=1.2.*above 1.2"),
        (dict(dual_clip=1.25, clip_epsilon=(0.2, 0.28)), "dual_clip=1.25.*above 1.28"),
        (dict(dual_clip=math.nan), "dual_clip=nan"),
        (dict(clip_epsilon=1.0), r"clip_epsilon=1.0.*\[0, 1\)"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        DualClipPPOLoss(PathActor([[0]]), **options)
