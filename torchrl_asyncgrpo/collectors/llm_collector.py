"""The collector: prompts in, scored groups of rollouts out, beside the trainer or in its turn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from transformers import PreTrainedTokenizerBase

from torchrl_asyncgrpo.collectors.group import as_answers, encode_prompt, make_group, request_seed
from torchrl_asyncgrpo.collectors.rewards import RewardFunction, RewardFunctions
from torchrl_asyncgrpo.data.advantages import group_advantages
from torchrl_asyncgrpo.data.prompts import PromptDraw, PromptSource
from torchrl_asyncgrpo.data.replay_buffer import GroupReplayBuffer
from torchrl_asyncgrpo.engines.base import Engine, SamplingParams

# Prompts of a list that are encoded at construction, so that a bad one is found before any work starts
CHECKED_PROMPTS = 1024


@dataclass
class FinishedGroup:
    """A group that was sampled and scored: its rollouts, none where it is dropped, and what it counts for."""

    draw: PromptDraw
    rollouts: list[TensorDict]
    counters: Counter[str]


class AsyncLLMCollector(BaseCollector):
    """Sample groups of completions with an engine, score them, and write them to a replay buffer.

    ``start()`` collects in a thread of its own beside the trainer. Back-pressure: at most
    ``(max_staleness + 1) · groups_per_step`` groups are running, waiting in the buffer, or handed out and not
    released. Iterating instead collects ``groups_per_step`` groups per item, in the caller's turn, and yields None
    where there is a replay buffer (the groups are in it), else a lazy stack of rollouts. In place of a group that is
    dropped, here or by a transform of the buffer as it is written, a further prompt is drawn: at once, or, in turn and
    with ``max_staleness=0``, when every group that runs is finished.

    A group whose completions fail for good is scored from the survivors when there are two or more, else dropped;
    ``counters`` says how often and why. Any exception, of a reward function or of the engine, ends the collection
    and is raised, itself, to whoever reads the buffer or iterates.

    Args:
        engine: samples completions; see ``engines.base.Engine``.
        prompts: a ``PromptSource``, or what one is made of: list, dataset or iterable of texts, chats or mappings.
        reward_funcs: one or several functions ``f(prompts, completions, **columns) -> list[float | None]``.
        tokenizer: encodes prompts (with its chat template where they are chats) and decodes completions.
        sampling_params: how completions are sampled; ``n`` is the group size, ``seed`` is derived per group.
        groups_per_step: groups of one optimizer step, >= 1.
        replay_buffer: where groups go; a ``make_replay_buffer`` buffer for ``start()``.
        max_staleness: policy versions that collection may run ahead by, >= 0; 0 is on-policy.
        reward_weights: one factor per reward function, for their sum.
        advantage: rewards of a group [G], NaN where unscored, to advantages: [G] numbers, or for each rollout a number
            or one value per token of its completion.
        advantage_per_reward: give ``advantage`` the rewards [G, K] of every function, NaN where it did not score,
            not weighted, instead of their weighted sums, which remain the ``reward`` of the rollouts.
        mask_truncated: leave completions that ended for lack of room out of the loss.
        seed: seed of sampling, >= 0; group ``g`` draws from a stream derived from ``(seed, g)``.

    Raises:
        ValueError: if an argument is out of range, the engine refuses the sampling parameters, a prompt leaves
            no room for one token, or chats are given without a chat template.
        TypeError: if a reward function cannot be called.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptSource | Sequence[Any] | Iterable[Any],
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        *,
        tokenizer: PreTrainedTokenizerBase,
        sampling_params: SamplingParams,
        groups_per_step: int,
        replay_buffer: ReplayBuffer | None = None,
        max_staleness: int = 1,
        reward_weights: Sequence[float] | None = None,
        advantage: Callable[[Tensor], Tensor | Sequence[Any]] = group_advantages,
        advantage_per_reward: bool = False,
        mask_truncated: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step={groups_per_step}; an optimizer step needs at least 1 group.")
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}; use 0 for on-policy or a positive number of versions.")
        self.engine = engine
        self.prompts = prompts if isinstance(prompts, PromptSource) else PromptSource(prompts)
        self.reward = RewardFunctions(reward_funcs, reward_weights)
        self.tokenizer = tokenizer
        self.sampling_params = sampling_params
        self.groups_per_step = groups_per_step
        self.replay_buffer = replay_buffer
        self.max_staleness = max_staleness
        self.advantage = advantage
        self.advantage_per_reward = advantage_per_reward
        self.mask_truncated = mask_truncated
        self.set_seed(seed)
        self.counters: Counter[str] = Counter()
        self.init_random_frames = 0
        self._repeat: list[PromptDraw] = []
        self._unfinished: dict[int, PromptDraw] = {}
        self._commit = threading.RLock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._main: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        engine.check(sampling_params)
        for draw in self.prompts.head(CHECKED_PROMPTS):
            encode_prompt(tokenizer, draw, engine.max_length)

    # --- torchrl's collector protocol -------------------------------------------------------------
    def start(self) -> None:
        """Collect in a thread of its own until the source is exhausted, an exception, or ``shutdown``.

        Raises:
            ValueError: if the replay buffer is not one of ``make_replay_buffer``.
            RuntimeError: if the collector runs already.
        """
        buffer = self.replay_buffer
        if not isinstance(buffer, GroupReplayBuffer):
            raise ValueError(
                f"replay_buffer is a {type(buffer).__name__}; collecting beside the trainer needs the "
                "back-pressure of a buffer made by make_replay_buffer."
            )
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the collector runs already; call shutdown() before starting it again.")
        buffer.reopen()
        buffer.on_free(self._slots_changed)
        self._failure, self._stopping = None, False
        self._loop = asyncio.new_event_loop()
        arguments = (self._loop, buffer)
        self._thread = threading.Thread(target=self._collect_beside, args=arguments, name="collector", daemon=True)
        self._thread.start()

    def iterator(self) -> Iterator[TensorDict | None]:
        """Collect ``groups_per_step`` groups per item, in the caller's turn; fewer in the last one."""
        buffer = self.replay_buffer
        if isinstance(buffer, GroupReplayBuffer):
            buffer.reopen()
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            while True:
                rollouts = self._collect_in_turn(loop)
                left_over = False
                if self._exhausted and isinstance(buffer, GroupReplayBuffer):
                    buffer.close()
                    left_over = buffer.can_sample()
                if rollouts or left_over:
                    yield None if buffer is not None else lazy_stack(rollouts)
                if self._exhausted:
                    return

    def _collect_in_turn(self, loop: asyncio.AbstractEventLoop) -> list[TensorDict]:
        """Rollouts of the groups of one step, written to the buffer, with further groups for those that it drops."""
        rollouts: list[TensorDict] = []
        missing = self.groups_per_step
        with self._repeating_unsettled():
            while missing and not self._exhausted:
                for group in self._finish_in_turn(loop, missing):
                    if self._settle(group):
                        rollouts += group.rollouts
                        missing -= 1
        return rollouts

    def _finish_in_turn(self, loop: asyncio.AbstractEventLoop, slots: int) -> list[FinishedGroup]:
        """Groups in the order of their draws, as many as there are slots, unless the source ends."""
        finished: list[FinishedGroup] = []
        main = loop.create_task(self._collect(lambda: slots - len(finished), finished.append, in_turn=True))
        try:
            loop.run_until_complete(main)
        finally:
            if not main.done():  # Ctrl-C leaves run_until_complete, not the task
                main.cancel()
                loop.run_until_complete(asyncio.gather(main, return_exceptions=True))
        return sorted(finished, key=lambda group: group.draw.group_id)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop collecting; groups that were running are drawn again at the next start. The engine stays up.

        Args:
            timeout: seconds to wait for the thread; None for ever.
            close_env: not used; here for the protocol.
            raise_on_error: raise ``TimeoutError`` if the thread does not end in time.
        """
        del close_env
        thread = self._thread
        if thread is None:
            return
        self._stopping = True
        self._call_in_loop(lambda: self._main.cancel() if self._main is not None else None)
        thread.join(timeout)
        if thread.is_alive():
            if raise_on_error:
                raise TimeoutError(f"the collector did not stop within {timeout} s; does a reward function not return?")
            return
        self._thread = self._loop = self._main = None

    @contextlib.contextmanager
    def pause(self, resume: bool = True) -> Iterator[None]:
        """Hold back finished groups, so that a checkpoint sees collector and buffer at one moment.

        Args:
            resume: not used; writing goes on afterwards in any case.
        """
        del resume
        with self._commit:
            yield

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the sampling of all groups drawn from now on.

        Args:
            seed: the seed.
            static_seed: return ``seed`` itself instead of one for the caller to go on with.

        Raises:
            ValueError: if ``seed`` is negative or not whole.
        """
        request_seed(seed, group_id=0)
        self.seed = seed
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict[str, Any]:
        """Cursor of the source, ids of the draws that are neither in the buffer nor dropped, counters."""
        with self._commit:
            unfinished = [*self._unfinished, *(draw.group_id for draw in self._repeat)]
            return OrderedDict(
                prompts=self.prompts.state_dict(),
                unfinished=sorted(unfinished),
                counters=dict(self.counters),
                seed=self.seed,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; unfinished draws come first."""
        with self._commit:
            self._unfinished.clear()
            self._repeat = self.prompts.load_state_dict(state_dict["prompts"], state_dict["unfinished"])
            self.counters = Counter({str(key): int(count) for key, count in state_dict["counters"].items()})
            self.seed = int(state_dict["seed"])

    def getattr_rb(self, attr: str) -> Any:
        """Read an attribute of the replay buffer; raises the exception that ended the collection, if one did."""
        if self._failure is not None:
            raise self._failure
        return getattr(self.replay_buffer, attr)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: weights reach the engine through a weight-sync sender, of which a collector knows nothing."""

    def stats(self) -> dict[str, int | float | bool]:
        """Counters of groups, rollouts and tokens, and of what failed, was dropped or left unscored."""
        return dict(self.counters)

    # --- collecting -------------------------------------------------------------------------------
    def _collect_beside(self, loop: asyncio.AbstractEventLoop, buffer: GroupReplayBuffer) -> None:
        limit = (self.max_staleness + 1) * self.groups_per_step
        self._main = loop.create_task(self._collect(lambda: limit - buffer.occupied, self._settle, in_turn=False))
        try:
            with self._repeating_unsettled():
                loop.run_until_complete(self._main)
            buffer.close()
        except asyncio.CancelledError:
            assert self._stopping
            buffer.close()
        except BaseException as failure:  # noqa: BLE001 - the reader raises it, whatever it is
            self._failure = failure
            buffer.close(failure)
        finally:
            buffer.forget(self._slots_changed)
            loop.close()

    async def _collect(
        self, free_slots: Callable[[], int], commit: Callable[[FinishedGroup], Any], *, in_turn: bool
    ) -> None:
        """Keep groups running while slots are free, until the source is exhausted or, in turn, no slot is left."""
        self._wake = asyncio.Event()
        scoring = ThreadPoolExecutor(1, thread_name_prefix="rewards")  # one: reward functions need not be thread-safe
        running: list[asyncio.Task[FinishedGroup]] = []
        woken = asyncio.create_task(self._wake.wait())
        try:
            while True:
                self._wake.clear()
                # Groups admitted in one tick of the loop reach the engine as one batch. On-policy, those in place of
                # dropped ones wait for the rest of their round, as in turn: the same batches give the same bits.
                in_time = self.max_staleness > 0 or not running
                while in_time and len(running) < free_slots() and (draw := self._draw()) is not None:
                    running.append(asyncio.create_task(self._sample_group(draw, scoring)))
                if not running and (in_turn or self._exhausted):
                    return
                if woken.done():
                    woken = asyncio.create_task(self._wake.wait())
                done, _ = await asyncio.wait({*running, woken}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task in done]:
                    if task.cancelled():
                        raise RuntimeError(
                            "a group was cancelled from outside the collector: the engine was shut down, or a reward "
                            "function raised CancelledError."
                        )
                    commit(task.result())
                    running.remove(task)
        finally:
            for pending in (*running, woken):
                pending.cancel()
            await asyncio.gather(*running, woken, return_exceptions=True)
            # A reward function that does not return is not waited for.
            scoring.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _repeating_unsettled(self) -> Iterator[None]:
        """Let draws that are not settled come again, when the block raises."""
        try:
            yield
        except BaseException:
            with self._commit:
                self._repeat = sorted((*self._unfinished.values(), *self._repeat), key=lambda draw: draw.group_id)
                self._unfinished.clear()
            raise

    def _settle(self, group: FinishedGroup) -> bool:
        """Write a group to the buffer, if there is one, and count it; False where nothing of it is left."""
        with self._commit:
            kept = bool(group.rollouts)
            if kept and self.replay_buffer is not None:
                kept = len(self.replay_buffer.extend(group.rollouts)) > 0
            del self._unfinished[group.draw.group_id]
            self.counters += group.counters
            return kept

    @property
    def _exhausted(self) -> bool:
        return not self._repeat and self.prompts.exhausted

    def _draw(self) -> PromptDraw | None:
        with self._commit:
            draw = self._repeat.pop(0) if self._repeat else self.prompts.draw()
            if draw is not None:
                self._unfinished[draw.group_id] = draw
            return draw

    async def _sample_group(self, draw: PromptDraw, scoring: Executor) -> FinishedGroup:
        """Sample and score one group; without rollouts where too few of its completions survive."""
        prompt_ids = encode_prompt(self.tokenizer, draw, self.engine.max_length)
        params = replace(self.sampling_params, seed=request_seed(self.seed, draw.group_id))
        answered = await self.engine.generate(prompt_ids, params)
        completions = [c for c in answered if c.finish_reason != "abort" and c.token_ids]
        counters = Counter(
            completions_failed=params.n - len(completions), tokens_sampled=sum(len(c.token_ids) for c in completions)
        )
        enough = min(2, params.n)
        if len(completions) < enough:
            return FinishedGroup(draw, [], counters + Counter(groups_dropped_failed=1))
        components = await self.reward.components(
            [draw.prompt] * len(completions),
            as_answers(self.tokenizer, draw, completions),
            [c.token_ids for c in completions],
            {name: [value] * len(completions) for name, value in draw.columns.items()},
            scoring,
        )
        rewards = self.reward.weighted_sums(components)
        scores = components if self.advantage_per_reward else rewards
        rollouts = make_group(
            draw,
            prompt_ids,
            completions,
            rewards,
            self.advantage(torch.tensor(scores, dtype=torch.float64)),
            group_size=params.n,
            mask_truncated=self.mask_truncated,
        )
        counters["rollouts_unscored"] = len(completions) - len(rollouts)
        if len(rollouts) < enough:
            return FinishedGroup(draw, [], counters + Counter(groups_dropped_unscored=1))
        return FinishedGroup(draw, rollouts, counters + Counter(groups_finished=1, rollouts_finished=len(rollouts)))

    def _slots_changed(self) -> None:
        self._call_in_loop(lambda: self._wake.set() if self._wake is not None else None)

    def _call_in_loop(self, call: Callable[[], Any]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            # the loop may close between the check and the call: then there is nothing left to tell
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)
