"""What the filters keep of a group: against enumeration, and on the edges."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_asyncgrpo import make_rollout
from torchrl_asyncgrpo.data.advantages import group_advantages, leave_one_out_advantages
from torchrl_asyncgrpo.data.group_filters import DropFlatGroups, KeepInformative, max_variance_subset

NAN = math.nan


def group(rewards, group_id=0, advantage=0.0):
    rows = []
    for i, reward in enumerate(rewards):
        n = 2 + i % 2
        mask, log_prob = [0] + [1] * (n - 1), [0.0] + [-1.0] * (n - 1)
        rows.append(
            make_rollout(range(n), mask, log_prob, group_id=group_id, reward=reward, advantage=advantage, rollout_id=i)
        )
    return rows


def ids(rollouts):
    return [(int(r["group_id"]), int(r["rollout_id"])) for r in rollouts]


@pytest.mark.parametrize(
    ("rewards", "tolerance", "flat"),
    [
        ([1.0, 1.0, 1.0], 0.0, True),
        ([0.1] * 7, 0.0, True),
        ([0.0, 0.0, 1.0], 0.0, False),
        ([0.0, 1e-6], 0.0, False),
        ([0.0, 0.25], 0.25, True),
        ([0.0, 0.26], 0.25, False),
        ([1.0, NAN, 1.0], 0.0, True),
        ([1.0, NAN, 0.0], 0.0, False),
        ([1.0, NAN], 0.0, True),
        ([NAN, NAN], 0.0, True),
        ([3.0], 0.0, True),
    ],
)
def test_flat_groups_are_dropped(rewards, tolerance, flat):
    rows = group(rewards)
    drop = DropFlatGroups(tolerance)
    assert [int(r["rollout_id"]) for r in drop.select(rows)] == ([] if flat else list(range(len(rewards))))


@pytest.mark.parametrize(
    ("advantages", "masks", "flat"),
    [
        ([0.0, 0.0], None, True),
        ([0.5, 0.5], None, False),
        ([0.0, [0.0, -0.1, 0.0]], None, False),
        ([0.0, [0.0, 0.0, 7.0]], [[0, 1, 1], [0, 1, 0]], True),
        ([1.0, 0.0], [[0, 0, 0], [0, 1, 0]], True),
    ],
)
def test_flat_by_advantage_looks_at_the_trained_tokens(advantages, masks, flat):
    rows = [
        make_rollout([1, 2, 3], mask, [0.0, -1.0, -1.0], group_id=0, reward=1.0, advantage=advantage)
        for advantage, mask in zip(advantages, masks or [[0, 1, 1]] * 2, strict=True)
    ]
    assert (not DropFlatGroups(key="advantage").select(rows)) == flat
    assert not DropFlatGroups(key="reward").select(rows)


def test_gives_up_after_so_many_in_a_row():
    drop = DropFlatGroups(give_up_after=3)
    flat, good = group([1.0, 1.0]), group([0.0, 1.0])
    for rows in (flat, flat, good, flat, flat):
        drop.select(rows)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"3 groups in a row .*rewards \[1.0, 1.0\].*raise give_up_after"):
            drop.select(flat)
    assert len(drop.select(good)) == 2
    drop.select(flat)


REWARDS = st.lists(st.sampled_from([NAN, 0.0, 1.0, 0.5, -3.0, 10.0, 0.125]), min_size=1, max_size=8)


@given(REWARDS, st.integers(1, 8))
def test_subset_has_the_largest_variance_of_all(rewards, keep):
    chosen = max_variance_subset(torch.tensor(rewards), keep)
    scored = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    assert chosen == sorted(set(chosen) & set(scored))
    assert len(chosen) == min(keep, len(scored))
    if len(scored) > keep:
        best = max(statistics.pvariance([rewards[i] for i in c]) for c in itertools.combinations(scored, keep))
        assert statistics.pvariance([rewards[i] for i in chosen]) == pytest.approx(best, rel=1e-12, abs=1e-15)


def test_subset_is_some_of_the_lowest_and_some_of_the_highest():
    """PODS: the middle is left out."""
    assert max_variance_subset(torch.tensor([0.5, 0.0, 0.4, 1.0, 0.6, 0.1]), 3) == [1, 3, 5]
    assert max_variance_subset(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]), 2) == [0, 4]
    assert max_variance_subset(torch.full((5,), 0.3), 2) == [0, 1]


@pytest.mark.parametrize("advantage", [group_advantages, leave_one_out_advantages, None])
def test_group_is_cut_with_advantages_among_what_stays(advantage):
    rows = group([0.5, 0.0, 0.4, 1.0, 0.6, 0.1], advantage=9.0)
    kept = KeepInformative(3, advantage).select(rows)
    assert [int(r["rollout_id"]) for r in kept] == [1, 3, 5]
    expected = [9.0] * 3 if advantage is None else advantage(torch.tensor([0.0, 1.0, 0.1])).tolist()
    assert [float(r["advantage"]) for r in kept] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.0, 1.0, NAN]])
def test_group_that_is_no_larger_is_left_as_it_is(rewards):
    kept = KeepInformative(3, group_advantages).select(group(rewards, advantage=9.0))
    assert [float(r["advantage"]) for r in kept] == [9.0] * len(rewards)


def test_unscored_rollouts_go_first():
    kept = KeepInformative(3, advantage=lambda r: torch.zeros(len(r))).select(group([NAN, 0.0, NAN, 1.0]))
    assert [int(r["rollout_id"]) for r in kept] == [1, 3]


def test_groups_are_judged_one_by_one_wherever_their_rollouts_stand():
    flat, good = group([1.0, 1.0, 1.0], 4), group([0.0, 1.0, 0.5], 2)
    mixed = [row for pair in zip(flat, good, strict=True) for row in pair]
    drop = DropFlatGroups()
    assert ids(drop._inv_call(mixed)) == [(2, 0), (2, 1), (2, 2)]
    assert (drop.dropped, drop.cut) == (1, 0)
    keep = KeepInformative(2, group_advantages)
    assert ids(keep._inv_call(mixed)) == [(4, 0), (4, 1), (2, 0), (2, 1)]
    assert (keep.dropped, keep.cut) == (0, 2)
    assert drop._inv_call(flat) is None
    assert keep._inv_call(None) is None


def test_any_torchrl_buffer_takes_a_filter():
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=2, collate_fn=lambda rows: rows
    )
    buffer.append_transform(DropFlatGroups())
    original = group([0.0, 1.0], 1)
    assert len(buffer.extend(group([1.0, 1.0], 0))) == 0
    assert len(buffer.extend(original)) == 2
    assert {g for g, _ in ids(buffer.sample().unbind(0))} == {1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DropFlatGroups(-0.1), "tolerance=-0.1"),
        (lambda: DropFlatGroups(NAN), "tolerance=nan"),
        (lambda: DropFlatGroups(give_up_after=0), "give_up_after=0"),
        (lambda: DropFlatGroups(key="rewards"), "key='rewards'; choose 'reward' or 'advantage'"),
        (lambda: KeepInformative(1, group_advantages), "keep=1"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
