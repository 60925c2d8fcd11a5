"""VLLMEngine and a server that fails, hangs, dies and comes back with old weights: nothing lost, nothing doubled."""

import asyncio
import math
import re
import threading
import time

import pytest
from engines.fake_vllm import WAIT_S, FakeVLLM, sampled, wait_until

from torchrl_asyncgrpo.engines.base import SamplingParams
from torchrl_asyncgrpo.engines.vllm import VLLMEngine
from torchrl_asyncgrpo.engines.vllm_http import RequestRefused, ServerFailed, ServerUnreachable

PARAMS = SamplingParams(max_tokens=6, n=2, seed=3)


@pytest.fixture
def make_engine(fake):
    engines = []

    def make(server=fake, **options):
        engines.append(VLLMEngine(server.url, **{"poll_interval": 0.01, "restart_timeout": WAIT_S} | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def engine(make_engine):
    return make_engine()


def sample(engine, prompt=(1, 2), params=PARAMS):
    return asyncio.run(engine.generate(prompt, params))


def counted(engine, **expected):
    return {name: engine.counters[name] for name in expected} == expected


@pytest.mark.parametrize(
    "fault", [(500, {"error": {"message": "out of blocks"}}), (503, b""), None, "half", (200, b"<")]
)
def test_failed_request_is_asked_again_and_counted_once(fake, engine, fault):
    fake.script = [fault, sampled, fault]
    first, second = sample(engine), sample(engine)
    assert [len(c.token_ids) for c in first + second] == [6] * 4
    assert counted(engine, requests=4, retries=2, recoveries=0, tokens=24)
    assert fake.bodies[0] == fake.bodies[1], "it draws what it would have drawn"


def test_retries_have_a_bound(fake, make_engine):
    engine = make_engine(retries=2)
    fake.script = [(500, {"error": {"message": f"fault {i}"}}) for i in range(4)]
    with pytest.raises(ServerFailed, match=r"failed 3 times in a row, and http://\S+ says it is well: .*fault 2"):
        sample(engine)
    assert counted(engine, requests=3, retries=3)
    assert len(sample(engine)) == 2, "one more failure, and a bound of its own"


def test_bound_is_of_failures_in_a_row(fake, make_engine):
    engine = make_engine(retries=1)
    part = lambda body: sampled(body, reason="abort", tokens=2)  # noqa: E731
    fake.script = [(500, b""), part, (500, b""), part, (500, b"")]
    (completion,) = sample(engine, params=SamplingParams(max_tokens=6, seed=3))
    assert len(completion.token_ids) == 6 and counted(engine, retries=3, resumed=2)


def test_refused_request_is_raised_at_once(fake, engine):
    fake.script = [(400, {"error": {"message": "token id 99999 is out of vocabulary"}})]
    with pytest.raises(RequestRefused, match="answered 400: token id 99999"):
        sample(engine)
    assert counted(engine, requests=1, retries=0)


def test_aborted_completions_are_continued_to_their_budget(fake, engine):
    """Each by its own request, with the tokens so far; the finished one is not asked for again."""

    def first(body):
        answer = sampled(body, versions=[(0, 1), (4, 2)], tokens=2)
        answer["choices"][0]["finish_reason"] = "abort"
        answer["choices"][1]["finish_reason"] = "stop"
        return answer

    fake.script = [first, lambda body: sampled(body, versions=[(5, None)], reason="abort", tokens=1)]
    fake.script.append(lambda body: sampled(body, versions=[(6, None)]))
    aborted, stopped = sample(engine)
    assert (stopped.finish_reason, stopped.policy_versions) == ("stop", [0, 4])
    assert (aborted.finish_reason, aborted.policy_versions) == ("length", [0, 4, 5, 6, 6, 6])
    assert aborted.log_probs == [-1.0 - token for token in aborted.token_ids]
    contexts = [body["token_ids"] for body in fake.bodies]
    assert contexts == [[1, 2], [1, 2, *aborted.token_ids[:2]], [1, 2, *aborted.token_ids[:3]]]
    budgets = [(body["sampling_params"]["n"], body["sampling_params"]["max_tokens"]) for body in fake.bodies]
    assert budgets == [(2, 6), (1, 4), (1, 3)]
    seeds = {body["sampling_params"]["seed"] for body in fake.bodies}
    assert len(seeds | {fake.bodies[0]["sampling_params"]["seed"] + 1}) == 4, "no stream is drawn from twice"
    assert counted(engine, requests=3, resumed=2, retries=0, tokens=8) and engine.policy_version == 6


def test_completion_aborted_at_its_last_token_has_ended(fake, engine):
    fake.script = [lambda body: sampled(body, reason="abort")]
    assert [c.finish_reason for c in sample(engine)] == ["length", "length"]
    assert counted(engine, requests=1, resumed=0)


def test_completion_aborted_before_its_first_token_starts_anew(fake, engine):
    fake.script = [lambda body: sampled(body, versions=[], reason="abort", tokens=0)] * 3
    assert [len(c.token_ids) for c in sample(engine)] == [6, 6]


def test_seeds_make_a_stream_per_completion_and_request(fake, engine):
    for seed in (3, 3, 4, None, None):
        sample(engine, params=SamplingParams(max_tokens=1, seed=seed))
    seeds = [body["sampling_params"]["seed"] for body in fake.bodies]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 4


def test_group_larger_than_the_server_takes_is_several_requests(fake, engine):
    """max_num_seqs bounds n; the streams are the same as of one request."""
    completions = sample(engine, params=SamplingParams(max_tokens=1, n=19, seed=3))
    sizes = [body["sampling_params"]["n"] for body in fake.bodies]
    assert len(completions) == 19 and sorted(sizes) == [3, 8, 8]
    start = min(body["sampling_params"]["seed"] for body in fake.bodies)
    assert [c.token_ids for c in completions] == [[(start + i) % 50] for i in range(19)]


def test_no_more_sequences_at_once_than_allowed_and_all_get_their_turn(fake, make_engine):
    engine = make_engine(max_concurrency=5)
    gate = threading.Barrier(2)

    def held(body):
        gate.wait(WAIT_S)
        return sampled(body)

    async def groups():
        params = [SamplingParams(max_tokens=2, n=n, seed=n) for n in (2, 3, 1, 4, 2, 3)]
        return await asyncio.gather(*(engine.generate([1], p) for p in params))

    # 2 + 3, then 1 + 4, then 2 + 3: two at a time, and each pair opens the gate for itself
    fake.script = [held] * 6
    assert [len(group) for group in asyncio.run(groups())] == [2, 3, 1, 4, 2, 3]
    assert fake.most_sequences == 5


def test_server_that_hangs_is_given_up_within_its_time_out_and_waited_for(fake, make_engine):
    engine = make_engine(hang_timeout=0.3)
    fake.script = [lambda body: fake.gate.clear() or "hang"]
    started = time.monotonic()
    opener = threading.Thread(target=lambda: fake.disconnected.acquire(timeout=WAIT_S) and fake.gate.set())
    opener.start()
    assert len(sample(engine)) == 2
    opener.join()
    assert time.monotonic() - started < 10, "request_timeout is ten minutes"
    assert counted(engine, requests=2, retries=1, recoveries=1)


def test_request_that_takes_too_long_is_asked_again(fake, make_engine):
    engine = make_engine(request_timeout=0.3, retries=1)
    fake.script = ["hang"] * 3
    with pytest.raises(ServerFailed, match=r"no answer within 0\.3 s.*Raise request_timeout"):
        sample(engine)
    assert len(sample(engine)) == 2 and counted(engine, retries=3, recoveries=0)


def test_server_that_dies_and_restarts_with_old_weights(fake, engine):
    """Every unfinished prompt waits until the current weights are back, is asked again, and one outage is counted."""
    fake.version = "5"
    fake.script = [lambda body: sampled(body, versions=[(5, None)])]
    sample(engine)
    probes = []

    def outage():
        for _ in range(6):
            fake.arrived.acquire(timeout=WAIT_S)
        fake.kill()
        fake.version = "default"
        fake.start()
        probes.append(wait_until(lambda: any("weight_info" in path for path in fake.paths)))
        fake.script = [lambda body: sampled(body, versions=[(6, None)])] * 6
        fake.version = "6"

    async def batch():
        fake.script = ["hang"] * 6
        thread = threading.Thread(target=outage)
        thread.start()
        groups = await asyncio.gather(*(engine.generate([i], PARAMS) for i in range(1, 7)))
        thread.join()
        return groups

    fake.arrived.acquire()
    fake.paths.clear()
    groups = asyncio.run(batch())
    assert [len(group) for group in groups] == [2] * 6 and probes == [True]
    assert {version for group in groups for c in group for version in c.policy_versions} == {6}
    assert counted(engine, requests=13, retries=6, recoveries=1) and engine.policy_version == 6
    asked = [body["token_ids"] for body in fake.bodies[1:]]
    assert sorted(asked[:6]) == sorted(asked[6:]) == [[i] for i in range(1, 7)]


def test_answer_of_a_server_that_restarted_between_two_requests_is_thrown_away(fake, engine):
    fake.version = "5"
    fake.script = [lambda body: sampled(body, versions=[(5, None)])]
    sample(engine)

    def old(body):
        fake.version = "default"
        return sampled(body, versions=[(0, None)])

    fake.script = [old, lambda body: sampled(body, versions=[(5, None)])]
    pushed = threading.Timer(0.2, lambda: setattr(fake, "version", "5"))
    pushed.start()
    completions = sample(engine)
    assert [c.policy_versions for c in completions] == [[5] * 6] * 2
    assert counted(engine, requests=3, retries=1, recoveries=1, tokens=24)


def test_answer_is_kept_when_the_version_rose_after_it_was_asked_for(fake, engine):
    """Two requests under way: the second one's answer tells of version 5, the first one's is still of 4."""
    release = threading.Event()

    def late(body):
        release.wait(WAIT_S)
        return sampled(body, versions=[(4, None)])

    async def both():
        fake.script = [late, lambda body: sampled(body, versions=[(5, None)])]
        first = asyncio.ensure_future(engine.generate([1], PARAMS))
        await asyncio.to_thread(fake.arrived.acquire)
        await engine.generate([2], PARAMS)
        release.set()
        return await first

    assert [c.policy_versions for c in asyncio.run(both())] == [[4] * 6] * 2
    assert engine.policy_version == 5 and counted(engine, retries=0)


def test_version_can_be_set_back(fake, engine):
    fake.script = [lambda body: sampled(body, versions=[(5, None)]), lambda body: sampled(body, versions=[(3, None)])]
    sample(engine)
    engine.policy_version = 2
    assert sample(engine)[0].policy_versions == [3] * 6 and engine.policy_version == 3
    assert counted(engine, retries=0)


def test_server_that_stays_away_is_named_with_seconds_and_remedy(fake, make_engine):
    engine = make_engine(restart_timeout=0.2)
    fake.script = [lambda body: fake.kill()]
    with pytest.raises(TimeoutError, match=rf"{fake.url} did not recover within restart_timeout=0.2 s.*start it again"):
        sample(engine)
    assert counted(engine, retries=1, recoveries=0)


def test_weights_that_are_not_pushed_again_are_named(fake, make_engine):
    engine = make_engine(restart_timeout=0.2)
    fake.script = [lambda body: sampled(body, versions=[(5, None)])]
    sample(engine)
    fake.script = [(500, b"")]
    with pytest.raises(TimeoutError, match="those of version 0, and version 5 was seen.*sender has to push again"):
        sample(engine)


def test_trainer_has_as_long_to_push_again_as_the_server_had_to_restart(fake, make_engine):
    engine = make_engine(restart_timeout=2.0, poll_interval=0.15)
    fake.version = "5"
    fake.script = [lambda body: sampled(body, versions=[(5, None)]), (500, b"")]
    sample(engine)
    fake.health, fake.versions = [503] * 8, ["default"] * 8
    fake.script.append(lambda body: sampled(body, versions=[(5, None)]))
    assert len(sample(engine)) == 2 and counted(engine, recoveries=1)


def test_server_that_comes_back_without_its_routes_is_refused(fake, engine):
    fake.version = None
    fake.script = [(500, b"")]
    with pytest.raises(RequestRefused, match="weight_info answered 404"):
        sample(engine)


def test_prompt_that_brings_the_server_down_each_time_is_given_up(fake, engine):
    def down(body):
        fake.health = [503]
        return 500, b""

    fake.script = [down] * 20
    with pytest.raises(ServerFailed, match="went down 11 times in a row"):
        sample(engine)


def test_answers_without_versions_are_an_error_at_once(fake, engine):
    fake.script = [lambda body: sampled(body, weight_versions=None)]
    with pytest.raises(RuntimeError, match="do not cover the 6 tokens"):
        sample(engine)
    assert counted(engine, requests=1)


def test_tokens_without_a_log_prob_are_counted(fake, engine):
    fake.script = [lambda body: sampled(body, logprobs=None)]
    completions = sample(engine)
    assert all(math.isnan(value) for c in completions for value in c.log_probs)
    assert counted(engine, missing_log_probs=12)


def test_failure_of_one_part_cancels_the_others(fake, engine):
    fake.script = ["hang", (400, b"no")]

    async def group():
        with pytest.raises(RequestRefused):
            await engine.generate([1], SamplingParams(max_tokens=1, n=16))
        return await asyncio.to_thread(fake.disconnected.acquire, timeout=WAIT_S)

    assert asyncio.run(group())
    fake.script = []
    assert len(sample(engine)) == 2


def test_cancelling_hangs_up_and_asks_nothing_again(fake, engine):
    fake.script = ["hang"]

    async def cancelled():
        task = asyncio.ensure_future(engine.generate([1], PARAMS))
        await asyncio.to_thread(fake.arrived.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(fake.disconnected.acquire, timeout=WAIT_S)

    assert asyncio.run(cancelled()) and counted(engine, requests=1, retries=0)


def test_failed_and_cancelled_groups_give_their_places_back(fake, make_engine):
    engine = make_engine(max_concurrency=2, retries=0)

    async def cancelled():
        waiting = [asyncio.ensure_future(engine.generate([1], PARAMS)) for _ in range(3)]
        await asyncio.to_thread(fake.arrived.acquire)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    fake.script = ["hang", (500, b"")]
    asyncio.run(cancelled())
    with pytest.raises(ServerFailed):
        sample(engine)
    assert len(sample(engine)) == 2


def test_shutdown_cancels_what_runs_and_refuses_what_comes(fake, engine):
    fake.script = ["hang"]

    async def caller():
        task = asyncio.ensure_future(engine.generate([1], PARAMS))
        await asyncio.to_thread(fake.arrived.acquire)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(caller())
    engine.shutdown()
    assert fake.disconnected.acquire(timeout=WAIT_S)
    with pytest.raises(RuntimeError, match="was shut down"):
        sample(engine)
    assert not any(thread.name == "vllm-engine" for thread in threading.enumerate())


def test_engine_that_was_never_asked_leaves_no_thread(fake, engine):
    engine.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        sample(engine)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 64}, "no room for a prompt.*--max-model-len above 64"),
        ({"temperature": 0.005}, "temperature=0.005; vLLM samples at temperatures from 0.01 to 2.0"),
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"top_p": 0.9}, r"top_p=0.9.*would not be 1.*--return-sampling-mask \(on a GPU\)"),
        ({"top_k": 5}, "--return-sampling-mask"),
        ({"min_p": 0.1}, "--return-sampling-mask"),
    ],
)
def test_parameters_that_cannot_be_sampled_exactly_are_refused(fake, engine, changes, reason):
    params = SamplingParams(**{"max_tokens": 6} | changes)
    with pytest.raises(ValueError, match=reason):
        engine.check(params)
    with pytest.raises(ValueError, match=reason):
        sample(engine, params=params)
    assert fake.bodies == []


