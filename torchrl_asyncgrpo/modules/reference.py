"""The frozen reference that a KL penalty compares the policy with."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from transformers import PreTrainedModel

from torchrl_asyncgrpo.adapters import (
    adapters_off,
    changes_its_base,
    has_adapters,
    trained_outside_adapters,
    unwrapped,
)
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.modules.actor import TreeActor
from torchrl_asyncgrpo.modules.checkpoint import load_model
from torchrl_asyncgrpo.modules.padding_free import PaddingFreeActor
from torchrl_asyncgrpo.modules.scoring import check_autocast, entry_log_prob


def reference_policy(
    actor: TreeActor,
    model: str | os.PathLike[str] | torch.nn.Module | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    kl_to_ref_coeff: float,
) -> TensorDictModuleBase | None:
    """The reference of a policy, as an actor for ``ReferenceLogProbs`` or ``RolloutScorer``.

    =================================== ==============================================================================
    policy                              reference
    =================================== ==============================================================================
    any, with ``kl_to_ref_coeff=0``     None: nothing is loaded
    with an adapter                     the same model with the adapter off, which takes no memory
    loaded by name or directory         a second load with the same arguments and revision
    an instance                         a frozen copy of it, as it is now: call this before training
    =================================== ==============================================================================

    Args:
        actor: of the policy that is trained; the reference has its temperature, attention and chunk size.
        model: what ``load_policy`` was given; None is the actor's own model, an instance.
        model_init_kwargs: what ``load_policy`` was given; not changed.
        kl_to_ref_coeff: of the loss, >= 0.

    Returns:
        The actor of the reference, of the policy's kind, without gradients and in eval mode, on the policy's device;
        or None. One that a device map spreads over several devices stays there.

    Raises:
        TypeError: if the actor's model is not in this process, or no transformers model.
        ValueError: if the coefficient is negative, or switching the adapter off does not give the base back: weights
            of the base are trained beside it, or it was initialised with a part of them (PiSSA, OLoRA).
    """
    if not kl_to_ref_coeff >= 0:
        raise ValueError(f"kl_to_ref_coeff={kl_to_ref_coeff}; it is >= 0, and 0 leaves the reference out.")
    if kl_to_ref_coeff == 0:
        return None
    if not isinstance(actor.model, PreTrainedModel):
        raise TypeError(
            f"the actor is a {type(actor).__name__} of a {type(actor.model).__name__}; reference_policy is for "
            "transformers models of this process. Give the reference an actor of its own, such as a RemoteActor of "
            "another backend, and pass that to ReferenceLogProbs or RolloutScorer."
        )
    if has_adapters(actor.model):
        if kind := changes_its_base(actor.model):
            raise ValueError(
                f"the adapter was initialised with init_lora_weights={kind!r}, which took a part of the weights out of "
                "the base, so that the policy with its adapter off is not the reference. Build a TreeActor of a model "
                "that you load for it."
            )
        if outside := trained_outside_adapters(actor.model):
            raise ValueError(
                f"{len(outside)} parameters of the base are trained beside the adapter ({', '.join(outside[:3])}), so "
                "that the policy with its adapter off is not the reference. Use bias='none' in the configuration of "
                "the adapter, or build a TreeActor of a model that you load for it."
            )
        return BaseActor(actor)
    if model is None or isinstance(model, torch.nn.Module):
        reference = copy.deepcopy(actor.model if model is None else unwrapped(model))
    elif isinstance(actor, PaddingFreeActor):
        kwargs = {"attn_implementation": actor.attention, **(model_init_kwargs or {})}
        reference = load_model(model, kwargs, attention=None)
    else:
        reference = load_model(model, model_init_kwargs)
    return _like(actor, _frozen_on(next(actor.parameters()).device, reference))


def _frozen_on(device: torch.device, model: PreTrainedModel) -> PreTrainedModel:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and devices != {device}:  # one over several devices stays where its device map put it
        model.to(device)
    return model.requires_grad_(False).eval()


def _like(actor: TreeActor, model: PreTrainedModel) -> TreeActor:
    """An actor of the same kind and settings over another model."""
    if isinstance(actor, PaddingFreeActor):
        return PaddingFreeActor(model, temperature=actor.temperature, chunk_size=actor.chunk_size)
    return TreeActor(model, temperature=actor.temperature, attention=actor.attention, chunk_size=actor.chunk_size)


class BaseActor(TensorDictModuleBase):
    """A policy as it is without its adapters: its forward is that of the base, in eval mode and without gradient.

    Args:
        actor: of the model with adapters.
    """

    def __init__(self, actor: TreeActor) -> None:
        super().__init__()
        self.actor = actor
        self.in_keys, self.out_keys = actor.in_keys, actor.out_keys

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write what the actor writes, under the base model."""
        training = [module for module in self.actor.modules() if module.training]
        try:
            self.actor.eval()
            with adapters_off(self.actor.model):
                return self.actor(tensordict)
        finally:
            for module in training:
                module.training = True


class ReferenceLogProbs:
    """Write ``entry.ref_log_prob``, which the KL penalty of a loss compares with, onto tree batches.

    One forward of the reference per micro-batch, over the distinct tokens. As a stage of the trainer, behind packing:

        >>> reference = reference_policy(actor, name, kwargs, kl_to_ref_coeff=0.05)
        >>> if reference is not None:
        ...     trainer.register_op("process_optim_batch", ReferenceLogProbs(reference))

    Several epochs over a window compute it anew each; ``RolloutScorer(reference, packer, key="ref_log_prob")`` keeps
    it with the rollouts instead.

    Args:
        actor: of the reference, at the temperature of the policy.
        autocast_dtype: run the forward under autocast, as the trainer with ``mixed_precision``; None for not.

    Raises:
        ValueError: if ``autocast_dtype`` is given for a model of another process.
    """

    def __init__(self, actor: TensorDictModuleBase, *, autocast_dtype: torch.dtype | None = None) -> None:
        check_autocast(actor, autocast_dtype)
        self.actor = actor
        self.autocast_dtype = autocast_dtype

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Write ``entry.ref_log_prob``, [L] float32 nats of the whole vocabulary at the actor's temperature.

        Args:
            batch: a ``TreeBatch`` on the reference's device, or a lazy stack [K] of some.

        Returns:
            The same batch.
        """
        for micro_batch in batch.unbind(0) if batch.ndim else (batch,):
            micro_batch[schema.ENTRY_REF_LOG_PROB] = entry_log_prob(
                self.actor, micro_batch, within_kept=False, autocast_dtype=self.autocast_dtype
            )
        return batch
