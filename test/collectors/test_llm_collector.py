"""Accounting, back-pressure, failures and resume of the collector, on an engine that the test controls."""

import threading
import time

import pytest
from fakes import ScriptedEngine, character_tokenizer

from torchrl_asyncgrpo import AsyncLLMCollector, PromptSource, SamplingParams, make_replay_buffer


def reward(completions, **_):
    return [float(len(c)) for c in completions]


def make(
    engine=None, prompts=("1+1=", "2+2=", "3+3="), rewards=reward, beside=True, batch_size=2, max_staleness=0, **options
):
    engine = engine or ScriptedEngine()
    buffer = make_replay_buffer(
        batch_size=batch_size, current_version=lambda: engine.policy_version, max_staleness=max_staleness, timeout=20
    )
    options = {"groups_per_step": batch_size, "replay_buffer": buffer, "max_staleness": max_staleness, **options}
    collector = AsyncLLMCollector(
        engine,
        prompts if not isinstance(prompts, tuple) else list(prompts),
        rewards,
        tokenizer=character_tokenizer(),
        sampling_params=SamplingParams(max_tokens=4, n=options.pop("n", 3), top_p=options.pop("top_p", 1.0)),
        **options,
    )
    return collector, buffer, engine


def eventually(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.001)


def group_ids(window):
    return [int(row["group_id"]) for row in window.unbind(0)]


def test_in_turn_yields_scored_groups():
    collector, _, engine = make(replay_buffer=None)
    batch = next(iter(collector))
    assert group_ids(batch) == [0, 0, 0, 1, 1, 1]
    rows = batch.unbind(0)
    assert [float(r["reward"]) for r in rows] == [float(r["loss_mask"].sum()) for r in rows]
    for group in (rows[:3], rows[3:]):
        assert sum(float(r["advantage"]) for r in group) == pytest.approx(0, abs=1e-5)
    assert engine.cohorts == [[0, 1]]


def test_in_turn_with_a_buffer_yields_none():
    collector, buffer, _ = make()
    iterator = iter(collector)
    assert next(iterator) is None
    assert buffer.waiting_group_ids == [0, 1]


def test_beside_and_in_turn_collect_the_same_rollouts():
    """S2: with max_staleness=0 and the same seeds."""
    in_turn, buffer_1, engine_1 = make()
    iterator = iter(in_turn)
    beside, buffer_2, engine_2 = make()
    beside.start()
    try:
        for _ in range(4):
            next(iterator)
            ours, theirs = (
                sorted(b.sample().unbind(0), key=lambda r: int(r["rollout_id"])) for b in (buffer_2, buffer_1)
            )
            assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
            engine_1.policy_version += 1
            engine_2.policy_version += 1
    finally:
        beside.shutdown()
    cohorts = len(engine_1.cohorts)
    assert engine_2.cohorts[:cohorts] == engine_1.cohorts


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_never_more_groups_than_slots(max_staleness):
    engine = ScriptedEngine(gated=True)
    collector, buffer, _ = make(engine, max_staleness=max_staleness)
    limit = (max_staleness + 1) * 2
    collector.start()
    try:
        eventually(lambda: len(engine.requests) == limit)
        engine.open(limit)
        eventually(lambda: buffer.occupied == limit)
        assert len(engine.requests) == limit
        buffer.sample()
        assert len(engine.requests) == limit
        buffer.release()
        eventually(lambda: len(engine.requests) == limit + 2)
        assert engine.cohorts[-1] == [limit, limit + 1]
    finally:
        collector.shutdown()


def test_dropped_stale_groups_free_their_slots():
    collector, buffer, engine = make()
    collector.start()
    try:
        eventually(lambda: buffer.occupied == 2)
        engine.policy_version = 1
        assert group_ids(buffer.sample()) == [2, 2, 2, 3, 3, 3]
        assert buffer.dropped == {"stale": 2}
    finally:
        collector.shutdown()


@pytest.mark.parametrize(("failed", "kept"), [(1, 2), (2, 0), (3, 0)])
def test_failed_completions_leave_the_survivors_or_drop_the_group(failed, kept):
    """G6."""
    engine = ScriptedEngine()
    engine.fail_completions = {0: failed}
    collector, buffer, _ = make(engine)
    next(iter(collector))
    window = group_ids(buffer.sample())
    assert window.count(0) == kept
    assert len(set(window)) == 2
    assert collector.counters["completions_failed"] == failed
    assert collector.counters["groups_dropped_failed"] == (kept == 0)


def test_unscored_rollouts_are_counted():
    """G2."""
    collector, buffer, _ = make(rewards=lambda completions, **_: [None, 1.0, 0.0], batch_size=1)
    next(iter(collector))
    assert len(buffer.sample()) == 2
    assert collector.counters["rollouts_unscored"] == 1


def test_group_without_scores_is_dropped_and_replaced():
    calls = []

    def picky(completions, **_):
        calls.append(1)
        return [None] * 3 if len(calls) == 1 else [1.0, 2.0, 3.0]

    collector, buffer, _ = make(rewards=picky, batch_size=1)
    next(iter(collector))
    assert group_ids(buffer.sample()) == [1, 1, 1]
    assert collector.counters["groups_dropped_unscored"] == 1


