"""The engine's own event loop: results, exceptions and cancellation cross to the caller's, and nothing is left over."""

import asyncio
import threading

import pytest

from torchrl_asyncgrpo.engines.loop_thread import LoopThread, Places, gather_or_cancel


@pytest.fixture
def loop():
    thread = LoopThread("test-loop")
    yield thread
    thread.close(nothing)


async def nothing():
    pass


async def name_of_thread():
    return threading.current_thread().name


def test_runs_in_its_own_thread_for_one_loop_after_the_other(loop):
    assert [asyncio.run(loop.run(name_of_thread)) for _ in range(2)] == ["test-loop"] * 2


def test_exception_reaches_the_caller_itself(loop):
    failure = ValueError("mine")

    async def fail():
        raise failure

    with pytest.raises(ValueError) as raised:
        asyncio.run(loop.run(fail))
    assert raised.value is failure


def started_and_waiting(started, ended):
    async def wait():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    return wait


def test_cancelling_the_caller_cancels_what_runs(loop):
    started, ended = threading.Event(), threading.Event()

    async def caller():
        task = asyncio.ensure_future(loop.run(started_and_waiting(started, ended)))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, 30)

    asyncio.run(caller())


def test_closing_cancels_what_runs_then_awaits_the_last_and_refuses_the_rest(loop):
    started, ended = threading.Event(), threading.Event()
    order = []

    async def last():
        order.append(ended.is_set())

    async def caller():
        task = asyncio.ensure_future(loop.run(started_and_waiting(started, ended)))
        await asyncio.to_thread(started.wait)
        loop.close(last)  # in the caller's own loop: nobody waits for it in turn
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(caller())
    loop.close(last)
    assert order == [True]
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(loop.run(nothing))
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}


def test_first_failure_cancels_the_others():
    ended = threading.Event()

    async def fail():
        raise KeyError("mine")

    async def main():
        with pytest.raises(KeyError):
            await gather_or_cancel([started_and_waiting(threading.Event(), ended)(), fail()])
        await asyncio.sleep(0)
        assert ended.is_set()
        assert await gather_or_cancel([asyncio.sleep(0, 1), asyncio.sleep(0, 2)]) == [1, 2]

    asyncio.run(main())


def test_places_are_given_in_order_and_never_by_halves():
    async def main():
        places, taken = Places(4), []

        async def take(name, number):
            await places.take(number)
            taken.append(name)

        tasks = [asyncio.ensure_future(take(name, number)) for name, number in (("a", 3), ("b", 2), ("c", 1), ("d", 4))]
        for _ in range(5):
            await asyncio.sleep(0)
        assert taken == ["a"], "c would fit, but does not overtake b"
        tasks[1].cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert taken == ["a", "c"], "b gave up its turn"
        places.give_back(1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert taken == ["a", "c"]
        places.give_back(3)
        await tasks[3]
        assert taken == ["a", "c", "d"]
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
