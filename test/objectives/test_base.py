"""What all objectives share: names, keys, and what they refuse."""

import math

import pytest
import torch
from objective_oracle import VARIANTS, objective
from objective_rollouts import PathActor, RoutedActor, assert_equal, gradients, random_rollouts, run

from torchrl_asyncgrpo import FlatPacker, GRPOLoss, PolicyLoss, TreePacker, make_objective, make_rollout
from torchrl_asyncgrpo.objectives import OBJECTIVES

EVERYTHING = dict(entropy_coeff=0.1, kl_to_ref_coeff=0.1, top_entropy=0.5)


def test_objectives_are_made_by_name():
    actor = PathActor([[0]])
    for name, kind in OBJECTIVES.items():
        options = {"constant": 3.0} if name == "dr_grpo" else {}
        loss = make_objective(name, actor, entropy_coeff=0.5, **options)
        assert type(loss) is kind
        assert loss.entropy_coeff == 0.5
        assert loss.actor_network is actor


def test_unknown_objective_lists_those_that_there_are():
    with pytest.raises(ValueError, match="'ppo' is unknown; choose one of 'grpo', .*'decoupled_ppo'"):
        make_objective("ppo", PathActor([[0]]))


def test_an_option_of_another_objective_is_refused():
    with pytest.raises(TypeError, match="epsilon_high"):
        make_objective("grpo", PathActor([[0]]), epsilon_high=0.2)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(aggregation="mean"), "aggregation='mean'.*'token-mean', 'sequence-mean', 'constant'"),
        (dict(aggregation="constant"), "needs constant=C"),
        (dict(entropy_coeff=-0.1), "entropy_coeff=-0.1"),
        (dict(kl_to_ref_coeff=math.inf), "kl_to_ref_coeff=inf"),
        (dict(kl_to_ref_coeff=math.nan), "kl_to_ref_coeff=nan"),
        (dict(load_balance_coeff=-1.0), "load_balance_coeff=-1.0"),
        (dict(load_balance_coeff=0.1), "experts_per_token=None.*num_experts_per_tok"),
        (dict(load_balance_coeff=0.1, experts_per_token=0), "experts_per_token=0"),
        (dict(load_balance_scope="window"), "load_balance_scope='window'.*'rollout', 'micro-batch'"),
        (dict(top_entropy=0.0), r"top_entropy=0.0.*\(0, 1\]"),
        (dict(top_entropy=1.2), "top_entropy=1.2"),
        (dict(top_entropy=math.nan), "top_entropy=nan"),
        (dict(kl_estimator="k4"), "kl_estimator='k4'.*'k1', 'k2', 'k3', 'unbiased'"),
    ],
)
def test_bad_options_are_refused_by_every_objective(name, options, message):
    with pytest.raises(ValueError, match=message):
        objective(name, PathActor([[0]]), "sample", **options)


def test_unknown_anchor():
    with pytest.raises(ValueError, match="anchor='old'.*'sample', 'proximal', 'current'"):
        GRPOLoss(PathActor([[0]]), anchor="old")


@pytest.mark.parametrize(("name", "options"), [("gspo", {}), ("gmpo", {})])
def test_a_term_per_rollout_cannot_choose_tokens(name, options):
    with pytest.raises(ValueError, match="top_entropy=0.5 with .*one term per rollout.*level='token'"):
        make_objective(name, PathActor([[0]]), top_entropy=0.5, **options)
    make_objective("gspo", PathActor([[0]]), top_entropy=0.5, level="token")


def test_the_unbiased_kl_refuses_kept_sets():
    rollout = make_rollout(
        [0, 1], [0, 1], [0.0, -0.5], group_id=0, ref_log_prob=[0.0, -1.0], sampling_mask=[None, [1, 2]]
    )
    (batch,) = TreePacker()([rollout])
    batch["entry", "log_kept"] = torch.tensor([-0.1])
    actor = PathActor([rollout])
    GRPOLoss(actor, kl_to_ref_coeff=0.1)(batch)
    with pytest.raises(ValueError, match="unbiased.*kept.*'k2' or 'k3'"):
        GRPOLoss(actor, kl_to_ref_coeff=0.1, kl_estimator="unbiased")(batch)


@pytest.mark.parametrize("clip_epsilon", [1.0, -0.2, (1.0, 0.2), (0.2, -0.1), math.nan])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "dual_clip_ppo", "decoupled_ppo"])
def test_bad_clip_widths_are_refused_by_every_objective_that_clips(name, clip_epsilon):
    options = {"constant": 3.0} if name == "dr_grpo" else {}
    with pytest.raises(ValueError, match=r"clip_epsilon=.*\[0, 1\)"):
        make_objective(name, PathActor([[0]]), clip_epsilon=clip_epsilon, **options)


def rollouts_without(key):
    rollouts = random_rollouts(1)
    for rollout in rollouts:
        del rollout[key]
    return rollouts


@pytest.mark.parametrize("name", VARIANTS)
def test_missing_reference_is_named_with_what_produces_it(name):
    rollouts = rollouts_without("ref_log_prob")
    loss = objective(name, PathActor(rollouts, 1), "sample", kl_to_ref_coeff=0.1)
    with pytest.raises(KeyError, match=r"kl_to_ref_coeff=0.1 needs.*ref_log_prob.*make_rollout.*RolloutScorer.*=0"):
        run(loss, TreePacker()(rollouts))


