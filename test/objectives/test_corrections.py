"""Corrections against plain loops, alone and together, and at the edge of what numbers hold."""

import math

import pytest
import torch
from objective_oracle import VARIANTS, masked, number, objective, off_policy, rejected, truncated, window
from objective_rollouts import PathActor, assert_equal, gradients, random_rollouts, run
from tensordict.nn import TensorDictModuleBase

from torchrl_asyncgrpo import (
    FlatPacker,
    GRPOLoss,
    MaskedImportanceSampling,
    OffPolicySequenceMask,
    ReinforceLoss,
    SequenceRejection,
    TreePacker,
    TruncatedImportanceSampling,
    make_rollout,
)
from torchrl_asyncgrpo.objectives.corrections import Correction

# the correction, its loops, and the metric that says that it did something
WEIGHING = {
    "tis-token": (TruncatedImportanceSampling(1.3), truncated(1.3, "token"), "tis_truncated"),
    "tis-sequence": (
        TruncatedImportanceSampling(1.2, level="sequence"),
        truncated(1.2, "sequence"),
        "tis_truncated",
    ),
    "is": (TruncatedImportanceSampling(None, level="sequence"), truncated(math.inf, "sequence"), None),
    "icepop-token": (MaskedImportanceSampling(0.7, 1.4), masked(0.7, 1.4, "token"), "icepop_masked"),
    "icepop-sequence": (
        MaskedImportanceSampling(0.6, 1.4, level="sequence"),
        masked(0.6, 1.4, "sequence"),
        "icepop_masked",
    ),
}
MASKING = {
    "mean": (SequenceRejection(0.9, 1.2, measure="mean"), rejected(0.9, 1.2, "mean"), "rejected"),
    "max": (SequenceRejection(0.5, 1.8, measure="max"), rejected(0.5, 1.8, "max"), "rejected"),
    "geometric": (SequenceRejection(0.8, 1.1), rejected(0.8, 1.1, "geometric"), "rejected"),
    "off-policy": (OffPolicySequenceMask(0.05), off_policy(0.05), "off_policy_masked"),
}
TOGETHER = {
    "truncate-mask-reject": ["tis-token", "icepop-sequence", "mean", "off-policy"],
    "reject-truncate": ["geometric", "tis-sequence"],
    "mask": ["max", "off-policy"],
}


def weighs_tokens(correction):
    return correction.weighs and correction.level == "token"


def check(name, anchor, corrections, loops, fired):
    seen = set()
    for seed, packer in ((1, TreePacker()), (2, TreePacker(token_budget=12)), (3, FlatPacker(min_micro_batches=2))):
        rollouts = random_rollouts(seed)
        actor = PathActor(rollouts, seed)
        expected = window(rollouts, actor.alone, VARIANTS[name], anchor=anchor, corrections=loops)
        ours = run(objective(name, actor, anchor, correction=corrections), packer(rollouts))
        assert_equal(ours, expected, list(actor.parameters()), 1e-12)
        seen |= {key for key, value in expected[1].items() if 0 < value < 1}
    assert set(fired) <= seen, "a correction that never acted, or on all"


@pytest.mark.parametrize(("name", "anchor"), [("grpo", "proximal"), ("gspo", "proximal"), ("reinforce", "sample")])
@pytest.mark.parametrize("correction", WEIGHING | MASKING)
def test_each_equals_loops(correction, name, anchor):
    ours, loops, fired = (WEIGHING | MASKING)[correction]
    if VARIANTS[name].sequence and weighs_tokens(ours):
        with pytest.raises(ValueError, match=f"{type(ours).__name__} at level='token'.*one term per.*level='sequence'"):
            objective(name, PathActor([[0]]), anchor, correction=ours)
    else:
        check(name, anchor, ours, [loops], {fired} - {None})


