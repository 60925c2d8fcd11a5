"""Asynchronous GRPO on prefix trees, as TorchRL components."""

from torchrl_asyncgrpo.collectors.llm_collector import AsyncLLMCollector
from torchrl_asyncgrpo.data.advantages import group_advantages
from torchrl_asyncgrpo.data.prompts import PromptSource
from torchrl_asyncgrpo.data.replay_buffer import make_replay_buffer
from torchrl_asyncgrpo.data.schema import TreeBatch, make_rollout
from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
from torchrl_asyncgrpo.engines.transformers import TransformersEngine
from torchrl_asyncgrpo.modules.actor import TreeActor
from torchrl_asyncgrpo.objectives.grpo import GRPOLoss
from torchrl_asyncgrpo.packing import FlatPacker, TreePacker, packing_ratio, unpack
from torchrl_asyncgrpo.trainers.trainer import AsyncGRPOTrainer
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender
from torchrl_asyncgrpo.weight_sync.local import LocalWeightSyncSender

__all__ = [
    "AsyncGRPOTrainer",
    "AsyncLLMCollector",
    "Completion",
    "FlatPacker",
    "GRPOLoss",
    "LocalWeightSyncSender",
    "PromptSource",
    "SamplingParams",
    "TransformersEngine",
    "TreeActor",
    "TreeBatch",
    "TreePacker",
    "WeightSyncSender",
    "group_advantages",
    "make_replay_buffer",
    "make_rollout",
    "packing_ratio",
    "unpack",
]
