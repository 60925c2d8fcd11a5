"""REINFORCE, and with leave-one-out advantages RLOO."""

from __future__ import annotations

from torch import Tensor

from torchrl_asyncgrpo.objectives.base import PolicyLoss
from torchrl_asyncgrpo.objectives.entries import Entries


class ReinforceLoss(PolicyLoss):
    """The plain policy gradient, without ratio or clip.

    :Formula: ``-A log p``
    :Aggregation: token-mean; constant in RLOO, which sums over a rollout
    :Reference: arXiv:2402.14740, eq. 6-7; RLOO with ``leave_one_out_advantages``
    :Use: on-policy runs, or off-policy ones with ``TruncatedImportanceSampling``

    It has no importance ratio, so that corrections of the gap go with every anchor.

    Args:
        actor_network: as in ``PolicyLoss``.
        options: those of :class:`PolicyLoss`.
    """

    uses_ratio = False

    def policy_term(self, entries: Entries) -> Tensor:
        """The term of every entry, [L]."""
        return -entries.log_prob_L * entries.advantage_L
