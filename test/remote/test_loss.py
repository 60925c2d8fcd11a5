"""The loss in the backend: the same course as the loss here, and nothing per token that comes back."""

import pytest
import torch
from remote.windows import ACTORS, PACKERS, adamw, assert_close, gradients, grpo, train, weights, window

from torchrl_asyncgrpo import GRPOLoss, TreePacker
from torchrl_asyncgrpo.remote.actor import RemoteActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.remote.loss import RemoteLoss
from torchrl_asyncgrpo.remote.optimizer import RemoteOptimizer

contracts = pytest.mark.parametrize("contract", ["tree", "flat"])


@contracts
def test_trains_as_with_the_loss_here(contract):
    backends, courses, found = [], [], [[], []]
    for here in (True, False):
        backend = HostedPolicy(ACTORS[contract], make_optimizer=adamw, make_loss=None if here else grpo)
        actor = RemoteActor(backend)
        courses.append(
            train(
                grpo(actor) if here else RemoteLoss(actor),
                RemoteOptimizer(backend, lr=1e-3),
                PACKERS[contract],
                at_gradient=lambda here=here, backend=backend: found[here].append(gradients(backend.model)),
            )
        )
        backends.append(backend)
    for mine, other in zip(*courses, strict=True):
        assert_close(mine, other)
    for mine, other in zip(*found, strict=True):
        assert_close(mine, other)
    assert_close(*(weights(backend.model) for backend in backends))


@contracts
def test_kept_sets_and_advantages_per_token_are_sent(contract):
    backend = HostedPolicy(ACTORS[contract], make_loss=GRPOLoss)
    (batch,) = PACKERS[contract].__class__(**({"padding_free": True} if contract == "flat" else {}))(
        window(kept=True, several=True)
    )
    ours, theirs = RemoteLoss(RemoteActor(backend))(batch), GRPOLoss(RemoteActor(backend))(batch)
    assert_close(dict(ours.items()), dict(theirs.items()))


def test_only_loss_shares_carry_the_gradient_and_all_values_are_scalars():
    backend = HostedPolicy(ACTORS["tree"], make_loss=grpo)
    (batch,) = TreePacker()(window())
    output = RemoteLoss(RemoteActor(backend))(batch)
    assert {name for name, value in output.items() if value.requires_grad} == {
        "loss_objective", "loss_entropy", "loss_kl_to_ref",
    }  # fmt: skip
    assert all(value.shape == () for value in output.values())
    assert "log_prob" not in batch["node"].keys()


def test_a_loss_that_is_scaled_scales_the_gradient():
    backend = HostedPolicy(ACTORS["tree"], make_loss=GRPOLoss)
    (batch,) = TreePacker()(window())
    found = []
    for factor in (1.0, -3.0):
        backend.step(None)
        (factor * RemoteLoss(RemoteActor(backend))(batch)["loss_objective"]).backward()
        found.append(gradients(backend.model))
    assert_close({name: -3 * g for name, g in found[0].items()}, found[1])


def test_without_gradient_mode_the_backend_keeps_nothing():
    backend = HostedPolicy(ACTORS["tree"], make_loss=GRPOLoss)
    (batch,) = TreePacker()(window())
    with torch.no_grad():
        assert not RemoteLoss(RemoteActor(backend))(batch)["loss_objective"].requires_grad
    assert not backend._forwards


@pytest.mark.parametrize("contract", ["tree", "flat"])
def test_what_stages_behind_the_packer_write_reaches_the_backend(contract):
    backend = HostedPolicy(ACTORS[contract], make_loss=grpo)
    (batch,) = PACKERS[contract].__class__(**({"padding_free": True} if contract == "flat" else {}))(window())
    batch["rollout", "advantage"].zero_()
    assert RemoteLoss(RemoteActor(backend))(batch)["loss_objective"].item() == 0


def test_backend_without_a_loss_is_refused():
    with pytest.raises(ValueError, match="HostedPolicy has no loss.*make_loss"):
        RemoteLoss(RemoteActor(HostedPolicy(ACTORS["tree"])))
