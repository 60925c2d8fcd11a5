"""Policy and engine in Ray actors: processes of this machine or of others, with the resources that Ray gives them."""

from __future__ import annotations

import asyncio
import sys
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger

from torchrl_asyncgrpo.engines.base import Completion, LocalEngine, SamplingParams
from torchrl_asyncgrpo.modules.actor import TreeActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy
from torchrl_asyncgrpo.remote.protocol import BackendInfo, Forward, Part, Push
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender

# Seconds
_HINT_AFTER = 10.0
_SHUTDOWN_TIMEOUT = 10.0
# Where transformers puts what it loads with trust_remote_code
_OWN_CODE = "transformers_modules"


def _ray() -> Any:
    try:
        import ray
        import ray.experimental.collective
        import ray.util.collective
    except ModuleNotFoundError as error:
        raise ImportError(
            f"training on Ray needs it, and {error.name} is not installed: pip install 'torchrl-asyncgrpo[ray]'."
        ) from error
    return ray


class RayBackend:
    """A :class:`RemoteBackend` on Ray actors, the *workers*, each with model and optimizer.

    Several workers are data parallel over micro-batches: each in turn gets the next one, their gradients are summed
    when the window is complete (Ray's collectives), and all take the same step. A backward runs while the next worker
    has its forward, so that about three workers are kept busy, four with gradient checkpointing; give the packer
    ``min_micro_batches`` of at least as many. All workers start from the first one's weights.

    What is raised in a worker is raised here, in the same type; ``ray.exceptions.RayActorError`` where one died. A
    backend of which a worker died is of no further use: build a new one and load a checkpoint. After a step or a load
    that failed in one of several workers they may differ: the backend refuses to go on until a checkpoint is loaded.

    Args:
        make_actor: builds the policy in the worker: a ``TreeActor``, which runs the batches of ``TreePacker``, or a
            ``PaddingFreeActor``, for ``FlatPacker(padding_free=True)``.
        make_optimizer: builds the optimizer from the model's parameters. A ``RemoteOptimizer`` gives it its options.
        make_loss: builds the loss from the policy, for ``RemoteLoss``.
        make_sender: builds, in the first worker, the sender that pushes the model's weights to the engine, for
            ``RemoteWeightSyncSender``.
        workers: how many, >= 1.
        autocast_dtype: run forward and loss under autocast.
        collective: ``"gloo"`` on any device, ``"nccl"`` between GPUs; Ray's needs cupy.
        actor_options: Ray's options for each worker, such as ``{"num_gpus": 1}`` or ``{"num_cpus": 4}``, which is the
            number of threads too.
        start_timeout: seconds that Ray may take to find room for the workers.

    Attributes:
        info: what the workers are.
        workers: handles of the Ray actors.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if ``workers`` is below 1, and what building the policy raised.
        TimeoutError: if the cluster has no room for the workers.
    """

    def __init__(
        self,
        make_actor: Callable[[], TreeActor],
        *,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
        make_loss: Callable[[TreeActor], nn.Module] | None = None,
        make_sender: Callable[[nn.Module], WeightSyncSender] | None = None,
        workers: int = 1,
        autocast_dtype: torch.dtype | None = None,
        collective: Literal["gloo", "nccl"] = "gloo",
        actor_options: Mapping[str, Any] | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}; a backend has at least one.")
        if collective not in ("gloo", "nccl"):
            raise ValueError(f"collective={collective!r}; choose 'gloo' or 'nccl'.")
        self._ray = _ray()
        self._next = 0
        self._running: list[Any] = []
        self._differ: set[Part] = set()  # what a failure may have left different in the workers
        options = dict(actor_options or {})
        self.workers = _start_workers(workers, options)
        try:
            _await_room(self.workers, f"{workers} workers", options, start_timeout)
            parts = {
                "make_optimizer": make_optimizer,
                "make_loss": make_loss,
                "autocast_dtype": autocast_dtype,
            }
            senders = [make_sender] + [None] * (workers - 1)
            infos = [
                worker.build.remote(make_actor, make_sender=sender, **parts)
                for worker, sender in zip(self.workers, senders, strict=True)
            ]
            self.info: BackendInfo = self._ray.get(infos)[0]
            if workers > 1:
                self._connect(collective)
        except BaseException:
            self._kill()
            raise

    def _connect(self, backend: str) -> None:
        name = f"torchrl_asyncgrpo-{uuid.uuid4()}"
        self._ray.experimental.collective.create_collective_group(self.workers, backend, name)
        self._get([worker.call.remote("join", _RayCollective(name)) for worker in self.workers])

    def _get(self, references: list[Any]) -> list[Any]:
        """Wait for answers of the workers and for all that still runs there; raises the first failure."""
        running, self._running = self._running, []
        return self._ray.get([*references, *running])[: len(references)]

    def _all(self, call: str, *arguments: Any) -> list[Any]:
        return self._get([worker.call.remote(call, *arguments) for worker in self.workers])

    def _write(self, parts: set[Part], call: str, *arguments: Any) -> None:
        """Change parts in all workers. What fails in one of several may have been done in the others."""
        try:
            self._all(call, *arguments)
        except Exception:
            if len(self.workers) > 1:
                self._differ |= parts
            raise

    def _check_alike(self) -> None:
        if self._differ:
            raise RuntimeError(
                f"a step or load failed in one of the {len(self.workers)} workers, and their "
                f"{' and '.join(sorted(self._differ))} may differ since; load a checkpoint, or build a new backend."
            )

    def forward(self, batch: TensorDictBase, *, loss: bool = False, grad: bool = True) -> Forward:
        """Run one micro-batch in the next worker; see :class:`RemoteBackend`."""
        self._check_alike()
        index = self._next
        self._next = (index + 1) % len(self.workers)
        values, ticket = self._ray.get(self.workers[index].call.remote("forward", batch, loss=loss, grad=grad))
        return Forward(values, None if ticket is None else (index, ticket))

    def backward(self, ticket: tuple[int, int], gradients: Mapping[str, Tensor]) -> None:
        """Start the backward in the worker of the forward; failures are raised later. See :class:`RemoteBackend`."""
        index, own = ticket
        self._running.append(self.workers[index].call.remote("backward", own, dict(gradients)))

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Sum the gradients over the workers and clip them; see :class:`RemoteBackend`."""
        self._check_alike()
        return self._all("clip_grad_norm", max_norm)[0]

    def step(self, options: Sequence[Mapping[str, Any]] | None) -> None:
        """Step in every worker; see :class:`RemoteBackend`."""
        self._next = 0
        if options is None:
            self._all("step", None)
            return
        self._check_alike()
        self._get([])  # a backward that failed is to be known before anything is stepped
        self._write({"model", "optimizer"}, "step", options)

    def save(self, part: Part) -> dict[str, Any]:
        """State of the first worker; see :class:`RemoteBackend`."""
        self._check_alike()
        return self._get([self.workers[0].call.remote("save", part)])[0]

    def load(self, part: Part, state: Mapping[str, Any]) -> None:
        """Restore every worker; see :class:`RemoteBackend`."""
        self._write({part}, "load", part, self._ray.put(dict(state)))
        self._differ.discard(part)

    def push_weights(self, version: int | None) -> Push:
        """Push from the first worker; see :class:`RemoteBackend`."""
        self._check_alike()
        return self._get([self.workers[0].call.remote("push_weights", version)])[0]

    def shutdown(self) -> None:
        """Close the transfer to the engine, and end the workers."""
        self._ray.wait([self.workers[0].call.remote("shutdown")], timeout=_SHUTDOWN_TIMEOUT)
        self._kill()

    def _kill(self) -> None:
        for worker in self.workers:
            self._ray.kill(worker)


class _Worker:
    """The process of a policy. It is built by a call, so that what that raises comes back as it is."""

    def build(self, make_actor: Callable[[], TreeActor], **parts: Any) -> BackendInfo:
        self.policy = HostedPolicy(make_actor, **parts)
        _send_own_code_by_value()
        return self.policy.info

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.policy, name)(*arguments, **options)


def _send_own_code_by_value() -> None:
    """Let the configuration of a model with its own code be read where that code was not loaded."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == _OWN_CODE:
            _ray().cloudpickle.register_pickle_by_value(module)


