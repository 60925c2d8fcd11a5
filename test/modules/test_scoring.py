"""Scores against each rollout alone through the plain model."""

import pytest
import torch
from fakes import kept_log_softmax, tiny_gpt2, tiny_qwen3
from tensordict import lazy_stack
from tensordict.nn import TensorDictModuleBase

from torchrl_asyncgrpo import FlatPacker, GRPOLoss, RolloutScorer, TreeActor, TreePacker, make_rollout
from torchrl_asyncgrpo.modules.padding_free import PaddingFreeActor

PACKERS = {"tree": TreePacker(), "split": TreePacker(token_budget=12), "flat": FlatPacker(min_micro_batches=3)}
KEYS = ["proximal_log_prob", "ref_log_prob"]


def rollouts(*, kept=True):
    """Identical ones, a prefix of them, holes, none trained, untrained tokens at the end, and kept sets on some."""
    tokens = [[1, 2, 3, 1], [1, 2, 3, 1], [1, 2], [3, 3, 2, 1, 2], [2, 1], [1, 2, 2]]
    masks = [[1, 1, 1, 1], [1, 0, 1, 1], [1, 1], [0, 1, 0, 1, 0], [0, 0], [0, 0, 1]]
    sets = {0: [None, None, [1, 2, 7], None, [1]], 1: [None, None, None, [3, 4], None], 5: [None, [1], None, [2, 3]]}
    return [
        make_rollout(
            [5, *ids],
            [0, *mask],
            [float("nan"), *(-1.0 if trained else float("nan") for trained in mask)],
            group_id=0,
            rollout_id=10 + i,
            advantage=1.0,
            sampling_mask=sets.get(i) if kept else None,
        )
        for i, (ids, mask) in enumerate(zip(tokens, masks, strict=True))
    ]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_the_model_on_each_rollout_alone(temperature, packer, key):
    """Within the kept sets for the proximal policy, of the whole vocabulary for the reference."""
    plain = tiny_gpt2(initializer_range=0.2).double()
    rows = rollouts()
    model = tiny_gpt2(initializer_range=0.2).double()
    scored = RolloutScorer(TreeActor(model, temperature=temperature), packer, key=key)(rows)
    assert all(row is own for row, own in zip(scored, rows, strict=True))
    for row in rows:
        expected = torch.zeros(row["token_ids"].shape)
        for n, within, whole in kept_log_softmax(plain, row, temperature):
            expected[n] = (within if key == "proximal_log_prob" else whole)[row["token_ids"][n]]
        assert row[key].dtype == torch.float32
        assert not row[key].requires_grad
        torch.testing.assert_close(row[key], expected.detach(), rtol=1e-6, atol=1e-6)


def test_a_policy_is_its_own_proximal_policy():
    actor = TreeActor(tiny_qwen3())
    rows = RolloutScorer(actor, TreePacker(), key="proximal_log_prob")(rollouts())
    metrics = GRPOLoss(actor, anchor="proximal")(TreePacker()(rows)[0])
    assert metrics["ratio"].item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("key", KEYS)
def test_scores_that_are_there_are_left(key):
    """Several optimizer steps on a window compare with the scores of the first."""
    rows = RolloutScorer(TreeActor(tiny_qwen3(seed=0)), TreePacker(), key=key)(rollouts())
    before = [row[key].clone() for row in rows]
    RolloutScorer(TreeActor(tiny_qwen3(seed=1)), TreePacker(), key=key)(rows)
    assert all(torch.equal(row[key], old) for row, old in zip(rows, before, strict=True))


def test_scores_that_are_missing_are_added_beside_those_that_are_there():
    first, second = (TreeActor(tiny_qwen3(seed=seed)) for seed in (0, 1))
    rows = rollouts()
    RolloutScorer(first, TreePacker(), key="ref_log_prob")(rows[:3])
    before = [row["ref_log_prob"].clone() for row in rows[:3]]
    RolloutScorer(second, TreePacker(), key="ref_log_prob")(rows)
    assert all(torch.equal(row["ref_log_prob"], old) for row, old in zip(rows, before, strict=False))
    fresh = RolloutScorer(second, TreePacker(), key="ref_log_prob")(rollouts())
    for row, other in zip(rows[3:], fresh[3:], strict=True):
        torch.testing.assert_close(row["ref_log_prob"], other["ref_log_prob"])


