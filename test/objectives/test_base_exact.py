"""Every objective, anchor, aggregation and extra term against plain loops: value, gradient and metrics."""

import pytest
from fakes import tiny_gpt2
from objective_oracle import VARIANTS, objective, off_policy, rejected, window
from objective_rollouts import PathActor, alone, assert_equal, random_rollouts, run

from torchrl_asyncgrpo import FlatPacker, OffPolicySequenceMask, SequenceRejection, TreeActor, TreePacker
from torchrl_asyncgrpo.objectives import OBJECTIVES

AGGREGATIONS = {"token-mean": None, "sequence-mean": None, "constant": 7.0}
ANCHORS = ("sample", "proximal", "current")
CASES = [(name, anchor) for name, v in VARIANTS.items() for anchor in ([v.anchor] if v.anchor else ANCHORS)]
EXTRAS = dict(entropy_coeff=0.03, kl_to_ref_coeff=0.05, top_entropy=0.5)


def test_every_objective_is_among_the_variants():
    assert {variant.name for variant in VARIANTS.values()} == OBJECTIVES.keys()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "anchor"), CASES)
def test_equals_loops(name, anchor, aggregation):
    variant = VARIANTS[name]
    weights = dict(aggregation=aggregation, constant=AGGREGATIONS[aggregation])
    bound = set()
    for seed, packer in ((1, TreePacker()), (2, TreePacker(token_budget=12)), (3, FlatPacker(min_micro_batches=2))):
        rollouts = random_rollouts(seed, per_token=seed == 2 and not variant.sequence)
        actor = PathActor(rollouts, seed)
        expected = window(rollouts, actor.alone, variant, anchor=anchor, **weights)
        ours = run(objective(name, actor, anchor, **weights), packer(rollouts))
        assert_equal(ours, expected, list(actor.parameters()), 1e-12)
        bound |= {key for key, value in expected[1].items() if key.startswith("clip_fraction") and value > 0}
    if anchor != "current":
        assert bound == {key for key in expected[1] if key.startswith("clip_fraction")}, "a clip that never bound"


@pytest.mark.parametrize("packer", [TreePacker(), FlatPacker()], ids=["tree", "flat"])
@pytest.mark.parametrize("name", VARIANTS)
def test_one_trained_token_in_the_window_equals_loops(name, packer):
    """L12."""
    (rollout,) = [r for r in random_rollouts(8) if int(r["rollout_id"]) == 102]
    assert rollout["loss_mask"].sum() == 1
    actor = PathActor([rollout])
    expected = window([rollout], actor.alone, VARIANTS[name], anchor="proximal", **EXTRAS)
    ours = run(objective(name, actor, "proximal", **EXTRAS), packer([rollout]))
    assert_equal(ours, expected, list(actor.parameters()), 1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_identical_rollouts_are_as_good_as_separate_ones(name, aggregation):
    """L14: several entries per node, and a loss that is the mean of those of windows of one rollout."""
    weights = dict(aggregation=aggregation, constant=AGGREGATIONS[aggregation])
    rollouts = [r.clone() for r in random_rollouts(9)[3:5] for _ in range(2)]
    for i, rollout in enumerate(rollouts):
        rollout["rollout_id"] += 10 * i
        rollout["advantage"] = rollout["advantage"] * (-1.5) ** i
    actor = PathActor(rollouts)
    loss = objective(name, actor, "proximal", **weights)
    (batch,) = TreePacker()(rollouts)
    assert batch.num_entries == 4 * len(set(batch["entry", "node"].tolist()))
    separate = [run(loss, TreePacker()([rollout])) for rollout in rollouts]
    mean = sum(losses["loss_objective"] for losses, _ in separate) / 4
    metrics = {key: sum(m[key] for _, m in separate) / 4 for key in separate[0][1]}
    metrics["ESS"] = metrics["ratio"] ** 2 / metrics["ratio_squared"]
    ours = run(loss, [batch])
    assert_equal(ours, ({"loss_objective": mean}, metrics), list(actor.parameters()), 1e-12)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce"])
def test_extra_terms_equal_loops(name, estimator, share):
    rollouts = random_rollouts(4)
    actor = PathActor(rollouts)
    options = EXTRAS | dict(kl_estimator=estimator, top_entropy=share, aggregation="sequence-mean")
    expected = window(rollouts, actor.alone, VARIANTS[name], anchor="proximal", **options)
    loss = objective(name, actor, "proximal", **options)
    assert_equal(run(loss, TreePacker(min_micro_batches=3)(rollouts)), expected, list(actor.parameters()), 1e-12)
    assert loss.out_keys == list(expected[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_gradient_of_model_parameters_equals_loops(name):
    """Each rollout alone through the plain model, which has no float32 inside, against the tree."""
    variant = VARIANTS[name]
    plain, model = (tiny_gpt2(initializer_range=0.2).double() for _ in range(2))
    for seed, packer, anchor in ((5, TreePacker(), "proximal"), (6, TreePacker(token_budget=9), "sample")):
        rollouts = random_rollouts(seed, policy=alone(plain))
        options = EXTRAS | dict(aggregation="sequence-mean")
        if variant.sequence:
            options |= dict(kl_estimator="unbiased")
        loops, masks = [], {}
        if not variant.anchor:
            loops = [rejected(0.9, 1.1, "geometric"), off_policy(0.05)]
            masks = dict(correction=[SequenceRejection(0.9, 1.1), OffPolicySequenceMask(0.05)])
        expected = window(rollouts, alone(plain), variant, anchor=anchor, corrections=loops, **options)
        ours = run(objective(name, TreeActor(model), anchor, **options, **masks), packer(rollouts))
        assert_equal(ours, expected, list(model.parameters()), 1e-9, list(plain.parameters()))
