import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_asyncgrpo.data.schema import make_rollout
from torchrl_asyncgrpo.packing.window import read_window


def rollout(tokens, trained, **changes):
    """A rollout that trains the given positions, with NaN and rubbish wherever the contract says it is ignored."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[list(trained)] = True
    log_prob = torch.where(mask, -0.5, torch.nan)
    given = {"group_id": 0, "rollout_id": 0} | changes
    return make_rollout(tokens, mask, log_prob, **given)


def test_rows_end_at_the_last_trained_token_and_come_sorted():
    window = read_window([rollout([2, 1, 9, 9], [1]), rollout([1, 3, 5], [1, 2]), rollout([1, 3, 2], [2])])
    assert [row.tolist() for row in window.rows] == [[1, 3, 2], [1, 3, 5], [2, 1]]
    assert window.entry_bounds.tolist() == [0, 1, 3, 4]
    assert window.entry_depth.tolist() == [2, 1, 2, 1]


def test_rollouts_without_a_trained_token_are_left_out():
    window = read_window([rollout([1, 2], []), rollout([3, 4], [1], rollout_id=7), rollout([0, 2], [])])
    assert window.rollout_id.tolist() == [7]
    assert window.first_token == 0


@pytest.mark.parametrize("ids", [[255, 256, 1], [2**31, 2**31 - 1, 5], [2**32, 2**32 - 1, 1], [2**62, 2**40, 3]])
def test_order_is_numerical_for_ids_of_any_size(ids):
    window = read_window([rollout([0, i], [1]) for i in ids])
    assert [int(row[1]) for row in window.rows] == sorted(ids)


def test_equal_tokens_are_ordered_by_rollout_id_then_content():
    rows = [rollout([1, 2, 3], trained, rollout_id=i) for i, trained in ((5, [2]), (3, [1, 2]), (3, [2]), (4, [2]))]
    forward, backward = read_window(rows), read_window(rows[::-1])
    assert forward.rollout_id.tolist() == [3, 3, 4, 5]
    assert forward.entry_bounds.tolist() == backward.entry_bounds.tolist()


def test_policy_version_is_that_of_the_oldest_trained_token():
    window = read_window([rollout([1, 2, 3, 4], [1, 3], policy_version=[0, 5, 1, 3])])
    assert window.policy_version.tolist() == [3]


def test_log_probs_and_reference_are_those_of_the_trained_tokens():
    row = make_rollout([1, 2, 3], [False, True, False], [9, -1.5, 9], group_id=0, ref_log_prob=[9, -2.5, 9])
    window = read_window([row])
    assert window.sample_log_prob.tolist() == [-1.5]
    assert window.ref_log_prob.tolist() == [-2.5]
    assert window.sample_log_prob.dtype == np.float32


def test_versions_and_proximal_log_probs_are_those_of_the_trained_tokens():
    rows = [rollout([1, 2, 3, 4], [1, 3], policy_version=[9, 5, 9, 3]), rollout([1, 2, 3], [2], policy_version=4)]
    for row, proximal in zip(rows, ([9, -1, 9, -2], [torch.nan, 9, -3]), strict=True):
        row["proximal_log_prob"] = torch.tensor(proximal, dtype=torch.float64)
    window = read_window(rows)
    assert window.entry_version.tolist() == [4, 5, 3]
    assert window.policy_version.tolist() == [4, 3]
    assert window.proximal_log_prob.tolist() == [-3, -1, -2]
    assert window.proximal_log_prob.dtype == np.float32
    assert read_window([rollout([1, 2], [1])]).proximal_log_prob is None


def test_advantages_that_vary_in_one_rollout_are_given_for_every_entry_of_the_window():
    window = read_window(
        [rollout([1, 2, 3], [1, 2], advantage=[9, 1.5, -0.5]), rollout([1, 3, 3], [1, 2], advantage=2)]
    )
    assert window.entry_advantage.tolist() == [1.5, -0.5, 2, 2]
    assert window.advantage.tolist() == [0.5, 2]
    assert window.advantage.dtype == window.entry_advantage.dtype == np.float32


@pytest.mark.parametrize("advantage", [1.5, [9, 1.5, torch.nan, 1.5], [1.5, 1.5]])
def test_advantages_that_are_constant_within_each_rollout_are_those_of_the_rollouts(advantage):
    """However they were given, so that objectives that judge rollouts take them."""
    window = read_window([rollout([1, 2, 3, 4], [1, 3], advantage=advantage), rollout([2, 2], [1], advantage=-1)])
    assert window.entry_advantage is None
    assert window.advantage.tolist() == [1.5, -1]


def test_rollouts_that_differ_in_advantages_alone_have_one_order():
    rows = [
        rollout([1, 2, 3], [1, 2], advantage=advantage) for advantage in (1.0, [0, 1, 2], [0, 2, 1], 1.5, [5, 1, 2])
    ]
    orders = [read_window([rows[i] for i in order]) for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 3, 4, 1))]
    assert len({tuple(w.entry_advantage.tolist()) for w in orders}) == 1
    assert len({tuple(w.advantage.tolist()) for w in orders}) == 1


def test_any_container_of_rollouts_is_read():
    rows = [rollout([1, 2], [1], rollout_id=1), rollout([1, 3], [1], rollout_id=2)]
    for rollouts in (rows, tuple(rows), iter(rows), lazy_stack(rows), torch.stack(rows)):
        assert read_window(rollouts).rollout_id.tolist() == [1, 2]


def test_kept_sets_are_those_of_the_trained_tokens():
    rows = [
        rollout([1, 2, 3, 4], [1, 3], sampling_mask=[[8], [2, 5], [7], None]),
        rollout([1, 2, 3], [1], rollout_id=1),
        rollout([1, 2], [1], rollout_id=2, sampling_mask=[None, [6, 2]]),
    ]
    window = read_window(rows)
    assert window.rollout_id.tolist() == [1, 2, 0]
    assert window.kept_bounds.tolist() == [0, 0, 2, 4, 4]
    assert window.kept_token.tolist() == [2, 6, 2, 5]


@pytest.mark.parametrize("trained", [[1], []])
def test_there_are_no_kept_columns_where_no_trained_token_has_a_kept_set(trained):
    window = read_window([rollout([1, 2, 3], trained, sampling_mask=[[1, 5], None, [2]])])
    assert window.kept_bounds is None
    assert window.kept_token is None


def test_rollouts_that_differ_in_kept_sets_alone_have_one_order():
    rows = [rollout([1, 2], [1], sampling_mask=mask) for mask in (None, [None, [2]], [None, [1, 2]], [None, [2, 3]])]
    orders = [read_window([rows[i] for i in order]) for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1))]
    assert len({(tuple(w.kept_bounds.tolist()), tuple(w.kept_token.tolist())) for w in orders}) == 1


def changed(key, value):
    return rollout([1, 2], [1]).set(key, value)


def masked(count, token_ids):
    return changed("kept_count", torch.tensor(count)).set("kept_token_ids", torch.tensor(token_ids))


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([], "no rollout"),
        (rollout([1, 2], [1]), "batch_size"),
        ([TensorDict({"token_ids": torch.tensor([1])})], "no 'loss_mask'.*make_rollout"),
        ([changed("token_ids", torch.tensor([1, -7]))], "token id -7"),
        ([changed("token_ids", torch.tensor([[1, 2]]))], r"shape \(1, 2\)"),
        ([changed("token_ids", torch.tensor([], dtype=torch.long))], r"shape \(0,\)"),
        ([changed("loss_mask", torch.tensor([False, True, True]))], r"loss_mask of shape \(3,\)"),
        ([changed("loss_mask", torch.tensor([True, True]))], r"loss_mask\[0\] True"),
        ([changed("sample_log_prob", torch.tensor([0.0, torch.nan]))], r"sample_log_prob\[1\].*nan"),
        ([changed("sample_log_prob", torch.tensor([0.0, -torch.inf]))], r"sample_log_prob\[1\].*-inf"),
        ([changed("ref_log_prob", torch.tensor([0.0, torch.nan]))], r"ref_log_prob\[1\].*nan"),
        ([changed("advantage", torch.tensor(torch.nan))], "advantage nan.*mask the tokens"),
        ([changed("advantage", torch.tensor(torch.inf))], "advantage inf"),
        ([changed("advantage", torch.tensor([0.0, torch.nan]))], "rollout 0 .*advantage nan"),
        ([rollout([0, 1], [1]), changed("advantage", torch.tensor([0.0, -torch.inf]))], "rollout 0 .*advantage -inf"),
        ([changed("advantage", torch.tensor([1.0, 2.0, 3.0]))], r"advantage of shape \(3,\).*one value, or one per"),
        ([changed("advantage", torch.tensor([1.0]))], r"advantage of shape \(1,\)"),
        ([changed("proximal_log_prob", torch.tensor([0.0, torch.nan]))], r"proximal_log_prob\[1\].*nan"),
        ([changed("proximal_log_prob", torch.zeros(2)), rollout([1, 2], [1])], "no 'proximal_log_prob'.*to none"),
        ([changed("proximal_log_prob", torch.zeros(3))], r"proximal_log_prob of shape \(3,\)"),
        ([changed("ref_log_prob", torch.zeros(2)), rollout([1, 2], [1])], "no 'ref_log_prob'"),
        ([changed("kept_count", torch.tensor([0, 1]))], "rollout 0 .*without 'kept_token_ids'.*make_rollout"),
        ([changed("kept_token_ids", torch.tensor([2]))], "rollout 0 .*without 'kept_count'"),
        ([masked([0], [2])], r"kept_count of shape \(1,\)"),
        ([masked([0, 2], [2])], r"sum 2.*kept_token_ids of shape \(1,\)"),
        ([masked([2, -1], [2])], "0 or more per token"),
        ([masked([0, 1], [[2]])], r"kept_token_ids of shape \(1, 1\)"),
        ([rollout([0, 9], [1]), masked([0, 2], [1, 3])], "rollout 0: the set kept for a trained token 2.*2 among them"),
        ([masked([0, 2], [3, 2])], "rollout 0: .*ascending"),
        ([masked([0, 2], [2, 2])], "rollout 0: .*each once"),
        ([masked([0, 2], [-1, 2])], "rollout 0: .*0 or more"),
    ],
)
def test_bad_rollouts_are_refused_by_name(rollouts, message):
    with pytest.raises(ValueError, match=message):
        read_window(rollouts)


@pytest.mark.parametrize("advantage", [torch.tensor(torch.nan), torch.tensor([torch.nan, torch.inf])])
def test_what_is_wrong_in_an_untrained_rollout_or_token_is_ignored(advantage):
    unscored = rollout([1, 2], []).set("advantage", advantage)
    assert read_window([unscored, rollout([3, 4, 5], [2])]).advantage.tolist() == [0.0]
    token = rollout([3, 4, 5], [2], advantage=[torch.nan, torch.inf, 0.5])
    assert read_window([unscored, token]).advantage.tolist() == [0.5]
