"""Whether the parts of a run fit each other, found before any work starts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.trainers import OptimizationStepper

from torchrl_asyncgrpo.collectors.llm_collector import AsyncLLMCollector
from torchrl_asyncgrpo.data.replay_buffer import GroupReplayBuffer
from torchrl_asyncgrpo.modules.actor import TreeActor
from torchrl_asyncgrpo.modules.reference import ReferenceLogProbs
from torchrl_asyncgrpo.remote.actor import RemoteActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.remote.optimizer import RemoteOptimizer
from torchrl_asyncgrpo.remote.weight_sync import RemoteWeightSyncSender
from torchrl_asyncgrpo.trainers.stepper import WindowOptimizationStepper
from torchrl_asyncgrpo.trainers.window import Packer
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender
from torchrl_asyncgrpo.weight_sync.local import LocalWeightSyncSender
from torchrl_asyncgrpo.weight_sync.vllm_adapter import VLLMAdapterSyncSender


def check_counts(replay_buffer: ReplayBuffer | None, **counts: int | None) -> None:
    """Raise ``ValueError`` where a count is below 1, or counts groups of a replay buffer that is not there.

    Args:
        replay_buffer: of the run, or None.
        counts: the trainer's arguments by name; None where one is not given.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name}={count}; it must be at least 1.")
    batch_size, accumulation = counts["batch_size"], counts["gradient_accumulation_steps"]
    if replay_buffer is None and (batch_size is not None or accumulation != 1):
        raise ValueError(
            f"batch_size={batch_size} and gradient_accumulation_steps={accumulation} count groups of a replay buffer, "
            "and there is none: an item of the collector is a window. Pass a buffer of make_replay_buffer, or leave "
            "them out."
        )


def check_stage(dest: str, op: Any, loss_module: Any) -> None:
    """Raise ``ValueError`` where an operation has no place in the trainer, or would train the wrong thing there.

    Args:
        dest: name of the stage.
        op: the operation; looked at where it is a ``ReferenceLogProbs``.
        loss_module: of the run; its ``actor_network`` is looked at where it is a ``TreeActor``.
    """
    if dest in ("post_loss", "process_loss", "optimizer"):
        raise ValueError(
            f"the stage {dest!r} has no place around a window of micro-batches; use 'pre_optim', when gradients are "
            "complete, or 'post_optim', change the loss module, or give an optimization_stepper of your own."
        )
    actor = getattr(loss_module, "actor_network", None)
    if not (isinstance(op, ReferenceLogProbs) and isinstance(op.actor, TreeActor) and isinstance(actor, TreeActor)):
        return
    if op.actor.temperature != actor.temperature:
        raise ValueError(
            f"the reference is scored at temperature {op.actor.temperature} and the policy trained at "
            f"{actor.temperature}, so that the KL of equal weights would not be 0; build both actors with one "
            "temperature."
        )


def check_parts(
    *,
    collector: BaseCollector,
    replay_buffer: ReplayBuffer | None,
    loss_module: Any,
    sender: WeightSyncSender | None,
    groups: int | None,
    windows_held: int,
    pushes_per_window: float,
    async_collection: bool,
    packer: Packer | None = None,
    stepper: OptimizationStepper | None = None,
) -> None:
    """Raise ``ValueError`` where two parts would hang or train the wrong thing together.

    Args:
        collector: of the run.
        replay_buffer: of the run, or None.
        loss_module: of the run; its ``actor_network`` is looked at where it is a ``TreeActor``.
        sender: of the run, or None.
        groups: groups of a window; None where there is no buffer to say it.
        windows_held: windows whose slots are held at once: with several epochs all of an item, which are drawn in the
            first and freed in the last.
        pushes_per_window: weight pushes while one window is trained; below 1 where a push comes every few windows.
        async_collection: whether the collector runs beside the trainer.
        packer, stepper: of the run; looked at where they are of this package.

    Raises:
        ValueError: naming the argument of the trainer.
    """
    if async_collection and (replay_buffer is None or collector.replay_buffer is not replay_buffer):
        raise ValueError(
            "async_collection=True needs one replay buffer that the collector writes and the trainer reads; pass the "
            "same object of make_replay_buffer to both."
        )
    actor = getattr(loss_module, "actor_network", None)
    if isinstance(actor, TreeActor):
        actor.check_packer(packer)
    _check_backend(actor, sender, stepper)
    if not isinstance(collector, AsyncLLMCollector):
        return
    if async_collection and groups is not None:
        _check_slots(collector, replay_buffer, sender, groups, windows_held, pushes_per_window)
    sampled_at = collector.sampling_params.temperature
    if isinstance(actor, TreeActor) and actor.temperature != sampled_at:
        raise ValueError(
            f"rollouts are sampled at temperature {sampled_at} and trained at {actor.temperature}, so that no ratio "
            "would be right; give TreeActor and SamplingParams one temperature."
        )


