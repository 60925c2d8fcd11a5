"""Log-probs of trained tokens under a further policy, written onto rollouts or onto tree batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.schema import TreeBatch
from torchrl_asyncgrpo.modules.actor import TreeActor


@torch.no_grad()
def entry_log_prob(
    actor: TensorDictModuleBase, batch: TensorDictBase, *, within_kept: bool, autocast_dtype: torch.dtype | None = None
) -> Tensor:
    """Log-prob of every entry of a tree batch under an actor, in one forward without gradient.

    Args:
        actor: the policy to score with.
        batch: a ``TreeBatch`` on the actor's device; nothing is written on it.
        within_kept: of the distribution within the sampler's kept sets where the batch has some; else of the whole
            vocabulary.
        autocast_dtype: run the forward under autocast; None for not.

    Returns:
        [L] nats, float32.
    """
    scored = batch.copy()
    if not within_kept:
        scored.pop("kept", None)
    device = batch[schema.NODE_INPUT_IDS].device
    with torch.autocast(device.type, autocast_dtype) if autocast_dtype else nullcontext():
        actor(scored)
    log_prob_L = scored[schema.NODE_LOG_PROB][scored[schema.ENTRY_NODE]]
    log_kept_L = scored.get(schema.ENTRY_LOG_KEPT, None) if within_kept else None
    return (log_prob_L if log_kept_L is None else log_prob_L - log_kept_L).float()


def check_autocast(actor: TensorDictModuleBase, autocast_dtype: torch.dtype | None) -> None:
    """Raise ``ValueError`` for autocast that would not reach the model of an actor."""
    if autocast_dtype is not None and isinstance(actor, TreeActor) and not actor.runs_here:
        raise ValueError(
            f"autocast_dtype={autocast_dtype} does not reach the model, which is in the backend of a "
            f"{type(actor).__name__}; leave it out, and build the backend with autocast_dtype."
        )


class RolloutScorer:
    """Score the trained tokens of a window under a policy, in one forward without gradient per micro-batch.

    As a step before packing it gives objectives what they compare with:

        >>> score = RolloutScorer(actor, packer, key="proximal_log_prob")
        >>> trainer = AsyncGRPOTrainer(packer=lambda rollouts: packer(score(rollouts)), ...)

    Rollouts that have the key already are left as they are, so that several optimizer steps on one window share the
    scores of the first. For a reference, ``ReferenceLogProbs`` does the same on micro-batches that are packed already.

    Args:
        actor: the policy to score with, usually a ``TreeActor``: the one that is trained for
            ``"proximal_log_prob"``, a frozen one for ``"ref_log_prob"``.
        packer: a window's rollouts to its micro-batches.
        key: ``"proximal_log_prob"``, within the sampler's kept sets where there are some, or ``"ref_log_prob"``, of the
            whole vocabulary.
        autocast_dtype: run the forward under autocast, as the trainer with ``mixed_precision``; None for not.

    Raises:
        ValueError: if the key is unknown, the actor cannot run what the packer makes, or ``autocast_dtype`` is given
            for a model of another process.
    """

    def __init__(
        self,
        actor: TensorDictModuleBase,
        packer: Callable[[Sequence[TensorDictBase]], list[TreeBatch]],
        *,
        key: Literal["proximal_log_prob", "ref_log_prob"],
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        if key not in (schema.PROXIMAL_LOG_PROB, schema.REF_LOG_PROB):
            raise ValueError(f"key={key!r}; choose 'proximal_log_prob' or 'ref_log_prob'.")
        check_autocast(actor, autocast_dtype)
        if isinstance(actor, TreeActor):
            actor.check_packer(packer)
        self.actor = actor
        self.packer = packer
        self.key = key
        self.autocast_dtype = autocast_dtype

    @torch.no_grad()
    def __call__(self, rollouts: Iterable[TensorDictBase]) -> list[TensorDictBase]:
        """Write ``key``, [N] float32 nats, 0 on untrained tokens, onto every rollout.

        Args:
            rollouts: those of one window; the ``rollout_id`` of those to score differ.

        Returns:
            The same rollouts.

        Raises:
            ValueError: if two rollouts without scores have one id.
        """
        rollouts = list(rollouts)
        unscored = [rollout for rollout in rollouts if self.key not in rollout.keys()]
        scores = {int(rollout[schema.ROLLOUT_ID]): torch.zeros(rollout[schema.TOKEN_IDS].shape) for rollout in unscored}
        if len(scores) < len(unscored):
            raise ValueError(
                f"{len(unscored)} rollouts have {len(scores)} different rollout_id; give each its own, as make_rollout "
                "does by default."
            )
        for batch in self.packer(unscored) if unscored else ():
            self._score(batch, scores)
        # last of all, so that a forward that was interrupted leaves nothing that looks like a score
        for rollout in unscored:
            rollout[self.key] = scores[int(rollout[schema.ROLLOUT_ID])]
        return rollouts

    def _score(self, batch: TreeBatch, scores: dict[int, Tensor]) -> None:
        """Write the log-probs of a micro-batch into the scores [N] of its rollouts."""
        parameter = next(self.actor.parameters(), None)  # a policy that is a table or a service has none
        batch = batch if parameter is None else batch.to(parameter.device)
        log_prob_L = entry_log_prob(
            self.actor, batch, within_kept=self.key == schema.PROXIMAL_LOG_PROB, autocast_dtype=self.autocast_dtype
        )
        position_L = batch[schema.NODE_POSITION_IDS][batch[schema.ENTRY_NODE]]
        lengths = batch[schema.ROLLOUT_LENGTH].tolist()
        for rollout_id, position_l, log_prob_l in zip(
            batch[schema.ROLLOUT_ROLLOUT_ID].tolist(),
            position_L.cpu().split(lengths),
            log_prob_L.cpu().split(lengths),
            strict=True,
        ):
            scores[rollout_id][position_l] = log_prob_l
