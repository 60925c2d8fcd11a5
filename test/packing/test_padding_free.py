"""The one row of tokens of a flat batch: what it says of every rollout, and that nothing of the batch is lost in it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_asyncgrpo.data.schema import make_rollout
from torchrl_asyncgrpo.packing import FlatPacker, TreePacker
from torchrl_asyncgrpo.packing.padding_free import chain_starts, from_padding_free, to_padding_free

CHANNELS = ("old_log_probs", "advantages", "policy_versions", "ref_log_probs", "proximal_log_probs", "kept_count")


@st.composite
def windows(draw):
    """Rollouts, some of them equal or untrained, all or none of them with each optional column."""
    with_reference, with_proximal, with_masks = (draw(st.booleans()) for _ in range(3))
    rollouts = []
    for i in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        N = len(tokens)
        mask = [False, *(draw(st.booleans()) for _ in tokens[1:])]
        log_prob = [-draw(st.floats(0, 4, width=32)) for _ in tokens]
        several = draw(st.booleans())
        numbers = st.floats(-2, 2, width=32)
        kept = [draw(st.one_of(st.none(), st.sets(st.integers(0, 4)).map(lambda s, t=t: s | {t}))) for t in tokens]
        rollout = make_rollout(
            tokens,
            mask,
            log_prob,
            group_id=0,
            rollout_id=i,
            advantage=[draw(numbers) for _ in tokens] if several else draw(numbers),
            policy_version=draw(st.lists(st.integers(0, 3), min_size=N, max_size=N)),
            ref_log_prob=[-draw(st.floats(0, 4, width=32)) for _ in tokens] if with_reference else None,
            sampling_mask=kept if with_masks else None,
        )
        if with_proximal:
            rollout["proximal_log_prob"] = torch.tensor([-draw(st.floats(0, 4, width=32)) for _ in tokens])
        rollouts.append(rollout)
    return rollouts


def naive_row(rollouts):
    """The row of rollouts in the order given, written token by token."""
    row = {name: [] for name in ("input_ids", "position_ids", "completion_mask", "kept_token_ids", *CHANNELS)}
    bounds = [0]
    for r in rollouts:
        trained = r["loss_mask"].nonzero().flatten().tolist()
        for n in range(trained[-1] + 1):
            on = bool(r["loss_mask"][n])
            row["input_ids"].append(int(r["token_ids"][n]))
            row["position_ids"].append(n)
            row["completion_mask"].append(on)
            advantage = r["advantage"] if r["advantage"].ndim == 0 else r["advantage"][n]
            row["old_log_probs"].append(float(r["sample_log_prob"][n]) if on else 0.0)
            row["advantages"].append(float(advantage) if on else 0.0)
            row["policy_versions"].append(int(r["policy_version"][n]) if on else 0)
            for name, key in (("ref_log_probs", "ref_log_prob"), ("proximal_log_probs", "proximal_log_prob")):
                row[name].append(float(r[key][n]) if on and key in r else 0.0)
            counts = r.get("kept_count", torch.zeros_like(r["token_ids"])).tolist()
            start = sum(counts[:n])
            row["kept_count"].append(counts[n] if on else 0)
            row["kept_token_ids"] += r["kept_token_ids"][start : start + counts[n]].tolist() if on and counts[n] else []
        bounds.append(len(row["input_ids"]))
    return row | {"cu_seqlens": bounds}


@given(windows())
def test_the_row_says_of_every_token_what_its_rollout_says(rollouts):
    (batch,) = FlatPacker(padding_free=True)(rollouts)
    flat = batch["flat"]
    if not batch.num_rollouts:
        assert flat["input_ids"].shape == (1,)
        assert not flat["completion_mask"].any()
        assert flat["cu_seqlens"].tolist() == [0, 1]
        return
    by_id = {int(r["rollout_id"]): r for r in rollouts}
    ordered = [by_id[i] for i in batch["rollout", "rollout_id"].tolist()]
    expected = naive_row(ordered)
    for name, value in flat.items():
        if not name.startswith("num_"):
            assert value.tolist() == expected[name], name
    optional = {"ref_log_probs": "ref_log_prob", "proximal_log_probs": "proximal_log_prob"}
    assert all((name in flat.keys()) == any(key in r for r in ordered) for name, key in optional.items())
    assert ("kept_count" in flat.keys()) == bool(expected["kept_token_ids"])
    assert flat["cu_seqlens"].dtype == torch.int32
    assert int(flat["num_entries"]) == sum(int(r["loss_mask"].sum()) for r in rollouts)
    assert int(flat["num_rollouts"]) == len(ordered)


@given(windows(), st.one_of(st.none(), st.integers(1, 12)))
@pytest.mark.filterwarnings("ignore:rollout .* has")
def test_reading_a_row_gives_the_tables_back(rollouts, budget):
    for batch in FlatPacker(budget, padding_free=True)(rollouts):
        again = from_padding_free(batch["flat"]).validate()
        for key in again.keys(include_nested=True, leaves_only=True):
            if key[0] == "window":
                assert torch.equal(again[key], batch[key])
            else:
                torch.testing.assert_close(again[key], batch[key], rtol=0, atol=1e-6, msg=str(key))
        lost = {key for key in set(batch.keys(True, True)) - set(again.keys(True, True)) if key[0] != "flat"}
        rollout_L = batch["entry", "rollout"]
        constant = "advantage" in batch["entry"].keys() and all(
            len(set(batch["entry", "advantage"][rollout_L == r].tolist())) == 1 for r in range(batch.num_rollouts)
        )
        assert lost == {("rollout", "rollout_id"), ("rollout", "group_id")} | (
            {("entry", "advantage")} if constant else set()
        )


def test_other_packers_write_no_row():
    row = make_rollout([1, 2], [0, 1], [0.0, -1.0], group_id=0)
    assert "flat" not in FlatPacker()([row])[0].keys()
    assert "flat" not in TreePacker()([row])[0].keys()


def test_tables_are_those_of_the_plain_flat_packer():
    rows = [make_rollout([1, 2, t], [0, 1, 1], [0.0, -1.0, -2.0], group_id=0, rollout_id=t) for t in (1, 2, 2)]
    (plain,), (padding_free,) = FlatPacker()(rows), FlatPacker(padding_free=True)(rows)
    assert (plain == padding_free.exclude("flat")).all()


@pytest.mark.parametrize("last", [3, 2])
def test_shared_nodes_are_no_row(last):
    """Branches, and rollouts that are equal, which branch nowhere."""
    rows = [make_rollout([1, t], [0, 1], [0.0, -1.0], group_id=0) for t in (2, last)]
    (tree,) = TreePacker()(rows)
    with pytest.raises(ValueError, match="FlatPacker"):
        to_padding_free(tree)


def test_a_branch_is_named():
    with pytest.raises(ValueError, match=r"node 2 of the batch branches off node 0.*TreeActor"):
        chain_starts(torch.tensor([-1, 0, 0]))
