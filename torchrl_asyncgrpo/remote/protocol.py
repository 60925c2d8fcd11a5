"""What a trainer needs of the process that holds the model: seven calls, and what it says of itself.

::

    trainer's process                                      backend
    RemoteActor    ── batch ─────────────────────────────▶ forward         log-probs, entropies
    RemoteLoss     ── batch ─────────────────────────────▶ forward         loss shares, metrics
      .backward()  ── d loss / d each of them ───────────▶ backward        accumulates Σ gradient · value
    RemoteOptimizer── norm, options of param_groups ─────▶ clip_grad_norm, step
    checkpoint    ◀── model, optimizer ──────────────────▶ save, load
    RemoteWeightSyncSender ── version ───────────────────▶ push_weights ──▶ engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from tensordict import TensorDictBase
from torch import Tensor

Contract = Literal["tree", "flat"]
Part = Literal["model", "optimizer"]


@dataclass(frozen=True)
class BackendInfo:
    """What a backend is, for those who put a run together.

    Attributes:
        contract: the batches that it runs. ``"tree"``: those of ``TreePacker``, and of ``FlatPacker``, by tree
            attention; ``"flat"``: the table ``flat`` of ``FlatPacker(padding_free=True)``.
        temperature: of its log-probs and entropies, > 0.
        param_groups: options of every parameter group of its optimizer, without parameters.
        config: the model's configuration, or None.
        router_logits: whether its forward returns ``router_logits``.
        has_loss: whether it can compute the loss.
        has_engine: whether it can push weights to an engine.
        engine_may_restart: whether that engine may lose its weights, so that asking ``push_weights(None)`` is worth it.
    """

    contract: Contract
    temperature: float
    param_groups: Sequence[Mapping[str, Any]]
    config: Any = None
    router_logits: bool = False
    has_loss: bool = False
    has_engine: bool = False
    engine_may_restart: bool = False


class Forward(NamedTuple):
    """What a forward returned.

    Attributes:
        values: ``log_prob`` [T] and ``entropy`` [T] nats, as ``node.log_prob`` and ``node.entropy`` of the batch;
            ``log_kept`` [L] nats where the batch has kept sets; ``router_logits`` [T, layers, experts] where the
            backend has them. With the loss: ``loss_*`` and metrics, scalars.
        ticket: names the forward to ``backward``; None for one without gradient.
    """

    values: dict[str, Tensor]
    ticket: Any


class Push(NamedTuple):
    """What came of a push.

    Attributes:
        held: True when the engine confirmed it; where nothing was pushed, whether it still holds the last one that it
            confirmed, as far as is known.
        version: policy version of the last one that it confirmed.
        counters: of the sender, such as ``server_recoveries``; the trainer logs them.
    """

    held: bool
    version: int
    counters: Mapping[str, int]


@runtime_checkable
class RemoteBackend(Protocol):
    """A model and its optimizer in another process. What goes wrong there is raised here, at the latest by ``step``."""

    info: BackendInfo

    def forward(self, batch: TensorDictBase, *, loss: bool = False, grad: bool = True) -> Forward:
        """Run one micro-batch.

        Args:
            batch: on the CPU. Contract ``"tree"``: a ``TreeBatch``, of which only what the actor reads where the loss
                is computed elsewhere. Contract ``"flat"``: the keys that ``FlatPacker`` documents.
            loss: compute the loss shares and metrics there, instead of log-probs.
            grad: keep what ``backward`` needs, until then or until ``step``.
        """
        ...

    def backward(self, ticket: Any, gradients: Mapping[str, Tensor]) -> None:
        """Accumulate the gradient of Σ gradient · value into the parameters; may return before it is done.

        Args:
            ticket: of the forward, once.
            gradients: by name of a value, in its shape; a value that is not named has the gradient 0.
        """
        ...

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Scale the accumulated gradient down to ``max_norm``; None leaves it. Returns the norm it had before."""
        ...

    def step(self, options: Sequence[Mapping[str, Any]] | None) -> None:
        """Step the optimizer, then drop all gradients and forwards.

        Args:
            options: of each parameter group, such as ``lr``, for this step; None takes no step and only drops.
        """
        ...

    def save(self, part: Part) -> dict[str, Any]:
        """State of the model or the optimizer, on the CPU; one of the same process may share the backend's memory."""
        ...

    def load(self, part: Part, state: Mapping[str, Any]) -> None:
        """Restore what ``save`` returned."""
        ...

    def push_weights(self, version: int | None) -> Push:
        """Push the weights to the engine.

        Args:
            version: policy version of the push, or a later one where the engine may have had that version of weights
                whose push failed; None pushes nothing, and only asks.
        """
        ...
