"""The backend's side: model, optimizer, loss and sender of one process. In one process, a ``RemoteBackend`` itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.modules.actor import TreeActor
from torchrl_asyncgrpo.modules.optimizers import check_eps
from torchrl_asyncgrpo.modules.padding_free import PaddingFreeActor
from torchrl_asyncgrpo.packing.padding_free import from_padding_free
from torchrl_asyncgrpo.remote.protocol import BackendInfo, Forward, Part, Push
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender

_MODEL = "model."  # of the actor's state


class Collective(Protocol):
    """What the workers of one backend need of each other; every worker calls it, in the same order."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the workers."""
        ...

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace the tensor by that of the first worker."""
        ...


class HostedPolicy:
    """A policy that is trained by calls from elsewhere: the methods of :class:`RemoteBackend`.

    With several workers each has its own, runs other micro-batches than the others, and all take the same step: the
    gradients are summed before they are clipped or the optimizer steps.

    Args:
        make_actor: builds the policy, a ``TreeActor`` for the contract ``"tree"`` or a ``PaddingFreeActor`` for
            ``"flat"``, on the device where it is trained.
        make_optimizer: builds the optimizer from the model's parameters.
        make_loss: builds the loss from the policy; None where the loss is computed elsewhere.
        make_sender: builds the sender that pushes the model's weights to the engine; None for none.
        autocast_dtype: run forward and loss under autocast; None for not.

    Raises:
        TypeError: if ``make_actor`` returns something else.
        ValueError: if ``autocast_dtype`` is ``torch.float16``, or the optimizer's ``eps`` is 0 in the weights' dtype.
    """

    def __init__(
        self,
        make_actor: Callable[[], TreeActor],
        *,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
        make_loss: Callable[[TreeActor], nn.Module] | None = None,
        make_sender: Callable[[nn.Module], WeightSyncSender] | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        if autocast_dtype == torch.float16:
            raise ValueError(
                "autocast_dtype=torch.float16: small gradients would vanish, since a backend scales no loss; use "
                "torch.bfloat16."
            )
        self.actor = make_actor()
        if not isinstance(self.actor, TreeActor):
            raise TypeError(
                f"make_actor returned a {type(self.actor).__name__}; return a TreeActor or a PaddingFreeActor."
            )
        self.model = self.actor.model
        self.device = next(self.model.parameters()).device
        self.optimizer = make_optimizer([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        check_eps(self.optimizer)
        self.loss = None if make_loss is None else make_loss(self.actor)
        self.sender = None if make_sender is None else make_sender(self.model)
        self.autocast_dtype = autocast_dtype
        self.collective: Collective | None = None
        self.info = BackendInfo(
            contract="flat" if isinstance(self.actor, PaddingFreeActor) else "tree",
            temperature=self.actor.temperature,
            param_groups=[
                {name: value for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ],
            config=self.model.config,
            router_logits=self.actor.router_logits,
            has_loss=self.loss is not None,
            has_engine=self.sender is not None,
            engine_may_restart=self.sender is not None and self.sender.engine_may_restart,
        )
        self._tickets = itertools.count()
        self._forwards: dict[int, dict[str, Tensor]] = {}
        self._summed = False

    @torch.no_grad()
    def join(self, collective: Collective) -> None:
        """Train together with other workers, from the first one's weights on."""
        self.collective = collective
        for tensor in self.model.state_dict().values():
            collective.broadcast_(tensor)

    def forward(self, batch: TensorDictBase, *, loss: bool = False, grad: bool = True) -> Forward:
        """See :class:`RemoteBackend`."""
        if self.info.contract == "flat":
            batch = from_padding_free(batch)
        batch = batch.to(self.device)
        with torch.set_grad_enabled(grad), self._autocast():
            values = self._losses(batch) if loss else self._log_probs(batch)
        ticket = next(self._tickets) if grad else None
        if ticket is not None:
            self._forwards[ticket] = values
        return Forward({name: value.detach().cpu() for name, value in values.items()}, ticket)

    def _log_probs(self, batch: TensorDictBase) -> dict[str, Tensor]:
        batch = self.actor(batch)
        values = {
            "log_prob": batch[schema.NODE_LOG_PROB],
            "entropy": batch[schema.NODE_ENTROPY],
            "log_kept": batch.get(schema.ENTRY_LOG_KEPT, None),
            "router_logits": batch.get(schema.NODE_ROUTER_LOGITS, None),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _losses(self, batch: TensorDictBase) -> dict[str, Tensor]:
        if self.loss is None:
            raise ValueError("loss=True, and the backend was built without make_loss.")
        return dict(self.loss(batch).items())

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.autocast_dtype) if self.autocast_dtype else nullcontext()

    def backward(self, ticket: int, gradients: Mapping[str, Tensor]) -> None:
        """See :class:`RemoteBackend`."""
        values = self._forwards.pop(ticket, None)
        if values is None:
            raise RuntimeError(
                f"forward {ticket} was backpropagated already, or dropped by zero_grad or step; call zero_grad before "
                "the forward, and backward once for each."
            )
        names = [name for name in gradients if values[name].requires_grad]
        torch.autograd.backward([values[name] for name in names], [gradients[name].to(values[name]) for name in names])

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """See :class:`RemoteBackend`."""
        self._sum_gradients()
        parameters = [parameter for parameter in self._parameters() if parameter.grad is not None]
        if max_norm is not None:
            return float(nn.utils.clip_grad_norm_(parameters, max_norm))
        return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def step(self, options: Sequence[Mapping[str, Any]] | None) -> None:
        """See :class:`RemoteBackend`."""
        if options is not None:
            self._sum_gradients()
            for group, own in zip(self.optimizer.param_groups, options, strict=True):
                group.update(own)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._forwards.clear()
        self._summed = False

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _sum_gradients(self) -> None:
        """Sum gradients over the workers, once per step; one that no worker has stays None."""
        if self.collective is None or self._summed:
            return
        parameters = self._parameters()
        present_P = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=self.device)
        self.collective.sum_(present_P)
        for parameter, present in zip(parameters, present_P.tolist(), strict=True):
            if present:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self.collective.sum_(parameter.grad)
        self._summed = True

    def save(self, part: Part) -> dict[str, Any]:
        """See :class:`RemoteBackend`. Of the model, layers in 4 or 8 bits are left out: they are frozen."""
        if part == "optimizer":
            return _on_cpu(self.optimizer.state_dict())
        state = self.actor.state_dict()  # and not the model's, which cannot load what it saves of few bits
        return _on_cpu({name.removeprefix(_MODEL): value for name, value in state.items()})

    def load(self, part: Part, state: Mapping[str, Any]) -> None:
        """See :class:`RemoteBackend`."""
        if part == "optimizer":
            self.optimizer.load_state_dict(dict(state))
        else:
            self.actor.load_state_dict({_MODEL + name: value for name, value in state.items()})

    def push_weights(self, version: int | None) -> Push:
        """See :class:`RemoteBackend`."""
        if self.sender is None:
            raise ValueError("the backend was built without make_sender, and has no engine to push to.")
        held = True
        if version is None:
            held = not self.sender.lost()
        else:
            self.sender.next_version = version
            self.sender.update_weights()
        return Push(held, self.sender.policy_version, self.sender.counters)

    def shutdown(self) -> None:
        """Close the transfer to the engine."""
        if self.sender is not None:
            self.sender.destroy()


def _on_cpu(state: Any) -> Any:
    """The tensors of a state of dictionaries and lists, on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state
