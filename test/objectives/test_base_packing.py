"""The gradient of a window does not depend on how it is packed, ordered, split or accumulated, for any objective."""

import pytest
import torch
from fakes import tiny_gpt2
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_oracle import VARIANTS, objective
from objective_rollouts import PathActor, assert_equal, random_rollouts, run

from torchrl_asyncgrpo import (
    FlatPacker,
    MaskedImportanceSampling,
    OffPolicySequenceMask,
    SequenceRejection,
    TreeActor,
    TreePacker,
    TruncatedImportanceSampling,
)

MASKS = [SequenceRejection(0.6, 1.5), OffPolicySequenceMask(0.2)]
WEIGHTS = [TruncatedImportanceSampling(1.5, level="sequence"), MaskedImportanceSampling(0.6, 1.6)]


@st.composite
def packings(draw):
    packer = draw(st.sampled_from([TreePacker, FlatPacker]))
    budget = draw(st.one_of(st.none(), st.integers(11, 30)))
    return packer(token_budget=budget, min_micro_batches=draw(st.integers(1, 5)))


def options_of(variant, draw):
    """Extra terms, corrections and an aggregation, as far as they go with the objective."""
    aggregation = draw(st.sampled_from(["token-mean", "sequence-mean", "constant"]))
    options = dict(
        aggregation=aggregation,
        constant=5.0 if aggregation == "constant" else None,
        entropy_coeff=0.03,
        kl_to_ref_coeff=0.05,
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3", "unbiased"])),
        top_entropy=draw(st.sampled_from([0.3, 1.0])),
    )
    anchor = draw(st.sampled_from(["sample", "proximal", "current"]))
    weights = WEIGHTS[: 1 if variant.sequence else 2]  # a term of a whole rollout has no weight of a token
    corrections = [] if variant.anchor else MASKS + (weights if anchor != "sample" else [])
    return anchor, options | ({"correction": corrections} if corrections else {})


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=12)
@given(data=st.data())
def test_window_of_log_probs_is_the_same_for_every_packing(name, data):
    variant = VARIANTS[name]
    seed, per_token = data.draw(st.integers(0, 10**6)), not variant.sequence and data.draw(st.booleans())
    rollouts = random_rollouts(seed, per_token=per_token)
    anchor, options = options_of(variant, data.draw)
    if per_token and "correction" in options:
        options["correction"] = [c for c in options["correction"] if not isinstance(c, OffPolicySequenceMask)]
    actor = PathActor(rollouts, seed)
    loss = objective(name, actor, anchor, **options)
    whole = run(loss, FlatPacker()(rollouts))
    order = data.draw(st.permutations(rollouts))
    assert_equal(run(loss, data.draw(packings())(order)), whole, list(actor.parameters()), 1e-12)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=3)
@given(data=st.data())
def test_gradient_of_model_parameters_is_the_same_for_every_packing(name, data):
    rollouts = random_rollouts(data.draw(st.integers(0, 10**6)))
    actor = TreeActor(tiny_gpt2(initializer_range=0.2).double())
    anchor, options = options_of(VARIANTS[name], data.draw)
    loss = objective(name, actor, anchor, **options)
    whole = run(loss, FlatPacker()(rollouts))
    order = data.draw(st.permutations(rollouts))
    assert_equal(run(loss, data.draw(packings())(order)), whole, list(actor.model.parameters()), 1e-9)


def test_a_window_in_parts_is_the_sum_of_its_parts():
    """What a distributed run does: each part is packed on its own and knows the totals of the whole window."""
    rollouts = random_rollouts(7)
    actor = PathActor(rollouts)
    whole = TreePacker()(rollouts)
    parts = [batch for part in (rollouts[:4], rollouts[4:]) for batch in TreePacker()(part)]
    for batch in parts:
        for key in ("num_entries", "num_rollouts"):
            batch["window", key] = whole[0]["window", key]
    for name in VARIANTS:
        loss = objective(name, actor, "proximal", aggregation="sequence-mean")
        assert_equal(run(loss, parts), run(loss, whole), list(actor.parameters()), 1e-12)
    assert torch.equal(sum(batch["rollout", "length"].sum() for batch in parts), whole[0]["window", "num_entries"])