@pytest.mark.parametrize("correction", MASKING)
@pytest.mark.parametrize("name", ["grpo", "gmpo", "cispo"])
def test_masks_go_with_the_sampler_as_anchor(correction, name):
    ours, loops, fired = MASKING[correction]
    check(name, "sample", [ours], [loops], {fired})


@pytest.mark.parametrize("correction", WEIGHING)
def test_the_current_policy_as_anchor_is_weighed_against_the_sampler(correction):
    ours, loops, _ = WEIGHING[correction]
    check("dual_clip", "current", ours, [loops], {})


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
def test_several_are_multiplied(names):
    parts = [(WEIGHING | MASKING)[name] for name in names]
    check("grpo", "proximal", [ours for ours, _, _ in parts], [loops for _, loops, _ in parts], {})


def test_a_correction_of_your_own_is_one_like_any_other():
    class First:
        """Trains the first token of each rollout alone."""

        weighs = False

        def __call__(self, entries, log_gap_L):
            assert not entries.log_prob_L.requires_grad
            weight_L = torch.ones_like(log_gap_L)
            weight_L[1:] = (entries.rollout_L[1:] != entries.rollout_L[:-1]).double()
            return weight_L, {"first": weight_L}

    def loops(row, gaps):
        weights = [1.0] + [0.0] * (len(gaps) - 1)
        return weights, {"first": weights}

    assert isinstance(First(), Correction)
    check("grpo", "sample", First(), [loops], {"first"})


class NodeActor(TensorDictModuleBase):
    """The log-prob of each token from a table by its position, its entropy 1."""

    in_keys, out_keys = [("node", "position_ids")], [("node", "log_prob"), ("node", "entropy")]

    def __init__(self, log_prob_N):
        super().__init__()
        self.log_prob_N = torch.nn.Parameter(log_prob_N)

    def forward(self, batch):
        batch["node", "log_prob"] = self.log_prob_N[batch["node", "position_ids"]]
        batch["node", "entropy"] = torch.ones_like(batch["node", "log_prob"])
        return batch


EVERY = [
    ["tis-token", "icepop-token", "mean", "off-policy"],
    ["tis-sequence", "icepop-sequence", "max"],
    ["is", "geometric"],
]


