"""What a configuration says of the policy and its objective, for this job and that of ../remote_grpo."""

from __future__ import annotations

from typing import Any

import hydra
from omegaconf import DictConfig
from torch import nn

from torchrl_asyncgrpo import ModelConfig, load_policy, model_kwargs, peft_config
from torchrl_asyncgrpo.adapters import has_quantized_layers


def model_settings(cfg: DictConfig, device: str) -> ModelConfig:
    """The section ``model``."""
    for option, key in (("dtype", "model.dtype"), ("attention", "model.attention"), ("device_map", "model.device")):
        if option in cfg.model.options:
            raise ValueError(f"model.options.{option}={cfg.model.options[option]}; set {key} instead.")
    return ModelConfig(dtype=cfg.model.dtype, device_map={"": device}, **cfg.model.options)


def make_policy(path: str, settings: ModelConfig, device: str, **changes: Any) -> nn.Module:
    """The policy that is trained, on its device; ``changes`` are further arguments of ``from_pretrained``."""
    kwargs = model_kwargs(settings) | changes
    policy = load_policy(path, kwargs, peft_config=peft_config(settings), attention=None)
    # under WORLD_SIZE > 1 there is no device map; quantised layers are where they were quantised
    return policy if has_quantized_layers(policy) else policy.to(device)


def server_flags(cfg: DictConfig) -> list[str]:
    """vLLM's options for the files of the policy: its revision, which is the tokenizer's too, and its own code."""
    kwargs = model_kwargs(model_settings(cfg, "cpu"))
    revision = ["--revision", kwargs["revision"]] if "revision" in kwargs else []
    return revision + ["--trust-remote-code"] * kwargs["trust_remote_code"]


def objective_options(cfg: DictConfig) -> dict[str, Any]:
    """Arguments of the objective, all that do not need the run."""
    options = hydra.utils.instantiate(cfg.loss.options, _convert_="all")  # corrections are objects: _target_
    if cfg.loss.name == "dr_grpo":
        options.setdefault("constant", cfg.sampling.max_tokens)
    return options
