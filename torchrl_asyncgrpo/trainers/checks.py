"""Whether the parts of a run fit each other, found before any work starts."""

from __future__ import annotations

from typing import Any

from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer

from torchrl_asyncgrpo.collectors.llm_collector import AsyncLLMCollector
from torchrl_asyncgrpo.data.replay_buffer import GroupReplayBuffer
from torchrl_asyncgrpo.modules.actor import TreeActor
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender
from torchrl_asyncgrpo.weight_sync.local import LocalWeightSyncSender


def check_parts(
    *,
    collector: BaseCollector,
    replay_buffer: ReplayBuffer | None,
    loss_module: Any,
    sender: WeightSyncSender | None,
    groups: int | None,
    async_collection: bool,
) -> None:
    """Raise ``ValueError`` where two parts would hang or train the wrong thing together.

    Args:
        collector: of the run.
        replay_buffer: of the run, or None.
        loss_module: of the run; its ``actor_network`` is looked at where it is a ``TreeActor``.
        sender: of the run, or None.
        groups: groups of a window; None where there is no buffer to say it.
        async_collection: whether the collector runs beside the trainer.
    """
    if async_collection and (replay_buffer is None or collector.replay_buffer is not replay_buffer):
        raise ValueError(
            "async_collection=True needs one replay buffer that the collector writes and the trainer reads; pass the "
            "same object of make_replay_buffer to both."
        )
    if not isinstance(collector, AsyncLLMCollector):
        return
    limit = (collector.max_staleness + 1) * collector.groups_per_step
    if async_collection and groups is not None and groups > limit:
        raise ValueError(
            f"a window takes {groups} groups, but the collector holds at most {limit} = (max_staleness + 1) · "
            f"groups_per_step, so that no window would ever be full; set groups_per_step={groups}."
        )
    gate = replay_buffer.max_staleness if isinstance(replay_buffer, GroupReplayBuffer) else None
    if async_collection and gate is not None and collector.max_staleness > gate:
        raise ValueError(
            f"the collector runs ahead by max_staleness={collector.max_staleness} and the replay buffer drops what is "
            f"staler than {gate}, so that groups would be sampled for nothing; give both one max_staleness."
        )
    shared = isinstance(sender, LocalWeightSyncSender) and sender.engine.shares_weights
    if async_collection and shared and collector.max_staleness > 0:
        raise ValueError(
            f"the engine shares the trainer's weights and max_staleness={collector.max_staleness}, so that it would "
            "decode while they are written; give the engine its own copy (copy_weights=True) or set max_staleness=0."
        )
    actor = getattr(loss_module, "actor_network", None)
    sampled_at = collector.sampling_params.temperature
    if isinstance(actor, TreeActor) and actor.temperature != sampled_at:
        raise ValueError(
            f"rollouts are sampled at temperature {sampled_at} and trained at {actor.temperature}, so that no ratio "
            "would be right; give TreeActor and SamplingParams one temperature."
        )
