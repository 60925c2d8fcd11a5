"""GRPO over tree batches: a clipped surrogate whose gradient is exact for any packing of the window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives.common import LossModule

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.objectives import functional


class GRPOLoss(LossModule):
    """Group-relative policy optimisation, DeepSeekMath, arXiv:2402.03300, eq. 3, over a prefix tree.

    loss_objective = Σ_entries w_e · policy_term_e with weights w_e that depend on window totals and the entry's
    rollout alone (``functional.entry_weights``); entropy bonus and KL penalty use the same weights. Summed over the
    micro-batches of a window, the losses and their gradients are those of the window, however it was split.

    Where top-p, top-k or min-p cut the sampler's distribution and the rollouts say which tokens were kept, the policy
    is restricted to the same tokens: log p(a) - log Σ_{v kept} p(v) enters the ratio, and all that is made of it, so
    that unchanged weights have the ratio 1. The KL to the reference and the entropy are of the whole vocabulary.

    Args:
        actor_network: writes ``node.log_prob`` and ``node.entropy``, and ``entry.log_kept`` for batches with kept sets;
            usually a ``TreeActor``.
        clip_epsilon: clip width of the ratio, one number or ``(low, high)``; low in [0, 1), high >= 0.
        aggregation: ``"token-mean"``, ``"sequence-mean"`` or ``"constant"``.
        constant: C of ``aggregation="constant"``, usually the most tokens of a completion.
        entropy_coeff: weight of the entropy bonus, >= 0; 0 leaves it out.
        kl_to_ref_coeff: weight of the k3 KL to the reference policy, >= 0; above 0 the batch needs
            ``entry.ref_log_prob``.

    Returns of ``forward``: a ``TensorDict`` of scalars. ``loss_objective``, and ``loss_entropy``, ``loss_kl_to_ref``
    where their coefficient is above 0, carry the gradient. ``entropy``, ``kl_to_ref`` (nats), ``clip_fraction_low``,
    ``clip_fraction_high``, ``kl_approx`` (nats), ``ratio``, ``ratio_squared`` are shares of means over the window's
    trained tokens and add up over micro-batches; ``ESS`` in (0, 1] is formed from them
    (``functional.reduce_window``).

    A loss of your own is this class with another ``policy_term``:

        >>> class Reinforce(GRPOLoss):
        ...     def policy_term(self, log_prob_L, sample_log_prob_L, advantage_L, rollout_L):
        ...         return -log_prob_L * advantage_L

    Raises:
        ValueError: if an argument is out of range.
        KeyError: in ``forward``, if ``kl_to_ref_coeff`` is above 0 and the batch has no reference log-probs, or if the
            batch has kept sets and the actor ignored them.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Keys that ``set_keys`` can change: all inputs of the loss."""

        log_prob: NestedKey = schema.NODE_LOG_PROB
        entropy: NestedKey = schema.NODE_ENTROPY
        entry_node: NestedKey = schema.ENTRY_NODE
        entry_rollout: NestedKey = schema.ENTRY_ROLLOUT
        sample_log_prob: NestedKey = schema.ENTRY_SAMPLE_LOG_PROB
        ref_log_prob: NestedKey = schema.ENTRY_REF_LOG_PROB
        log_kept: NestedKey = schema.ENTRY_LOG_KEPT
        kept_entry: NestedKey = schema.KEPT_ENTRY
        advantage: NestedKey = schema.ROLLOUT_ADVANTAGE
        length: NestedKey = schema.ROLLOUT_LENGTH
        num_entries: NestedKey = schema.WINDOW_NUM_ENTRIES
        num_rollouts: NestedKey = schema.WINDOW_NUM_ROLLOUTS

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Sequence[float] = 0.2,
        aggregation: functional.Aggregation = "token-mean",
        constant: float | None = None,
        entropy_coeff: float = 0.0,
        kl_to_ref_coeff: float = 0.0,
    ) -> None:
        super().__init__()
        widths = tuple(clip_epsilon) if isinstance(clip_epsilon, Sequence) else (clip_epsilon, clip_epsilon)
        low, high = widths if len(widths) == 2 else (math.nan, math.nan)
        if not 0 <= low < 1 or not high >= 0:
            raise ValueError(
                f"clip_epsilon={clip_epsilon}; the low width lies in [0, 1), the high one is >= 0: give one number "
                "such as 0.2 or a pair such as (0.2, 0.28)."
            )
        for name, value in (("entropy_coeff", entropy_coeff), ("kl_to_ref_coeff", kl_to_ref_coeff)):
            if not value >= 0:
                raise ValueError(f"{name}={value}; a coefficient is >= 0, and 0 leaves the term out.")
        functional.check_aggregation(aggregation, constant)
        self.actor_network = actor_network
        self.clip_epsilon_low, self.clip_epsilon_high = float(low), float(high)
        self.aggregation: functional.Aggregation = aggregation
        self.constant = constant
        self.entropy_coeff = float(entropy_coeff)
        self.kl_to_ref_coeff = float(kl_to_ref_coeff)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that a batch needs, the actor's inputs included; ``log_kept`` is read where it is there."""
        keys = self.tensor_keys
        own = [keys.entry_node, keys.entry_rollout, keys.sample_log_prob, keys.advantage]
        own += [keys.length, keys.num_entries, keys.num_rollouts]
        own += [keys.ref_log_prob] if self.kl_to_ref_coeff > 0 else []
        return [*self.actor_network.in_keys, *(key for key in own if key not in self.actor_network.in_keys)]

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys of the output that carry the gradient."""
        optional = {"loss_entropy": self.entropy_coeff, "loss_kl_to_ref": self.kl_to_ref_coeff}
        return ["loss_objective", *(key for key, coefficient in optional.items() if coefficient > 0)]

    def policy_term(
        self, log_prob_L: Tensor, sample_log_prob_L: Tensor, advantage_L: Tensor, rollout_L: Tensor
    ) -> Tensor:
        """Loss term of every entry, before weighting; override it for another objective.

        Args:
            log_prob_L: [L] nats under the policy being trained, within the entry's kept set where it has one; carries
                the gradient.
            sample_log_prob_L: [L] nats, as the sampler recorded them.
            advantage_L: [L] advantage of the entry's rollout.
            rollout_L: [L] int64, rollout of the entry; a rollout is never split over micro-batches.

        Returns:
            [L] terms, to be minimised.
        """
        del rollout_L
        ratio_L = functional.importance_ratio(log_prob_L, sample_log_prob_L)
        return functional.clipped_surrogate(ratio_L, advantage_L, self.clip_epsilon_low, self.clip_epsilon_high)

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Loss shares and metrics of one micro-batch; see the class for keys and units."""
        keys = self.tensor_keys
        batch = self.actor_network(tensordict.copy())
        node_L, rollout_L = batch[keys.entry_node], batch[keys.entry_rollout]
        whole_log_prob_L, entropy_L = batch[keys.log_prob][node_L], batch[keys.entropy][node_L]
        log_prob_L = self._within_kept(whole_log_prob_L, batch)
        sample_log_prob_L = batch[keys.sample_log_prob].to(log_prob_L.dtype)
        advantage_L = batch[keys.advantage][rollout_L].to(log_prob_L.dtype)
        num_entries = batch[keys.num_entries]
        weight_L = functional.entry_weights(
            rollout_L,
            batch[keys.length],
            num_entries,
            batch[keys.num_rollouts],
            aggregation=self.aggregation,
            constant=self.constant,
        ).to(log_prob_L.dtype)

        term_L = self.policy_term(log_prob_L, sample_log_prob_L, advantage_L, rollout_L)
        output = {"loss_objective": (weight_L * term_L).sum()}
        if self.entropy_coeff > 0:
            output["loss_entropy"] = -self.entropy_coeff * (weight_L * entropy_L).sum()
        if self.kl_to_ref_coeff > 0:
            kl_L = functional.k3_kl(whole_log_prob_L, self._ref_log_prob(batch))
            output["loss_kl_to_ref"] = self.kl_to_ref_coeff * (weight_L * kl_L).sum()
            output["kl_to_ref"] = kl_L.detach().sum() / num_entries.clamp_min(1)
        output["entropy"] = entropy_L.detach().sum() / num_entries.clamp_min(1)
        output |= functional.ratio_metrics(
            log_prob_L.detach(),
            sample_log_prob_L,
            advantage_L,
            num_entries,
            self.clip_epsilon_low,
            self.clip_epsilon_high,
        )
        output["ESS"] = functional.reduce_window([TensorDict(output)])["ESS"]
        return TensorDict(output, batch_size=[])

    def _within_kept(self, whole_log_prob_L: Tensor, batch: TensorDictBase) -> Tensor:
        """Log-probs of the distribution that was sampled: the policy's, restricted to what the sampler kept."""
        log_kept_L = batch.get(self.tensor_keys.log_kept, None)
        if log_kept_L is not None:
            return whole_log_prob_L - log_kept_L
        if batch.get(self.tensor_keys.kept_entry, None) is not None:
            raise KeyError(
                f"the batch has {self.tensor_keys.kept_entry}, what top-p, top-k or min-p kept, and no "
                f"{self.tensor_keys.log_kept} from {type(self.actor_network).__name__}: ratios would be off. Use "
                "TreeActor, let the actor write the log of the probability of each entry's kept set, or sample from "
                "the whole vocabulary."
            )
        return whole_log_prob_L

    def _ref_log_prob(self, batch: TensorDictBase) -> Tensor:
        ref_log_prob_L = batch.get(self.tensor_keys.ref_log_prob, None)
        if ref_log_prob_L is None:
            raise KeyError(
                f"kl_to_ref_coeff={self.kl_to_ref_coeff} needs {self.tensor_keys.ref_log_prob} in the batch: pass "
                "ref_log_prob to make_rollout for every rollout, or set kl_to_ref_coeff=0."
            )
        return ref_log_prob_L
