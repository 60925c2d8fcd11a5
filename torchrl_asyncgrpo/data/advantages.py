"""Advantages of the rollouts of one group, as pure functions of their rewards."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Scale = Literal["std", "population_std", "none"]


def group_advantages(rewards_G: Tensor, *, scale: Scale = "std", eps: float = 1e-4) -> Tensor:
    """Centre the rewards of one group on their mean and, if asked, scale them to unit spread.

    A_i = (r_i - mean r) / (std r + eps), DeepSeekMath, arXiv:2402.03300, section 4.1.2; ``scale="none"`` leaves the
    division out, Dr. GRPO, arXiv:2503.20783, section 3.2.

    Args:
        rewards_G: [G] float, one reward per rollout of the group; NaN marks a rollout that was not scored and takes
            no part in mean and spread.
        scale: ``"std"`` divides by the sample standard deviation (n - 1), ``"population_std"`` by that of the
            population (n), ``"none"`` by nothing.
        eps: added to the standard deviation, >= 0.

    Returns:
        [G] float32, mean 0 over the scored rollouts; exactly 0 where all rewards are equal or only one was scored;
        NaN stays NaN.

    Raises:
        ValueError: if ``rewards_G`` is not one-dimensional or holds an infinity, or ``scale`` or ``eps`` is unknown
            or out of range.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(map(repr, get_args(Scale)))}.")
    if not eps >= 0:
        raise ValueError(f"eps={eps}; it is added to a standard deviation and must be >= 0.")
    rewards_G = torch.as_tensor(rewards_G)
    if rewards_G.ndim != 1:
        shape = tuple(rewards_G.shape)
        raise ValueError(f"rewards have shape {shape}; give one value per rollout of one group, [G].")
    if rewards_G.isinf().any():
        raise ValueError(
            f"rewards {rewards_G.tolist()} hold an infinity; return a finite number, or None for unscored."
        )
    rewards_G = rewards_G.double()
    scored_G = ~rewards_G.isnan()
    scored = rewards_G[scored_G]
    advantage_G = torch.full_like(rewards_G, float("nan"))
    advantage_G[scored_G] = 0.0
    # Equal rewards are compared, not subtracted: rounding of their mean must not be blown up by a tiny deviation.
    if len(scored) > 1 and scored.min() != scored.max():
        spread = 1.0 if scale == "none" else scored.std(correction=int(scale == "std")) + eps
        advantage_G[scored_G] = (scored - scored.mean()) / spread
    return advantage_G.float()
