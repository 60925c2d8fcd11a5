"""Asynchronous GRPO on prefix trees, as TorchRL components.

The names below are imported when they are first used: a vLLM server that loads the weight-transfer plugin of this
package needs none of the packages that a trainer needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_asyncgrpo.collectors.llm_collector import AsyncLLMCollector
    from torchrl_asyncgrpo.collectors.overlong import SoftOverlongPunishment, soft_overlong_punishment
    from torchrl_asyncgrpo.data.advantages import (
        batch_advantages,
        gdpo_advantages,
        group_advantages,
        leave_one_out_advantages,
        make_estimator,
        pass_at_k_advantages,
    )
    from torchrl_asyncgrpo.data.group_filters import DropFlatGroups, GroupFilter, KeepInformative
    from torchrl_asyncgrpo.data.prompts import PromptSource
    from torchrl_asyncgrpo.data.replay_buffer import make_replay_buffer
    from torchrl_asyncgrpo.data.schema import TreeBatch, make_rollout
    from torchrl_asyncgrpo.data.window_advantages import batch_normalised, batch_scaled, kl_in_reward
    from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
    from torchrl_asyncgrpo.engines.transformers import TransformersEngine
    from torchrl_asyncgrpo.engines.vllm import VLLMEngine
    from torchrl_asyncgrpo.modules.actor import TreeActor
    from torchrl_asyncgrpo.modules.scoring import RolloutScorer
    from torchrl_asyncgrpo.objectives import (
        CISPOLoss,
        DAPOLoss,
        DecoupledPPOLoss,
        DrGRPOLoss,
        DualClipPPOLoss,
        GMPOLoss,
        GRPOLoss,
        GSPOLoss,
        PolicyLoss,
        ReinforceLoss,
        SAPOLoss,
        make_objective,
    )
    from torchrl_asyncgrpo.objectives.corrections import (
        MaskedImportanceSampling,
        OffPolicySequenceMask,
        SequenceRejection,
        TruncatedImportanceSampling,
    )
    from torchrl_asyncgrpo.packing import FlatPacker, TreePacker, packing_ratio, unpack
    from torchrl_asyncgrpo.trainers.kl_control import AdaptiveKLControl
    from torchrl_asyncgrpo.trainers.trainer import AsyncGRPOTrainer
    from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender
    from torchrl_asyncgrpo.weight_sync.local import LocalWeightSyncSender
    from torchrl_asyncgrpo.weight_sync.vllm import VLLMWeightSyncSender

_HOME = {
    "AdaptiveKLControl": "trainers.kl_control",
    "AsyncGRPOTrainer": "trainers.trainer",
    "AsyncLLMCollector": "collectors.llm_collector",
    "CISPOLoss": "objectives",
    "Completion": "engines.base",
    "DAPOLoss": "objectives",
    "DecoupledPPOLoss": "objectives",
    "DrGRPOLoss": "objectives",
    "DropFlatGroups": "data.group_filters",
    "DualClipPPOLoss": "objectives",
    "FlatPacker": "packing",
    "GMPOLoss": "objectives",
    "GRPOLoss": "objectives",
    "GSPOLoss": "objectives",
    "GroupFilter": "data.group_filters",
    "KeepInformative": "data.group_filters",
    "LocalWeightSyncSender": "weight_sync.local",
    "MaskedImportanceSampling": "objectives.corrections",
    "OffPolicySequenceMask": "objectives.corrections",
    "PolicyLoss": "objectives",
    "PromptSource": "data.prompts",
    "ReinforceLoss": "objectives",
    "RolloutScorer": "modules.scoring",
    "SAPOLoss": "objectives",
    "SamplingParams": "engines.base",
    "SequenceRejection": "objectives.corrections",
    "SoftOverlongPunishment": "collectors.overlong",
    "TransformersEngine": "engines.transformers",
    "TreeActor": "modules.actor",
    "TreeBatch": "data.schema",
    "TreePacker": "packing",
    "TruncatedImportanceSampling": "objectives.corrections",
    "VLLMEngine": "engines.vllm",
    "VLLMWeightSyncSender": "weight_sync.vllm",
    "WeightSyncSender": "weight_sync.base",
    "batch_advantages": "data.advantages",
    "batch_normalised": "data.window_advantages",
    "batch_scaled": "data.window_advantages",
    "gdpo_advantages": "data.advantages",
    "group_advantages": "data.advantages",
    "kl_in_reward": "data.window_advantages",
    "leave_one_out_advantages": "data.advantages",
    "make_estimator": "data.advantages",
    "make_objective": "objectives",
    "make_replay_buffer": "data.replay_buffer",
    "make_rollout": "data.schema",
    "packing_ratio": "packing",
    "pass_at_k_advantages": "data.advantages",
    "soft_overlong_punishment": "collectors.overlong",
    "unpack": "packing",
}

__all__ = [
    "AdaptiveKLControl",
    "AsyncGRPOTrainer",
    "AsyncLLMCollector",
    "CISPOLoss",
    "Completion",
    "DAPOLoss",
    "DecoupledPPOLoss",
    "DrGRPOLoss",
    "DropFlatGroups",
    "DualClipPPOLoss",
    "FlatPacker",
    "GMPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "GroupFilter",
    "KeepInformative",
    "LocalWeightSyncSender",
    "MaskedImportanceSampling",
    "OffPolicySequenceMask",
    "PolicyLoss",
    "PromptSource",
    "ReinforceLoss",
    "RolloutScorer",
    "SAPOLoss",
    "SamplingParams",
    "SequenceRejection",
    "SoftOverlongPunishment",
    "TransformersEngine",
    "TreeActor",
    "TreeBatch",
    "TreePacker",
    "TruncatedImportanceSampling",
    "VLLMEngine",
    "VLLMWeightSyncSender",
    "WeightSyncSender",
    "batch_advantages",
    "batch_normalised",
    "batch_scaled",
    "gdpo_advantages",
    "group_advantages",
    "kl_in_reward",
    "leave_one_out_advantages",
    "make_estimator",
    "make_objective",
    "make_replay_buffer",
    "make_rollout",
    "packing_ratio",
    "pass_at_k_advantages",
    "soft_overlong_punishment",
    "unpack",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
