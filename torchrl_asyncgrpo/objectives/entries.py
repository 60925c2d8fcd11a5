"""The loss terms of a micro-batch as objectives and corrections see them: plain tensors, one value per entry.

Shapes: L entries (one loss term each), S rollouts. Log-probs are natural logs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from torchrl_asyncgrpo.objectives import functional


@dataclass(frozen=True)
class Entries:
    """The trained tokens of a micro-batch. A rollout is never split over micro-batches, so that its sums are whole.

    Attributes:
        log_prob_L: [L] nats under the policy being trained, within the entry's kept set where it has one; carries the
            gradient.
        anchor_log_prob_L: [L] nats, the policy that importance ratios are taken against; a constant.
        sample_log_prob_L: [L] nats, as the sampler recorded them.
        advantage_L: [L] advantage.
        entropy_L: [L] nats, entropy of the policy where the token was sampled; a constant.
        rollout_L: [L] int64, rollout of the entry.
        length_S: [S] int64, entries of each rollout.
        several_advantages: whether advantages differ within a rollout.
    """

    log_prob_L: Tensor
    anchor_log_prob_L: Tensor
    sample_log_prob_L: Tensor
    advantage_L: Tensor
    entropy_L: Tensor
    rollout_L: Tensor
    length_S: Tensor
    several_advantages: bool = False

    @property
    def log_ratio_L(self) -> Tensor:
        """[L] nats, log-ratio of the current policy to the anchor, not clamped; carries the gradient."""
        return self.log_prob_L - self.anchor_log_prob_L

    @property
    def ratio_L(self) -> Tensor:
        """[L] importance ratio of the current policy to the anchor; carries the gradient."""
        return functional.bounded_exp(self.log_ratio_L)

    def sum_by_rollout(self, value_L: Tensor) -> Tensor:
        """[S] sums over the entries of each rollout, formed in float64."""
        return functional.sum_by_rollout(value_L, self.rollout_L, len(self.length_S))

    def mean_by_rollout(self, value_L: Tensor) -> Tensor:
        """[S] means over the entries of each rollout, formed in float64; 0 for a rollout without any."""
        return functional.mean_by_rollout(value_L, self.rollout_L, self.length_S)

    def one_advantage(self, who: str) -> Tensor:
        """[L] advantages, after a check that each rollout has one.

        Args:
            who: what needs it, for the error.

        Raises:
            ValueError: if advantages differ within a rollout.
        """
        if self.several_advantages:
            raise ValueError(
                f"{who} judges a rollout as a whole and needs one advantage for all its tokens, but the window has "
                "rollouts with several: give make_rollout one number, or use a token-level objective or correction "
                "(GRPOLoss, CISPOLoss, GSPOLoss(level='token'))."
            )
        return self.advantage_L

    def detached(self) -> Entries:
        """The same entries without the gradient."""
        return replace(self, log_prob_L=self.log_prob_L.detach())
