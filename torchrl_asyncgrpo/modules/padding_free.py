"""The policy over flat batches, for models that tree attention does not run."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.modules.actor import TreeActor, evaluating
from torchrl_asyncgrpo.modules.tree_attention.features import beyond_attention
from torchrl_asyncgrpo.packing import TreePacker
from torchrl_asyncgrpo.packing.padding_free import chain_starts


class PaddingFreeActor(TreeActor):
    """A causal language model as a policy over flat batches, run by its own attention.

    All rollouts of a micro-batch are one row without padding; position ids that start again at 0 tell transformers'
    models where the next one begins. ``attn_implementation="flash_attention_2"`` keeps memory linear in the row; sdpa
    and eager make a mask of [T, T]. Log-probs, entropies and kept sets are those of :class:`TreeActor`.

    Args:
        model: a ``transformers`` causal language model, or peft's wrapper around one. Its attention stays what it is.
        temperature, chunk_size, router_logits: as in :class:`TreeActor`.

    Raises:
        TypeError: if ``model`` is not a transformers model.
        ValueError: if an argument is out of range, the model mixes the rollouts of a row, or its head or adapter is one
            that :class:`TreeActor` refuses.

    Example:
        >>> actor = PaddingFreeActor(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        >>> (batch,) = FlatPacker()(rollouts)
        >>> actor(batch)["node", "log_prob"]  # [T] float32, nats
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        chunk_size: int | None = None,
        router_logits: bool = False,
    ) -> None:
        super().__init__(model, temperature=temperature, chunk_size=chunk_size, router_logits=router_logits)

    def install_attention(self, model: PreTrainedModel, attention: str) -> str:
        """Leave the model its own attention, if that keeps the rollouts of a row apart; returns its name."""
        del attention
        _check_sequences_apart(model)
        return model.config._attn_implementation

    def check_packer(self, packer: object) -> None:
        """Refuse ``TreePacker``.

        Args:
            packer: looked at where it is of this package.
        """
        if isinstance(packer, TreePacker):
            raise ValueError(
                f"packer={type(packer).__name__} makes trees, which {type(self).__name__} has no attention for; pass "
                "packer=FlatPacker()."
            )

    def model_inputs(self, tensordict: TensorDictBase) -> dict[str, Any]:
        """Position ids of the row.

        Raises:
            ValueError: if rollouts share nodes.
        """
        chain_starts(tensordict[schema.NODE_PARENT])
        return {"position_ids": tensordict[schema.NODE_POSITION_IDS][None], "use_cache": False}


@torch.no_grad()
def _check_sequences_apart(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` if layers look beyond attention, or the second sequence of a row is not what it is alone."""
    for feature in beyond_attention(model):
        raise ValueError(
            f"{type(model).__name__} has {feature}, which reach from one sequence of a row into the next; "
            "PaddingFreeActor runs models of attention layers only."
        )
    device = next(model.parameters()).device
    if device.type == "meta":
        return
    first_N, second_N = torch.arange(5, device=device), 1 + torch.arange(7, device=device)

    def hidden_states(*sequences: Tensor) -> Tensor:
        ids, positions = torch.cat(sequences), torch.cat([torch.arange(len(s), device=device) for s in sequences])
        output = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0].double()

    with evaluating(model):
        together_TD = hidden_states(first_N, second_N)
        alone_TD = torch.cat([hidden_states(first_N), hidden_states(second_N)])
    error_T = (together_TD - alone_TD).abs().amax(1)
    # nothing stands before the first sequence: what it differs by is rounding, of products of other shapes
    rounding, scale = float(error_T[: len(first_N)].max()), float(alone_TD.abs().max())
    floor = max(1e-3, min(16 * torch.finfo(model.dtype).eps, 0.05)) * scale
    if not float(error_T[len(first_N) :].max()) <= max(8 * rounding, floor):
        raise ValueError(
            f"{type(model).__name__} with attn_implementation={model.config._attn_implementation!r} mixes the "
            "sequences of one row: it does not read position_ids as their boundaries. Use a model of causal attention "
            "with 'sdpa', 'eager' or 'flash_attention_2', or TreeActor, which gives the model its attention."
        )
