"""Steps on the rollouts of a window: what they set, what they leave, and that a second epoch changes nothing."""

import copy
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_asyncgrpo import TreePacker, make_rollout
from torchrl_asyncgrpo.data.advantages import group_advantages, leave_one_out_advantages
from torchrl_asyncgrpo.data.window_advantages import batch_normalised, batch_scaled, kl_in_reward

REWARDS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, 0.25, 7.5])), min_size=2, max_size=9)


def row(group_id, reward, sampled=(-1.0, -0.5), reference=None, mask=None, **more):
    mask = [0, *(mask or [1] * len(sampled))]
    reference = None if reference is None else [0.0, *reference]
    return make_rollout(
        range(len(mask)),
        mask,
        [0.0, *sampled],
        group_id=group_id,
        reward=reward,
        ref_log_prob=reference,
        **more,
    )


def advantages(rollouts):
    return [float(rollout["advantage"]) for rollout in rollouts]


def centred_over(values, spread):
    return [(v - math.fsum(values) / len(values)) / spread if len(set(values)) > 1 else 0.0 for v in values]


@given(REWARDS)
def test_batch_scaled_divides_by_the_spread_of_the_window(rows):
    rollouts = [row(group, reward, advantage=9.0) for group, reward in rows]
    result = batch_scaled(rollouts, eps=0.5, clip=0.25)
    assert all(a is b for a, b in zip(result, rollouts, strict=True))
    spread = statistics.stdev([reward for _, reward in rows]) + 0.5
    expected = []
    for group, reward in rows:
        own = [r for g, r in rows if g == group]
        expected.append(0.0 if len(set(own)) < 2 else (reward - math.fsum(own) / len(own)) / spread)
    assert advantages(result) == pytest.approx([max(-0.25, min(0.25, e)) for e in expected], rel=1e-6, abs=1e-9)
    assert [float(r["reward"]) for r in result] == [reward for _, reward in rows]


@given(REWARDS)
def test_batch_normalised_has_mean_zero_and_unit_spread(rows):
    values = [reward for _, reward in rows]
    rollouts = [row(group, 0.0, advantage=reward) for group, reward in rows]
    expected = centred_over(values, statistics.stdev(values) + 0.1)
    assert advantages(batch_normalised(rollouts, eps=0.1)) == pytest.approx(expected, rel=1e-6, abs=1e-9)


ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_kl_in_reward_takes_the_sum_over_trained_tokens_off(estimator):
    """L4: what the untrained tokens have is of no account."""
    rows = [
        row(0, 1.0, [-1.0, -0.25, -2.0], [-0.5, -1.25, -30.0], mask=[1, 1, 0]),
        row(1, 0.5, [-1.0], [-2.0]),
        row(0, 0.0, [math.nan, -3.0], [math.nan, -1.0], mask=[0, 1]),
        row(1, 0.25, [-1.0], [-1.0]),
        row(1, 7.0, [-1.0, -1.0], [-1.0, -1.0], mask=[0, 0]),  # whose divergence is unknown
    ]
    f = ESTIMATES[estimator]
    first = 1.0 - 0.1 * (f(-1.0 + 0.5) + f(-0.25 + 1.25))
    second = 0.0 - 0.1 * f(-3.0 + 1.0)
    other = 0.5 - 0.1 * f(-1.0 + 2.0)
    result = kl_in_reward(rows, coeff=0.1, estimator=estimator, advantage=leave_one_out_advantages)
    expected = [first - second, other - 0.25, second - first, 0.25 - other, 0.0]
    assert advantages(result) == pytest.approx(expected, rel=1e-6)
    assert [float(r["reward"]) for r in result] == [1.0, 0.5, 0.0, 0.25, 7.0]


def test_k3_of_very_different_policies_is_finite():
    rows = [row(0, 1.0, [-1.0], [-1e4]), row(0, 0.0, [-1e4], [-1.0])]
    assert all(
        math.isfinite(a) for a in advantages(kl_in_reward(rows, coeff=1.0, estimator="k3", advantage=group_advantages))
    )


def test_without_weight_the_advantages_are_those_of_the_rewards():
    rows = [row(0, r, [-1.0], [-2.0]) for r in (0.0, 0.0, 0.0, 1.0)]
    assert advantages(kl_in_reward(rows, coeff=0.0, advantage=group_advantages))[3] == pytest.approx(1.4997, abs=5e-5)