def test_scoring_that_is_interrupted_leaves_no_scores_behind():
    """Or the next call would take what stands there for scores."""
    actor, rows, calls = TreeActor(tiny_qwen3()), rollouts(), []

    def interrupted(batch, forward=actor.forward):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(batch)

    actor.forward = interrupted
    score = RolloutScorer(actor, FlatPacker(min_micro_batches=3), key="proximal_log_prob")
    with pytest.raises(KeyboardInterrupt):
        score(rows)
    assert not any("proximal_log_prob" in row.keys() for row in rows)
    score(rows)
    fresh = RolloutScorer(TreeActor(tiny_qwen3()), TreePacker(), key="proximal_log_prob")(rollouts())
    for row, other in zip(rows, fresh, strict=True):
        torch.testing.assert_close(row["proximal_log_prob"], other["proximal_log_prob"])


def test_a_window_in_which_nothing_is_trained_is_scored_with_zeros():
    rows = [make_rollout([1, 2], [0, 0], [0, 0], group_id=0) for _ in range(2)]
    RolloutScorer(TreeActor(tiny_qwen3()), TreePacker(), key="ref_log_prob")(rows)
    assert [row["ref_log_prob"].tolist() for row in rows] == [[0.0, 0.0]] * 2
    TreePacker()(rows)


def test_a_window_of_a_replay_buffer_is_scored_in_place():
    rows = rollouts()
    RolloutScorer(TreeActor(tiny_qwen3()), TreePacker(), key="ref_log_prob")(lazy_stack(rows).unbind(0))
    assert all("ref_log_prob" in row.keys() for row in rows)


def test_autocast_is_that_of_the_trainer():
    seen = []

    class Watched(TreeActor):
        def forward(self, batch):
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return super().forward(batch)

    actor = Watched(tiny_qwen3())
    for dtype in (None, torch.bfloat16):
        RolloutScorer(actor, TreePacker(), key="ref_log_prob", autocast_dtype=dtype)(rollouts(kept=False))
    assert seen == [(False, False), (True, False)]


def test_rollouts_of_one_id_are_refused():
    rows = rollouts()
    rows[1]["rollout_id"] = rows[0]["rollout_id"].clone()
    with pytest.raises(ValueError, match="6 rollouts have 5 different rollout_id.*make_rollout"):
        RolloutScorer(TreeActor(tiny_qwen3()), TreePacker(), key="ref_log_prob")(rows)
    assert "ref_log_prob" not in rows[0].keys()


def test_unknown_key():
    with pytest.raises(ValueError, match="key='sample_log_prob'.*'proximal_log_prob' or 'ref_log_prob'"):
        RolloutScorer(TreeActor(tiny_qwen3()), TreePacker(), key="sample_log_prob")


def test_packer_whose_batches_the_policy_does_not_run():
    actor = PaddingFreeActor(tiny_qwen3())
    with pytest.raises(ValueError, match=r"packer=TreePacker makes trees, which PaddingFreeActor .*FlatPacker\(\)"):
        RolloutScorer(actor, TreePacker(), key="ref_log_prob")


def test_a_policy_without_parameters_scores_too():
    class Table(TensorDictModuleBase):
        in_keys, out_keys = [("node", "input_ids")], [("node", "log_prob"), ("node", "entropy")]

        def forward(self, batch):
            batch["node", "log_prob"] = batch["node", "entropy"] = -batch["node", "input_ids"].float()
            return batch

    (row, *_) = RolloutScorer(Table(), TreePacker(), key="ref_log_prob")(rollouts(kept=False))
    assert row["ref_log_prob"].tolist() == [0.0, -1.0, -2.0, -3.0, -1.0]
