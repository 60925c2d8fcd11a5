"""An event loop in a thread of its own, which runs coroutines for callers in any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Run coroutines in one event loop, so that what belongs to a loop outlives the loops of those who wait for it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closing = threading.Lock()
        self._closed = False
        self._thread.start()

    async def run(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Result of ``function(*arguments)``, awaited in the thread's loop; cancelling this cancels that.

        Raises:
            RuntimeError: after :meth:`close`.
            asyncio.CancelledError: if the loop was closed meanwhile.
        """
        with self._closing:
            if self._closed:
                raise RuntimeError("the event loop was closed.")
            future = asyncio.run_coroutine_threadsafe(function(*arguments), self._loop)
        return await asyncio.wrap_future(future)

    def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """Cancel everything that runs, await ``last()`` in the loop, and end the thread. May be called again."""
        with self._closing:
            first, self._closed = not self._closed, True
        if first:
            asyncio.run_coroutine_threadsafe(self._finish(last), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _finish(self, last: Callable[[], Awaitable[None]]) -> None:
        try:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await last()
        finally:
            self._loop.stop()


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order; when one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Places:
    """A limit on what runs at once, in which one request takes several places. Those who wait come in order.

    Args:
        number: places, >= 1.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, places: int) -> None:
        """Return when ``places`` of them are this request's; at most as many as there are."""
        async with self._turn:  # nobody overtakes, and no two wait with half of their places each
            while self._free < places:
                self._freed.clear()
                await self._freed.wait()
            self._free -= places

    def give_back(self, places: int) -> None:
        """Free what ``take`` took."""
        self._free += places
        self._freed.set()
