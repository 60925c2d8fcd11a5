"""Advantages of the rollouts of one group, or one batch of groups, as pure functions of their rewards.

Shapes: G rollouts of one group, K reward functions, S rollouts of a batch. Rewards are read, and advantages formed, in
float64.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Scale = Literal["std", "population_std", "none"]
SubsetScale = Literal["population_std", "none"]
Estimator = Callable[[Tensor], Tensor]


def group_advantages(
    rewards_G: Tensor, *, scale: Scale = "std", eps: float = 1e-4, clip: float | None = None
) -> Tensor:
    """Centre the rewards of one group on their mean and, if asked, scale them to unit spread.

    A_i = (r_i - mean r) / (std r + eps), DeepSeekMath, arXiv:2402.03300, section 4.1.2; ``scale="none"`` leaves the
    division out, Dr. GRPO, arXiv:2503.20783, section 3.2.

    Args:
        rewards_G: [G] float, one reward per rollout of the group; NaN marks a rollout that was not scored and takes
            no part in mean and spread.
        scale: ``"std"`` divides by the sample standard deviation (n - 1), ``"population_std"`` by that of the
            population (n), ``"none"`` by nothing.
        eps: added to the standard deviation, >= 0.
        clip: bound of the result, > 0: advantages lie in [-clip, clip]; None for none.

    Returns:
        [G] float32, mean 0 over the scored rollouts before clipping; exactly 0 where all rewards are equal or only one
        was scored; NaN stays NaN.

    Raises:
        ValueError: if ``rewards_G`` is not one-dimensional or holds an infinity, or ``scale``, ``eps`` or ``clip`` is
            unknown or out of range.
    """
    return _clipped(_normalised(rewards_G, scale, eps), clip)


def leave_one_out_advantages(rewards_G: Tensor, *, clip: float | None = None) -> Tensor:
    """Compare every reward of a group with the mean of the others.

    A_i = r_i - mean_{j != i} r_j = G / (G - 1) · (r_i - mean r): REINFORCE leave-one-out (RLOO),
    arXiv:2402.14740. The baseline does not depend on the rollout itself, so that the gradient is unbiased.

    Args:
        rewards_G: [G] float, G != 1; NaN marks a rollout that was not scored and is no part of any baseline.
        clip: bound of the result, > 0; None for none.

    Returns:
        [G] float32, mean 0 over the scored rollouts before clipping; exactly 0 where all rewards are equal or only one
        of several was scored; NaN stays NaN.

    Raises:
        ValueError: if the group has one rollout, or as in :func:`group_advantages`.
    """
    deviation_G, scored = _deviations(rewards_G)
    if len(deviation_G) == 1:
        raise ValueError(
            "leave_one_out on a group of 1 rollout: there is no other to compare with. Sample 2 or more completions "
            "per prompt (SamplingParams(n=...)), or use group_advantages."
        )
    if len(scored) > 1:
        deviation_G = deviation_G * (len(scored) / (len(scored) - 1))
    return _clipped(deviation_G, clip)


def pass_at_k_advantages(
    rewards_G: Tensor,
    *,
    k: int,
    scale: SubsetScale = "population_std",
    eps: float = 1e-4,
    clip: float | None = None,
) -> Tensor:
    """Credit a rollout for the best reward of the k-subsets of its group that it is in.

    A_i = mean over the k-subsets U with i of max r_U - mean over all k-subsets of max r_U, divided by the standard
    deviation of max r_U over all of them: Pass@k Training, arXiv:2508.10751, its analytical derivation. Without the
    division it is, up to the factor G / k, the estimator of PKPO, arXiv:2505.15201, centred, for any reward. ``k=1`` is
    :func:`group_advantages` with the same scale. In closed form: of the rollouts in ascending order, the j-th (from 0)
    is the best of C(j, k - 1) subsets.

    Args:
        rewards_G: [G] float; NaN marks a rollout that was not scored and is in no subset.
        k: size of the subsets, 1 <= k <= G. Where fewer than k rollouts were scored, all of them are the only subset,
            and the advantages 0.
        scale: ``"population_std"`` divides by the standard deviation over the subsets, ``"none"`` by nothing.
        eps: added to the standard deviation, >= 0.
        clip: bound of the result, > 0; None for none.

    Returns:
        [G] float32, mean 0 over the scored rollouts before clipping; exactly 0 where every subset has the same best
        reward; NaN stays NaN.

    Raises:
        ValueError: if ``k`` is out of range, or as in :func:`group_advantages`.
    """
    _check_scale(scale, get_args(SubsetScale))
    _check_eps(eps)
    rewards_G = _checked(rewards_G)
    if not 1 <= k <= len(rewards_G):
        raise ValueError(
            f"k={k} for a group of {len(rewards_G)} rollouts; a subset has 1 to {len(rewards_G)} of them: lower k, or "
            "sample more completions per prompt (SamplingParams(n=...))."
        )
    advantage_G = torch.where(rewards_G.isnan(), rewards_G, 0.0)
    scored_G = ~rewards_G.isnan()
    ascending, order = rewards_G[scored_G].sort()
    if len(ascending):
        advantage, spread = _pass_at_k_of(ascending, min(k, len(ascending)))
        if scale != "none":
            advantage = _divided(advantage, spread + eps)
        advantage_G[scored_G] = torch.empty_like(advantage).index_copy(0, order, advantage)
    return _clipped(advantage_G, clip)


def gdpo_advantages(
    rewards_GK: Tensor,
    weights_K: Sequence[float] | Tensor | None = None,
    *,
    scale: Scale = "std",
    eps: float = 1e-4,
    clip: float | None = None,
) -> Tensor:
    """Normalise every reward function within the group, then sum them.

    A_i = Σ_k w_k (r_ik - mean r_k) / (std r_k + eps): GDPO, arXiv:2601.05242. Rollouts whose weighted sums agree for
    different reasons keep different advantages, and the scale of a function does not matter. GDPO then normalises over
    the batch: ``window_advantages.batch_normalised``.

    Args:
        rewards_GK: [G, K] float, rewards by function (``AsyncLLMCollector(advantage_per_reward=True)``); NaN where a
            function did not score a rollout, which leaves that rollout out of that function's mean and spread.
        weights_K: [K] finite, weight of each function; None for 1 each.
        scale: as in :func:`group_advantages`, for every function.
        eps: added to the standard deviations, >= 0.
        clip: bound of the sum, > 0; None for none.

    Returns:
        [G] float32, sums over the functions that scored a rollout; NaN where none did. A function that gave every
        rollout the same reward adds exactly 0.

    Raises:
        ValueError: if ``rewards_GK`` is not two-dimensional, ``weights_K`` is not of finite [K], or as in
            :func:`group_advantages`.
    """
    rewards_GK = torch.as_tensor(rewards_GK)
    if rewards_GK.ndim != 2 or not rewards_GK.shape[1]:
        raise ValueError(
            f"rewards have shape {tuple(rewards_GK.shape)}; gdpo takes those of every reward function, [G, K]: build "
            "the collector with advantage_per_reward=True."
        )
    K = rewards_GK.shape[1]
    weight_K = torch.as_tensor([1.0] * K if weights_K is None else weights_K, dtype=torch.float64).to(rewards_GK.device)
    if weight_K.shape != (K,) or not weight_K.isfinite().all():
        raise ValueError(f"weights={weight_K.tolist()} for {K} reward functions; give one finite number each.")
    advantage_GK = torch.stack([_normalised(rewards_GK[:, k], scale, eps) for k in range(K)], 1) * weight_K
    return _clipped(advantage_GK.nansum(1).masked_fill(advantage_GK.isnan().all(1), math.nan), clip)


def batch_advantages(rewards_S: Tensor, group_id_S: Tensor, *, eps: float = 1e-4, clip: float | None = None) -> Tensor:
    """Centre rewards on the mean of their group and scale them by the spread of the whole batch.

    A_i = (r_i - mean of its group) / (std of all rewards of the batch + eps): a group in which rewards differ little
    is not blown up. "Lite PPO", arXiv:2508.08221; TRL's ``scale_rewards="batch"``.

    Args:
        rewards_S: [S] float, rewards of the rollouts of several groups; NaN marks one that was not scored.
        group_id_S: [S] int, group of each rollout.
        eps: added to the sample standard deviation (n - 1), >= 0.
        clip: bound of the result, > 0; None for none.

    Returns:
        [S] float32; exactly 0 throughout a group in which all rewards are equal or only one was scored; NaN stays NaN.

    Raises:
        ValueError: if the shapes differ, or as in :func:`group_advantages`.
    """
    _check_eps(eps)
    rewards_S, group_id_S = _checked(rewards_S), torch.as_tensor(group_id_S)
    if group_id_S.shape != rewards_S.shape:
        raise ValueError(
            f"group_id_S has shape {tuple(group_id_S.shape)} and rewards_S {tuple(rewards_S.shape)}; give the group of "
            "every rollout."
        )
    deviation_S = torch.empty_like(rewards_S)
    for group_id in group_id_S.unique():
        deviation_S[group_id_S == group_id] = _deviations(rewards_S[group_id_S == group_id])[0]
    scored = rewards_S[~rewards_S.isnan()]
    if len(scored) > 1:
        deviation_S = _divided(deviation_S, scored.std() + eps)
    return _clipped(deviation_S, clip)


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "group": group_advantages,
    "leave_one_out": leave_one_out_advantages,
    "pass_at_k": pass_at_k_advantages,
    "gdpo": gdpo_advantages,
}


def make_estimator(name: str, *, group_size: int | None = None, **options: Any) -> Estimator:
    """Make the ``advantage`` of a collector from its name in a configuration.

    Args:
        name: ``"group"``, ``"leave_one_out"``, ``"pass_at_k"`` or ``"gdpo"``, which reads rewards [G, K]. Scaling by
            the batch is no estimator of one group: ``window_advantages.batch_scaled``.
        group_size: completions asked for per prompt. Where it is given, options that do not go with it are found here,
            and a group of which fewer survive is no error.
        options: keyword arguments of the estimator's function.

    Returns:
        A function from the rewards of a group to its advantages.

    Raises:
        ValueError: if the name or an option is unknown, one is missing or out of range, or the group is too small.
    """
    if name not in ESTIMATORS:
        raise ValueError(
            f"advantage estimator {name!r} is unknown; choose one of {', '.join(map(repr, ESTIMATORS))}, or pass a "
            "function of your own as advantage."
        )
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size={group_size}; a group has at least 1 completion.")
    function = ESTIMATORS[name]
    known = list(inspect.signature(function).parameters.values())[1:]
    names = [parameter.name for parameter in known]
    needed = {parameter.name for parameter in known if parameter.default is parameter.empty}
    if not needed <= options.keys() <= set(names):
        raise ValueError(
            f"options {sorted(options)} for the advantage estimator {name!r}; it takes {', '.join(names)}"
            + (f" and needs {', '.join(sorted(needed))}." if needed else ".")
        )
    estimator = functools.partial(function, **options)
    size = group_size or max(2, options.get("k", 2))
    weights_K = options.get("weights_K")
    # a dry run, which checks the options
    estimator(torch.zeros((size, 1 if weights_K is None else len(weights_K)) if name == "gdpo" else size))
    if name == "pass_at_k" and group_size is not None:
        return functools.partial(_of_survivors, estimator, group_size)
    return estimator


def _of_survivors(estimator: Estimator, group_size: int, rewards_G: Tensor) -> Tensor:
    """Advantages of those of a group that were sampled: the others count as not scored."""
    failed = torch.full((max(0, group_size - len(rewards_G)),), math.nan, dtype=torch.float64, device=rewards_G.device)
    return estimator(torch.cat([rewards_G.double(), failed]))[: len(rewards_G)]


def _pass_at_k_of(ascending: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Unscaled advantages [n] of rewards in ascending order, and the standard deviation over their k-subsets."""
    n = len(ascending)
    subsets, with_one = math.comb(n, k), math.comb(n - 1, k - 1)
    # measured from the best one: of one sign, so that no sum cancels, and exactly 0 where every subset has that best
    below = ascending - ascending[-1]
    # share of the subsets, of those with one given rollout whose best that is, and of those whose best is another
    share = ascending.new_tensor([math.comb(j, k - 1) / subsets for j in range(n)])
    own = ascending.new_tensor([math.comb(j, k - 1) / with_one for j in range(n)])
    other = ascending.new_tensor([math.comb(j - 1, k - 2) / with_one if k > 1 and j else 0.0 for j in range(n)])
    above = (other * below).flip(0).cumsum(0).flip(0) - other * below
    mean = (share * below).sum()
    return own * below + above - mean, (share * (below - mean).square()).sum().sqrt()