def _check_backend(actor: Any, sender: WeightSyncSender | None, stepper: OptimizationStepper | None) -> None:
    """Policy, optimizer and sender are those of one backend, or of none."""
    if actor is None:  # a loss of a kind of its own
        return
    backend = actor.backend if isinstance(actor, RemoteActor) else None
    where = "in the actor's backend" if backend else "in this process"
    optimizer = stepper.optimizer if isinstance(stepper, WindowOptimizationStepper) else None
    its = optimizer.backend if isinstance(optimizer, RemoteOptimizer) else None
    if optimizer is not None and its is not backend:
        right = "RemoteOptimizer(actor.backend)" if backend else "one over the model's parameters"
        raise ValueError(
            f"optimizer={type(optimizer).__name__} cannot reach the model, which is {where}; pass {right}."
        )
    if backend is None and optimizer is not None and not _steps(optimizer, actor):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has none of the parameters of the loss's policy, which it would "
            "never change; build it over model.parameters() of the model that the policy runs."
        )
    if not _reaches(sender, actor):
        right = "RemoteWeightSyncSender(actor)" if backend else "one of the model"
        raise ValueError(
            f"weight_sync_sender={type(sender).__name__} cannot reach the model, which is {where}; pass {right}."
        )


def _steps(optimizer: torch.optim.Optimizer, actor: torch.nn.Module) -> bool:
    """Whether an optimizer changes the policy that is trained."""
    trained = {id(parameter) for parameter in actor.parameters()}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return not trained.isdisjoint(stepped) if trained else True


def _reaches(sender: WeightSyncSender | None, actor: Any) -> bool:
    """Whether a sender pushes weights of the policy that is trained."""
    if sender is None:
        return True
    backend = actor.backend if isinstance(actor, RemoteActor) else None
    if isinstance(sender, RemoteWeightSyncSender):
        return sender.backend is backend
    if backend is not None and not isinstance(backend, HostedPolicy):
        return False  # its weights are in another process
    trained = {id(parameter) for parameter in (actor if backend is None else backend.model).parameters()}
    sent = {id(parameter) for parameter in sender.module.parameters()}
    return not trained.isdisjoint(sent) if trained and sent else True


def _check_slots(
    collector: AsyncLLMCollector,
    replay_buffer: ReplayBuffer | None,
    sender: WeightSyncSender | None,
    groups: int,
    windows_held: int,
    pushes_per_window: float,
) -> None:
    limit = (collector.max_staleness + 1) * collector.groups_per_step
    if groups > limit:
        raise ValueError(
            f"a window takes {groups} groups, but the collector holds at most {limit} = (max_staleness + 1) · "
            f"groups_per_step, so that no window would ever be full; set groups_per_step={groups}."
        )
    if windows_held * groups > limit:
        raise ValueError(
            f"optim_steps_per_batch={windows_held} windows of {groups} groups are drawn before the second epoch begins "
            f"and the last one frees them, but the collector holds at most {limit} = (max_staleness + 1) · "
            f"groups_per_step, so that the run would wait for ever; set groups_per_step={windows_held * groups}, or "
            "optim_steps_per_batch=1."
        )
    gate = replay_buffer.max_staleness if isinstance(replay_buffer, GroupReplayBuffer) else None
    staleness = math.ceil((limit / groups - 1) * pushes_per_window)
    if gate is not None and staleness > gate:
        raise ValueError(
            f"the collector holds {limit} groups, so that some wait for {limit / groups - 1:g} windows of {groups} "
            f"with {pushes_per_window:g} pushes each, until they are {staleness} versions old, and the replay buffer "
            f"drops what is older than {gate}: they would be sampled for nothing. Set groups_per_step={groups} and one "
            f"max_staleness for both; for several epochs max_staleness={staleness} or more in make_replay_buffer."
        )
    if isinstance(sender, RemoteWeightSyncSender) and isinstance(sender.backend, HostedPolicy):
        sender = sender.backend.sender  # a backend of this process
    if isinstance(sender, VLLMAdapterSyncSender) and (gate is None or gate > sender.max_staleness):
        raise ValueError(
            f"weight_sync_sender serves adapters up to max_staleness={sender.max_staleness}, beyond which a request "
            f"may be answered by the newest one, and the replay buffer hands out rollouts up to max_staleness={gate}, "
            "where None is any. Give both the same."
        )
    if isinstance(sender, LocalWeightSyncSender) and sender.engine.shares_weights and limit > groups:
        raise ValueError(
            f"the engine shares the trainer's weights, and holds {limit} groups for windows of {groups}, so that it "
            "would decode while they are written; give the engine its own copy (copy_weights=True), or set "
            f"max_staleness=0 and groups_per_step={groups}."
        )
