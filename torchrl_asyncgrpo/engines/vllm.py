"""The engine of a vLLM server: token ids out over HTTP, sampled tokens with log-probs and policy versions back."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import secrets
import threading
from collections import Counter
from collections.abc import Sequence

from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
from torchrl_asyncgrpo.engines.loop_thread import LoopThread, Places, gather_or_cancel
from torchrl_asyncgrpo.engines.vllm_answer import joined, naming, read_answer, request_body, stream_seed
from torchrl_asyncgrpo.engines.vllm_description import ServerDescription
from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP, RequestRefused, ServerFailed, ServerHung
from torchrl_asyncgrpo.engines.vllm_watch import OUTAGES, ServerWatch

# Of one request in a row; a prompt that brings the server down each time is not asked for ever.
_MAX_OUTAGES = 10
# vLLM raises a temperature below the first to it, and refuses one above the second.
_TEMPERATURES = (0.01, 2.0)


class VLLMEngine:
    """Sample completions with a running vLLM server, with the policy version of every token.

    A group is one request; what a push aborts is asked for the rest. A request that fails is asked again. While the
    server is down, hangs, or was restarted and has not been given current weights yet, all requests wait, and are asked
    again when it is back: a call to :meth:`generate` returns ``params.n`` completions or raises, never fewer or more.

    The engine has no part in pushing weights. Where the server serves adapters of policy versions
    (``VLLMAdapterSyncSender``), each request names the newest one that the server lists, and keeps it to its end.

    It runs in a thread and an event loop of its own, so that any event loop may use it, and several over time.

    Args:
        url: the server's root, such as ``"http://localhost:8000"``.
        max_concurrency: sequences at the server at once, >= 1; further ones wait here.
        request_timeout: seconds until a group must be answered, waiting at the server included.
        retries: failures in a row of one request, of a server that is well, before it raises.
        restart_timeout: seconds to wait for a server that is down, and again for it to be given current weights.
        poll_interval: seconds between two looks at a server that is down.
        hang_timeout: seconds after which a server that answers nothing counts as down.
        required_length: tokens of prompt and completion that the server must have room for; None for no matter how
            many.
        api_key: that of the server's ``--api-key``.

    Attributes:
        policy_version: newest version seen in an answer, from 0; answers under an older one are not accepted. Set it
            back for a trainer that went back to an earlier checkpoint. The version of the last push is the sender's.
        max_length: most tokens of prompt and completion together, the server's ``--max-model-len``.
        server: what the server said of itself.
        counters: requests, tokens, retries (failed requests), resumed (aborted completions that were continued),
            recoveries (outages that ended), missing_log_probs (tokens that came without).

    Raises:
        ValueError: if the server lacks what is needed, naming all the flags to add, or ``url`` is none of vLLM's.
        ConnectionError: if nothing answers there.
    """

    def __init__(
        self,
        url: str,
        *,
        max_concurrency: int = 256,
        request_timeout: float = 600.0,
        retries: int = 3,
        restart_timeout: float = 300.0,
        poll_interval: float = 0.5,
        hang_timeout: float = 30.0,
        required_length: int | None = None,
        api_key: str | None = None,
    ) -> None:
        for name, value, low in (("max_concurrency", max_concurrency, 1), ("retries", retries, 0)):
            if value < low:
                raise ValueError(f"{name}={value}; it must be at least {low}.")
        for name, seconds in (
            ("request_timeout", request_timeout),
            ("restart_timeout", restart_timeout),
            ("poll_interval", poll_interval),
            ("hang_timeout", hang_timeout),
        ):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds}; it is a time in seconds, above 0.")
        self._http = VLLMHTTP(url, api_key=api_key)
        self.server = _describe(self._http)
        _check_server(self._http.url, self.server, required_length)
        self.max_length = self.server.max_model_len
        self.counters: Counter[str] = Counter(
            dict.fromkeys(("requests", "tokens", "retries", "resumed", "recoveries", "missing_log_probs"), 0)
        )
        self._request_timeout = request_timeout
        self._retries = retries
        self._poll_interval = poll_interval
        self._group_size = min(max_concurrency, self.server.max_num_seqs or max_concurrency)
        self._places = Places(max_concurrency)
        self._watch = ServerWatch(
            self._http,
            adapters=self.server.adapters is not None,
            restart_timeout=restart_timeout,
            poll_interval=poll_interval,
            hang_timeout=hang_timeout,
            counters=self.counters,
        )
        self._opening = threading.Lock()
        self._thread: LoopThread | None = None
        self._closed = False

    @property
    def policy_version(self) -> int:
        """Newest version seen in an answer, from 0; what is older is not accepted, unless it is set back."""
        return self._watch.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._watch.policy_version = version

    def check(self, params: SamplingParams) -> None:
        """Refuse what the server cannot sample, or not so that log-probs are the policy's.

        Raises:
            ValueError: if ``max_tokens`` leaves no room for a prompt, the temperature is none of vLLM's, a repetition
                penalty is set, or top-p, top-k or min-p without a server that reports what they kept.
        """
        low, high = _TEMPERATURES
        if not low <= params.temperature <= high:
            raise ValueError(
                f"temperature={params.temperature}; vLLM samples at temperatures from {low} to {high} only. Choose one "
                "of them, for the actor too."
            )
        if params.max_tokens >= self.max_length:
            raise ValueError(
                f"max_tokens={params.max_tokens} leaves no room for a prompt in the server's {self.max_length} tokens: "
                f"start it with --max-model-len above {params.max_tokens}, or lower max_tokens."
            )
        if params.repetition_penalty != 1.0:
            raise ValueError(
                f"repetition_penalty={params.repetition_penalty}; the trainer's distribution has no penalty, so that "
                "the importance ratio of unchanged weights would not be 1. Leave it at 1.0."
            )
        if self.server.returns_sampling_mask and params.top_k < 1:
            raise ValueError(
                f"top_k={params.top_k}; a server with --return-sampling-mask takes no request without a top_k of at "
                "least 1. Set one, or start the server without that flag to sample from the whole vocabulary."
            )
        if not self.server.returns_sampling_mask and not params.keeps_whole_vocabulary:
            raise ValueError(
                f"top_p={params.top_p}, top_k={params.top_k}, min_p={params.min_p}: the server does not report which "
                "tokens they kept, so that the importance ratio of unchanged weights would not be 1. Start it with "
                "--return-sampling-mask (on a GPU), or leave them at 1, 0 and 0 and lower the temperature instead."
            )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample ``params.n`` completions of one prompt. Cancelling it ends the request on the server too.

        Args:
            prompt_ids: [L] token ids, 1 <= L < ``max_length``.
            params: ``max_tokens`` is shortened to ``max_length - L``. Completion ``i`` draws from a stream of its own,
                derived from ``(seed, i)``, and from another one after it was aborted; without a seed, from a fresh one.

        Returns:
            ``params.n`` completions, in the order of their streams; none of them aborted.

        Raises:
            ValueError: an empty or too long prompt, parameters that :meth:`check` refuses, or anything else that the
                server does.
            RuntimeError: if the request failed ``retries + 1`` times in a row, or the answer lacks versions or masks;
                after :meth:`shutdown`.
            TimeoutError: if the server was down for longer than ``restart_timeout``.
            asyncio.CancelledError: if the engine was shut down meanwhile.
        """
        prompt = [int(token) for token in prompt_ids]
        self.check(params)
        if not 0 < len(prompt) < self.max_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; it needs at least 1, and room for another in the server's "
                f"{self.max_length}. Shorten it, or start the server with a greater --max-model-len."
            )
        return await self._loop_thread().run(self._group, prompt, params)

    def shutdown(self) -> None:
        """Close all connections and cancel what still runs; the server stays up. May be called again."""
        with self._opening:
            self._closed = True
            thread = self._thread
        atexit.unregister(self.shutdown)
        if thread is not None:
            thread.close(self._http.aclose)

    def _loop_thread(self) -> LoopThread:
        with self._opening:
            if self._closed:
                raise RuntimeError("the engine was shut down; build a new one.")
            if self._thread is None:
                self._thread = LoopThread("vllm-engine")
                atexit.register(self.shutdown)
            return self._thread

    # --- in the engine's own event loop -----------------------------------------------------------
    async def _group(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        await self._watch.look()
        seed = secrets.randbits(64) if params.seed is None else params.seed
        starts = range(0, params.n, self._group_size)
        parts = await gather_or_cancel(
            self._part(prompt, params, seed, range(start, min(start + self._group_size, params.n))) for start in starts
        )
        return [completion for part in parts for completion in part]

    async def _part(self, prompt: list[int], params: SamplingParams, seed: int, indices: range) -> list[Completion]:
        """Those of a group that fit into one request."""
        await self._places.take(len(indices))
        try:
            budget = min(params.max_tokens, self.max_length - len(prompt))
            begun = await self._ask(
                prompt, params, n=len(indices), max_tokens=budget, seed=stream_seed(seed) + indices[0]
            )
            return await gather_or_cancel(
                self._finish(prompt, params, budget, completion, (seed, i))
                for i, completion in zip(indices, begun, strict=True)
            )
        finally:
            self._places.give_back(len(indices))

    async def _finish(
        self, prompt: list[int], params: SamplingParams, budget: int, completion: Completion, stream: tuple[int, int]
    ) -> Completion:
        """Ask on for what was aborted until it has ended."""
        part = 0
        while completion.finish_reason == "abort":
            left = budget - len(completion.token_ids)
            if left == 0:
                return dataclasses.replace(completion, finish_reason="length")
            part += 1
            self.counters["resumed"] += 1
            context = [*prompt, *completion.token_ids]
            (rest,) = await self._ask(context, params, n=1, max_tokens=left, seed=stream_seed(*stream, part))
            if not rest.token_ids:  # aborted while it waited: do not spin
                await asyncio.sleep(self._poll_interval)
            completion = joined(completion, rest)
        return completion

    async def _ask(
        self, context: list[int], params: SamplingParams, *, n: int, max_tokens: int, seed: int
    ) -> list[Completion]:
        """One request, asked until it is answered under weights no older than those known when it was sent."""
        body = request_body(context, params, n=n, max_tokens=max_tokens, seed=seed)
        failures = outages = 0
        while True:
            known = self._watch.policy_version
            self.counters["requests"] += 1
            try:
                adapter = await self._watch.newest_adapter()
                answer = await self._watch.generate(naming(body, adapter), self._request_timeout)
                completions = read_answer(answer, n, with_mask=not params.keeps_whole_vocabulary, adapter=adapter)
            except OUTAGES as error:
                failure: Exception = error
            except RequestRefused as refused:
                if adapter is None or refused.status != 404:
                    raise
                failure = refused  # unloaded, or lost, before the request was there
            else:
                versions = [version for completion in completions for version in completion.policy_versions]
                if min(versions, default=known) >= known:
                    self._watch.saw(max(versions, default=known))
                    self._count(completions)
                    return completions
                failure = ServerFailed(f"{self._http.url} sampled under version {min(versions)}, after {known}.")
            self.counters["retries"] += 1
            if await self._watch.recover():
                failures, outages = 0, outages + 1
                if outages > _MAX_OUTAGES:
                    raise ServerFailed(
                        f"{self._http.url} went down {outages} times in a row while it was asked to continue "
                        f"{len(context)} tokens; its log says why. The last failure: {failure}"
                    ) from failure
            else:
                failures += 1
                if failures > self._retries:
                    late = isinstance(failure, ServerHung)
                    raise ServerFailed(
                        f"a request failed {failures} times in a row, and {self._http.url} says it is well: {failure} "
                        + ("Raise request_timeout if a group takes longer." if late else "Look into its log.")
                    ) from failure
                await asyncio.sleep(self._poll_interval)

    def _count(self, completions: list[Completion]) -> None:
        for completion in completions:
            self.counters["tokens"] += len(completion.token_ids)
            self.counters["missing_log_probs"] += sum(value != value for value in completion.log_probs)


def _describe(http: VLLMHTTP) -> ServerDescription:
    try:
        return http.describe()
    except OUTAGES as error:
        raise type(error)(
            f"no vLLM server answers at {http.url}: {error} Start one, for example with python -m "
            "torchrl_asyncgrpo.engines.vllm_server --model DIRECTORY, wait until it is up, and check host and port."
        ) from error
    finally:
        http.close()


def _check_server(url: str, server: ServerDescription, required_length: int | None) -> None:
    missing = []
    if not server.has_weight_routes:
        missing.append("VLLM_SERVER_DEV_MODE=1 in its environment: opens the routes for weights and their versions")
    if not server.has_generate_route:
        missing.append("--enable-scale-out: opens token-in, token-out generation")
    if server.logprobs_mode not in (None, "processed_logprobs"):
        missing.append(
            f"--logprobs-mode processed_logprobs: it reports {server.logprobs_mode}, and the trainer needs log-probs "
            "of the sampling distribution, at its temperature"
        )
    if server.device == "cpu" and server.chunks_prefill:
        missing.append("--no-enable-chunked-prefill: on a CPU, vLLM dies of a seeded request that it prefills in parts")
    if required_length is not None and server.max_model_len < required_length:
        missing.append(
            f"--max-model-len {required_length}: it takes {server.max_model_len} tokens of prompt and completion"
        )
    if missing:
        listed = "".join(f"\n  {flag}." for flag in missing)
        raise ValueError(f"the vLLM server at {url} cannot serve this trainer. Start it with{listed}")