@pytest.mark.parametrize("length", [0, 64, 100])
def test_prompt_without_room_is_refused(fake, engine, length):
    with pytest.raises(ValueError, match=f"{length} tokens; it needs at least 1, and room for another.*64"):
        sample(engine, prompt=[1] * length)


def test_long_prompt_shortens_the_completion(fake, engine):
    sample(engine, prompt=[1] * 60)
    assert fake.bodies[0]["sampling_params"]["max_tokens"] == 4


def test_sampling_masks_of_all_parts_come_with_the_completion(make_engine):
    fake = FakeVLLM(return_sampling_mask=True)
    try:
        engine = make_engine(fake)
        params = SamplingParams(max_tokens=3, top_k=5, top_p=0.9, seed=3)
        engine.check(params)
        with pytest.raises(ValueError, match="top_k of at least 1"):
            engine.check(SamplingParams(max_tokens=3))
        fake.script = [lambda body: sampled(body, reason="abort", tokens=1, sampling_mask=[[7, 8]])]
        fake.script.append(lambda body: sampled(body, sampling_mask=[[1], [2, 3]]))
        (completion,) = sample(engine, params=params)
        assert completion.sampling_mask == [[7, 8], [1], [2, 3]]
        assert fake.bodies[0]["sampling_params"]["top_p"] == 0.9
    finally:
        fake.stop()


