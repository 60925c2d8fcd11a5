import pytest
import torch

from torchrl_asyncgrpo.data.schema import (
    ENTRY_ADVANTAGE,
    ENTRY_NODE,
    ENTRY_POLICY_VERSION,
    ENTRY_REF_LOG_PROB,
    ENTRY_ROLLOUT,
    ENTRY_SAMPLE_LOG_PROB,
    NODE_PARENT,
    NODE_POSITION_IDS,
    NODE_SUBTREE_END,
    ROLLOUT_ADVANTAGE,
    ROLLOUT_LEAF,
    ROLLOUT_LENGTH,
    ROLLOUT_POLICY_VERSION,
    WINDOW_NUM_ENTRIES,
    WINDOW_NUM_ROLLOUTS,
    TreeBatch,
    make_rollout,
    oldest_version,
)
from torchrl_asyncgrpo.packing import TreePacker

MASK, LOG_PROB = [False, True, True], [0.0, -1.0, -2.0]
FORK = [[1, 2, 3], [1, 4]]


def test_a_rollout_holds_the_keys_of_the_contract():
    row = make_rollout([1, 2, 3], MASK, LOG_PROB, group_id=4, reward=1, advantage=-0.5, policy_version=6, rollout_id=9)
    assert row.batch_size == ()
    assert {key: (value.dtype, value.tolist()) for key, value in row.items()} == {
        "token_ids": (torch.int64, [1, 2, 3]),
        "loss_mask": (torch.bool, MASK),
        "sample_log_prob": (torch.float32, LOG_PROB),
        "policy_version": (torch.int64, [6, 6, 6]),
        "reward": (torch.float32, 1.0),
        "advantage": (torch.float32, -0.5),
        "group_id": (torch.int64, 4),
        "rollout_id": (torch.int64, 9),
    }


def test_rollout_ids_differ_by_default():
    rows = [make_rollout([1], [False], [0.0], group_id=0) for _ in range(3)]
    assert len({int(row["rollout_id"]) for row in rows}) == 3


def test_the_reference_is_kept_and_untrained_log_probs_may_be_nan():
    nan = float("nan")
    row = make_rollout([1, 2, 3], [False, False, True], [nan, nan, -1], group_id=0, ref_log_prob=[nan, nan, -3.0])
    assert row["ref_log_prob"][2] == -3


def test_versions_of_tokens_are_kept_and_the_oldest_trained_one_counts():
    row = make_rollout(
        [1, 2, 3, 4], [False, True, True, True], [0, -1, -1, -1], group_id=0, policy_version=[0, 3, 3, 5]
    )
    assert row["policy_version"].tolist() == [0, 3, 3, 5]
    assert oldest_version(row) == 3


def test_oldest_version_of_an_untrained_rollout_is_over_all_tokens():
    assert oldest_version(make_rollout([1, 2], [False, False], [0, 0], group_id=0, policy_version=[4, 2])) == 2


@pytest.mark.parametrize(
    ("mask", "advantage", "expected"),
    [
        ([0, 1, 1, 0, 1], 2.5, 2.5),
        ([0, 1, 1, 0, 1], [9, 1.5, -2, 9, 3], [9.0, 1.5, -2.0, 9.0, 3.0]),  # one per token
        ([0, 1, 1, 0, 1], [1.5, -2], [0.0, 1.5, 1.5, 0.0, -2.0]),  # one per turn
        ([0, 0, 1, 1, 1], [4], [0.0, 0.0, 4.0, 4.0, 4.0]),
        ([0, 1, 0, 1, 0], [1, 2], [0.0, 1.0, 0.0, 2.0, 0.0]),
        ([0, 0, 0], [], [0.0, 0.0, 0.0]),
        ([0], [7], [7.0]),
        ([0], [], [0.0]),
    ],
)
def test_advantage_is_one_number_or_one_per_token_or_per_turn(mask, advantage, expected):
    row = make_rollout(range(len(mask)), mask, [-1.0] * len(mask), group_id=0, advantage=advantage)
    assert row["advantage"].dtype == torch.float32
    assert row["advantage"].tolist() == expected


def test_advantage_of_a_tensor_is_a_copy():
    given = torch.tensor([0.0, 1.0, 2.0])
    row = make_rollout([1, 2, 3], MASK, LOG_PROB, group_id=0, advantage=given)
    given += 1
    assert row["advantage"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("advantage", [[1.0, 2.0], [], [1.0] * 4, [[1.0, 2.0, 3.0]]])
def test_advantage_of_another_length_is_refused_with_those_that_fit(advantage):
    with pytest.raises(ValueError, match=r"advantage has shape .*per token \[3\].*per turn \[1\].*1 runs of trained"):
        make_rollout([1, 2, 3], MASK, LOG_PROB, group_id=0, advantage=advantage)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, r"token_ids has shape \(0,\)"),
        ({"token_ids": [[1, 2, 3]]}, r"token_ids has shape \(1, 3\)"),
        ({"loss_mask": [False, True, True, True]}, r"loss_mask has shape \(4,\) and token_ids \(3,\)"),
        ({"sample_log_prob": [-1.0]}, r"sample_log_prob has shape \(1,\)"),
        ({"policy_version": [1, 1]}, r"policy_version has shape \(2,\)"),
        ({"ref_log_prob": [-1.0, -1.0]}, r"ref_log_prob has shape \(2,\)"),
        ({"loss_mask": [True, True, True]}, r"loss_mask\[0\] is True"),
        ({"sample_log_prob": [0.0, float("nan"), -1.0]}, r"sample_log_prob\[1\] is nan"),
        ({"sample_log_prob": [0.0, -1.0, float("-inf")]}, r"sample_log_prob\[2\] is -inf"),
        ({"sample_log_prob": [0.0, 0.25, -1.0]}, r"sample_log_prob\[1\] is 0.25"),
        ({"ref_log_prob": [0.0, -1.0, float("inf")]}, r"ref_log_prob\[2\] is inf"),
    ],
)
def test_bad_rollouts_are_refused_by_name(changes, message):
    arguments = {"token_ids": [1, 2, 3], "loss_mask": MASK, "sample_log_prob": LOG_PROB} | changes
    with pytest.raises(ValueError, match=message):
        make_rollout(**arguments, group_id=0)