@pytest.mark.parametrize(
    ("gap", "dtype"),
    [("above", torch.float32), ("below", torch.float32), ("both", torch.float32), ("both", torch.float64)],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_ten_thousand_tokens_of_any_two_policies_are_finite(name, gap, dtype):
    """Log-ratios of 10,000 nats on every one of 10,000 tokens, of either sign, in the ratio and in every correction."""
    length, far = 10_000, -1e4
    log_prob = torch.full((length + 1,), -1.0, dtype=dtype)
    other = log_prob.clone()
    log_prob[{"above": slice(0, 0), "below": slice(None), "both": slice(None, None, 2)}[gap]] = far
    other[{"above": slice(None), "below": slice(0, 0), "both": slice(1, None, 2)}[gap]] = far
    batches = []
    for advantage in (-2.0, 2.0):
        rollout = make_rollout(
            [0] * (length + 1), [0] + [1] * length, other, group_id=0, advantage=advantage, ref_log_prob=other
        )
        batches += FlatPacker()([rollout.set("proximal_log_prob", other.float())])
    options = dict(kl_to_ref_coeff=0.1, kl_estimator="unbiased", aggregation="sequence-mean", top_entropy=0.5)
    variant, actor = VARIANTS[name], NodeActor(log_prob)
    for anchor in ("sample", "proximal", "current"):
        for names in EVERY:
            corrections = [(WEIGHING | MASKING)[correction][0] for correction in names]
            if anchor == "sample" and name != "reinforce":
                corrections = [correction for correction in corrections if not correction.weighs]
            if variant.sequence:
                corrections = [correction for correction in corrections if not weighs_tokens(correction)]
            own = {} if variant.anchor else {"correction": corrections}
            losses, metrics = run(objective(name, actor, anchor, **options, **own), batches)
            assert all(math.isfinite(value) for value in [*map(number, losses.values()), *metrics.values()])
            (gradient,) = gradients(sum(losses.values()), [actor.log_prob_N])
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("correction", WEIGHING)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_gap_is_not_weighed_twice(name, correction):
    ours, _, _ = WEIGHING[correction]
    if VARIANTS[name].anchor:
        with pytest.raises(ValueError, match="correction given to DecoupledPPOLoss.*GRPOLoss with anchor='proximal'"):
            objective(name, PathActor([[0]]), "sample", correction=ours)
    elif name == "reinforce":
        objective(name, PathActor([[0]]), "sample", correction=ours)
    else:
        with pytest.raises(
            ValueError, match=f"{type(ours).__name__} with anchor='sample'.*twice.*'current'.*'proximal'"
        ):
            objective(name, PathActor([[0]]), "sample", correction=[OffPolicySequenceMask(1.0), ours])
        for anchor in ("proximal", "current") if not (VARIANTS[name].sequence and weighs_tokens(ours)) else ():
            objective(name, PathActor([[0]]), anchor, correction=ours)


def test_a_rollout_that_is_judged_as_a_whole_needs_one_advantage():
    rollouts = random_rollouts(1, per_token=True)
    loss = ReinforceLoss(PathActor(rollouts, 1), correction=OffPolicySequenceMask(0.1))
    with pytest.raises(ValueError, match="OffPolicySequenceMask judges a rollout as a whole.*one number.*CISPOLoss"):
        run(loss, TreePacker()(rollouts))


def test_one_advantage_given_per_token_is_one_advantage():
    rollouts = random_rollouts(1)
    whole = [rollout.clone() for rollout in rollouts]
    for rollout in rollouts:
        rollout["advantage"] = torch.full(rollout["token_ids"].shape, float(rollout["advantage"]))
    actor = PathActor(rollouts, 1)
    loss = GRPOLoss(actor, correction=OffPolicySequenceMask(0.05))
    assert_equal(run(loss, TreePacker()(rollouts)), run(loss, TreePacker()(whole)), list(actor.parameters()), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TruncatedImportanceSampling(0.0), "cap=0.0.*above 0.*None"),
        (lambda: TruncatedImportanceSampling(math.nan), "cap=nan"),
        (lambda: TruncatedImportanceSampling(level="rollout"), "level='rollout'.*'token', 'sequence'"),
        (lambda: MaskedImportanceSampling(1.1, 2.0), "low=1.1"),
        (lambda: MaskedImportanceSampling(-0.1, 2.0), "low=-0.1"),
        (lambda: MaskedImportanceSampling(0.5, 0.9), "high=0.9"),
        (lambda: MaskedImportanceSampling(0.5, math.nan), "high=nan"),
        (lambda: MaskedImportanceSampling(level="max"), "level='max'.*'token', 'sequence'"),
        (lambda: SequenceRejection(2.0), "low=2.0, high=2.0.*must pass"),
        (lambda: SequenceRejection(math.nan), "low=nan"),
        (lambda: SequenceRejection(measure="min"), "measure='min'.*'mean', 'max', 'geometric'"),
        (lambda: OffPolicySequenceMask(-0.1), "max_kl=-0.1"),
        (lambda: OffPolicySequenceMask(math.nan), "max_kl=nan"),
        (lambda: GRPOLoss(PathActor([[0]]), correction="tis"), "correction='tis'|a str.*TruncatedImportanceSampling"),
        (lambda: GRPOLoss(PathActor([[0]]), correction=[SequenceRejection], anchor="proximal"), "SequenceRejection"),
        (
            lambda: GRPOLoss(PathActor([[0]]), correction=[SequenceRejection(), SequenceRejection(measure="max")]),
            "SequenceRejection, SequenceRejection name one kind twice",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
