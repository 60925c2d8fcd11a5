"""What a packer carries along for every trained token: advantage, policy version, proximal log-prob."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_asyncgrpo.data.schema import make_rollout
from torchrl_asyncgrpo.packing import FlatPacker, TreePacker

NAN = float("nan")
packers = pytest.mark.parametrize("packer_class", [TreePacker, FlatPacker])


@st.composite
def windows(draw):
    """Rollouts over three tokens whose advantage is one number, one per token or one per turn."""
    rollouts = []
    proximal = draw(st.booleans())
    for i in range(draw(st.integers(1, 7))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        mask = [False, *(draw(st.booleans()) for _ in tokens[1:])]
        turns = sum(now and not before for before, now in pairwise(mask))
        count = draw(st.sampled_from([None, len(tokens), turns]))
        value = st.sampled_from([-1.0, 0.5, 0.5, 2.0])
        advantage = draw(value if count is None else st.lists(value, min_size=count, max_size=count))
        row = make_rollout(
            tokens,
            mask,
            [-1.0] * len(tokens),
            group_id=0,
            rollout_id=i,
            advantage=advantage,
            policy_version=draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens))),
        )
        if proximal:
            row["proximal_log_prob"] = torch.tensor([-float(n) - i / 8 if t else NAN for n, t in enumerate(mask)])
        rollouts.append(row)
    return rollouts


@packers
@given(rollouts=windows(), budget=st.one_of(st.none(), st.integers(6, 20)), least=st.integers(1, 4))
def test_every_entry_has_what_its_own_token_has(packer_class, rollouts, budget, least):
    expected, varies = {}, False
    for row in rollouts:
        trained = row["loss_mask"].nonzero().flatten().tolist()
        advantage = row["advantage"].expand(row["token_ids"].shape)
        varies |= len({float(advantage[n]) for n in trained}) > 1
        for n in trained:
            proximal = float(row["proximal_log_prob"][n]) if "proximal_log_prob" in row.keys() else None
            version = int(row["policy_version"][n])
            expected[int(row["rollout_id"]), n] = float(advantage[n]), version, proximal
    found = {}
    for batch in packer_class(token_budget=budget, min_micro_batches=least)(rollouts):
        entry = batch.validate()["entry"]
        if batch.num_rollouts:
            assert ("advantage" in entry.keys()) == varies, "all micro-batches of a window or none"
        assert ("proximal_log_prob" in entry.keys()) == ("proximal_log_prob" in rollouts[0].keys())
        of_rollout = batch["rollout", "advantage"][entry["rollout"]]
        columns = [
            batch["rollout", "rollout_id"][entry["rollout"]],
            batch["node", "position_ids"][entry["node"]],
            entry.get("advantage", of_rollout),
            entry["policy_version"],
            entry.get("proximal_log_prob", torch.zeros(batch.num_entries)),
        ]
        for i, n, advantage, version, proximal in zip(*(column.tolist() for column in columns), strict=True):
            found[i, n] = advantage, version, proximal if "proximal_log_prob" in entry.keys() else None
    assert found == expected


@packers
def test_the_advantage_of_a_rollout_whose_tokens_differ_is_their_mean(packer_class):
    rows = [make_rollout([1, 2, 3], [0, 1, 1], [-1.0] * 3, group_id=0, advantage=[NAN, 1.0, 4.0])]
    (batch,) = packer_class()(rows)
    assert batch["rollout", "advantage"].tolist() == [2.5]
    assert batch["entry", "advantage"].dtype == torch.float32


@packers
def test_a_window_without_a_trained_token_has_the_keys(packer_class):
    row = make_rollout([1, 2], [0, 0], [NAN, NAN], group_id=0, advantage=[NAN, NAN])
    row["proximal_log_prob"] = torch.tensor([NAN, NAN])
    (batch,) = packer_class()([row])
    assert batch.validate()["entry", "policy_version"].tolist() == []
    assert batch["entry", "proximal_log_prob"].tolist() == []
    assert "advantage" not in batch["entry"].keys()
