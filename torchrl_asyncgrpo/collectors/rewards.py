"""Reward functions in TRL's calling convention, checked and combined."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Executor
from typing import Any

RewardFunction = Callable[..., Any]


class RewardFunctions:
    """One reward per completion from one or several functions ``f(prompts, completions, **columns)``.

    Each function gets lists with one element per completion: ``prompts`` and ``completions`` (texts, or message
    lists where the prompt is a chat), ``completion_ids`` (token ids) and every column of the prompt source. It
    returns a list of numbers, with None for a completion that it does not score. Functions may be async.

    Args:
        functions: one function or a non-empty sequence of them.
        weights: one finite factor per function; 1 each by default.

    Raises:
        ValueError: if there is no function, or weights and functions differ in number.
        TypeError: if a function cannot be called.
    """

    def __init__(
        self, functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> None:
        self.functions = list(functions) if isinstance(functions, Sequence) else [functions]
        if not self.functions:
            raise ValueError("reward_funcs is empty; give at least one reward function.")
        for function in self.functions:
            if not callable(function):
                raise TypeError(f"reward function {function!r} is a {type(function).__name__}; give a callable.")
        self.weights = [1.0] * len(self.functions) if weights is None else [float(w) for w in weights]
        if len(self.weights) != len(self.functions) or not all(map(math.isfinite, self.weights)):
            raise ValueError(
                f"reward_weights={weights} for {len(self.functions)} reward functions; give one finite number each."
            )

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        executor: Executor,
    ) -> list[float]:
        """Score the completions of one group: the weighted sums of ``components``, which has the arguments."""
        return self.weighted_sums(await self.components(prompts, completions, completion_ids, columns, executor))

    def weighted_sums(self, components: Sequence[Sequence[float]]) -> list[float]:
        """Combine the rewards of all functions.

        Args:
            components: [G, K] rewards, NaN where a function did not score a completion.

        Returns:
            [G] weighted sums over the functions that scored a completion; NaN where none did.
        """
        sums = []
        for row in components:
            total = math.nan
            for weight, value in zip(self.weights, row, strict=True):
                if not math.isnan(value):
                    total = weight * value + (0.0 if math.isnan(total) else total)
            sums.append(total)
        return sums

    async def components(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        executor: Executor,
    ) -> list[list[float]]:
        """Score the completions of one group by every function.

        Args:
            prompts: [G] prompts.
            completions: [G] texts or message lists.
            completion_ids: [G] token ids.
            columns: further columns, [G] values each.
            executor: where functions that are not async run, so that they do not hold up the event loop.

        Returns:
            [G, K] rewards, not weighted; NaN where a function did not score a completion.

        Raises:
            ValueError: if a function returns no list, or one of another length, or a value that is not a finite
                number or None.
            Exception: whatever a function raised; a ``RuntimeError`` in place of ``StopIteration``, as in coroutines.
        """
        arguments = {**columns, "prompts": list(prompts), "completions": list(completions)}
        arguments["completion_ids"] = [list(ids) for ids in completion_ids]
        by_function = []
        for function in self.functions:
            if inspect.iscoroutinefunction(function):
                values = await function(**arguments)
            else:
                call = functools.partial(_call, function, arguments)
                values = await asyncio.get_running_loop().run_in_executor(executor, call)
                if inspect.isawaitable(values):  # an object with an async __call__, or a function that returns one
                    values = await values
            by_function.append(_checked(function, values, len(completions)))
        return [list(row) for row in zip(*by_function, strict=True)]


def _call(function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    """Call a function in a thread; asyncio never ends the future of one that raises ``StopIteration``."""
    try:
        return function(**arguments)
    except StopIteration as stop:
        raise RuntimeError(
            f"reward function {_name(function)!r} raised StopIteration: an iterator in it ended. Give next() a "
            "default, or catch StopIteration there."
        ) from stop


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", repr(function))


def _checked(function: RewardFunction, values: Any, count: int) -> list[float]:
    """Values of a function as finite numbers, NaN where it returned None."""
    name = _name(function)
    # a mapping would be read by its keys, a set in any order
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Collection):
        kind = type(values).__name__
        raise ValueError(
            f"reward function {name!r} returned a {kind}; return a list of {count} numbers, in order of completions."
        )
    if len(values) != count:
        raise ValueError(
            f"reward function {name!r} returned {len(values)} values for {count} completions; return a list of {count}."
        )
    checked: list[float] = []
    for i, value in enumerate(values):
        if value is None:
            checked.append(math.nan)
            continue
        number = None if isinstance(value, (str, bytes)) else _as_float(value)
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"reward function {name!r} returned {value!r} for completion {i} of {count}; return a finite number, "
                "or None where the completion is not scored."
            )
        checked.append(number)
    return checked


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