@pytest.fixture
def batch():
    """Nodes 0-1-2 and 1-3 of one tree, 4-5 of another; three rollouts."""
    rows = [[1, 2, 3], [1, 2, 4], [5, 6]]
    (batch,) = TreePacker()(
        [
            make_rollout(
                r,
                [False] + [True] * (len(r) - 1),
                [-1.0] * len(r),
                ref_log_prob=[-1.0] * len(r),
                advantage=[float(i) for i in range(len(r))],
                policy_version=[9, 3, 4][: len(r)],
                group_id=0,
            )
            for r in rows
        ]
    )
    return batch


def test_a_packed_batch_is_valid_and_counts_its_tables(batch):
    assert batch.validate() is batch
    assert (batch.num_nodes, batch.num_entries, batch.num_rollouts) == (6, 5, 3)


def test_a_tree_batch_passes_through_tensordict_operations(batch):
    clone = batch.clone()
    assert isinstance(clone, TreeBatch)
    assert torch.equal(clone.validate()[NODE_PARENT], batch[NODE_PARENT])


@pytest.mark.parametrize(
    ("key", "at", "value"),
    [
        (NODE_PARENT, 2, 3),
        (NODE_PARENT, 2, -2),
        (NODE_PARENT, 3, 0),
        (NODE_POSITION_IDS, 0, 1),
        (NODE_POSITION_IDS, 3, 3),
        (NODE_SUBTREE_END, 5, 7),
        (NODE_SUBTREE_END, 2, 2),
        (NODE_SUBTREE_END, 2, 4),
        (NODE_SUBTREE_END, 0, 3),
        (NODE_SUBTREE_END, 0, 5),
        (NODE_SUBTREE_END, 4, 5),
        (ENTRY_NODE, 0, 6),
        (ENTRY_NODE, 0, -1),
        (ENTRY_NODE, 0, 0),
        (ENTRY_NODE, 0, 5),
        (ENTRY_NODE, 0, 2),
        (ENTRY_NODE, 3, 2),
        (ENTRY_ROLLOUT, 4, 3),
        (ENTRY_ROLLOUT, 4, 0),
        (ENTRY_SAMPLE_LOG_PROB, 1, float("nan")),
        (ENTRY_REF_LOG_PROB, 1, float("nan")),
        (ENTRY_ADVANTAGE, 1, float("inf")),
        (ENTRY_POLICY_VERSION, 4, 2),
        (ROLLOUT_POLICY_VERSION, 0, 4),
        (ROLLOUT_ADVANTAGE, 2, float("nan")),
        (ROLLOUT_LEAF, 0, 1),
        (ROLLOUT_LEAF, 1, 2),
        (ROLLOUT_LENGTH, 0, 3),
        (WINDOW_NUM_ENTRIES, (), 4),
        (WINDOW_NUM_ROLLOUTS, (), 2),
    ],
)
def test_validate_refuses_a_broken_batch(batch, key, at, value):
    batch[key][at] = value
    with pytest.raises(ValueError, match="TreeBatch"):
        batch.validate()


def test_validate_names_a_node_in_the_subtree_of_another():
    """Attention would run from a node to one that is not on its path."""
    (batch,) = TreePacker()([make_rollout(row, MASK[: len(row)], LOG_PROB[: len(row)], group_id=0) for row in FORK])
    batch[NODE_SUBTREE_END][1] = 4
    with pytest.raises(ValueError, match=r"'subtree_end'\) .* index 3: a node lies in the subtrees of its ancestors"):
        batch.validate()


def test_validate_refuses_a_rollout_without_a_trained_token(batch):
    batch[ENTRY_ROLLOUT][4] = 0
    batch[ROLLOUT_LENGTH][:] = torch.bincount(batch[ENTRY_ROLLOUT], minlength=3)
    with pytest.raises(ValueError, match=r"'length'\) .* index 2: a rollout without a trained token"):
        batch.validate()


def test_what_is_optional_may_be_missing(batch):
    del batch[ROLLOUT_LEAF], batch[ENTRY_REF_LOG_PROB], batch[ENTRY_ADVANTAGE]
    batch.validate()
