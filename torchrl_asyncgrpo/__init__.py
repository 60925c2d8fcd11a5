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
    from torchrl_asyncgrpo.modules.loading import ModelConfig, load_policy, model_kwargs, peft_config, run_name
    from torchrl_asyncgrpo.modules.padding_free import PaddingFreeActor
    from torchrl_asyncgrpo.modules.reference import ReferenceLogProbs, reference_policy
    from torchrl_asyncgrpo.modules.scoring import RolloutScorer
    from torchrl_asyncgrpo.modules.tokenizer import load_tokenizer
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
    from torchrl_asyncgrpo.remote.actor import RemoteActor
    from torchrl_asyncgrpo.remote.loss import RemoteLoss
    from torchrl_asyncgrpo.remote.on_ray import RayBackend, RayEngine
    from torchrl_asyncgrpo.remote.optimizer import RemoteOptimizer
    from torchrl_asyncgrpo.remote.protocol import RemoteBackend
    from torchrl_asyncgrpo.remote.weight_sync import RemoteWeightSyncSender
    from torchrl_asyncgrpo.trainers.kl_control import AdaptiveKLControl
    from torchrl_asyncgrpo.trainers.trainer import AsyncGRPOTrainer
    from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender
    from torchrl_asyncgrpo.weight_sync.local import LocalWeightSyncSender
    from torchrl_asyncgrpo.weight_sync.vllm import VLLMWeightSyncSender
    from torchrl_asyncgrpo.weight_sync.vllm_adapter import VLLMAdapterSyncSender

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
    "ModelConfig": "modules.loading",
    "OffPolicySequenceMask": "objectives.corrections",
    "PaddingFreeActor": "modules.padding_free",
    "PolicyLoss": "objectives",
    "PromptSource": "data.prompts",
    "RayBackend": "remote.on_ray",
    "RayEngine": "remote.on_ray",
    "ReferenceLogProbs": "modules.reference",
    "ReinforceLoss": "objectives",
    "RemoteActor": "remote.actor",
    "RemoteBackend": "remote.protocol",
    "RemoteLoss": "remote.loss",
    "RemoteOptimizer": "remote.optimizer",
    "RemoteWeightSyncSender": "remote.weight_sync",
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
    "VLLMAdapterSyncSender": "weight_sync.vllm_adapter",
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
    "load_policy": "modules.loading",
    "load_tokenizer": "modules.tokenizer",
    "make_estimator": "data.advantages",
    "make_objective": "objectives",
    "make_replay_buffer": "data.replay_buffer",
    "make_rollout": "data.schema",
    "model_kwargs": "modules.loading",
    "packing_ratio": "packing",
    "pass_at_k_advantages": "data.advantages",
    "peft_config": "modules.loading",
    "reference_policy": "modules.reference",
    "run_name": "modules.loading",
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
    "ModelConfig",
    "OffPolicySequenceMask",
    "PaddingFreeActor",
    "PolicyLoss",
    "PromptSource",
    "RayBackend",
    "RayEngine",
    "ReferenceLogProbs",
    "ReinforceLoss",
    "RemoteActor",
    "RemoteBackend",
    "RemoteLoss",
    "RemoteOptimizer",
    "RemoteWeightSyncSender",
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
    "VLLMAdapterSyncSender",
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
    "load_policy",
    "load_tokenizer",
    "make_estimator",
    "make_objective",
    "make_replay_buffer",
    "make_rollout",
    "model_kwargs",
    "packing_ratio",
    "pass_at_k_advantages",
    "peft_config",
    "reference_policy",
    "run_name",
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
