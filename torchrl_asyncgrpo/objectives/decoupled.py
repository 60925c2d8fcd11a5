"""Decoupled PPO: the policy that sampled, the one that a step must stay close to, and the one that is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives.base import PolicyOptions
from torchrl_asyncgrpo.objectives.corrections import TruncatedImportanceSampling
from torchrl_asyncgrpo.objectives.grpo import GRPOLoss

Proximal = Literal["recomputed", "interpolated"]


def interpolated_log_prob(log_prob_L: Tensor, sample_log_prob_L: Tensor, staleness_L: Tensor) -> Tensor:
    """Log-probs of the proximal policy, between those of the sampler and of the current policy by their versions.

    (1 / s) log q + (1 - 1 / s) log p with staleness s, and log p where s = 0: A-3PO, arXiv:2512.06547. A token that is
    one version old is clipped around its sampler, an older one around a policy that is the nearer to the current one,
    the older it is.

    Args:
        log_prob_L: [L] nats, under the policy being trained.
        sample_log_prob_L: [L] nats, as sampled.
        staleness_L: [L] >= 0, policy versions between sampler and trainer.

    Returns:
        [L] nats, constant.
    """
    sampler_L = torch.where(staleness_L > 0, 1 / staleness_L.double().clamp_min(1), 0.0).to(log_prob_L.dtype)
    return torch.lerp(log_prob_L.detach(), sample_log_prob_L, sampler_L)


class DecoupledPPOLoss(GRPOLoss):
    """Decoupled PPO: clip around a recent policy, weigh by its ratio to the one that sampled.

    :Formula: ``-w min(r A, clip(r, 1 - ε_low, 1 + ε_high) A)``, ``r = p / p_prox``, ``w = p_prox / q``
    :Aggregation: token-mean
    :Reference: AReaL, arXiv:2505.24298, eq. 5, after arXiv:2110.00641
    :Use: stale rollouts, several optimizer steps per window

    The proximal policy is the trainer's own when it began the window. Its log-probs are ``"recomputed"`` once per
    window in a forward without gradient (``entry.proximal_log_prob``, written by ``RolloutScorer``), or
    ``"interpolated"`` between those of sampler and current policy by their versions, which costs nothing.

    Args:
        actor_network: as in ``PolicyLoss``.
        proximal: ``"recomputed"`` or ``"interpolated"``.
        current_version: returns the current policy version, for example ``lambda: sender.policy_version``; with
            ``"interpolated"`` alone.
        behaviour_cap: highest weight w, > 0; None does not truncate.
        clip_epsilon: as in ``GRPOLoss``.
        options: those of :class:`PolicyLoss`, without ``anchor`` and ``correction``.

    Raises:
        ValueError: if an argument is out of range.
        KeyError: in ``forward``, if the batch lacks what ``proximal`` needs.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        proximal: Proximal = "recomputed",
        current_version: Callable[[], int] | None = None,
        behaviour_cap: float | None = None,
        clip_epsilon: float | Sequence[float] = 0.2,
        **options: Unpack[PolicyOptions],
    ) -> None:
        if proximal not in get_args(Proximal):
            raise ValueError(f"proximal={proximal!r}; choose one of {', '.join(map(repr, get_args(Proximal)))}.")
        if (proximal == "interpolated") != (current_version is not None):
            raise ValueError(
                f"proximal={proximal!r} with current_version={current_version}; 'interpolated' needs "
                "current_version=lambda: sender.policy_version, 'recomputed' takes none."
            )
        if taken := {"anchor", "correction"} & options.keys():
            raise ValueError(
                f"{', '.join(sorted(taken))} given to DecoupledPPOLoss, which sets its own; use GRPOLoss with "
                "anchor='proximal' to choose the correction."
            )
        if behaviour_cap is not None and not behaviour_cap > 0:
            raise ValueError(f"behaviour_cap={behaviour_cap}; the highest weight is above 0, or None for no limit.")
        options |= {"anchor": "proximal", "correction": TruncatedImportanceSampling(behaviour_cap)}
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **options)
        self.proximal: Proximal = proximal
        self.current_version = current_version

    def anchor_log_prob(self, batch: TensorDictBase, log_prob_L: Tensor) -> Tensor:
        """[L] nats, of the proximal policy."""
        if self.current_version is None:
            return super().anchor_log_prob(batch, log_prob_L)
        keys = self.tensor_keys
        version_L = self._needed(
            batch,
            keys.entry_policy_version,
            "proximal='interpolated'",
            "pack with TreePacker or FlatPacker, which write the version that sampled each token",
        )
        staleness_L = (self.current_version() - version_L).clamp_min(0)
        return interpolated_log_prob(log_prob_L, batch[keys.sample_log_prob].to(log_prob_L.dtype), staleness_L)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that a batch needs, the actor's inputs included."""
        keys = super().in_keys
        if self.current_version is None:
            return keys
        own = self.tensor_keys
        return [own.entry_policy_version if key == own.proximal_log_prob else key for key in keys]
