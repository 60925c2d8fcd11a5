import random
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_asyncgrpo.data.schema import (
    ENTRY_NODE,
    ENTRY_REF_LOG_PROB,
    ENTRY_ROLLOUT,
    ENTRY_SAMPLE_LOG_PROB,
    KEPT_ENTRY,
    KEPT_TOKEN,
    NODE_INPUT_IDS,
    NODE_PARENT,
    NODE_POSITION_IDS,
    NODE_SUBTREE_END,
    ROLLOUT_ADVANTAGE,
    ROLLOUT_GROUP_ID,
    ROLLOUT_LEAF,
    ROLLOUT_LENGTH,
    ROLLOUT_POLICY_VERSION,
    ROLLOUT_ROLLOUT_ID,
    WINDOW_NUM_ENTRIES,
    WINDOW_NUM_ROLLOUTS,
    make_rollout,
    oldest_version,
)
from torchrl_asyncgrpo.packing import FlatPacker, TreePacker, unpack

packers = pytest.mark.parametrize("packer_class", [TreePacker, FlatPacker])


@st.composite
def windows(draw, max_rollouts=8):
    """Rollouts over three tokens, some identical, some a prefix of another, some without a trained token."""
    with_reference, with_masks = draw(st.booleans()), draw(st.booleans())
    rollouts = []
    for i in range(draw(st.integers(1, max_rollouts))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        mask = [False, *(draw(st.booleans()) for _ in tokens[1:])]
        log_prob = [-draw(st.floats(0, 4, width=32)) if trained else float("nan") for trained in mask]
        kept = None
        if with_masks and draw(st.booleans()):
            kept = [draw(st.one_of(st.none(), st.sets(st.integers(0, 4)).map(lambda s, t=t: s | {t}))) for t in tokens]
        rollouts.append(
            make_rollout(
                tokens,
                mask,
                log_prob,
                group_id=draw(st.integers(0, 2)),
                rollout_id=i,
                advantage=draw(st.floats(-2, 2, width=32)),
                policy_version=draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens))),
                ref_log_prob=log_prob if with_reference else None,
                sampling_mask=kept,
            )
        )
    return rollouts


budgets = st.one_of(st.none(), st.integers(1, 20))


def pack(packer_class, rollouts, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return packer_class(**kwargs)(rollouts)


def kept(rollout):
    """Tokens up to the last trained one."""
    trained = rollout["loss_mask"].nonzero().flatten().tolist()
    return rollout["token_ids"][: trained[-1] + 1].tolist() if trained else []


def rows_of(rollouts):
    return {int(r["rollout_id"]): kept(r) for r in rollouts if kept(r)}


@given(windows())
def test_a_tree_has_one_node_per_distinct_path(rollouts):
    (batch,) = TreePacker()(rollouts)
    paths = {tuple(row[: n + 1]) for row in rows_of(rollouts).values() for n in range(len(row))}
    assert batch.validate().num_nodes == max(len(paths), 1)


@given(windows())
def test_a_flat_batch_has_one_node_per_token(rollouts):
    (batch,) = FlatPacker()(rollouts)
    assert batch.validate().num_nodes == max(sum(map(len, rows_of(rollouts).values())), 1)


@packers
@given(windows(), budgets, st.integers(1, 4))
def test_every_trained_token_is_one_entry(packer_class, rollouts, budget, least):
    expected, found = Counter(), Counter()
    for r in rollouts:
        for n in r["loss_mask"].nonzero().flatten().tolist():
            expected[int(r["rollout_id"]), n, int(r["token_ids"][n]), float(r["sample_log_prob"][n])] += 1
    for batch in pack(packer_class, rollouts, token_budget=budget, min_micro_batches=least):
        node_L = batch[ENTRY_NODE]
        columns = (
            batch[ROLLOUT_ROLLOUT_ID][batch[ENTRY_ROLLOUT]],
            batch[NODE_POSITION_IDS][node_L],
            batch[NODE_INPUT_IDS][node_L],
            batch[ENTRY_SAMPLE_LOG_PROB],
        )
        found.update(zip(*(column.tolist() for column in columns), strict=True))
        if "ref_log_prob" in rollouts[0]:
            assert torch.equal(batch[ENTRY_REF_LOG_PROB], batch[ENTRY_SAMPLE_LOG_PROB])
    assert found == expected


@packers
@given(windows(), budgets, st.integers(1, 4))
def test_every_entry_has_the_kept_set_of_its_own_token(packer_class, rollouts, budget, least):
    expected = {}
    for r in rollouts:
        count_N = r.get("kept_count", torch.zeros(len(r["token_ids"]), dtype=torch.long)).tolist()
        kept_N = r.get("kept_token_ids", torch.zeros(0, dtype=torch.long)).split(count_N)
        for n in r["loss_mask"].nonzero().flatten().tolist():
            expected[int(r["rollout_id"]), n] = kept_N[n].tolist()
    found = {}
    for batch in pack(packer_class, rollouts, token_budget=budget, min_micro_batches=least):
        depth_L = batch.validate()[NODE_POSITION_IDS][batch[ENTRY_NODE]].tolist()
        rollout_L = batch[ROLLOUT_ROLLOUT_ID][batch[ENTRY_ROLLOUT]].tolist()
        assert ("kept" in batch.keys()) == any(expected.values()), "all micro-batches of a window or none"
        for entry, key in enumerate(zip(rollout_L, depth_L, strict=True)):
            found[key] = batch[KEPT_TOKEN][batch[KEPT_ENTRY] == entry].tolist() if "kept" in batch.keys() else []
    assert found == expected


@packers
@given(windows(), budgets, st.integers(1, 4))
def test_unpack_inverts_pack(packer_class, rollouts, budget, least):
    found = {}
    for batch in pack(packer_class, rollouts, token_budget=budget, min_micro_batches=least):
        ids = batch.validate()[ROLLOUT_ROLLOUT_ID].tolist()
        assert not found.keys() & set(ids)
        found |= dict(zip(ids, (row.tolist() for row in unpack(batch, NODE_INPUT_IDS)), strict=True))
        for row in unpack(batch, NODE_POSITION_IDS):
            assert row.tolist() == list(range(len(row)))
    assert found == rows_of(rollouts)


@packers
@given(windows(), budgets, st.integers(1, 4), st.randoms(use_true_random=False))
def test_input_order_does_not_matter(packer_class, rollouts, budget, least, rng):
    shuffled = rng.sample(rollouts, len(rollouts))
    first = pack(packer_class, rollouts, token_budget=budget, min_micro_batches=least)
    second = pack(packer_class, shuffled, token_budget=budget, min_micro_batches=least)
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert sorted(a.keys(True, True)) == sorted(b.keys(True, True))
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))