def _checked(rewards: Tensor) -> Tensor:
    """Rewards as [G] float64."""
    rewards = torch.as_tensor(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}; give one value per rollout of one group, [G].")
    if rewards.isinf().any():
        raise ValueError(f"rewards {rewards.tolist()} hold an infinity; return a finite number, or None for unscored.")
    return rewards.double()


def _deviations(rewards_G: Tensor) -> tuple[Tensor, Tensor]:
    """Deviations from the mean of the scored rewards, [G] float64 with NaN where unscored, and the scored rewards."""
    rewards_G = _checked(rewards_G)
    scored = rewards_G[~rewards_G.isnan()]
    # Equal rewards are compared, not subtracted: rounding of their mean must not be blown up by a tiny deviation.
    if len(scored) < 2 or scored.min() == scored.max():
        return torch.where(rewards_G.isnan(), rewards_G, 0.0), scored
    return rewards_G - scored.mean(), scored


def _normalised(rewards_G: Tensor, scale: Scale, eps: float) -> Tensor:
    """Deviations from the mean of the group, divided by its standard deviation if asked."""
    _check_scale(scale, get_args(Scale))
    _check_eps(eps)
    deviation_G, scored = _deviations(rewards_G)
    if scale == "none" or len(scored) < 2:
        return deviation_G
    return _divided(deviation_G, scored.std(correction=int(scale == "std")) + eps)


def _divided(deviation: Tensor, spread: Tensor) -> Tensor:
    """Deviations by their spread; 0 where they are so small that their squares, and thus the spread, vanish."""
    return deviation / spread if spread > 0 else torch.where(deviation.isnan(), deviation, 0.0)


def _clipped(advantage: Tensor, clip: float | None) -> Tensor:
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip}; advantages are bounded by [-clip, clip]: give a number above 0, or None.")
    return (advantage if clip is None else advantage.clamp(-clip, clip)).float()


def _check_scale(scale: str, known: tuple[str, ...]) -> None:
    if scale not in known:
        raise ValueError(f"scale={scale!r} is unknown; choose one of {', '.join(map(repr, known))}.")


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"eps={eps}; it is added to a standard deviation and must be >= 0.")
