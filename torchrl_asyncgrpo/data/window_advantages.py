"""Advantages that take a whole window to know, or what was computed for it: steps on its rollouts before packing.

Each takes the rollouts of a window, sets their ``advantage`` and returns them, so that it stands before the packer:

    >>> trainer = AsyncGRPOTrainer(packer=lambda rollouts: packer(batch_scaled(rollouts)), ...)

What a step sets does not depend on how often it sees a window, as it does in every epoch. A window is what one process
trains in one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.advantages import batch_advantages, group_advantages
from torchrl_asyncgrpo.objectives.functional import k3_kl

RewardKL = Literal["k1", "k2", "k3"]


def batch_scaled(
    rollouts: Iterable[TensorDictBase], *, eps: float = 1e-4, clip: float | None = None
) -> list[TensorDictBase]:
    """Set advantages of rewards centred in the group and scaled by the spread of the window.

    Args:
        rollouts: those of a window, in whole groups; ``reward`` and ``group_id`` are read.
        eps: added to the standard deviation of the window's rewards, >= 0.
        clip: bound of the advantages, > 0; None for none.

    Returns:
        The same rollouts, with the ``advantage`` of :func:`~torchrl_asyncgrpo.data.advantages.batch_advantages`.
    """
    rollouts = list(rollouts)
    return _with_advantages(rollouts, batch_advantages(_rewards(rollouts), _group_ids(rollouts), eps=eps, clip=clip))


def batch_normalised(
    rollouts: Iterable[TensorDictBase], *, eps: float = 1e-4, clip: float | None = None
) -> list[TensorDictBase]:
    """Normalise the advantages of a window to mean 0 and unit spread, as GDPO does after its sum.

    A_i <- (A_i - mean A) / (std A + eps) over the rollouts of the window: GDPO, arXiv:2601.05242.

    Args:
        rollouts: those of a window, with one ``advantage`` each; ``"group_advantage"`` keeps it on the rollout.
        eps: added to the sample standard deviation (n - 1), >= 0.
        clip: bound of the result, > 0; None for none.

    Returns:
        The same rollouts; advantages are exactly 0 where all were equal.

    Raises:
        ValueError: if a rollout has an advantage per token.
    """
    rollouts = list(rollouts)
    for rollout in rollouts:
        if rollout[schema.ADVANTAGE].ndim:
            raise ValueError(
                f"rollout {int(rollout[schema.ROLLOUT_ID])} has {len(rollout[schema.ADVANTAGE])} advantages, one per "
                "token, of which the window has no one mean; leave batch_normalised out, or give one per rollout."
            )
        if schema.GROUP_ADVANTAGE not in rollout.keys():
            rollout[schema.GROUP_ADVANTAGE] = rollout[schema.ADVANTAGE].clone()
    advantage_S = torch.stack([rollout[schema.GROUP_ADVANTAGE] for rollout in rollouts])
    return _with_advantages(rollouts, group_advantages(advantage_S, scale="std", eps=eps, clip=clip))


def kl_in_reward(
    rollouts: Iterable[TensorDictBase],
    *,
    coeff: float,
    advantage: Callable[[Tensor], Tensor],
    estimator: RewardKL = "k1",
) -> list[TensorDictBase]:
    """Take the divergence of the sampler from the reference off the rewards, and set the advantages anew.

    A = advantage of r_i - coeff · Σ_t KL_t within the group, over the trained tokens t of rollout i, with d the
    log-prob as sampled minus that of the reference: k1 is d, k2 d² / 2, k3 exp(-d) - 1 + d; see
    http://joschu.net/blog/kl-approx.html. In expectation the gradient of the k1 penalty is that of the divergence: the
    penalised reward of RLHF, arXiv:1909.08593, section 2, as in RLOO, arXiv:2402.14740. ``reward`` itself stays as it
    is.

    Args:
        rollouts: those of a window, in whole groups, with ``ref_log_prob``.
        coeff: weight of the divergence, in rewards per nat, finite and >= 0.
        advantage: rewards of a group [G] to advantages [G]: what the collector was given, such as
            ``group_advantages``. Rollouts without a trained token, whose divergence is unknown, count as not scored,
            and have the advantage 0.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``. Where top-p, top-k or min-p cut the sampler's distribution, the
            divergence is that of the cut one.

    Returns:
        The same rollouts.

    Raises:
        ValueError: if an argument is unknown or out of range.
        KeyError: if a rollout has no ``ref_log_prob``.
    """
    if not 0 <= coeff < math.inf:
        raise ValueError(f"coeff={coeff}; the weight of a divergence is finite and >= 0.")
    if estimator not in get_args(RewardKL):
        known = ", ".join(map(repr, get_args(RewardKL)))
        raise ValueError(f"estimator={estimator!r} is unknown; choose one of {known}.")
    rollouts = list(rollouts)
    kl_S = torch.stack([_kl(rollout, estimator) for rollout in rollouts])
    trained_S = torch.stack([rollout[schema.LOSS_MASK].any() for rollout in rollouts])
    penalised_S = (_rewards(rollouts) - coeff * kl_S).masked_fill(~trained_S, math.nan)
    group_id_S = _group_ids(rollouts)
    advantage_S = torch.empty_like(penalised_S)
    for group_id in group_id_S.unique():
        of_group_S = group_id_S == group_id
        advantage_S[of_group_S] = torch.as_tensor(advantage(penalised_S[of_group_S])).to(advantage_S)
    return _with_advantages(rollouts, advantage_S.masked_fill(~trained_S, 0.0))


def _kl(rollout: TensorDictBase, estimator: RewardKL) -> Tensor:
    """Sum of the estimates over the trained tokens, [] float64."""
    if schema.REF_LOG_PROB not in rollout.keys():
        raise KeyError(
            f"kl_in_reward needs {schema.REF_LOG_PROB!r}, and rollout {int(rollout[schema.ROLLOUT_ID])} has none: let "
            "a RolloutScorer(frozen_actor, packer, key='ref_log_prob') see the rollouts first, or pass ref_log_prob to "
            "make_rollout."
        )
    mask_N = rollout[schema.LOSS_MASK]
    sampled_L = rollout[schema.SAMPLE_LOG_PROB][mask_N].double()
    reference_L = rollout[schema.REF_LOG_PROB][mask_N].double()
    if estimator == "k3":
        return k3_kl(sampled_L, reference_L).sum()
    difference_L = sampled_L - reference_L
    return (difference_L if estimator == "k1" else difference_L.square() / 2).sum()


def _with_advantages(rollouts: list[TensorDictBase], advantage_S: Tensor) -> list[TensorDictBase]:
    for rollout, advantage in zip(rollouts, advantage_S.float().unbind(), strict=True):
        rollout[schema.ADVANTAGE] = advantage.clone()
    return rollouts


def _rewards(rollouts: list[TensorDictBase]) -> Tensor:
    return torch.stack([rollout[schema.REWARD] for rollout in rollouts]).double()


def _group_ids(rollouts: list[TensorDictBase]) -> Tensor:
    return torch.stack([rollout[schema.GROUP_ID] for rollout in rollouts])
