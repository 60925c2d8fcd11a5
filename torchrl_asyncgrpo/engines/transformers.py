"""The engine that runs inside the trainer's process, on any causal language model of transformers."""

from __future__ import annotations

import asyncio
import atexit
import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_asyncgrpo.adapters import bits_outside_parameters, is_plain, keep_bits, plain_copy, unwrapped
from torchrl_asyncgrpo.data.end_tokens import end_token_ids
from torchrl_asyncgrpo.data.rope_length import check_rope_length, rope_limits
from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
from torchrl_asyncgrpo.engines.cohort import Cohort, Request
from torchrl_asyncgrpo.engines.group_attention import GROUP_ATTENTION
from torchrl_asyncgrpo.engines.group_cache import GroupCache, PromptPass
from torchrl_asyncgrpo.engines.weight_slots import WeightSlots
from torchrl_asyncgrpo.kernels.linear import use_onednn

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class TransformersEngine:
    """Sample completions in this process, with exact log-probs and the policy version of every token.

    Requests made in one tick of the event loop form a *cohort*: decoded together in the engine's own thread, and bit
    for bit the same whenever the same requests are made with the same seeds. Several cohorts take turns, one step each.
    Weights may change between two steps (:meth:`pause`, :meth:`load_weights`, :meth:`resume`): running completions go
    on with the keys and values they have, and each token carries the version that sampled it.

    An exception while decoding is raised at every request of that cohort; the engine goes on with the others. Any event
    loop may be used, and several over time.

    Args:
        model: causal language model, or peft's wrapper around one. Its weights are never modified: the engine works on
            a copy of its modules, in eval mode and with its own attention function.
        copy_weights: True gives the engine its own parameters, with adapters merged into them and quantised ones
            written out. False shares the model's own (``shares_weights``), adapters and all: no pushes are needed and
            none is accepted, but no step may run while they are being written, and they may only be written in place.
        max_length: most tokens of prompt and completion together; None is the model's own limit, with RoPE of a type
            that depends on the length ("longrope", "dynamic") its original one, beyond which nothing is exact.
        seed: seed of the requests that bring none; each gets its own, derived from ``seed``, how many came before, and
            its prompt. None seeds from the operating system.

    Attributes:
        policy_version: version of the weights that sample the next token, from 0.
        max_length: most tokens of prompt and completion together.
        shares_weights: True when the parameters are the trainer's own.

    Raises:
        ValueError: if the model has layers or attention that it cannot decode exactly, an adapter that cannot be merged
            (``copy_weights=True``), or no known ``max_length``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        copy_weights: bool = True,
        max_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        model = unwrapped(model)
        _check_model(model)
        self.policy_version = 0
        self.max_length = _max_length(model, max_length)
        self.shares_weights = not copy_weights
        self._model = _decoding_copy(model, copy_weights)
        self._device = next(self._model.parameters()).device
        _check_attention(self._model, self._device)
        self._vocabulary = self._model.get_input_embeddings().weight.shape[0]
        self._end_ids = end_token_ids(model)
        self._weights = WeightSlots(self._model, shared=self.shares_weights)
        self._seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        self._seedless_requests = 0

        # Guards everything below, and is notified whenever any of it changes.
        self._state = threading.Condition()
        self._forming: weakref.WeakKeyDictionary[Any, list[Request]] = weakref.WeakKeyDictionary()
        self._cohorts: deque[Cohort] = deque()
        self._worker: threading.Thread | None = None
        self._stepping = False
        self._paused = False
        self._closed = False

    def check(self, params: SamplingParams) -> None:
        """Refuse what reshapes the distribution.

        Raises:
            ValueError: if top-p, top-k, min-p or a repetition penalty is set.
        """
        if not params.keeps_whole_vocabulary:
            raise ValueError(
                f"top_p={params.top_p}, top_k={params.top_k}, min_p={params.min_p}, repetition_penalty="
                f"{params.repetition_penalty}: the trainer's distribution is the whole vocabulary, so that the "
                "importance ratio of unchanged weights would not be 1. Leave them at 1, 0, 0 and 1 and "
                "lower the temperature instead."
            )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample ``params.n`` completions of one prompt.

        Args:
            prompt_ids: [L] token ids, 1 <= L < ``max_length``.
            params: ``max_tokens`` is shortened to ``max_length - L``.

        Returns:
            ``params.n`` completions, in the order of their random streams.

        Raises:
            ValueError: empty or too long prompt, a token id outside the vocabulary, or a parameter that reshapes the
                distribution.
            RuntimeError: after :meth:`shutdown`.
            asyncio.CancelledError: if the engine was shut down meanwhile.
        """
        loop = asyncio.get_running_loop()
        request = self._request(tuple(int(token) for token in prompt_ids), params, loop)
        with self._state:
            if self._closed:
                raise RuntimeError("the engine was shut down; build a new one.")
            if loop not in self._forming:
                self._forming[loop] = []
                loop.call_soon(self._submit, loop)
            self._forming[loop].append(request)
        try:
            return await request.future
        finally:
            request.abandoned = True

    def pause(self) -> None:
        """Return once no decoding step runs; none starts until :meth:`resume`. Starts a push; may be called again.

        Pausing a paused engine starts the push anew, which is how to go on after one that failed.
        """
        with self._state:
            if self._stepping and threading.current_thread() is self._worker:
                raise RuntimeError("pause() was called from inside a decoding step, and would wait for itself.")
            was_paused, self._paused = self._paused, True
            try:
                self._state.wait_for(lambda: not self._stepping)
            except BaseException:  # Ctrl-C: nobody would resume
                self._paused = was_paused
                self._state.notify_all()
                raise
            self._weights.start()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy named tensors into the engine's own; only while paused, in as many calls as it takes.

        Args:
            weights: names of ``model.state_dict()``; a tied weight under any one of its names. dtype and device are
                converted. Persistent buffers may be among them.

        Raises:
            ValueError: unknown name or other shape; that tensor is not written. The weights are now those of two
                versions if others were, so that :meth:`resume` refuses until a whole push succeeded.
            RuntimeError: if the engine is not paused.
        """
        if not self._paused:
            raise RuntimeError("load_weights() needs a paused engine; call pause() first.")
        self._weights.load(weights)

    def resume(self, policy_version: int | None = None) -> None:
        """Go on decoding, from now on under ``policy_version`` (None: the version before).

        Raises:
            RuntimeError: if the engine is not paused; if a new version is announced or weights were loaded, but not all
                parameters were: the engine then stays paused, at the version before.
        """
        with self._state:
            if not self._paused:
                raise RuntimeError("resume() needs a paused engine; call pause() first.")
            self._weights.finish(new_version=policy_version not in (None, self.policy_version))
            if policy_version is not None:
                self.policy_version = policy_version
            self._paused = False
            self._state.notify_all()

    def shutdown(self) -> None:
        """Stop after the step that runs, free all caches and cancel what still runs. May be called again."""
        atexit.unregister(self.shutdown)
        with self._state:
            self._closed = True
            self._state.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()
        with self._state:
            cohorts, self._cohorts = list(self._cohorts), deque()
            forming = [request for requests in self._forming.values() for request in requests]
            self._forming.clear()
        for cohort in cohorts:
            cohort.cancel()
        for request in forming:
            request.cancel()

    def _request(self, prompt_ids: tuple[int, ...], params: SamplingParams, loop: asyncio.AbstractEventLoop) -> Request:
        self.check(params)
        if not prompt_ids:
            raise ValueError("the prompt is empty; it needs at least one token, such as the begin-of-text token.")
        if len(prompt_ids) >= self.max_length:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for another in max_length={self.max_length}: "
                "shorten the prompt or raise max_length."
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocabulary:
            bad = next(token for token in prompt_ids if not 0 <= token < self._vocabulary)
            raise ValueError(
                f"prompt token {bad} is outside the vocabulary of {self._vocabulary}; check that tokenizer and model "
                "belong together."
            )
        return Request(
            prompt_ids=prompt_ids,
            n=params.n,
            max_tokens=min(params.max_tokens, self.max_length - len(prompt_ids)),
            temperature=params.temperature,
            seed=self._seed_of(prompt_ids, params.seed),
            stop_ids=frozenset() if params.ignore_eos else self._end_ids | frozenset(params.stop_token_ids),
            loop=loop,
            future=loop.create_future(),
        )

    def _seed_of(self, prompt_ids: tuple[int, ...], seed: int | None) -> tuple[int, ...]:
        if seed is not None:
            return (seed % 2**64,)
        with self._state:
            self._seedless_requests += 1
            return (self._seed, self._seedless_requests, *prompt_ids)

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand the requests of this tick to the worker; runs in their event loop."""
        with self._state:
            requests = [request for request in self._forming.pop(loop, []) if not request.abandoned]
            if self._closed:
                for request in requests:
                    request.cancel()
                return
            if not requests:
                return
            self._cohorts.append(Cohort(self._model, requests, self._device))
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="TransformersEngine", daemon=True)
                self._worker.start()
                atexit.register(self.shutdown)
            self._state.notify_all()

    def _work(self) -> None:
        while (turn := self._next_turn()) is not None:
            cohort, version = turn
            try:
                cohort.step(version)
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to those who wait
                cohort.fail(error)
            with self._state:
                self._stepping = False
                if not cohort.done:
                    self._cohorts.append(cohort)
                self._state.notify_all()

    def _next_turn(self) -> tuple[Cohort, int] | None:
        """The cohort to step, once one may be, and the version it samples under; None after shutdown."""
        with self._state:
            self._state.wait_for(lambda: self._closed or (bool(self._cohorts) and not self._paused))
            if self._closed:
                return None
            self._stepping = True
            return self._cohorts.popleft(), self.policy_version


