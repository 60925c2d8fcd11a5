"""What runs where the model is: graphs that are kept and dropped, gradients summed over workers, state, refusals."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from adapted import quantized
from fakes import tiny_moe, tiny_qwen3
from peft import LoraConfig
from remote.windows import ACTORS, PACKERS, adamw, assert_close, gradients, grpo, weights, window
from torch import nn

from torchrl_asyncgrpo import FlatPacker, TreeActor, TreePacker, load_policy
from torchrl_asyncgrpo.remote.actor import RemoteActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.remote.protocol import RemoteBackend


class Threads:
    """A collective of threads, one per worker."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=20)
        self.rank = threading.local()
        self.slots = [None] * size

    def exchange(self, tensor):
        self.slots[self.rank.value] = tensor.clone()
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def sum_(self, tensor):
        tensor.copy_(torch.stack(self.exchange(tensor)).sum(0))

    def broadcast_(self, tensor):
        tensor.copy_(self.exchange(tensor)[0])

    def run(self, *calls):
        """Each call in the thread of its worker; the results."""

        def work(rank):
            self.rank.value = rank
            return calls[rank]()

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(work, range(len(calls))))


def joined(*policies):
    collective = Threads(len(policies))
    collective.run(*(lambda p=p: p.join(collective) for p in policies))
    return collective


def test_is_a_backend_itself():
    policy = HostedPolicy(ACTORS["tree"])
    assert isinstance(policy, RemoteBackend)
    assert not isinstance(nn.Linear(1, 1), RemoteBackend)
    info = policy.info
    assert (info.contract, info.temperature, info.router_logits, info.has_loss, info.has_engine) == (
        "tree", 1.0, False, False, False,
    )  # fmt: skip
    assert HostedPolicy(ACTORS["flat"], make_loss=grpo).info.contract == "flat"


@pytest.mark.parametrize("sizes", [(1, 2), (3, 0)])
def test_workers_sum_what_each_of_them_ran(sizes):
    """One of them may have run nothing."""
    policies = [HostedPolicy(ACTORS["tree"], make_optimizer=adamw) for _ in sizes]
    collective = joined(*policies)
    alone = HostedPolicy(ACTORS["tree"], make_optimizer=adamw)
    batches = TreePacker(min_micro_batches=3)(window())
    for i, batch in enumerate(batches):
        for policy in (alone, policies[int(i >= sizes[0])]):
            grpo(RemoteActor(policy))(batch.copy())["loss_objective"].backward()
    norm = alone.clip_grad_norm(0.1)
    assert collective.run(*(lambda p=p: p.clip_grad_norm(0.1) for p in policies)) == [pytest.approx(norm)] * 2
    for policy in policies:
        assert_close(gradients(policy.model), gradients(alone.model))
    collective.run(*(lambda p=p: p.step([{"lr": 1e-3}]) for p in (policies)))
    alone.step([{"lr": 1e-3}])
    for policy in policies:
        assert_close(weights(policy.model), weights(alone.model))


def test_gradients_are_summed_once_and_also_without_clipping():
    policies = [HostedPolicy(ACTORS["tree"]) for _ in range(2)]
    collective = joined(*policies)
    (batch,) = TreePacker()(window())
    for clips in (0, 2):
        for policy in policies:
            grpo(RemoteActor(policy))(batch.copy())["loss_objective"].backward()
        own = gradients(policies[0].model)
        for _ in range(clips):
            collective.run(*(lambda p=p: p.clip_grad_norm(None) for p in policies))
            assert_close(gradients(policies[1].model), {name: 2 * g for name, g in own.items()})
        seen = []
        for policy in policies:
            policy.optimizer.step = lambda p=policy, seen=seen: seen.append(gradients(p.model))
        collective.run(*(lambda p=p: p.step([{}]) for p in policies))
        for mine in seen:
            assert_close(mine, {name: 2 * g for name, g in own.items()})


def test_gradients_of_the_window_after_a_skipped_one_are_summed_too():
    """One whose gradient is not finite is clipped and then dropped, without a step of the optimizer."""
    policies = [HostedPolicy(ACTORS["tree"]) for _ in range(2)]
    collective = joined(*policies)
    (batch,) = TreePacker()(window())
    for window_is_stepped in (False, True):
        for policy in policies:
            grpo(RemoteActor(policy))(batch.copy())["loss_objective"].backward()
        own = gradients(policies[0].model)
        collective.run(*(lambda p=p: p.clip_grad_norm(None) for p in policies))
        for policy in policies:
            assert_close(gradients(policy.model), {name: 2 * g for name, g in own.items()})
        options = [{}] if window_is_stepped else None
        collective.run(*(lambda p=p, o=options: p.step(o) for p in policies))


