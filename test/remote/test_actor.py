"""The remote actor on a backend of this process: every objective as on the local actor; what reaches the backend."""

import pytest
import torch
from fakes import tiny_moe, tiny_qwen3
from remote.windows import ACTORS, PACKERS, adamw, assert_close, gradients, grpo, train, weights, window
from torch import nn

from torchrl_asyncgrpo import (
    CISPOLoss,
    FlatPacker,
    GMPOLoss,
    GRPOLoss,
    GSPOLoss,
    ReferenceLogProbs,
    RolloutScorer,
    SAPOLoss,
    TreeActor,
    TreePacker,
)
from torchrl_asyncgrpo.modules.padding_free import PaddingFreeActor
from torchrl_asyncgrpo.remote.actor import RemoteActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.remote.optimizer import RemoteOptimizer

contracts = pytest.mark.parametrize("contract", ["tree", "flat"])
OBJECTIVES = {
    "grpo": grpo,
    "sequence-mean": lambda actor: GRPOLoss(actor, aggregation="sequence-mean", top_entropy=0.5),
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "gmpo": GMPOLoss,
    "sapo": lambda actor: SAPOLoss(actor, anchor="current", entropy_coeff=0.1),
}


class Watched(HostedPolicy):
    """Notes what it is called with."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = []

    def forward(self, batch, **options):
        self.calls.append(("forward", batch.copy(), options))
        return super().forward(batch, **options)

    def backward(self, ticket, gradients):
        self.calls.append(("backward", gradients))
        super().backward(ticket, gradients)


@pytest.mark.parametrize("name", OBJECTIVES)
@contracts
def test_every_objective_trains_as_on_the_local_actor(name, contract):
    actor = ACTORS[contract]()
    ours, theirs = [], []
    backend = HostedPolicy(ACTORS[contract], make_optimizer=adamw)
    course = train(
        OBJECTIVES[name](RemoteActor(backend)),
        RemoteOptimizer(backend, lr=1e-3),
        PACKERS[contract],
        at_gradient=lambda: ours.append(gradients(backend.model)),
    )
    local = train(
        OBJECTIVES[name](actor),
        adamw(actor.model.parameters(), lr=1e-3),
        PACKERS[contract],
        at_gradient=lambda: theirs.append(gradients(actor.model)),
    )
    for mine, other in zip(course, local, strict=True):
        assert_close(mine, other)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other)
    assert_close(weights(backend.model), weights(actor.model))
    assert float((weights(actor.model)["lm_head.weight"] - weights(tiny_qwen3())["lm_head.weight"]).abs().max()) > 1e-3


def test_flat_training_is_tree_training():
    """In float64, where AdamW does not blow rounding up."""
    backends = []
    for actor, packer in ((TreeActor, PACKERS["tree"]), (PaddingFreeActor, PACKERS["flat"])):
        backend = HostedPolicy(lambda actor=actor: actor(tiny_qwen3().double()), make_optimizer=adamw)
        train(grpo(RemoteActor(backend)), RemoteOptimizer(backend, lr=1e-3), packer)
        backends.append(backend)
    assert_close(*(weights(backend.model) for backend in backends), 1e-7)


@contracts
def test_kept_sets_and_advantages_per_token(contract):
    rows = window(kept=True, several=True)
    model = tiny_qwen3()
    backend = HostedPolicy(ACTORS[contract])
    remote, local = GRPOLoss(RemoteActor(backend)), GRPOLoss(TreeActor(model))
    for loss, packer in ((remote, PACKERS[contract]), (local, TreePacker())):
        for batch in packer(rows):
            loss(batch)["loss_objective"].backward()
    assert_close(gradients(backend.model), gradients(model))
    assert max(float(g.abs().max()) for g in gradients(model).values()) > 1e-3


def test_router_logits_and_their_gradient():
    options = dict(load_balance_coeff=0.1, experts_per_token=2)
    backend = HostedPolicy(lambda: TreeActor(tiny_moe(), router_logits=True))
    local = TreeActor(tiny_moe(), router_logits=True)
    for actor in (RemoteActor(backend), local):
        (batch,) = TreePacker()(window())
        output = GRPOLoss(actor, **options)(batch)
        assert output["loss_load_balance"] > 0
        output["loss_load_balance"].backward()
    found = {name: p.grad for name, p in backend.model.named_parameters() if p.grad is not None}
    assert found
    assert_close(found, {name: p.grad for name, p in local.model.named_parameters() if p.grad is not None})


def test_one_backward_carries_the_gradients_of_log_prob_and_entropy():
    backend = Watched(ACTORS["tree"])
    (batch,) = TreePacker()(window())
    out = RemoteActor(backend)(batch)
    (2 * out["node", "log_prob"].sum() + 3 * out["node", "entropy"].sum()).backward()
    (_, sent) = backend.calls[-1]
    assert len(backend.calls) == 2
    assert sent.keys() == {"log_prob", "entropy"}
    assert (sent["log_prob"] == 2).all()
    assert (sent["entropy"] == 3).all()


def test_what_the_loss_does_not_use_is_not_sent():
    backend = Watched(ACTORS["tree"])
    (batch,) = TreePacker()(window())
    GRPOLoss(RemoteActor(backend))(batch)["loss_objective"].backward()
    assert backend.calls[-1][1].keys() == {"log_prob"}


def test_with_the_loss_here_advantages_stay_here():
    backend = Watched(ACTORS["tree"])
    (batch,) = TreePacker()(window(kept=True))
    GRPOLoss(RemoteActor(backend))(batch)
    sent = backend.calls[0][1]
    assert set(sent.keys()) == {"node", "entry", "kept"}
    assert set(sent["entry"].keys()) == {"node"}
    assert set(sent["node"].keys()) == {"input_ids", "position_ids", "parent", "subtree_end"}


def test_without_gradient_mode_the_backend_keeps_nothing():
    backend = Watched(ACTORS["tree"])
    actor = RemoteActor(backend)
    rows = window()
    RolloutScorer(actor, TreePacker(), key="proximal_log_prob")(rows)
    assert [call[2]["grad"] for call in backend.calls] == [False]
    assert not backend._forwards
    (batch,) = TreePacker()(rows)
    with torch.no_grad():
        expected = TreeActor(tiny_qwen3())(batch.clone())["node", "log_prob"][batch["entry", "node"]]
    torch.testing.assert_close(batch["entry", "proximal_log_prob"], expected)
    assert not actor(batch.clone())["node", "log_prob"].is_leaf
    assert backend._forwards


def test_the_stand_in_holds_one_number():
    backend = HostedPolicy(ACTORS["tree"])
    actor = RemoteActor(backend)
    assert [p.numel() for p in actor.parameters()] == [1]
    assert actor.model.config.hidden_size == 32
    assert actor.temperature == 1.0


def test_weights_travel_with_the_state_of_the_actor():
    backend, other = HostedPolicy(ACTORS["tree"]), HostedPolicy(lambda: TreeActor(tiny_qwen3(seed=1)))
    loss = GRPOLoss(RemoteActor(backend))
    GRPOLoss(RemoteActor(other)).load_state_dict(loss.state_dict())
    assert_close(weights(other.model), weights(tiny_qwen3()), 0)


def test_temperature_is_the_backend_s():
    backend = HostedPolicy(lambda: TreeActor(tiny_qwen3(), temperature=0.7))
    (batch,) = TreePacker()(window())
    assert RemoteActor(backend).temperature == 0.7
    expected = TreeActor(tiny_qwen3(), temperature=0.7)(batch.clone())["node", "log_prob"]
    torch.testing.assert_close(RemoteActor(backend)(batch)["node", "log_prob"], expected)


@pytest.mark.parametrize("packer", [TreePacker(), FlatPacker()], ids=["tree", "flat"])
def test_batch_without_a_row_is_refused_by_name(packer):
    actor = RemoteActor(HostedPolicy(ACTORS["flat"]))
    with pytest.raises(ValueError, match=r"no table 'flat'.*contract is 'flat'.*FlatPacker\(padding_free=True\)"):
        actor(packer(window())[0])


def test_packer_without_a_row_is_refused_when_the_scorer_is_built():
    actor = RemoteActor(HostedPolicy(ACTORS["flat"]))
    with pytest.raises(ValueError, match=r"packer=TreePacker .*contract is 'flat'.*FlatPacker\(padding_free=True\)"):
        RolloutScorer(actor, TreePacker(), key="ref_log_prob")


@pytest.mark.parametrize(
    "build",
    [ReferenceLogProbs, lambda actor, **kw: RolloutScorer(actor, TreePacker(), key="proximal_log_prob", **kw)],
    ids=["reference", "scorer"],
)
def test_autocast_that_would_not_reach_the_model_is_refused(build):
    """The model of a backend runs elsewhere, under autocast of its own or none."""
    actor = RemoteActor(HostedPolicy(ACTORS["tree"], autocast_dtype=torch.bfloat16))
    build(actor)
    with pytest.raises(ValueError, match=r"autocast_dtype=torch.bfloat16 does not reach .* backend of a RemoteActor"):
        build(actor, autocast_dtype=torch.bfloat16)


def test_flat_batches_run_on_tree_attention_too():
    (flat,), (tree,) = FlatPacker()(window()), TreePacker()(window())
    actor = RemoteActor(HostedPolicy(ACTORS["tree"]))
    ours, theirs = (actor(b)["node", "log_prob"][b["entry", "node"]] for b in (flat, tree))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", [nn.Linear(2, 2), tiny_qwen3()], ids=["module", "model"])
def test_model_is_no_backend(backend):
    with pytest.raises(TypeError, match=f"{type(backend).__name__}.*RayBackend.*TreeActor"):
        RemoteActor(backend)


@pytest.mark.parametrize("actor", [TreeActor, PaddingFreeActor])
def test_backend_is_no_model(actor):
    with pytest.raises(TypeError, match=r"HostedPolicy.*AutoModelForCausalLM"):
        actor(HostedPolicy(ACTORS["tree"]))
