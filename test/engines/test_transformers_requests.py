"""Cohorts, cancellation, errors and shutdown."""

import asyncio
import gc
import threading
import weakref

import pytest
import torch
from engines.tiny_models import prompts_of, sample, tiny_model

from torchrl_asyncgrpo.engines.base import SamplingParams
from torchrl_asyncgrpo.engines.transformers import TransformersEngine


@pytest.fixture
def engine():
    engine = TransformersEngine(tiny_model(), seed=0)
    yield engine
    engine.shutdown()


def embedded_shapes(engine):
    """Shape of the input of every forward from now on."""
    shapes = []
    engine._model.transformer.wte.register_forward_hook(
        lambda module, args, output: shapes.append(tuple(args[0].shape))
    )
    return shapes


class Gate:
    """Holds each forward of the engine until the test lets it go on."""

    def __init__(self, engine):
        self.reached = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        engine._model.register_forward_pre_hook(self._wait)

    def _wait(self, module, args):
        self.reached.release()
        assert self.allowed.acquire(timeout=60)

    async def step_reached(self):
        assert await asyncio.to_thread(self.reached.acquire, timeout=60)

    def open(self):
        self.allowed.release(10**6)


PARAMS = SamplingParams(max_tokens=6, n=2, seed=0, ignore_eos=True)


def test_requests_of_one_tick_form_one_cohort_and_a_later_one_another(engine):
    shapes = embedded_shapes(engine)

    async def main():
        first = [asyncio.create_task(engine.generate(prompt, PARAMS)) for prompt in prompts_of(4, 4, 4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        later = asyncio.create_task(engine.generate(prompts_of(5)[0], PARAMS))
        return await asyncio.gather(*first, later)

    assert [len(completions) for completions in asyncio.run(main())] == [2, 2, 2, 2]
    assert shapes.count((3, 4)) == shapes.count((1, 5)) == 1
    assert shapes.count((6, 1)) == shapes.count((2, 1)) == 5


def test_a_cohort_gives_the_same_bits_beside_another(engine):
    prompts = prompts_of(4, 6)
    alone = [sample(engine, [prompt], PARAMS) for prompt in prompts]

    async def main():
        gate = Gate(engine)
        first = asyncio.create_task(engine.generate(prompts[0], PARAMS))
        await gate.step_reached()
        second = asyncio.create_task(engine.generate(prompts[1], PARAMS))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.open()
        return [[await first], [await second]]

    assert asyncio.run(main()) == alone


def test_cohorts_take_turns(engine):
    shapes = embedded_shapes(engine)

    async def main():
        gate = Gate(engine)
        long = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(max_tokens=40, seed=0, ignore_eos=True)))
        await gate.step_reached()
        short = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=1, seed=0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate.open()
        await short
        await long

    asyncio.run(main())
    assert shapes.index((1, 2)) <= 2
    assert len(shapes) == 41


def test_a_request_is_answered_when_its_own_completions_ended(engine):
    async def main():
        gate = Gate(engine)
        short = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=2, seed=0, ignore_eos=True)))
        long = asyncio.create_task(engine.generate([2], SamplingParams(max_tokens=9, seed=0, ignore_eos=True)))
        gate.allowed.release(2)
        [completion] = await short
        assert not long.done()
        gate.open()
        await long
        return completion

    assert len(asyncio.run(main()).token_ids) == 2


def test_the_event_loop_stays_responsive_while_a_step_runs(engine):
    async def main():
        gate = Gate(engine)
        task = asyncio.create_task(engine.generate([1], PARAMS))
        await gate.step_reached()
        ticks = 0
        for _ in range(100):
            await asyncio.sleep(0)
            ticks += 1
        assert not task.done()
        gate.open()
        await task
        return ticks

    assert asyncio.run(main()) == 100


def test_a_cancelled_request_leaves_the_batch_and_the_others_stay(engine):
    shapes = embedded_shapes(engine)
    prompts = prompts_of(4, 4)
    [_, expected] = sample(engine, prompts, PARAMS)
    shapes.clear()

    async def main():
        gate = Gate(engine)
        doomed, other = (asyncio.create_task(engine.generate(prompt, PARAMS)) for prompt in prompts)
        await gate.step_reached()
        gate.allowed.release()
        await gate.step_reached()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        gate.open()
        return await other

    survivors = asyncio.run(main())
    assert [c.token_ids for c in survivors] == [c.token_ids for c in expected]
    assert shapes == [(2, 4), (4, 1), *[(2, 1)] * 4]


