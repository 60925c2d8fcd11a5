"""The policy as a trainer sees it when the model is elsewhere: a stand-in, and log-probs that come from the backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.modules.actor import TreeActor
from torchrl_asyncgrpo.packing import FlatPacker, TreePacker
from torchrl_asyncgrpo.packing.padding_free import to_padding_free
from torchrl_asyncgrpo.remote.protocol import RemoteBackend

_KEY_OF = {
    "log_prob": schema.NODE_LOG_PROB,
    "entropy": schema.NODE_ENTROPY,
    "log_kept": schema.ENTRY_LOG_KEPT,
    "router_logits": schema.NODE_ROUTER_LOGITS,
}


class StandIn(nn.Module):
    """What a trainer's process holds of a remote model: its configuration and one number.

    Its state is the backend's: ``state_dict`` fetches the weights from there, ``load_state_dict`` sends them.

    Args:
        backend: holds the model.
    """

    def __init__(self, backend: RemoteBackend) -> None:
        super().__init__()
        self.backend = backend
        self.config = backend.info.config
        # A graph needs one input with a gradient for its backward to come here
        self.anchor = nn.Parameter(torch.zeros(()))

    def get_extra_state(self) -> dict[str, Any]:
        """The weights."""
        return self.backend.save("model")

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Send the weights."""
        self.backend.load("model", state)


class RemoteActor(TreeActor):
    """A policy whose model is in a backend: log-probs and entropies come from there, their gradients go back.

    Objectives run here, unchanged. What they make of ``node.log_prob`` and ``node.entropy`` reaches the model when
    their loss is backpropagated: d loss / d log-prob and d loss / d entropy are sent, and the backend backpropagates
    Σ gradient · value. Without gradient mode nothing is kept there.

    Args:
        backend: holds the model.

    Raises:
        TypeError: if ``backend`` is no backend.

    Example:
        >>> actor = RemoteActor(RayBackend(make_actor))
        >>> loss = GRPOLoss(actor)
        >>> optimizer = RemoteOptimizer(actor.backend, lr=1e-5)
    """

    runs_here = False

    def __init__(self, backend: RemoteBackend) -> None:
        if not isinstance(backend, RemoteBackend):
            raise TypeError(
                f"backend is a {type(backend).__name__}; RemoteActor takes a RemoteBackend, such as RayBackend. For a "
                "model of this process use TreeActor."
            )
        info = backend.info
        super().__init__(StandIn(backend), temperature=info.temperature, router_logits=info.router_logits)
        self.backend = backend

    def check_packer(self, packer: object) -> None:
        """Refuse packers whose batches the backend's contract has no place for.

        Args:
            packer: looked at where it is of this package.
        """
        if self.backend.info.contract == "tree":
            return
        if isinstance(packer, TreePacker) or (isinstance(packer, FlatPacker) and not packer.padding_free):
            raise ValueError(
                f"packer={type(packer).__name__} makes batches that the backend cannot run: its contract is 'flat'. "
                "Pass packer=FlatPacker(padding_free=True), or build the backend with a TreeActor."
            )

    def prepare(self, model: nn.Module, attention: str) -> nn.Module:
        """Leave the stand-in as it is: attention, head and checks are the backend's.

        Args:
            model: the stand-in.
            attention: not used.
        """
        del attention
        return model

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``node.log_prob`` and ``node.entropy``, and what else :class:`TreeActor` writes.

        Args:
            tensordict: a ``TreeBatch``.

        Returns:
            The same batch.

        Raises:
            ValueError: if the backend cannot run the batch.
        """
        for name, value in self.ask(tensordict, loss=False).items():
            tensordict[_KEY_OF[name]] = value
        return tensordict

    def ask(self, tensordict: TensorDictBase, *, loss: bool) -> dict[str, Tensor]:
        """Run one micro-batch in the backend.

        Args:
            tensordict: a ``TreeBatch``.
            loss: whether the loss is computed there.

        Returns:
            The values of ``RemoteBackend.forward``, on the device of the batch; log-probs, or ``loss_*``, carry the
            gradient.
        """
        values, ticket = self.backend.forward(self._sent(tensordict, loss), loss=loss, grad=torch.is_grad_enabled())
        device = tensordict[schema.NODE_INPUT_IDS].device
        values = {name: value.to(device) for name, value in values.items()}
        if ticket is None:
            return values
        names = [name for name in values if name.startswith("loss") or not loss]
        traced = _Remote.apply(self.model.anchor, self.backend, ticket, names, *(values[name] for name in names))
        return values | dict(zip(names, traced, strict=True))

    def _sent(self, batch: TensorDictBase, loss: bool) -> TensorDictBase:
        if self.backend.info.contract == "flat":
            if schema.FLAT not in batch.keys():
                raise ValueError(
                    f"the batch has no table {schema.FLAT!r}, and the backend's contract is 'flat': it has no tree "
                    "attention. Pack with FlatPacker(padding_free=True)."
                )
            sent = to_padding_free(batch)  # anew: stages behind the packer write the other tables
        elif loss:
            sent = batch.exclude(schema.FLAT)
        else:
            sent = batch.select(*self.in_keys, schema.KEPT_ENTRY, schema.KEPT_TOKEN, strict=False)
        return sent.detach().cpu()


class _Remote(torch.autograd.Function):
    """Values of a remote forward as the leaves of a graph here, whose gradients go back in one piece."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, backend: RemoteBackend, ticket: Any, names: list[str], *values: Tensor
    ) -> tuple[Tensor, ...]:
        del anchor
        ctx.backend, ctx.ticket, ctx.names = backend, ticket, names
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        named = zip(ctx.names, gradients, strict=True)
        ctx.backend.backward(ctx.ticket, {name: gradient.cpu() for name, gradient in named if gradient is not None})
        return (None,) * (4 + len(gradients))