def test_any_event_loop_may_ask_and_several_at_once(fake, engine):
    def ask(results):
        for _ in range(3):
            results += asyncio.run(engine.generate([1], PARAMS))

    results = []
    threads = [threading.Thread(target=ask, args=(results,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 24 and counted(engine, requests=12)


def test_everything_that_a_server_lacks_is_listed_at_once(make_engine):
    fake = FakeVLLM(logprobs_mode="raw_logprobs", chunked=True)
    try:
        with pytest.raises(ValueError) as failure:
            make_engine(fake, required_length=65)
        text = str(failure.value)
        for flag in ("--logprobs-mode processed_logprobs", "--no-enable-chunked-prefill", "--max-model-len 65"):
            assert flag in text
        assert "DEV_MODE" not in text and "--enable-scale-out" not in text
    finally:
        fake.stop()


def test_server_without_any_routes_of_its_own(fake, make_engine):
    del fake.routes["/server_info"]
    fake.version, fake.empty_request = None, (403, {"error": {"message": "restart with --enable-scale-out"}})
    with pytest.raises(ValueError, match=re.compile("VLLM_SERVER_DEV_MODE=1.*--enable-scale-out", re.DOTALL)):
        make_engine()


def test_unreachable_server_is_named_with_what_to_do(fake, make_engine):
    fake.kill()
    with pytest.raises(ServerUnreachable, match=f"no vLLM server answers at {fake.url}.*vllm_server --model"):
        make_engine()


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_concurrency", 0), ("retries", -1), ("request_timeout", 0), ("poll_interval", -1), ("hang_timeout", 0)],
)
def test_options_out_of_range_are_refused(make_engine, option, value):
    with pytest.raises(ValueError, match=f"{option}={value}"):
        make_engine(**{option: value})
