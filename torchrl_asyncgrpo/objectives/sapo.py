"""SAPO: a smooth gate in the place of the clip."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from typing_extensions import Unpack

from torchrl_asyncgrpo.objectives.base import PolicyLoss, PolicyOptions
from torchrl_asyncgrpo.objectives.entries import Entries


def sapo_term(ratio_L: Tensor, advantage_L: Tensor, temperature_positive: float, temperature_negative: float) -> Tensor:
    """Soft-gated surrogate per entry.

    -(4 / τ) σ(τ (r - 1)) A with one τ for positive advantages and one for the others: arXiv:2511.20347, eq. 5 and 6.
    The slope in r is that of r A at r = 1, and falls off on both sides.

    Args:
        ratio_L: [L] importance ratio.
        advantage_L: [L] advantage.
        temperature_positive: τ where A > 0.
        temperature_negative: τ elsewhere.

    Returns:
        [L] loss terms.
    """
    tau_L = torch.full_like(ratio_L, temperature_negative).masked_fill(advantage_L > 0, temperature_positive)
    return -(4 / tau_L) * torch.sigmoid(tau_L * (ratio_L - 1)) * advantage_L


class SAPOLoss(PolicyLoss):
    """Soft adaptive policy optimisation: off-policy tokens fade out instead of being cut off.

    :Formula: ``-(4 / τ) σ(τ (r - 1)) A``, τ by the sign of A
    :Aggregation: sequence-mean
    :Reference: SAPO, arXiv:2511.20347, eq. 5-6
    :Use: when hard clipping makes training jumpy

    Args:
        actor_network: as in ``PolicyLoss``.
        temperature_positive: τ of positive advantages, > 0.
        temperature_negative: τ of negative ones, > 0; higher, so that they fade sooner.
        options: those of :class:`PolicyLoss`.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        temperature_positive: float = 1.0,
        temperature_negative: float = 1.05,
        **options: Unpack[PolicyOptions],
    ) -> None:
        options.setdefault("aggregation", "sequence-mean")
        super().__init__(actor_network, **options)
        for name, value in (
            ("temperature_positive", temperature_positive),
            ("temperature_negative", temperature_negative),
        ):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}; it is finite and above 0, usually about 1.")
        self.temperature_positive = float(temperature_positive)
        self.temperature_negative = float(temperature_negative)

    def policy_term(self, entries: Entries) -> Tensor:
        """The gated surrogate of every entry, [L]."""
        return sapo_term(entries.ratio_L, entries.advantage_L, self.temperature_positive, self.temperature_negative)
