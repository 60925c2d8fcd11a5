"""Kept sets of a sampling mask in a rollout, and on its way through buffer and checkpoint."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_asyncgrpo.data.replay_buffer import make_replay_buffer
from torchrl_asyncgrpo.data.schema import KEPT_ENTRY, KEPT_TOKEN, NODE_INPUT_IDS, make_rollout
from torchrl_asyncgrpo.packing import TreePacker


def rollout(sampling_mask, tokens=(5, 1, 2), trained=(0, 1, 1), rollout_id=0):
    return make_rollout(
        list(tokens),
        list(trained),
        [-1.0] * len(tokens),
        group_id=0,
        rollout_id=rollout_id,
        sampling_mask=sampling_mask,
    )


@pytest.mark.parametrize("mask", [[None, [9, 1, 4], [2]], [[], {4, 9, 1}, (2,)], [(), range(1, 9), torch.tensor([2])]])
def test_kept_sets_are_stored_ragged_and_sorted(mask):
    row = rollout(mask)
    sets = [sorted(map(int, kept or ())) if not isinstance(kept, torch.Tensor) else kept.tolist() for kept in mask]
    assert row["kept_count"].tolist() == [len(kept) for kept in sets]
    assert row["kept_token_ids"].tolist() == [token for kept in sets for token in kept]
    assert row["kept_count"].dtype == row["kept_token_ids"].dtype == torch.int64


@pytest.mark.parametrize("mask", [None, [None] * 3, [[], None, ()]])
def test_a_mask_that_cuts_nothing_leaves_no_keys(mask):
    assert set(rollout(mask).keys()) == set(rollout(None).keys())
    assert "kept_count" not in rollout(mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1], [2]], "sampling_mask has 2 sets and token_ids 3 tokens.*one set per token"),
        ([None, [1], [1, 3]], r"sampling_mask\[2\] keeps 2 token ids, and the trained token_ids\[2\], 2, is not"),
        ([None, [1, 7, 7], [2]], r"sampling_mask\[1\] holds the token id 7, .*second time.*distinct"),
        ([None, [1], [2, -4]], r"sampling_mask\[2\] holds the token id -4, negative.*0 or more"),
    ],
)
def test_bad_masks_are_refused_by_name(mask, message):
    with pytest.raises(ValueError, match=message):
        rollout(mask)


def test_sets_of_untrained_tokens_are_not_checked():
    assert rollout([[7, 7], None, [8]], trained=(0, 1, 0))["kept_count"].tolist() == [2, 0, 1]


def rows_with_and_without():
    return [
        rollout([None, [1, 4], None], rollout_id=0),
        rollout(None, rollout_id=1),
        rollout([[], [1], [2, 9, 3]], rollout_id=2),
    ]


def test_rows_with_and_without_a_mask_pass_through_the_replay_buffer_and_its_checkpoint(tmp_path):
    rows = rows_with_and_without()
    buffers = [make_replay_buffer(batch_size=1, current_version=lambda: 0, timeout=1) for _ in range(2)]
    buffers[0].extend(rows)
    buffers[0].dumps(tmp_path)
    buffers[1].loads(tmp_path)
    for buffer in buffers:
        drawn = buffer.sample().unbind(0)
        for ours, theirs in zip(drawn, rows, strict=True):
            assert set(ours.keys()) == set(theirs.keys())
            assert (ours == theirs).all()


def test_rows_with_and_without_a_mask_pass_through_stacks_and_dicts():
    rows = rows_with_and_without()
    restored = [TensorDict(row.to_dict(), batch_size=[]) for row in rows]
    (expected,) = TreePacker()(rows)
    for other in (lazy_stack(rows), lazy_stack(restored), lazy_stack(rows).to("cpu").clone()):
        (batch,) = TreePacker()(other)
        assert set(batch.keys(True, True)) == set(expected.keys(True, True))
        assert all(torch.equal(batch[key], expected[key]) for key in expected.keys(True, True))


@pytest.fixture
def batch():
    (batch,) = TreePacker()(rows_with_and_without())
    return batch


def test_a_packed_batch_with_kept_sets_is_valid_and_stays_one(batch):
    assert batch.validate()["kept"].batch_size == (6,)
    assert torch.equal(batch.clone().validate()[KEPT_TOKEN], batch[KEPT_TOKEN])
    (unbound,) = lazy_stack([batch]).to("cpu").unbind(0)
    assert torch.equal(unbound[KEPT_ENTRY], batch[KEPT_ENTRY])


@pytest.mark.parametrize(
    ("key", "at", "value", "rule"),
    [
        (KEPT_ENTRY, 0, -1, "one of the 6 entries"),
        (KEPT_ENTRY, 5, 6, "one of the 6 entries"),
        (KEPT_ENTRY, 0, 3, "ascending by entry"),
        (KEPT_TOKEN, 0, -1, "0 or more"),
        (KEPT_TOKEN, 5, 3, "each once"),
        (KEPT_TOKEN, 0, 0, "own kept set"),
        (NODE_INPUT_IDS, 1, 63, "own kept set"),
    ],
)
def test_validate_refuses_broken_kept_sets(batch, key, at, value, rule):
    batch[key][at] = value
    with pytest.raises(ValueError, match=f"TreeBatch.*{rule}"):
        batch.validate()