def test_decoding_stops_when_nobody_waits_any_more(engine):
    shapes = embedded_shapes(engine)

    async def main():
        gate = Gate(engine)
        task = asyncio.create_task(engine.generate([1, 2], PARAMS))
        await gate.step_reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=1))

    asyncio.run(main())
    assert shapes == [(1, 2), (1, 3)]


def test_an_error_while_decoding_reaches_every_request_of_its_cohort_and_no_other(engine):
    class BrokenError(Exception):
        pass

    def break_widest(module, args, kwargs):
        if kwargs["input_ids"].shape[0] == 4:
            raise BrokenError("no memory left")

    engine._model.register_forward_pre_hook(break_widest, with_kwargs=True)

    async def main():
        pair = [asyncio.create_task(engine.generate(prompt, PARAMS)) for prompt in prompts_of(4, 5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        other = asyncio.create_task(engine.generate([1], PARAMS))
        return await asyncio.gather(*pair, other, return_exceptions=True)

    one, two, other = asyncio.run(main())
    assert isinstance(one, BrokenError)
    assert one is two
    assert len(other) == 2
    assert len(sample(engine, [[1]], PARAMS)) == 1


def test_stop_iteration_while_decoding_reaches_the_request(engine):
    """No future takes a StopIteration."""
    engine._model.register_forward_pre_hook(lambda *_: next(iter([])))
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        asyncio.run(asyncio.wait_for(engine.generate([1], PARAMS), 5))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_weights_that_give_no_distribution_are_reported(engine):
    with torch.no_grad():
        engine._model.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="check the weights"):
        sample(engine, [[1]], PARAMS)


def test_several_event_loops_one_after_the_other_and_at_once(engine):
    expected = sample(engine, [[1, 2]], PARAMS)
    results = []
    threads = [threading.Thread(target=lambda: results.append(sample(engine, [[1, 2]], PARAMS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3


def test_a_loop_that_closed_meanwhile_disturbs_nobody(engine):
    gate = Gate(engine)
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate([1], PARAMS))
    loop.run_until_complete(gate.step_reached())
    loop.run_until_complete(loop.shutdown_default_executor())
    task._log_destroy_pending = False
    loop.close()
    gate.open()
    assert len(sample(engine, [[1]], PARAMS)) == 1


@pytest.mark.parametrize("paused", [False, True])
def test_shutdown_cancels_what_runs(engine, paused):
    async def main():
        gate = Gate(engine)
        running = asyncio.create_task(engine.generate([1], PARAMS))
        if paused:
            engine.pause()
            await asyncio.sleep(0)
        else:
            await gate.step_reached()
        forming = asyncio.create_task(engine.generate([2], PARAMS))
        await asyncio.sleep(0)
        gate.open()
        await asyncio.to_thread(engine.shutdown)
        results = await asyncio.wait_for(asyncio.gather(running, forming, return_exceptions=True), 60)
        with pytest.raises(RuntimeError, match="shut down"):
            await engine.generate([1], PARAMS)
        return results

    assert [type(result) for result in asyncio.run(main())] == [asyncio.CancelledError] * 2
    engine.shutdown()
    assert not engine._worker or not engine._worker.is_alive()


def test_caches_are_freed_when_a_cohort_ended_or_failed(engine, monkeypatch):
    from torchrl_asyncgrpo.engines import cohort

    caches = []

    class Watched(cohort.GroupCache):
        def __init__(self, *args):
            super().__init__(*args)
            caches.append((weakref.ref(self), self.layers))

    monkeypatch.setattr(cohort, "GroupCache", Watched)
    sample(engine, [[1, 2]], PARAMS)
    sample(engine, [[1]], SamplingParams(max_tokens=1))
    gc.collect()
    assert len(caches) == 2
    assert caches[0][0]() is None
    engine._model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as held:
        sample(engine, [[1, 2]], PARAMS)
    assert held.value
    assert caches[2][1] == []
