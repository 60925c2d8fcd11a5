"""What every policy-gradient objective over tree batches shares: terms become an exact share of a window's loss."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives.common import LossModule

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.objectives import functional
from torchrl_asyncgrpo.objectives.corrections import (
    Correction,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
)
from torchrl_asyncgrpo.objectives.entries import Entries
from torchrl_asyncgrpo.objectives.kl import KLEstimator, check_estimator, kl_term
from torchrl_asyncgrpo.objectives.load_balance import LoadBalanceScope, check_scope, load_balance_terms

Anchor = Literal["sample", "proximal", "current"]


class PolicyOptions(TypedDict, total=False):
    """Keyword arguments that every objective takes; see :class:`PolicyLoss`."""

    aggregation: functional.Aggregation
    constant: float | None
    anchor: Anchor
    correction: Correction | Sequence[Correction] | None
    entropy_coeff: float
    top_entropy: float
    kl_to_ref_coeff: float
    kl_estimator: KLEstimator
    load_balance_coeff: float
    load_balance_scope: LoadBalanceScope
    experts_per_token: int | None


class PolicyLoss(LossModule):
    """Base of the policy-gradient objectives: everything but the term of an entry.

    loss_objective = Σ_entries w_e · c_e · term_e with weights w_e that depend on window totals and the entry's rollout
    alone (``functional.entry_weights``) and constants c_e of the corrections; entropy bonus and KL penalty use the
    same w_e. Summed over the micro-batches of a window, the losses and their gradients are those of the window, however
    it was split. What masks a term leaves its weight in the totals.

    Where top-p, top-k or min-p cut the sampler's distribution and the rollouts say which tokens were kept, the policy
    is restricted to the same tokens: log p(a) - log Σ_{v kept} p(v) enters the ratio, and all that is made of it, so
    that unchanged weights have the ratio 1. The KL to the reference and the entropy are of the whole vocabulary.

    A loss of your own is this class with a ``policy_term``:

        >>> class Reinforce(PolicyLoss):
        ...     def policy_term(self, entries):
        ...         return -entries.log_prob_L * entries.advantage_L

    Args:
        actor_network: writes ``node.log_prob`` and ``node.entropy``, and ``entry.log_kept`` for batches with kept sets;
            usually a ``TreeActor``.
        aggregation: ``"token-mean"``, ``"sequence-mean"`` or ``"constant"``, the sum over a rollout divided by a
            constant.
        constant: C of ``aggregation="constant"``, usually the most tokens of a completion.
        anchor: what the importance ratio is taken against. ``"sample"``: the log-probs that the sampler recorded.
            ``"proximal"``: the trainer's own when it began the window, ``entry.proximal_log_prob`` (see
            ``RolloutScorer``). ``"current"``: the current policy, held constant, which equals ``"proximal"`` in the
            first optimizer step on a window.
        correction: corrections of the gap between sampler and anchor, or, with ``anchor="sample"``, current policy;
            their weights are multiplied. Those that weigh by that gap need another anchor, unless the objective has no
            ratio: with ``"sample"`` the ratio holds the gap already.
        entropy_coeff: weight of the entropy bonus, >= 0; 0 leaves it out.
        top_entropy: share of the tokens of each rollout, those of the highest entropy, whose terms are trained, in
            (0, 1]; arXiv:2506.01939, section 5.1, where the share is of the batch and the mean is over trained tokens.
        kl_to_ref_coeff: weight of the KL to the reference policy, >= 0; above 0 the batch needs
            ``entry.ref_log_prob``. May be changed between windows.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"unbiased"``; see ``objectives.kl``.
        load_balance_coeff: weight of the load-balancing loss of a mixture of experts, >= 0; above 0 the batch needs
            ``node.router_logits``, ``TreeActor(model, router_logits=True)``.
        load_balance_scope: ``"rollout"`` or ``"micro-batch"``; see ``objectives.load_balance``.
        experts_per_token: experts that a token is sent to (``config.num_experts_per_tok``), with
            ``load_balance_coeff``.

    Returns of ``forward``: a ``TensorDict`` of scalars. ``loss_objective``, and ``loss_entropy``, ``loss_kl_to_ref``,
    ``loss_load_balance`` where their coefficient is above 0, carry the gradient. ``entropy``, ``kl_to_ref`` (nats),
    ``kl_approx`` (nats), ``ratio``, ``ratio_squared``, those of the objective (``term_metrics``) and of the corrections
    are shares of means over the window's trained tokens and add up over micro-batches, ``load_balance`` of one over its
    rollouts; ``ESS`` in (0, 1] is formed from them (``functional.reduce_window``). With corrections come
    ``mismatch_ratio``, ``mismatch_k1`` and ``mismatch_k3`` (``functional.mismatch_values``).

    Raises:
        ValueError: if an argument is out of range, or a correction does not go with the anchor.
        ValueError: in ``forward``, if ``kl_estimator="unbiased"`` meets kept sets.
        KeyError: in ``forward``, if the batch lacks a key that an argument asks for, or if it has kept sets and the
            actor ignored them.
    """

    uses_ratio = True

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Keys that ``set_keys`` can change: all inputs of the loss."""

        log_prob: NestedKey = schema.NODE_LOG_PROB
        entropy: NestedKey = schema.NODE_ENTROPY
        router_logits: NestedKey = schema.NODE_ROUTER_LOGITS
        subtree_end: NestedKey = schema.NODE_SUBTREE_END
        entry_node: NestedKey = schema.ENTRY_NODE
        entry_rollout: NestedKey = schema.ENTRY_ROLLOUT
        entry_policy_version: NestedKey = schema.ENTRY_POLICY_VERSION
        entry_advantage: NestedKey = schema.ENTRY_ADVANTAGE
        sample_log_prob: NestedKey = schema.ENTRY_SAMPLE_LOG_PROB
        proximal_log_prob: NestedKey = schema.ENTRY_PROXIMAL_LOG_PROB
        ref_log_prob: NestedKey = schema.ENTRY_REF_LOG_PROB
        log_kept: NestedKey = schema.ENTRY_LOG_KEPT
        kept_entry: NestedKey = schema.KEPT_ENTRY
        advantage: NestedKey = schema.ROLLOUT_ADVANTAGE
        length: NestedKey = schema.ROLLOUT_LENGTH
        leaf: NestedKey = schema.ROLLOUT_LEAF
        num_entries: NestedKey = schema.WINDOW_NUM_ENTRIES
        num_rollouts: NestedKey = schema.WINDOW_NUM_ROLLOUTS

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        *,
        aggregation: functional.Aggregation = "token-mean",
        constant: float | None = None,
        anchor: Anchor = "sample",
        correction: Correction | Sequence[Correction] | None = None,
        entropy_coeff: float = 0.0,
        top_entropy: float = 1.0,
        kl_to_ref_coeff: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        load_balance_coeff: float = 0.0,
        load_balance_scope: LoadBalanceScope = "rollout",
        experts_per_token: int | None = None,
    ) -> None:
        super().__init__()
        coefficients = {"entropy_coeff": entropy_coeff, "kl_to_ref_coeff": kl_to_ref_coeff}
        for name, value in {**coefficients, "load_balance_coeff": load_balance_coeff}.items():
            if not value >= 0 or math.isinf(value):
                raise ValueError(f"{name}={value}; a coefficient is finite and >= 0, and 0 leaves the term out.")
        if not 0 < top_entropy <= 1:
            raise ValueError(
                f"top_entropy={top_entropy}; it is a share of the trained tokens, in (0, 1]; 1 trains all."
            )
        if anchor not in get_args(Anchor):
            raise ValueError(f"anchor={anchor!r}; choose one of {', '.join(map(repr, get_args(Anchor)))}.")
        if load_balance_coeff > 0 and (experts_per_token is None or experts_per_token < 1):
            raise ValueError(
                f"load_balance_coeff={load_balance_coeff} with experts_per_token={experts_per_token}; give the number "
                "of experts that a token is sent to, model.config.num_experts_per_tok."
            )
        functional.check_aggregation(aggregation, constant)
        check_estimator(kl_estimator)
        check_scope(load_balance_scope)
        self.actor_network = actor_network
        self.aggregation: functional.Aggregation = aggregation
        self.constant = constant
        self.anchor: Anchor = anchor
        self.corrections: tuple[Correction, ...] = _as_corrections(correction)
        self.entropy_coeff = float(entropy_coeff)
        self.top_entropy = float(top_entropy)
        self.kl_to_ref_coeff = float(kl_to_ref_coeff)
        self.kl_estimator: KLEstimator = kl_estimator
        self.load_balance_coeff = float(load_balance_coeff)
        self.load_balance_scope: LoadBalanceScope = load_balance_scope
        self.experts_per_token = experts_per_token
        weighing = [type(c).__name__ for c in self.corrections if c.weighs]
        if weighing and anchor == "sample" and self.uses_ratio:
            raise ValueError(
                f"{', '.join(weighing)} with anchor='sample': the ratio of {type(self).__name__} to the sampler's "
                "log-probs holds the gap already, which would be weighed twice. Use anchor='current' (one optimizer "
                "step per window) or 'proximal', or a correction that only masks (SequenceRejection)."
            )

    def _check_one_term_per_rollout(self) -> None:
        """Raise ``ValueError`` for options that choose or weigh tokens where a rollout has one term for all of them."""
        if self.top_entropy < 1:
            raise ValueError(
                f"top_entropy={self.top_entropy} with {type(self).__name__}, whose one term per rollout trains all of "
                "its tokens, chosen or not; use a token-level objective (GRPOLoss, GSPOLoss(level='token'))."
            )
        weighing = (TruncatedImportanceSampling, MaskedImportanceSampling)
        by_token = [type(c).__name__ for c in self.corrections if isinstance(c, weighing) and c.level == "token"]
        if by_token:
            raise ValueError(
                f"{', '.join(by_token)} at level='token' with {type(self).__name__}, whose one term per rollout trains "
                "all of its tokens alike; use level='sequence', or a token-level objective (GSPOLoss(level='token'))."
            )

    @abstractmethod
    def policy_term(self, entries: Entries) -> Tensor:
        """Loss term of every entry, before weighting.

        Args:
            entries: the trained tokens of the micro-batch.

        Returns:
            [L] terms, to be minimised.
        """

    def term_metrics(self, entries: Entries) -> dict[str, Tensor]:
        """Diagnostics of the objective's own, [L] values each, of which the mean over the window is reported."""
        del entries
        return {}

    def anchor_log_prob(self, batch: TensorDictBase, log_prob_L: Tensor) -> Tensor:
        """[L] nats, what the importance ratio is taken against; a constant.

        Args:
            batch: the micro-batch, with what the actor wrote.
            log_prob_L: [L] nats, under the policy being trained.
        """
        keys = self.tensor_keys
        if self.anchor == "current":
            return log_prob_L.detach()
        if self.anchor == "sample":
            return batch[keys.sample_log_prob].to(log_prob_L.dtype)
        return self._needed(
            batch,
            keys.proximal_log_prob,
            "anchor='proximal'",
            "let a RolloutScorer(actor, packer, key='proximal_log_prob') see the rollouts of a window before they are "
            "packed, or use another anchor",
        ).to(log_prob_L.dtype)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that a batch needs, the actor's inputs included; ``log_kept`` and ``entry.advantage`` may be there."""
        keys = self.tensor_keys
        own = [keys.entry_node, keys.entry_rollout, keys.sample_log_prob, keys.advantage]
        own += [keys.length, keys.num_entries, keys.num_rollouts]
        own += [keys.ref_log_prob] if self.kl_to_ref_coeff > 0 else []
        own += [keys.proximal_log_prob] if self.anchor == "proximal" else []
        own += [keys.subtree_end, keys.leaf] if self.load_balance_coeff > 0 else []
        return [*self.actor_network.in_keys, *(key for key in own if key not in self.actor_network.in_keys)]

    @property
    def out_keys(self) -> list[NestedKey]:
        """Keys of the output that carry the gradient."""
        optional = {
            "loss_entropy": self.entropy_coeff,
            "loss_kl_to_ref": self.kl_to_ref_coeff,
            "loss_load_balance": self.load_balance_coeff,
        }
        return ["loss_objective", *(key for key, coefficient in optional.items() if coefficient > 0)]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Loss shares and metrics of one micro-batch; see the class for keys and units."""
        keys = self.tensor_keys
        batch = self.actor_network(tensordict.copy())
        whole_log_prob_L = batch[keys.log_prob][batch[keys.entry_node]]
        entropy_L = batch[keys.entropy][batch[keys.entry_node]]
        entries = self._entries(batch, whole_log_prob_L, entropy_L.detach())
        weight_L = functional.entry_weights(
            entries.rollout_L,
            entries.length_S,
            batch[keys.num_entries],
            batch[keys.num_rollouts],
            aggregation=self.aggregation,
            constant=self.constant,
        ).to(entries.log_prob_L.dtype)
        correction_L, values = self._correct(entries.detached())
        values["entropy"] = entries.entropy_L
        output = {"loss_objective": (weight_L * correction_L * self.policy_term(entries)).sum()}
        if self.entropy_coeff > 0:
            output["loss_entropy"] = -self.entropy_coeff * (weight_L * entropy_L).sum()
        if self.kl_to_ref_coeff > 0:
            if self.kl_estimator == "unbiased" and batch.get(keys.kept_entry, None) is not None:
                raise ValueError(
                    f"kl_estimator='unbiased' with {keys.kept_entry} in the batch: its ratio would be that of the "
                    "whole vocabulary to what top-p, top-k or min-p kept, below 1 for equal policies. Sample from the "
                    "whole vocabulary, or use 'k2' or 'k3'."
                )
            ref_log_prob_L = self._needed(
                batch,
                keys.ref_log_prob,
                f"kl_to_ref_coeff={self.kl_to_ref_coeff}",
                "pass ref_log_prob to make_rollout for every rollout or compute it with RolloutScorer, or set "
                "kl_to_ref_coeff=0",
            )
            kl_L = kl_term(whole_log_prob_L, ref_log_prob_L, entries.sample_log_prob_L, estimator=self.kl_estimator)
            output["loss_kl_to_ref"] = self.kl_to_ref_coeff * (weight_L * kl_L).sum()
            values["kl_to_ref"] = kl_L.detach()
        if self.load_balance_coeff > 0:
            balance = self._load_balance(batch)
            output["loss_load_balance"] = self.load_balance_coeff * balance
            output["load_balance"] = balance.detach()
        with torch.no_grad():
            values |= functional.ratio_values(entries.log_ratio_L) | self.term_metrics(entries.detached())
            count = batch[keys.num_entries].clamp_min(1)
            output |= {name: value_L.double().sum() / count for name, value_L in values.items()}
        output["ESS"] = functional.reduce_window([TensorDict(output)])["ESS"]
        return TensorDict(output, batch_size=[])

    def _entries(self, batch: TensorDictBase, whole_log_prob_L: Tensor, entropy_L: Tensor) -> Entries:
        keys = self.tensor_keys
        log_prob_L = self._within_kept(whole_log_prob_L, batch)
        advantage_L = batch.get(keys.entry_advantage, None)
        several = advantage_L is not None
        rollout_L = batch[keys.entry_rollout]
        if advantage_L is None:
            advantage_L = batch[keys.advantage][rollout_L]
        return Entries(
            log_prob_L=log_prob_L,
            anchor_log_prob_L=self.anchor_log_prob(batch, log_prob_L),
            sample_log_prob_L=batch[keys.sample_log_prob].to(log_prob_L.dtype),
            advantage_L=advantage_L.to(log_prob_L.dtype),
            entropy_L=entropy_L,
            rollout_L=rollout_L,
            length_S=batch[keys.length],
            several_advantages=several,
        )

    @torch.no_grad()
    def _correct(self, entries: Entries) -> tuple[Tensor, dict[str, Tensor]]:
        """Product of the weights of all corrections, [L], and their metrics, [L] each."""
        values: dict[str, Tensor] = {}
        weight_L = torch.ones_like(entries.log_prob_L)
        if self.top_entropy < 1:
            weight_L = functional.top_of_rollout(
                entries.entropy_L, entries.rollout_L, entries.length_S, self.top_entropy
            ).to(weight_L.dtype)
        for correction in self.corrections:
            own_L, metrics = correction(entries, self._gap(entries))
            weight_L = weight_L * own_L
            values |= metrics
        if self.corrections:
            values |= functional.mismatch_values(self._gap(entries))
        return weight_L, values

    def _gap(self, entries: Entries) -> Tensor:
        """[L] nats, log-ratio of the anchor to the sampler; of the current policy where the sampler is the anchor."""
        trainer_L = entries.log_prob_L if self.anchor == "sample" else entries.anchor_log_prob_L
        return trainer_L - entries.sample_log_prob_L

    def _load_balance(self, batch: TensorDictBase) -> Tensor:
        keys = self.tensor_keys
        logits = self._needed(
            batch,
            keys.router_logits,
            f"load_balance_coeff={self.load_balance_coeff}",
            "use TreeActor(model, router_logits=True) with a mixture of experts, or set load_balance_coeff=0",
        )
        assert self.experts_per_token is not None
        balance_S = load_balance_terms(
            logits,
            batch[keys.subtree_end],
            batch[keys.leaf],
            self.experts_per_token,
            scope=self.load_balance_scope,
        )
        return balance_S.sum() / batch[keys.num_rollouts].clamp_min(1)

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

    def _needed(self, batch: TensorDictBase, key: NestedKey, why: str, remedy: str) -> Tensor:
        value: Any = batch.get(key, None)
        if value is None:
            raise KeyError(f"{why} needs {key} in the batch: {remedy}.")
        return value


def _as_corrections(correction: Correction | Sequence[Correction] | None) -> tuple[Correction, ...]:
    if correction is None:
        return ()
    corrections = tuple(correction) if isinstance(correction, Sequence) else (correction,)
    names = [type(c).__name__ for c in corrections]
    for c in corrections:
        if isinstance(c, type) or not isinstance(c, Correction):
            raise ValueError(
                f"correction={c!r} is a {type(c).__name__}; give corrections such as TruncatedImportanceSampling()."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"the corrections {', '.join(names)} name one kind twice; their metrics would collide.")
    return corrections
