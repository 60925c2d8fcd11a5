import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_asyncgrpo import group_advantages

NAN = math.nan


@pytest.mark.parametrize(
    ("scale", "eps", "winner"), [("std", 1e-4, 1.4997), ("population_std", 1e-8, 1.7321), ("none", 0.0, 0.75)]
)
def test_kinds_of_scale(scale, eps, winner):
    """G1."""
    advantage = group_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0]), scale=scale, eps=eps)
    assert advantage[3].item() == pytest.approx(winner, abs=5e-5)
    assert advantage[:3].tolist() == pytest.approx([-winner / 3] * 3, abs=5e-5)


def test_unscored_rollouts_are_left_out_of_the_baseline():
    """G2."""
    advantage = group_advantages(torch.tensor([1.0, NAN, 0.0, 1.0]), scale="none")
    assert advantage.isnan().tolist() == [False, True, False, False]
    assert advantage[[0, 2, 3]].tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])


@pytest.mark.parametrize("rewards", [[0.7], [NAN], [NAN, 0.3]])
def test_group_with_one_score_has_advantage_zero(rewards):
    """G3."""
    advantage = group_advantages(torch.tensor(rewards))
    assert advantage[~advantage.isnan()].tolist() == [0.0] * sum(not math.isnan(r) for r in rewards)


@given(value=st.floats(-(2.0**99), 2.0**99, width=32), count=st.integers(1, 9), scale=st.sampled_from(["std", "none"]))
def test_equal_rewards_give_exactly_zero(value, count, scale):
    assert group_advantages(torch.full((count,), value), scale=scale, eps=0.0).tolist() == [0.0] * count


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_equals_the_formula(rewards):
    if max(rewards) == min(rewards):
        return
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    expected = [(r - mean) / (std + 1e-4) for r in rewards]
    assert group_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rewards_G=torch.tensor([[1.0]])), r"shape \(1, 1\).*\[G\]"),
        (dict(rewards_G=torch.tensor([1.0, math.inf])), "infinity.*finite"),
        (dict(rewards_G=torch.tensor([1.0]), scale="mad"), "'mad'.*'std', 'population_std', 'none'"),
        (dict(rewards_G=torch.tensor([1.0]), eps=-1.0), "eps=-1.0.*>= 0"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(**arguments)