STEPS = {
    "batch_scaled": batch_scaled,
    "batch_normalised": batch_normalised,
    "kl_in_reward": lambda rollouts: kl_in_reward(rollouts, coeff=0.3, advantage=group_advantages),
    "composed": lambda rollouts: batch_normalised(kl_in_reward(rollouts, coeff=0.3, advantage=group_advantages)),
}


@pytest.mark.parametrize("name", STEPS)
def test_second_epoch_and_resumed_epoch_have_the_same_advantages(name):
    rows = [
        row(i % 2, r, [-1.0, -0.3 * i], [-2.0, -1.0], advantage=0.5 * r + i)
        for i, r in enumerate([0.0, 1.0, 0.5, 3.0, 2.0])
    ]
    before = advantages(rows)
    once = advantages(STEPS[name](rows))
    assert once != before
    assert advantages(STEPS[name](rows)) == once
    resumed = [copy.deepcopy(r) for r in rows]
    assert advantages(STEPS[name](resumed)) == once


def test_packers_read_what_a_step_sets():
    rows = [row(0, r, [-1.0, -2.0], [-2.0, -1.0], advantage=[0.0, 1.0, 2.0]) for r in (0.0, 1.0)]
    (batch,) = TreePacker()(batch_scaled(rows))
    assert "advantage" not in batch["entry"].keys()
    assert batch["rollout", "advantage"].sort().values.tolist() == pytest.approx([-0.70701, 0.70701], abs=1e-4)


def test_groups_are_told_apart_by_their_ids_not_their_tokens():
    """G4: the same prompt drawn twice."""
    rows = [row(group, r, [-1.0], [-1.0]) for group, r in ((0, 0.0), (1, 5.0), (0, 1.0), (1, 6.0))]
    assert advantages(kl_in_reward(rows, coeff=0.1, advantage=leave_one_out_advantages)) == [-1.0, -1.0, 1.0, 1.0]
    scale = statistics.stdev([0.0, 5.0, 1.0, 6.0])
    expected = [-0.5 / scale, -0.5 / scale, 0.5 / scale, 0.5 / scale]
    assert advantages(batch_scaled(rows, eps=0.0)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "step", [batch_scaled, lambda rollouts: kl_in_reward(rollouts, coeff=0.0, advantage=group_advantages)]
)
def test_turns_and_tokens_of_a_rollout_do_not_weigh(step):
    """G5: a success in 4 turns and in 1 has one advantage on every trained token."""
    rows = [
        row(0, 1.0, [-1.0] * 8, [-1.0] * 8, mask=[1, 0] * 4),
        row(0, 1.0, [-1.0], [-1.0]),
        row(0, 0.0, [-1.0] * 3, [-1.0] * 3),
    ]
    (batch,) = TreePacker()(step(rows))
    by_length = dict(zip(batch["rollout", "length"].tolist(), batch["rollout", "advantage"].tolist(), strict=True))
    assert by_length[4] == by_length[1] > 0 > by_length[3]
    assert "advantage" not in batch["entry"].keys()


def test_advantages_per_token_have_no_batch_to_be_normalised_in():
    rows = [row(0, 1.0, advantage=[0.0, 1.0, 2.0], rollout_id=7), row(0, 0.0)]
    with pytest.raises(ValueError, match="rollout 7 has 3 advantages, one per token"):
        batch_normalised(rows)


def test_missing_reference_says_how_to_make_it():
    rows = [row(0, 1.0, [-1.0], [-1.0]), row(0, 1.0, [-1.0], rollout_id=5)]
    with pytest.raises(KeyError, match=r"needs 'ref_log_prob', and rollout 5 has none.*RolloutScorer.*ref_log_prob"):
        kl_in_reward(rows, coeff=0.1, advantage=group_advantages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(coeff=-0.1), "coeff=-0.1"),
        (dict(coeff=math.inf), "coeff=inf"),
        (dict(coeff=0.1, estimator="k4"), "'k4' is unknown; choose one of 'k1', 'k2', 'k3'"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        kl_in_reward([row(0, 1.0, [-1.0], [-1.0])], advantage=group_advantages, **options)


def test_infinite_penalty_is_an_error_not_an_advantage():
    rows = [row(0, 1.0, [-1.0], [-1.0]), row(0, 0.0, [-1.0], [-1.0])]
    rows[0]["ref_log_prob"] = torch.tensor([0.0, -math.inf])
    with pytest.raises(ValueError, match="infinity"):
        kl_in_reward(rows, coeff=0.1, advantage=group_advantages)