def _start_workers(count: int, options: dict[str, Any]) -> list[Any]:
    worker = _ray().remote(_Worker).options(**options)
    return [worker.remote() for _ in range(count)]


def _await_room(actors: Sequence[Any], what: str, options: Mapping[str, Any], timeout: float) -> None:
    """Return when Ray has started the actors; say after a while what they wait for, and raise in the end."""
    ray = _ray()
    ready = [actor.__ray_ready__.remote() for actor in actors]
    _, waiting = ray.wait(ready, num_returns=len(ready), timeout=min(_HINT_AFTER, timeout))
    if not waiting:
        return
    need = f"{what} with actor_options={dict(options)}"
    has, free = ray.cluster_resources(), ray.available_resources()
    room = ", ".join(f"{free.get(name, 0):g} of {has.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    remedy = "Where that is too little, ask for less, or add machines to the cluster"
    torchrl_logger.warning(f"{need}: Ray has not started them yet. It has {room} free. {remedy}.")
    _, waiting = ray.wait(ready, num_returns=len(ready), timeout=max(0.0, timeout - _HINT_AFTER))
    if waiting:
        raise TimeoutError(
            f"{need}: Ray did not start them within start_timeout={timeout:g} s. It has {room} free. {remedy}."
        )


class _RayCollective:
    """Sums and broadcasts within a named collective group of Ray."""

    def __init__(self, group: str) -> None:
        self.group = group

    def sum_(self, tensor: Tensor) -> None:
        _ray().util.collective.allreduce(tensor, self.group)

    def broadcast_(self, tensor: Tensor) -> None:
        _ray().util.collective.broadcast(tensor, 0, self.group)


class RayEngine:
    """An engine in a Ray actor, for a collector here and a ``LocalWeightSyncSender`` in a worker of a ``RayBackend``.

    Requests made in one tick of the event loop reach the engine in one tick as well, and are answered together. May be
    sent to other processes, where it is the same engine.

    Args:
        make_engine: builds the engine, such as a ``TransformersEngine``, in the actor.
        actor_options: Ray's options for the actor, such as ``{"num_cpus": 2}``.
        start_timeout: seconds that Ray may take to find room for the actor.

    Attributes:
        max_length: most tokens of prompt and completion together.
        shares_weights: False: a push copies them.

    Raises:
        ImportError: if Ray is not installed.
        TimeoutError: if the cluster has no room for the actor.

    Example:
        >>> engine = RayEngine(lambda: TransformersEngine(AutoModelForCausalLM.from_pretrained(path)))
        >>> backend = RayBackend(make_actor, make_sender=lambda model: LocalWeightSyncSender(model, engine))
    """

    shares_weights = False

    def __init__(
        self,
        make_engine: Callable[[], LocalEngine],
        *,
        actor_options: Mapping[str, Any] | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        ray = _ray()
        options = dict(actor_options or {})
        self._host = ray.remote(_EngineHost).options(**options).remote()
        self._forming: weakref.WeakKeyDictionary[Any, _Tick] = weakref.WeakKeyDictionary()
        try:
            _await_room([self._host], "an engine", options, start_timeout)
            self.max_length: int = ray.get(self._host.build.remote(make_engine))
        except BaseException:
            ray.kill(self._host)
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {"_host": self._host, "max_length": self.max_length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_forming": weakref.WeakKeyDictionary()}

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._call("policy_version")

    def check(self, params: SamplingParams) -> None:
        """Raise what the engine raises of ``params``."""
        self._call("check", params)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample ``params.n`` completions of one prompt.

        Args:
            prompt_ids: [L] token ids.
            params: of the request.

        Raises:
            Exception: what the engine raised of this request; ``ray.exceptions.RayActorError`` if it died.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._forming:
            self._forming[loop] = _Tick(loop.create_task(self._ask(loop)))
        tick = self._forming[loop]
        index = len(tick.requests)
        tick.requests.append((tuple(prompt_ids), params))
        tick.waiting += 1
        try:
            # shielded: one request that is cancelled leaves the others alone
            answer = (await asyncio.shield(tick.answers))[index]
        finally:
            tick.waiting -= 1
            if not tick.waiting and not tick.answers.done():  # all were cancelled, and the loop may be about to close
                tick.answers.cancel()
                await asyncio.wait([tick.answers])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _ask(self, loop: asyncio.AbstractEventLoop) -> list[Any]:
        reference = self._host.generate.remote(self._forming.pop(loop).requests)
        return await asyncio.wrap_future(reference.future())

    def pause(self) -> None:
        """Return once no decoding step runs; none starts until ``resume``."""
        self._call("pause")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy named tensors into the engine's own; only while paused."""
        self._call("load_weights", [(name, tensor.detach().cpu()) for name, tensor in weights])

    def resume(self, policy_version: int | None = None) -> None:
        """Go on decoding under ``policy_version`` (None: the version before)."""
        self._call("resume", policy_version)

    def shutdown(self) -> None:
        """End the engine and its process."""
        _ray().kill(self._host)

    def _call(self, name: str, *arguments: Any) -> Any:
        return _ray().get(self._host.call.remote(name, *arguments))


class _Tick:
    """Requests of one tick of an event loop, and the task that answers them."""

    def __init__(self, answers: asyncio.Task) -> None:
        self.answers = answers
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.waiting = 0


class _EngineHost:
    """The process of an engine. Asynchronous, so that pushes come between the steps of requests."""

    async def build(self, make_engine: Callable[[], LocalEngine]) -> int:
        self.engine = make_engine()
        return self.engine.max_length

    async def generate(self, requests: list[tuple[tuple[int, ...], SamplingParams]]) -> list[Any]:
        answers = (self.engine.generate(prompt_ids, params) for prompt_ids, params in requests)
        return await asyncio.gather(*answers, return_exceptions=True)

    async def call(self, name: str, *arguments: Any) -> Any:
        attribute = getattr(self.engine, name)
        # in a thread: to pause waits for a decoding step
        return await asyncio.to_thread(attribute, *arguments) if callable(attribute) else attribute