@packers
@given(windows(), st.integers(1, 20), st.integers(1, 9))
def test_budget_and_least_number_of_micro_batches_hold(packer_class, rollouts, budget, least):
    batches = pack(packer_class, rollouts, token_budget=budget, min_micro_batches=least)
    for batch in batches:
        assert batch.num_rollouts <= 1 or max(batch.num_nodes, batch.num_entries) <= budget
    trained = len(rows_of(rollouts))
    assert min(least, max(trained, 1)) <= len(batches) <= max(trained, 1)


@packers
@given(windows(), budgets)
@settings(max_examples=50)
def test_tables_of_rollouts_and_window(packer_class, rollouts, budget):
    by_id = {int(r["rollout_id"]): r for r in rollouts}
    batches = pack(packer_class, rollouts, token_budget=budget)
    for batch in batches:
        assert int(batch[WINDOW_NUM_ENTRIES]) == sum(b.num_entries for b in batches)
        assert int(batch[WINDOW_NUM_ROLLOUTS]) == sum(b.num_rollouts for b in batches) == len(rows_of(rollouts))
        for s, i in enumerate(batch[ROLLOUT_ROLLOUT_ID].tolist()):
            assert batch[ROLLOUT_ADVANTAGE][s] == by_id[i]["advantage"]
            assert batch[ROLLOUT_GROUP_ID][s] == by_id[i]["group_id"]
            assert batch[ROLLOUT_LENGTH][s] == by_id[i]["loss_mask"].sum()
            assert batch[ROLLOUT_POLICY_VERSION][s] == oldest_version(by_id[i])


def rollout(tokens, trained, rollout_id=0, **kwargs):
    mask = [n in trained for n in range(len(tokens))]
    return make_rollout(tokens, mask, [-1.0] * len(tokens), group_id=0, rollout_id=rollout_id, **kwargs)


def test_the_drawn_example():
    """Prompt 1 2; two rollouts branch inside their sampled part, a third ends on the way, a fourth has its own root."""
    (batch,) = TreePacker()(
        [
            rollout([7, 8], [1], 3),
            rollout([1, 2, 5, 6], [2, 3], 0),
            rollout([1, 2, 5, 4], [2, 3], 1),
            rollout([1, 2, 5], [2], 2),
        ]
    )
    assert batch[NODE_INPUT_IDS].tolist() == [1, 2, 5, 4, 6, 7, 8]
    assert batch[NODE_POSITION_IDS].tolist() == [0, 1, 2, 3, 3, 0, 1]
    assert batch[NODE_PARENT].tolist() == [-1, 0, 1, 2, 2, -1, 5]
    assert batch[NODE_SUBTREE_END].tolist() == [5, 5, 5, 4, 5, 7, 7]
    assert batch[ROLLOUT_ROLLOUT_ID].tolist() == [2, 1, 0, 3]
    assert batch[ROLLOUT_LEAF].tolist() == [2, 3, 4, 6]
    assert batch[ENTRY_NODE].tolist() == [2, 2, 3, 2, 4, 6]
    assert batch[ENTRY_ROLLOUT].tolist() == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("copies", [2, 5])
