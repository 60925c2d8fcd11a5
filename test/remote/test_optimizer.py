"""Options here, steps there: schedules, groups, state, and what an optimizer elsewhere cannot do."""

import pytest
import torch
from remote.windows import ACTORS, adamw, assert_close, weights, window

from torchrl_asyncgrpo import GRPOLoss, TreePacker
from torchrl_asyncgrpo.remote.actor import RemoteActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.remote.optimizer import RemoteOptimizer


def backend_with(make_optimizer=adamw):
    return HostedPolicy(ACTORS["tree"], make_optimizer=make_optimizer)


def backpropagate(backend):
    (batch,) = TreePacker()(window())
    GRPOLoss(RemoteActor(backend))(batch)["loss_objective"].backward()


def by_dimension(parameters):
    groups = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.ndim > 1].append(parameter)
    return torch.optim.SGD([{"params": groups[True]}, {"params": groups[False], "lr": 0.5}], lr=0.1, momentum=0.9)


def test_options_are_the_backend_s_unless_given():
    optimizer = RemoteOptimizer(backend_with(), lr=0.25)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.25, 0.1, (0.9, 0.999))


def test_one_group_for_each_of_the_backend_s():
    backend = backend_with(by_dimension)
    optimizer = RemoteOptimizer(backend)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    optimizer.param_groups[1]["lr"] = 0.0
    before = weights(backend.model)
    backpropagate(backend)
    optimizer.step()
    after = weights(backend.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(before[name].ndim > 1 for name in moved)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=5),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["lambda", "one-cycle", "plateau"],
)
def test_each_step_is_taken_with_the_options_of_its_moment(schedule):
    backend = backend_with()
    optimizer = RemoteOptimizer(backend, lr=0.5)
    scheduler = schedule(optimizer)
    own = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))], lr=0.5)
    theirs = schedule(own)
    for loss in (1.0, 2.0, 3.0):
        optimizer.step()
        own.step()
        for name in ("lr", "betas"):
            assert backend.optimizer.param_groups[0][name] == own.param_groups[0][name]
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        for one in (scheduler, theirs):
            one.step(*([loss] if plateau else []))


def test_gradients_are_dropped_by_zero_grad_and_behind_a_step():
    backend = backend_with()
    optimizer = RemoteOptimizer(backend)
    for drop in (optimizer.zero_grad, optimizer.step):
        backpropagate(backend)
        (batch,) = TreePacker()(window())
        RemoteActor(backend)(batch)
        assert backend._forwards
        drop()
        assert all(parameter.grad is None for parameter in backend.model.parameters())
        assert not backend._forwards


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e6])
def test_the_norm_is_that_before_clipping(max_norm):
    backend = backend_with()
    backpropagate(backend)
    before = [parameter.grad.clone() for parameter in backend.model.parameters()]
    norm = torch.stack([g.double().square().sum() for g in before]).sum().sqrt()
    assert RemoteOptimizer(backend).clip_grad_norm(max_norm) == pytest.approx(float(norm), rel=1e-5)
    factor = 1.0 if max_norm != 1e-3 else 1e-3 / float(norm)
    for parameter, old in zip(backend.model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, factor * old, rtol=1e-4, atol=1e-9)


def test_state_is_the_backend_s_and_goes_on_exactly():
    backends = [backend_with(), backend_with(), backend_with()]
    straight, first, second = (RemoteOptimizer(backend, lr=1e-3) for backend in backends)
    for _ in range(2):
        for backend, optimizer in ((backends[0], straight), (backends[1], first)):
            backpropagate(backend)
            optimizer.step()
    first.param_groups[0]["lr"] = straight.param_groups[0]["lr"] = 7e-3
    second.load_state_dict(first.state_dict())
    backends[2].load("model", backends[1].save("model"))
    assert second.param_groups[0]["lr"] == 7e-3
    assert "exp_avg" in str(first.state_dict()["remote"]["state"])
    for backend, optimizer in ((backends[0], straight), (backends[2], second)):
        backpropagate(backend)
        optimizer.step()
    assert_close(weights(backends[0].model), weights(backends[2].model), 0)


def test_unknown_option_is_named():
    with pytest.raises(ValueError, match=r"momentum=0.9: the backend's optimizer has no such option, only .*betas"):
        RemoteOptimizer(backend_with(), momentum=0.9)


def test_what_an_optimizer_elsewhere_cannot_do():
    optimizer = RemoteOptimizer(backend_with())
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="set_to_none=False"):
        optimizer.zero_grad(set_to_none=False)
