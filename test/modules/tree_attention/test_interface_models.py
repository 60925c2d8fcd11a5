"""Whole models over a tree against each rollout alone through the plain model, gradients included."""

from __future__ import annotations

import pytest
import torch
from tree_oracle import MODELS, assert_same, random_rollouts, run_alone, run_tree, tiny_model

from torchrl_asyncgrpo.modules.tree_attention import install

SOFTCAPPED = {"gemma2"}
PAIRS = [
    (model_type, backend)
    for model_type in MODELS
    for backend in ("reference", "segments")
    if not (backend == "segments" and model_type in SOFTCAPPED)
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("model_type", "backend"), PAIRS)
def test_tree_equals_each_rollout_alone_in_float64(model_type: str, backend: str, seed: int) -> None:
    model = tiny_model(model_type)
    rollouts = random_rollouts(seed)
    alone = run_alone(model, rollouts)
    assert install(model, backend) == backend
    assert_same(alone, run_tree(model, rollouts), rollouts, 1e-6)


@pytest.mark.parametrize("model_type", [m for m, b in PAIRS if b == "segments"])
def test_segments_in_float32_equal_each_rollout_alone(model_type: str) -> None:
    model = tiny_model(model_type, torch.float32)
    rollouts = random_rollouts(7)
    alone = run_alone(model, rollouts)
    install(model, "segments")
    assert_same(alone, run_tree(model, rollouts), rollouts, 1e-5)
