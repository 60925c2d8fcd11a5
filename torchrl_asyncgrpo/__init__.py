"""Asynchronous GRPO on prefix trees, as TorchRL components.

The names below are imported when they are first used: a vLLM server that loads the weight-transfer plugin of this
package needs none of the packages that a trainer needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_asyncgrpo.collectors.llm_collector import AsyncLLMCollector
    from torchrl_asyncgrpo.data.advantages import group_advantages
    from torchrl_asyncgrpo.data.prompts import PromptSource
    from torchrl_asyncgrpo.data.replay_buffer import make_replay_buffer
    from torchrl_asyncgrpo.data.schema import TreeBatch, make_rollout
    from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
    from torchrl_asyncgrpo.engines.transformers import TransformersEngine
    from torchrl_asyncgrpo.engines.vllm import VLLMEngine
    from torchrl_asyncgrpo.modules.actor import TreeActor
    from torchrl_asyncgrpo.objectives.grpo import GRPOLoss
    from torchrl_asyncgrpo.packing import FlatPacker, TreePacker, packing_ratio, unpack
    from torchrl_asyncgrpo.trainers.trainer import AsyncGRPOTrainer
    from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender
    from torchrl_asyncgrpo.weight_sync.local import LocalWeightSyncSender
    from torchrl_asyncgrpo.weight_sync.vllm import VLLMWeightSyncSender

_HOME = {
    "AsyncGRPOTrainer": "trainers.trainer",
    "AsyncLLMCollector": "collectors.llm_collector",
    "Completion": "engines.base",
    "FlatPacker": "packing",
    "GRPOLoss": "objectives.grpo",
    "LocalWeightSyncSender": "weight_sync.local",
    "PromptSource": "data.prompts",
    "SamplingParams": "engines.base",
    "TransformersEngine": "engines.transformers",
    "TreeActor": "modules.actor",
    "TreeBatch": "data.schema",
    "TreePacker": "packing",
    "VLLMEngine": "engines.vllm",
    "VLLMWeightSyncSender": "weight_sync.vllm",
    "WeightSyncSender": "weight_sync.base",
    "group_advantages": "data.advantages",
    "make_replay_buffer": "data.replay_buffer",
    "make_rollout": "data.schema",
    "packing_ratio": "packing",
    "unpack": "packing",
}

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
    "VLLMEngine",
    "VLLMWeightSyncSender",
    "WeightSyncSender",
    "group_advantages",
    "make_replay_buffer",
    "make_rollout",
    "packing_ratio",
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