def test_identical_rollouts_share_every_node(copies):
    (batch,) = TreePacker()([rollout([1, 2, 3], [1, 2], i, advantage=float(i)) for i in range(copies)])
    assert batch.validate().num_nodes == 3
    assert batch[ENTRY_NODE].tolist() == [1, 2] * copies
    assert batch[ROLLOUT_ADVANTAGE].tolist() == [float(i) for i in range(copies)]


def test_different_kept_sets_on_one_node_share_it():
    (batch,) = TreePacker()(
        [rollout([1, 2], [1], i, sampling_mask=mask) for i, mask in enumerate([[None, [2, 7]], None, [None, [2]]])]
    )
    assert batch.validate().num_nodes == 2
    assert batch[ENTRY_NODE].tolist() == [1, 1, 1]
    assert batch[KEPT_ENTRY].tolist() == [0, 0, 2]
    assert batch[KEPT_TOKEN].tolist() == [2, 7, 2]


@packers
def test_one_trained_token_in_the_window(packer_class):
    (batch,) = packer_class(token_budget=2)([rollout([1, 2], [1])])
    assert batch.validate()[ENTRY_NODE].tolist() == [1]
    assert batch[WINDOW_NUM_ENTRIES].item() == batch[WINDOW_NUM_ROLLOUTS].item() == 1


@packers
@pytest.mark.parametrize("reference", [None, [0.0, 0.0]])
def test_a_window_without_a_trained_token_is_one_valid_batch(packer_class, reference):
    rows = [rollout([i, 2], [], i, ref_log_prob=reference) for i in (3, 1)]
    (batch,) = packer_class(token_budget=1, min_micro_batches=2)(rows)
    batch.validate()
    assert (batch.num_nodes, batch.num_entries, batch.num_rollouts) == (1, 0, 0)
    assert batch[NODE_INPUT_IDS].tolist() == [1]
    assert batch[WINDOW_NUM_ENTRIES].item() == batch[WINDOW_NUM_ROLLOUTS].item() == 0
    assert (ENTRY_REF_LOG_PROB in batch.keys(True)) == (reference is not None)
    assert unpack(batch, NODE_INPUT_IDS) == []


@packers
@pytest.mark.parametrize("tail", [0, 6])
def test_untrained_tokens_behind_the_last_trained_one_change_nothing(packer_class, tail):
    (batch,) = packer_class()([rollout([1, 2, 3] + [9] * tail, [1, 2])])
    assert batch[NODE_INPUT_IDS].tolist() == [1, 2, 3]


@packers
def test_a_rollout_over_the_budget_is_kept_alone_and_warned_of_once(packer_class):
    packer = packer_class(token_budget=3)
    rows = [rollout([1, 2], [1], 0), rollout([1, 2, 3, 4], [3], 8), rollout([1, 2, 3, 4, 5], [4], 9)]
    with pytest.warns(UserWarning, match="rollout 9 has 5 tokens and token_budget is 3"):
        batches = packer(rows)
    assert [batch[ROLLOUT_ROLLOUT_ID].tolist() for batch in batches] == [[0], [8], [9]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packer(rows)


@packers
@pytest.mark.parametrize("kwargs", [{"token_budget": 0}, {"token_budget": -5}, {"min_micro_batches": 0}])
def test_sizes_below_one_are_refused(packer_class, kwargs):
    ((name, value),) = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}={value}.*give 1 or more"):
        packer_class(**kwargs)


def test_a_large_window_is_minimal_and_within_budget():
    rng = random.Random(0)
    rows = []
    for i in range(300):
        prompt = [100 + i // 10] * 20
        tokens = prompt + [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        rows.append(rollout(tokens, range(20, len(tokens)), i))
    (whole,) = TreePacker()(rows)
    paths = {tuple(row[: n + 1]) for row in rows_of(rows).values() for n in range(len(row))}
    assert whole.validate().num_nodes == len(paths)
    parts = TreePacker(token_budget=500)(rows)
    assert all(max(part.validate().num_nodes, part.num_entries) <= 500 for part in parts)
    assert sum(part.num_entries for part in parts) == whole.num_entries