def test_missing_proximal_log_probs_are_named_with_what_produces_them():
    rollouts = rollouts_without("proximal_log_prob")
    with pytest.raises(KeyError, match=r"anchor='proximal' needs.*proximal_log_prob.*RolloutScorer"):
        run(GRPOLoss(PathActor(rollouts, 1), anchor="proximal"), TreePacker()(rollouts))


def test_missing_router_logits_are_named_with_what_produces_them():
    rollouts = random_rollouts(1)
    loss = GRPOLoss(PathActor(rollouts, 1), load_balance_coeff=0.1, experts_per_token=2)
    with pytest.raises(
        KeyError, match=r"load_balance_coeff=0.1 needs.*router_logits.*TreeActor\(model, router_logits=True"
    ):
        run(loss, TreePacker()(rollouts))


ROUTED = dict(load_balance_coeff=0.1, experts_per_token=2)


@pytest.mark.parametrize("anchor", ["sample", "proximal", "current"])
@pytest.mark.parametrize("per_token", [False, True])
def test_in_keys_are_all_that_is_read(anchor, per_token):
    rollouts = random_rollouts(1, per_token=per_token)
    actor = RoutedActor(rollouts, 1)
    loss = GRPOLoss(actor, anchor=anchor, **EVERYTHING, **ROUTED)
    whole = run(loss, TreePacker()(rollouts))
    optional = [("entry", "advantage")] if per_token else []
    for batch in (batches := TreePacker()(rollouts)):
        keep = {*loss.in_keys, *optional}
        for key in set(batch.keys(include_nested=True, leaves_only=True)) - keep:
            del batch[key]
    assert_equal(run(loss, batches), whole, list(actor.parameters()), 0)
    unread = [("rollout", "advantage")] if per_token else []
    for key in set(loss.in_keys) - set(actor.in_keys) - set(unread):
        (batch,) = TreePacker()(rollouts)
        del batch[key]
        with pytest.raises(KeyError):
            loss(batch)


# those of kept sets have tests of their own in test_grpo_sampling_mask.py
KEYS = PolicyLoss._AcceptedKeys.__dataclass_fields__.keys() - {"log_kept", "kept_entry"}


@pytest.mark.parametrize("name", sorted(KEYS))
def test_every_key_can_be_changed(name):
    rollouts = random_rollouts(1, per_token=name == "entry_advantage")
    actor = RoutedActor(rollouts, 1)
    kind = "decoupled-interpolated" if name == "entry_policy_version" else "grpo"
    loss = objective(kind, actor, "proximal", **EVERYTHING, **ROUTED)
    (batch,) = TreePacker()(rollouts)
    expected = run(loss, [batch])
    key, new = getattr(loss.tensor_keys, name), ("elsewhere", name)

    def moved(batch):
        batch = PathActor.forward(actor, batch)
        batch["node", "router_logits"] = actor.router[actor.index_of_nodes(batch)]
        batch[new] = batch[key]
        batch[key] = torch.full_like(batch[key], -1) if batch[key].dtype == torch.int64 else batch[key] * torch.nan
        return batch

    loss.actor_network.forward = moved
    loss.set_keys(**{name: new})
    assert_equal(run(loss, [batch]), expected, list(actor.parameters()), 0)


def test_out_keys_are_those_with_a_gradient():
    rollouts = random_rollouts(1)
    actor = RoutedActor(rollouts, 1)
    for options in ({}, EVERYTHING, ROUTED, EVERYTHING | ROUTED):
        loss = GRPOLoss(actor, **options)
        output = loss(TreePacker()(rollouts)[0])
        assert {key for key, value in output.items() if value.requires_grad} == set(loss.out_keys)
        assert all(value.shape == () for value in output.values())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("packer", [TreePacker(), FlatPacker()])
def test_window_without_trained_tokens_is_zero_with_a_gradient_function(name, packer):
    """L9."""
    rollouts = [make_rollout([0, 1, 2], [0, 0, 0], [math.nan] * 3, group_id=0, advantage=math.nan) for _ in range(2)]
    for rollout in rollouts:
        rollout["ref_log_prob"] = rollout["proximal_log_prob"] = torch.full((3,), math.nan)
    actor = RoutedActor(rollouts)
    for anchor in ("sample", "proximal", "current"):
        loss = objective(name, actor, anchor, aggregation="sequence-mean", **EVERYTHING, **ROUTED)
        losses, metrics = run(loss, packer(rollouts))
        assert [float(value.detach()) for value in losses.values()] == [0.0] * 4
        assert all(value == 0 for value in metrics.values())
        assert all((g == 0).all() for g in gradients(sum(losses.values()), list(actor.parameters())))


@pytest.mark.parametrize("name", VARIANTS)
def test_diagnostics_have_no_part_in_the_gradient(name):
    """L11."""
    rollouts = random_rollouts(1)
    actor = PathActor(rollouts, 1)
    loss = objective(name, actor, "proximal")
    with_metrics = run(loss, TreePacker()(rollouts))[0]
    before = gradients(with_metrics["loss_objective"], list(actor.parameters()))
    loss.term_metrics = lambda entries: {}
    bare = run(loss, TreePacker()(rollouts))[0]
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, gradients(bare["loss_objective"], list(actor.parameters())), strict=True)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_the_batch_is_left_alone(name):
    rollouts = random_rollouts(1)
    (batch,) = TreePacker()(rollouts)
    before = batch.clone()
    objective(name, PathActor(rollouts, 1), "current", **EVERYTHING)(batch)
    assert set(batch.keys(include_nested=True)) == set(before.keys(include_nested=True))
    assert (batch == before).all()