def test_group_of_one():
    """G3."""
    collector, buffer, _ = make(n=1)
    next(iter(collector))
    assert [float(r["advantage"]) for r in buffer.sample().unbind(0)] == [0.0, 0.0]


@pytest.mark.parametrize("where", ["engine", "reward"])
def test_exception_reaches_the_reader_as_itself(where):
    """S6."""
    error = ZeroDivisionError("boom")

    def broken(**_):
        raise error

    collector, buffer, engine = make(rewards=broken if where == "reward" else reward)
    engine.exception = error if where == "engine" else None
    collector.start()
    with pytest.raises(ZeroDivisionError) as caught:
        buffer.sample()
    assert caught.value is error
    with pytest.raises(ZeroDivisionError):
        collector.getattr_rb("write_count")
    collector.shutdown()
    engine.exception, collector.reward.functions = None, [reward]
    collector.start()
    try:
        assert group_ids(buffer.sample()) == [0, 0, 0, 1, 1, 1], "the draws that failed come again"
    finally:
        collector.shutdown()


def test_exhausted_source_closes_the_buffer():
    collector, buffer, _ = make(prompts=PromptSource(["1", "2", "3"], num_epochs=1), max_staleness=1)
    collector.start()
    assert len(buffer.sample()) == 6
    assert len(buffer.sample()) == 3
    with pytest.raises(StopIteration):
        buffer.sample()
    collector.shutdown()


def test_in_turn_ends_with_the_source():
    collector, _, _ = make(prompts=PromptSource(["1", "2", "3"], num_epochs=1), replay_buffer=None)
    assert [group_ids(batch) for batch in collector] == [[0, 0, 0, 1, 1, 1], [2, 2, 2]]


def test_shutdown_in_the_middle_loses_no_draw():
    engine = ScriptedEngine(gated=True)
    collector, buffer, _ = make(engine, max_staleness=1)
    collector.start()
    eventually(lambda: len(engine.requests) == 4)
    engine.open(1)
    eventually(lambda: buffer.occupied == 1)
    collector.shutdown()
    state = collector.state_dict()
    assert sorted(state["unfinished"] + buffer.waiting_group_ids) == [0, 1, 2, 3]

    resumed, buffer_2, _engine_2 = make(max_staleness=1)
    resumed.load_state_dict(state)
    buffer_2.load_state_dict(buffer.state_dict())
    resumed.start()
    try:
        seen = sorted({*group_ids(buffer_2.sample()), *group_ids(buffer_2.sample())})
        assert seen == [0, 1, 2, 3]
    finally:
        resumed.shutdown()


def test_state_taken_under_pause_is_of_one_moment():
    """Whatever instant a checkpoint hits, every draw is in exactly one of collector and buffer."""
    collector, buffer, _engine = make(max_staleness=3)
    collector.start()
    try:
        for _ in range(200):
            with collector.pause():
                state, waiting = collector.state_dict(), buffer.waiting_group_ids
            drawn = state["prompts"]["cursor"]
            assert not set(waiting) & set(state["unfinished"])
            consumed = set(range(drawn)) - set(waiting) - set(state["unfinished"])
            assert consumed == set(range(len(consumed)))
            if buffer.can_sample():
                buffer.sample()
    finally:
        collector.shutdown()


def test_slow_reward_does_not_hold_up_other_groups():
    release, first = threading.Event(), threading.Event()

    async def slow_first(completions, prompts, **_):
        import asyncio

        if not first.is_set():
            first.set()
            while not release.is_set():
                await asyncio.sleep(0.001)
        return [1.0, 2.0, 3.0]

    collector, buffer, _ = make(rewards=slow_first, batch_size=1, max_staleness=1)
    collector.start()
    try:
        assert group_ids(buffer.sample()) == [1, 1, 1]
        release.set()
        assert 0 in group_ids(buffer.sample()) + group_ids(buffer.sample())
    finally:
        collector.shutdown()


def test_seed_changes_every_sample():
    rows = []
    for seed in (0, 0, 1):
        collector, buffer, _ = make(seed=seed)
        next(iter(collector))
        rows.append([r["token_ids"].tolist() for r in buffer.sample().unbind(0)])
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompts=[]), "prompts are empty"),
        (dict(prompts=["x" * 64]), "64 tokens.*no room for one token"),
        (dict(groups_per_step=0), "groups_per_step=0"),
        (dict(rewards=[]), "reward_funcs is empty"),
        (dict(top_p=0.9), "top_p=0.9"),
        (dict(seed=-1), "seed=-1; .* whole number from 0 on"),
        (dict(seed=0.5), "seed=0.5"),
    ],
)
def test_bad_arguments_are_found_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_start_needs_back_pressure_and_one_thread():
    collector, _, _ = make(replay_buffer=None)
    with pytest.raises(ValueError, match="make_replay_buffer"):
        collector.start()
    collector, _, _ = make(ScriptedEngine(gated=True))
    collector.start()
    with pytest.raises(RuntimeError, match="runs already"):
        collector.start()
    collector.shutdown()
