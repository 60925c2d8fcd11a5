"""Filters and other transforms inside the buffer: what is written, what is counted, and what a checkpoint holds."""

import pytest
import torch
from torchrl.envs.transforms import Compose, Transform

from torchrl_asyncgrpo import make_replay_buffer, make_rollout
from torchrl_asyncgrpo.data.advantages import group_advantages
from torchrl_asyncgrpo.data.group_filters import DropFlatGroups, GroupFilter, KeepInformative


def group(group_id, rewards, version=0):
    return [
        make_rollout(
            [1, 2, 3],
            [0, 1, 1],
            [0.0, -1.0, -1.0],
            group_id=group_id,
            reward=r,
            rollout_id=10 * group_id + i,
            policy_version=version,
        )
        for i, r in enumerate(rewards)
    ]


def make(transform=None, batch_size=1, **options):
    return make_replay_buffer(
        batch_size=batch_size, current_version=lambda: 0, timeout=0.05, transform=transform, **options
    )


def ids(sample):
    return [int(row["rollout_id"]) for row in sample.unbind(0)]


def test_flat_groups_are_not_written_and_take_no_slot():
    buffer, freed = make(DropFlatGroups()), []
    buffer.on_free(lambda: freed.append(1))
    assert buffer.extend(group(0, [1.0, 1.0])).shape == (0,)
    assert len(buffer.extend(group(1, [0.0, 1.0]))) == 2
    assert len(buffer.extend(group(2, [0.0, 0.0]) + group(3, [2.0, 1.0]) + group(4, [2.0, 2.0]))) == 2
    assert buffer.waiting_group_ids == [1, 3]
    assert buffer.occupied == 2
    assert buffer.dropped == {"flat": 3}
    assert buffer.cut == {}
    assert freed == [], "a slot that was never taken is not freed"
    assert [ids(buffer.sample()) for _ in range(2)] == [[10, 11], [30, 31]]


def test_cut_groups_are_counted_in_rollouts():
    buffer = make()
    buffer.append_transform(KeepInformative(2, group_advantages))
    rows = group(0, [0.5, 0.0, 1.0, 0.6])
    buffer.extend(rows)
    buffer.extend(group(1, [0.0, 1.0]))
    assert buffer.cut == {"uninformative": 2}
    assert buffer.dropped == {}
    first = buffer.sample()
    assert ids(first) == [1, 2]
    assert [float(row["advantage"]) for row in first.unbind(0)] == pytest.approx([-0.70701, 0.70701], abs=1e-4)
    assert [float(row["advantage"]) for row in rows] == [0.0] * 4, "the caller's rollouts are as they were"


@pytest.mark.parametrize("nested", [False, True])
def test_filters_are_combined(nested):
    """The subset of a group with two different rewards is never flat, so that the order does not matter here."""
    filters = Compose(DropFlatGroups(), KeepInformative(2, group_advantages))
    buffer = make(Compose(filters) if nested else filters)
    for i, rewards in enumerate(([1.0] * 3, [0.0, 0.5, 1.0], [0.0] * 2)):
        buffer.extend(group(i, rewards))
    assert buffer.dropped == {"flat": 2}
    assert ids(buffer.sample()) == [10, 12]


class Shorter(Transform):
    """One of a user's own: leaves out group 1, and drops the last rollout of others."""

    def _inv_call(self, rollouts):
        return [r for r in rollouts if int(r["group_id"]) != 1][:-1] or None

    def forward(self, rollouts):
        rollouts["seen"] = torch.ones(len(rollouts))
        return rollouts


def test_other_transforms_act_on_writing_and_reading():
    buffer = make(Compose(DropFlatGroups(), Shorter()))
    for i in range(3):
        buffer.extend(group(i, [0.0, 1.0, 2.0] if i < 2 else [0.0, 0.0, 1.0]))
    assert buffer.dropped == {"transform": 1, "flat": 1}
    window = buffer.sample()
    assert ids(window) == [0, 1]
    assert window["seen"].tolist() == [1.0, 1.0]


def test_giving_up_writes_and_counts_nothing():
    buffer = make(DropFlatGroups(give_up_after=2))
    buffer.extend(group(0, [0.0, 0.0]))
    with pytest.raises(RuntimeError, match="2 groups in a row"):
        buffer.extend(group(1, [1.0, 1.0]))
    assert buffer.dropped == {"flat": 1}
    assert buffer.occupied == 0
    buffer.extend(group(1, [1.0, 2.0]))
    assert buffer.waiting_group_ids == [1]


def test_capacity_holds_what_is_left():
    buffer = make(KeepInformative(2, group_advantages), capacity=2)
    buffer.extend(group(0, [0.0, 1.0, 2.0]))
    with pytest.raises(RuntimeError, match="2 rollouts do not fit: 2 wait and the capacity is 2"):
        buffer.extend(group(1, [0.0, 1.0, 2.0]))
    assert buffer.cut == {"uninformative": 1}


def test_filter_of_ones_own():
    class Solvable(GroupFilter):
        reason = "unsolved"

        def select(self, group):
            return group if any(rollout["reward"] > 0 for rollout in group) else []

    buffer = make(Solvable())
    buffer.extend(group(0, [0.0, 0.0]))
    buffer.extend(group(1, [1.0, 1.0]))
    assert buffer.dropped == {"unsolved": 1}
    assert buffer.waiting_group_ids == [1]


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_state_holds_the_counters_and_what_is_in_a_row(how, tmp_path):
    def fresh():
        return make(Compose(DropFlatGroups(give_up_after=3), KeepInformative(2, group_advantages)))

    buffer = fresh()
    buffer.extend(group(0, [0.0, 1.0, 0.5]))
    buffer.extend(group(1, [0.0, 0.0]))
    buffer.extend(group(2, [0.0, 0.0]))
    state = buffer.state_dict()
    if how == "state_dict":
        torch.save(state, tmp_path / "state.pt")
    else:
        buffer.dumps(tmp_path)
    restored = fresh()
    if how == "state_dict":
        restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        restored.loads(tmp_path)
    assert (restored.dropped, restored.cut) == ({"flat": 2}, {"uninformative": 1})
    with pytest.raises(RuntimeError, match="3 groups in a row"):
        restored.extend(group(3, [1.0, 1.0]))
    assert ids(restored.sample()) == [0, 1]


def test_state_is_of_its_moment():
    buffer = make(DropFlatGroups(give_up_after=3))
    buffer.extend(group(0, [0.0, 0.0]))
    state = buffer.state_dict()
    buffer.extend(group(1, [0.0, 0.0]))
    buffer.load_state_dict(state)
    assert buffer.dropped == {"flat": 1}
    buffer.extend(group(1, [0.0, 0.0]))
    with pytest.raises(RuntimeError, match="3 groups in a row"):
        buffer.extend(group(2, [0.0, 0.0]))


def test_advantages_per_token_go_in_and_out():
    buffer = make()
    rows = group(0, [0.0, 1.0])
    rows[0]["advantage"] = torch.tensor([0.0, 0.5, -0.5])
    buffer.extend(rows)
    out = buffer.sample().unbind(0)
    assert out[0]["advantage"].tolist() == [0.0, 0.5, -0.5]
    assert out[1]["advantage"].shape == ()