def test_parameter_that_no_worker_reached_keeps_no_gradient():
    policies = [HostedPolicy(lambda: TreeActor(tiny_moe())) for _ in range(2)]
    collective = joined(*policies)
    unused = nn.Parameter(torch.ones(2))
    policies[0].optimizer.add_param_group({"params": [unused]})
    policies[1].optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    (batch,) = TreePacker()(window())
    grpo(RemoteActor(policies[0]))(batch)["loss_objective"].backward()
    collective.run(*(lambda p=p: p.clip_grad_norm(None) for p in policies))
    assert unused.grad is None
    assert policies[1].model.lm_head.weight.grad.abs().max() > 0


def test_workers_start_from_the_weights_of_the_first():
    policies = [HostedPolicy(lambda seed=seed: TreeActor(tiny_qwen3(seed))) for seed in (3, 4)]
    joined(*policies)
    assert_close(weights(policies[1].model), weights(tiny_qwen3(3)), 0)


def test_a_forward_is_backpropagated_once():
    policy = HostedPolicy(ACTORS["tree"])
    (batch,) = TreePacker()(window())
    values, ticket = policy.forward(batch)
    policy.backward(ticket, {"log_prob": torch.ones_like(values["log_prob"])})
    with pytest.raises(RuntimeError, match="forward 0 was backpropagated already, or dropped by zero_grad"):
        policy.backward(ticket, {"log_prob": torch.ones_like(values["log_prob"])})


@pytest.mark.parametrize("contract", ["tree", "flat"])
def test_saved_state_restores_model_and_optimizer(contract):
    first, second = (HostedPolicy(ACTORS[contract], make_optimizer=adamw, make_loss=grpo) for _ in range(2))
    (batch,) = FlatPacker(padding_free=True)(window())
    batch = batch["flat"] if contract == "flat" else batch

    def step(policy):
        values, ticket = policy.forward(batch, loss=True)
        policy.backward(ticket, {"loss_objective": torch.ones(())})
        policy.step([{"lr": 1e-3}])
        return values["loss_objective"]

    step(first)
    for part in ("model", "optimizer"):
        second.load(part, copy.deepcopy(first.save(part)))  # within a process they share memory
    assert torch.equal(step(first), step(second))
    assert_close(weights(first.model), weights(second.model), 0)


def test_autocast_runs_forward_and_loss_in_its_dtype():
    plain, cast = (HostedPolicy(ACTORS["tree"], make_loss=grpo, autocast_dtype=d) for d in (None, torch.bfloat16))
    (batch,) = PACKERS["tree"].__class__()(window())
    expected, ours = (p.forward(batch.copy(), grad=False).values["log_prob"] for p in (plain, cast))
    assert not torch.equal(ours, expected)
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.05)


def test_frozen_parameters_are_not_given_to_the_optimizer():
    def make_actor():
        model = tiny_qwen3()
        model.model.requires_grad_(False)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return TreeActor(model)

    policy = HostedPolicy(make_actor)
    assert [len(group["params"]) for group in policy.optimizer.param_groups] == [1]


@pytest.mark.parametrize("built", [nn.Linear(2, 2), tiny_qwen3()], ids=["module", "model"])
def test_what_is_no_actor_is_a_type_error(built):
    with pytest.raises(TypeError, match=f"make_actor returned a {type(built).__name__}.*TreeActor"):
        HostedPolicy(lambda: built)


def test_every_parameter_reaches_an_optimizer_with_several_groups():
    """Those with and without weight decay, as everybody builds it."""

    def make_optimizer(parameters):
        groups = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]]
        return torch.optim.AdamW([{"params": group} for group in groups])

    policy = HostedPolicy(ACTORS["tree"], make_optimizer=make_optimizer)
    given = {id(parameter) for parameter in policy._parameters()}
    assert given == {id(parameter) for parameter in policy.model.parameters()}


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_state_of_an_adapter_comes_back_on_a_base_that_is_loaded_anew(bits, tmp_path):
    model, options = (tiny_qwen3, {}) if bits is None else (partial(quantized, tmp_path, bits), {})

    def make_actor():
        return TreeActor(load_policy(model(), peft_config=LoraConfig(target_modules="all-linear"), **options))

    first, second = (HostedPolicy(make_actor, make_loss=grpo) for _ in range(2))
    (batch,) = TreePacker()(window())

    def step(policy):
        values, ticket = policy.forward(batch.copy(), loss=True)
        policy.backward(ticket, {"loss_objective": torch.ones(())})
        policy.step([{"lr": 1e-2}])
        return values["loss_objective"]

    for _ in range(2):
        step(first)
    for part in ("model", "optimizer"):
        second.load(part, copy.deepcopy(first.save(part)))
    assert torch.equal(step(first), step(second))


def test_half_precision_that_needs_a_scaled_loss_is_refused():
    with pytest.raises(ValueError, match="autocast_dtype=torch.float16.*bfloat16"):
        HostedPolicy(ACTORS["tree"], autocast_dtype=torch.float16)


def test_loss_and_push_without_their_parts_are_refused():
    policy = HostedPolicy(ACTORS["tree"])
    (batch,) = TreePacker()(window())
    with pytest.raises(ValueError, match="make_loss"):
        policy.forward(batch, loss=True)
    with pytest.raises(ValueError, match="make_sender"):
        policy.push_weights(1)
