"""The requests that were made together, decoded in lockstep from one cache.

Shapes: B prompts of a pass, R rows (completions still running), G groups (distinct prompts), S tokens of a completion,
L tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_asyncgrpo.engines.base import Completion
from torchrl_asyncgrpo.engines.categorical import sample_categorical
from torchrl_asyncgrpo.engines.group_cache import GroupCache, PromptPass, StepPass

#: most prompt tokens of one forward: what a pause may have to wait for
PROMPT_TOKENS_AT_ONCE = 4096


@dataclass
class Request:
    """One prompt, how to continue it, and who waits for the completions."""

    prompt_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    seed: tuple[int, ...]
    stop_ids: frozenset[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    #: set once nobody waits any more; its rows then leave the batch
    abandoned: bool = False
    completions: list[Completion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.completions = [Completion([], [], [], "abort") for _ in range(self.n)]

    def uniforms(self, index: int) -> np.ndarray:
        """[S] float64 in [0, 1), one per token: the stream of completion ``index``, whatever runs beside it."""
        return np.random.default_rng((*self.seed, index)).random(self.max_tokens)

    def deliver(self) -> None:
        """Hand the completions over, from any thread."""
        self._settle(lambda: self.future.set_result(self.completions))

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` where the request is awaited, from any thread; ``StopIteration`` as a ``RuntimeError``."""
        if isinstance(error, StopIteration):  # no future takes it, so that the request would be awaited for ever
            stop, error = error, RuntimeError("the model raised StopIteration while the engine was decoding.")
            error.__cause__ = stop
        self._settle(lambda: self.future.set_exception(error))

    def cancel(self) -> None:
        """Cancel the await, from any thread."""
        self._settle(self.future.cancel)

    def _settle(self, settle: Callable[[], object]) -> None:
        def unless_done() -> None:
            if not self.future.done():
                settle()

        try:
            self.loop.call_soon_threadsafe(unless_done)
        except RuntimeError:
            # The loop was closed under us, and whoever waited is gone with it.
            if not self.loop.is_closed():
                raise


@dataclass
class _Row:
    request: Request
    completion: Completion
    group: int
    uniform_S: np.ndarray
    running: bool = True

    @property
    def next_uniform(self) -> float:
        return float(self.uniform_S[len(self.completion.token_ids)])

    def append(self, token: int, log_prob: float, version: int) -> None:
        self.completion.token_ids.append(token)
        self.completion.log_probs.append(log_prob)
        self.completion.policy_versions.append(version)
        if token in self.request.stop_ids:
            self.completion.finish_reason = "stop"
        elif len(self.completion.token_ids) == self.request.max_tokens:
            self.completion.finish_reason = "length"
        else:
            return
        self.running = False