def _check_model(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    name = type(model).__name__
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        raise ValueError(f"{name} has layers of type {', '.join(others)}; TransformersEngine decodes {_LAYER_TYPES}.")
    if not model._supports_attention_backend or model._is_stateful or model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} keeps a state of its own or does not call transformers' attention interface; TransformersEngine "
            "cannot decode it exactly. Serve it with VLLMEngine."
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"{name} shares keys and values between layers, which TransformersEngine does not do.")


@torch.inference_mode()
def _check_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ``ValueError`` if the attention of a model brings what only a forward shows, such as a mask of its own."""
    position_ids = torch.arange(2, device=device)[None]
    prompt = PromptPass(GroupCache([2], 1, device), 0, 1, 0, 2)
    model(input_ids=torch.zeros_like(position_ids), position_ids=position_ids, use_cache=False, cache=prompt)


def _max_length(model: PreTrainedModel, max_length: int | None) -> int:
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_length is None and limit is not None:
        max_length = min([limit, *(length for _, length in rope_limits(model.config))])
    if max_length is None:
        raise ValueError(f"{type(model).__name__} has no max_position_embeddings; pass max_length.")
    if max_length < 2 or (limit is not None and max_length > limit):
        raise ValueError(f"max_length={max_length}; it must be between 2 and the model's limit of {limit} tokens.")
    check_rope_length(model.config, max_length)
    return max_length


def _decoding_copy(model: PreTrainedModel, copy_weights: bool) -> PreTrainedModel:
    """The modules of ``model`` in eval mode with the engine's attention; tensors are its own, or those of ``model``."""
    own: PreTrainedModel
    if copy_weights and not is_plain(model):
        own = plain_copy(model)
    else:
        keep_bits(model)  # before the two share bits
        tensors = [*model.parameters(), *model.buffers(), *bits_outside_parameters(model)]
        own = copy.deepcopy(model, {} if copy_weights else {id(tensor): tensor for tensor in tensors})
    own.config._attn_implementation = GROUP_ATTENTION
    use_onednn(own)
    if copy_weights:
        own.requires_grad_(False)
    return own.eval()