class Cohort:
    """Requests decoded together: the same requests give the same bits, whatever other cohorts run in between.

    Each distinct prompt is forwarded once, the tokens with which all of them begin once for all. A completion leaves
    the batch when it ends, a request is answered when its last completion did.

    Args:
        model: decodes through ``GROUP_ATTENTION``.
        requests: at least one.
        device: where the model is.
    """

    def __init__(self, model: nn.Module, requests: Sequence[Request], device: torch.device) -> None:
        self._model, self._requests, self._device = model, list(requests), device
        self._planned = False
        self._rows: list[_Row] = []

    @property
    def done(self) -> bool:
        """True when no request waits for anything any more."""
        return self._planned and not self._rows

    def step(self, version: int) -> None:
        """One forward: some prompts, or one token of every row. Tokens it samples carry ``version``."""
        with torch.inference_mode():
            if not self._planned:
                self._plan()
            self._keep(lambda row: not row.request.abandoned)
            if self._rows and self._passes:
                self._forward_prompts(self._passes.popleft(), version)
            elif self._rows:
                self._decode(version)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at every request that still waits, and free the cache."""
        self._end(lambda request: request.fail(error))

    def cancel(self) -> None:
        """Cancel every request that still waits, and free the cache."""
        self._end(Request.cancel)

    def _end(self, settle: Callable[[Request], None]) -> None:
        if self._planned:
            # The traceback of an error keeps our frames alive, and they would keep the tensors.
            self._cache.layers.clear()
        self._planned, self._rows = True, []
        for request in self._requests:
            settle(request)

    def _plan(self) -> None:
        """Sort the prompts by length and lay out the passes over them."""
        by_prompt: dict[tuple[int, ...], list[Request]] = {}
        for request in sorted(self._requests, key=lambda request: len(request.prompt_ids)):
            by_prompt.setdefault(request.prompt_ids, []).append(request)
        self._prompts = list(by_prompt)
        self._rows = [
            _Row(request, completion, group, request.uniforms(index))
            for group, members in enumerate(by_prompt.values())
            for request in members
            for index, completion in enumerate(request.completions)
        ]
        self._cache = GroupCache(
            [len(prompt) for prompt in self._prompts],
            max(request.max_tokens for request in self._requests),
            self._device,
        )
        self._passes = self._prompt_passes()
        self._planned = True

    def _prompt_passes(self) -> deque[PromptPass]:
        """Prompts of one length share a pass, which therefore needs no padding."""
        lengths = [len(prompt) for prompt in self._prompts]
        head = _common_head(self._prompts)
        passes = deque([PromptPass(self._cache, 0, len(lengths), 0, head)] if head else [])
        first = 0
        while first < len(lengths):
            length = lengths[first]
            last = first + lengths.count(length)
            at_once = max(1, PROMPT_TOKENS_AT_ONCE // (length - head))
            for start in range(first, last, at_once):
                passes.append(PromptPass(self._cache, start, min(start + at_once, last), head, length))
            first = last
        return passes

    def _forward_prompts(self, prompt_pass: PromptPass, version: int) -> None:
        first, last, start, stop = prompt_pass.first, prompt_pass.last, prompt_pass.start, prompt_pass.stop
        is_head = stop < len(self._prompts[first])
        prompts = self._prompts[first : first + 1] if is_head else self._prompts[first:last]
        input_ids_BL = self._tensor([prompt[start:stop] for prompt in prompts])
        position_ids_BL = torch.arange(start, stop, device=self._device).expand_as(input_ids_BL)
        logits_BV = self._forward(input_ids_BL, position_ids_BL, prompt_pass)
        if not is_head:
            rows = [row for row in self._rows if first <= row.group < last]
            self._sample(logits_BV, [row.group - first for row in rows], rows, version)
        if not self._passes:
            self._answer_finished()
            self._rows = [row for row in self._rows if row.running]
            self._cache.start_rows([row.group for row in self._rows])

    def _decode(self, version: int) -> None:
        step_pass = StepPass(self._cache)
        input_ids_R1 = self._tensor([row.completion.token_ids[-1:] for row in self._rows])
        position_ids_R1 = self._tensor([[len(row.request.prompt_ids) + step_pass.step] for row in self._rows])
        logits_RV = self._forward(input_ids_R1, position_ids_R1, step_pass)
        self._sample(logits_RV, range(len(self._rows)), self._rows, version)
        self._answer_finished()
        self._keep(lambda row: row.running)

    def _forward(self, input_ids: Tensor, position_ids: Tensor, cache: PromptPass | StepPass) -> Tensor:
        output = self._model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=1, cache=cache
        )
        cache.finish()
        return output.logits[:, -1]

    def _sample(self, logits_BV: Tensor, sources: Sequence[int], rows: Sequence[_Row], version: int) -> None:
        """Append one token to each row, from the row of logits that ``sources`` names."""
        if not rows:
            return
        token_R, log_prob_R = sample_categorical(
            logits_BV,
            self._tensor(sources),
            self._tensor([row.request.temperature for row in rows], torch.float64),
            self._tensor([row.next_uniform for row in rows], torch.float64),
        )
        for row, token, log_prob in zip(rows, token_R.tolist(), log_prob_R.tolist(), strict=True):
            row.append(token, log_prob, version)

    def _keep(self, stays: Callable[[_Row], bool]) -> None:
        kept = [index for index, row in enumerate(self._rows) if stays(row)]
        if len(kept) == len(self._rows):
            return
        prompts_written = not self._passes
        order = self._cache.keep_rows(kept) if prompts_written and kept else kept
        self._rows = [self._rows[index] for index in order]

    def _answer_finished(self) -> None:
        running = {id(row.request) for row in self._rows if row.running}
        for request in {id(row.request): row.request for row in self._rows if not row.running}.values():
            if id(request) not in running:
                request.deliver()

    def _tensor(self, values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def _common_head(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens with which all prompts begin, less than the shortest prompt; 0 for a single prompt."""
    if len(prompts) == 1:
        return 0
    low, high = min(prompts), max(prompts)
    head = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return min(head, min(len(prompt) for prompt in prompts) - 1)
