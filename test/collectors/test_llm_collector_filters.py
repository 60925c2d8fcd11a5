"""Groups that the buffer drops as they are written: made up for, counted once, neither lost nor repeated; advantages
from the rewards of every function."""

import asyncio
import itertools
import time

import pytest
import torch
from fakes import ScriptedEngine, character_tokenizer
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_asyncgrpo import AsyncLLMCollector, PromptSource, SamplingParams, make_replay_buffer
from torchrl_asyncgrpo.data.advantages import group_advantages, make_estimator
from torchrl_asyncgrpo.data.group_filters import DropFlatGroups, KeepInformative

PROMPTS = [{"prompt": f"{i}+{i}=", "number": i} for i in range(42)]


def is_flat(number):
    return number % 3 != 1


def reward(completions, number, **_):
    """Groups 1, 4, 7 ... have signal."""
    return [0.0 if is_flat(number[0]) else float(i) for i in range(len(completions))]


def make(transform=None, engine=None, prompts=PROMPTS, rewards=reward, groups=2, max_staleness=0, n=3, **options):
    engine = engine or ScriptedEngine()
    buffer = make_replay_buffer(
        batch_size=groups,
        current_version=lambda: engine.policy_version,
        max_staleness=max_staleness,
        timeout=20,
        transform=transform,
    )
    options = {"groups_per_step": groups, "replay_buffer": buffer, "max_staleness": max_staleness, **options}
    collector = AsyncLLMCollector(
        engine,
        prompts,
        rewards,
        tokenizer=character_tokenizer(),
        sampling_params=SamplingParams(max_tokens=4, n=n),
        **options,
    )
    return collector, buffer, engine


def group_ids(window):
    return sorted({int(row["group_id"]) for row in window.unbind(0)})


def slowed(generate, ticks):
    """``generate``, whose request number ``i`` is answered ``ticks(i)`` ticks of the event loop late."""
    numbers = itertools.count()

    async def late(prompt_ids, params):
        number = next(numbers)
        completions = await generate(prompt_ids, params)
        for _ in range(ticks(number)):
            await asyncio.sleep(0)
        return completions

    return late


@pytest.fixture
def beside():
    """Starts collectors, and stops them at the end of the test."""
    started = []

    def start(collector):
        started.append(collector)
        collector.start()

    yield start
    for collector in started:
        collector.shutdown()


def test_in_turn_dropped_groups_are_drawn_again_until_the_step_is_full():
    collector, buffer, engine = make(DropFlatGroups())
    iterator = iter(collector)
    seen = []
    for _ in range(3):
        assert next(iterator) is None
        seen.append(group_ids(buffer.sample()))
        assert buffer.occupied == 2
    assert seen == [[1, 4], [7, 10], [13, 16]]
    assert len(engine.requests) == 17, "nothing beyond what the steps needed"
    assert buffer.dropped == {"flat": 11}
    assert collector.counters["groups_finished"] == 17
    assert collector.state_dict()["unfinished"] == []


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_beside_the_trainer_a_dropped_group_frees_its_slot_once(beside, max_staleness):
    """S2: does not hang; and there are never more requests than slots."""
    collector, buffer, engine = make(DropFlatGroups(), max_staleness=max_staleness)
    slots, most, running = 2 * (max_staleness + 1), [], set()
    generate = engine.generate

    async def watched(prompt_ids, params):
        running.add(params.seed)
        most.append(len(running) + buffer.occupied)
        completions = await generate(prompt_ids, params)
        running.discard(params.seed)
        return completions

    engine.generate = watched
    beside(collector)
    seen = []
    for step in range(1, 6):
        window = buffer.sample()
        seen += group_ids(window)
        engine.policy_version = step
    assert len(seen) == len(set(seen)) == 10
    assert not any(is_flat(g) for g in seen)
    assert max(most) <= slots
    collector.shutdown()
    drawn, unfinished = collector.prompts.cursor, collector.state_dict()["unfinished"]
    decided = set(range(drawn)) - set(unfinished)
    flat = {g for g in decided if is_flat(g)}
    assert buffer.dropped["flat"] == len(flat)
    assert set(seen) | set(buffer.waiting_group_ids) | flat <= decided
    # what became stale while it waited is dropped when it is looked at
    assert len(decided) == len(seen) + len(buffer.waiting_group_ids) + sum(buffer.dropped.values())


def some_unscored(completions, number, **_):
    """Groups 0, 3, 6 ... are not scored, and 2, 5, 8 ... flat."""
    return [None if number[0] % 3 == 0 else r for r in reward(completions, number)]


@pytest.mark.parametrize("rewards", [reward, some_unscored])
def test_both_ways_train_the_same_groups_of_the_same_batches(beside, rewards):
    """S2: with max_staleness=0 and the same seeds, however long each group of a step takes."""
    in_turn, buffer_1, engine_1 = make(DropFlatGroups(), rewards=rewards, groups=4)
    at_once, buffer_2, engine_2 = make(DropFlatGroups(), rewards=rewards, groups=4)
    for engine, slow in ((engine_1, 1), (engine_2, 2)):
        engine.generate = slowed(engine.generate, lambda request, slow=slow: 99 * (request % 4 == slow))
    iterator = iter(in_turn)
    beside(at_once)
    for step in range(1, 4):
        next(iterator)
        ours, theirs = (
            sorted(b.sample(release=False).unbind(0), key=lambda r: int(r["rollout_id"])) for b in (buffer_2, buffer_1)
        )
        assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
        cohorts = len(engine_1.cohorts)
        assert engine_2.cohorts[:cohorts] == engine_1.cohorts
        assert max(map(len, engine_1.cohorts)) == 4
        engine_1.policy_version = engine_2.policy_version = step
        buffer_1.release()
        buffer_2.release()


def test_giving_up_reaches_the_reader_and_the_group_comes_again(beside):
    """S6."""
    collector, buffer, _ = make(DropFlatGroups(give_up_after=2), prompts=PROMPTS[2:3] * 9)
    beside(collector)
    with pytest.raises(RuntimeError, match="2 groups in a row have no signal"):
        buffer.sample()
    collector.shutdown()
    assert buffer.dropped == {"flat": 1}
    state = collector.state_dict()
    assert state["unfinished"] == sorted(set(range(state["prompts"]["cursor"])) - {0})
    collector.reward.functions = [lambda completions, **_: list(range(len(completions)))]
    beside(collector)
    assert group_ids(buffer.sample()) == [1, 2]


def test_giving_up_in_turn_leaves_what_is_not_settled_to_be_repeated():
    collector, buffer, _ = make(DropFlatGroups(give_up_after=2), prompts=PROMPTS[1:], groups=3)
    with pytest.raises(RuntimeError, match="2 groups in a row"):
        next(iter(collector))
    assert buffer.waiting_group_ids == [0]
    assert buffer.dropped == {"flat": 1}
    assert collector.state_dict()["unfinished"] == [2]
    collector.reward.functions = [lambda completions, **_: list(range(len(completions)))]
    next(iter(collector))
    assert buffer.waiting_group_ids == [0, 2, 3, 4]


def test_exhausted_source_ends_where_every_group_was_dropped(beside):
    flat = PromptSource(PROMPTS[2:4], num_epochs=1)
    collector, buffer, _ = make(DropFlatGroups(), prompts=flat)
    assert [item for item in collector] == []  # noqa: C416 - list() asks for a length
    assert buffer.dropped == {"flat": 2}
    collector, buffer, _ = make(DropFlatGroups(), prompts=PromptSource(PROMPTS[2:5], num_epochs=1))
    beside(collector)
    assert group_ids(buffer.sample()) == [2]
    with pytest.raises(StopIteration):
        buffer.sample()


def test_checkpoint_at_any_moment_has_every_draw_once(beside):
    collector, buffer, _engine = make(DropFlatGroups(), max_staleness=3, prompts=PROMPTS * 1000)
    beside(collector)
    consumed, end = set(), time.monotonic() + 60
    while len(consumed) < 30:
        assert time.monotonic() < end, "did not happen"
        with collector.pause():
            state, waiting = collector.state_dict(), buffer.waiting_group_ids
            flat = buffer.state_dict()["dropped"].get("flat", 0)
        decided = set(range(state["prompts"]["cursor"])) - set(state["unfinished"])
        assert set(waiting) <= decided
        assert not consumed & set(waiting)
        assert flat == len({g for g in decided if is_flat(g)})
        assert len(decided) == flat + len(waiting) + len(consumed)
        if buffer.can_sample():
            consumed |= set(group_ids(buffer.sample()))
        time.sleep(1e-4)  # or this thread, which holds the lock nearly all the time, leaves the collector none


def test_resumed_run_neither_loses_nor_repeats_a_draw(beside):
    collector, buffer, _ = make(DropFlatGroups(), max_staleness=1)
    beside(collector)
    first = group_ids(buffer.sample())
    collector.shutdown()
    resumed, buffer_2, _ = make(DropFlatGroups(), max_staleness=1)
    resumed.load_state_dict(collector.state_dict())
    buffer_2.load_state_dict(buffer.state_dict())
    assert buffer_2.dropped == buffer.dropped
    beside(resumed)
    seen = first + [g for _ in range(4) for g in group_ids(buffer_2.sample())]
    resumed.shutdown()
    assert len(set(seen)) == 10
    decided = set(range(resumed.prompts.cursor)) - set(resumed.state_dict()["unfinished"])
    flat = {g for g in decided if is_flat(g)}
    assert decided == set(seen) | set(buffer_2.waiting_group_ids) | flat
    assert buffer_2.dropped == {"flat": len(flat)}


def test_oversampled_groups_are_cut_as_they_are_written():
    collector, buffer, _ = make(KeepInformative(2, group_advantages), groups=1, n=5, prompts=PROMPTS[1:])
    next(iter(collector))
    rows = buffer.sample().unbind(0)
    assert [float(r["reward"]) for r in rows] == [0.0, 4.0]
    assert [float(r["advantage"]) for r in rows] == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    assert buffer.cut == {"uninformative": 3}


def test_any_torchrl_buffer_is_filled_in_turn():
    buffer = ReplayBuffer(
        storage=LazyStackStorage(64), sampler=SamplerWithoutReplacement(), batch_size=6, collate_fn=lambda rows: rows
    )
    buffer.append_transform(DropFlatGroups())
    collector, _, _ = make(replay_buffer=buffer)
    next(iter(collector))
    assert group_ids(buffer.sample()) == [1, 4]


def counts(completions, **_):
    return [float(len(c)) for c in completions]


def every_second(completions, **_):
    return [1.0 if i % 2 else None for i in range(len(completions))]


def test_advantage_gets_the_rewards_of_every_function():
    seen = []

    def advantage(rewards_GK):
        seen.append(rewards_GK.clone())
        return rewards_GK[:, 0] * 10

    collector, buffer, _ = make(
        rewards=[counts, every_second], reward_weights=[2.0, 0.5], advantage=advantage, advantage_per_reward=True
    )
    next(iter(collector))
    assert [rewards_GK.dtype for rewards_GK in seen] == [torch.float64] * 2
    assert [str(rewards_GK[:, 1].tolist()) for rewards_GK in seen] == ["[nan, 1.0, nan]"] * 2
    for row in buffer.sample().unbind(0):
        i = int(row["rollout_id"])
        length = seen[i // 3][i % 3, 0]
        assert row["reward"] == 2.0 * length + (0.5 if i % 3 == 1 else 0.0)
        assert row["advantage"] == 10 * length


def test_gdpo_in_the_collector():
    gdpo = make_estimator("gdpo", scale="none", group_size=3)
    collector, buffer, _ = make(rewards=[counts, every_second], advantage=gdpo, advantage_per_reward=True, groups=1)
    next(iter(collector))
    rows = buffer.sample().unbind(0)
    lengths = [float(r["loss_mask"].sum()) for r in rows]
    expected = [length - sum(lengths) / 3 for length in lengths]
    assert [float(r["advantage"]) for r in rows] == pytest.approx(expected, abs=1e-6)


def test_unscored_by_every_function_is_left_out():
    """G2."""
    collector, buffer, _ = make(
        rewards=[every_second, lambda **_: [None, 3.0, 4.0]],
        advantage=make_estimator("gdpo"),
        advantage_per_reward=True,
        groups=1,
    )
    next(iter(collector))
    assert [int(r["rollout_id"]) for r in buffer.sample().unbind(0)] == [1, 2]
    assert collector.counters["rollouts_unscored"] == 1


def test_advantages_per_token_reach_the_rollouts():
    lengths = []

    def remember(completions, completion_ids, **_):
        lengths[:] = [len(ids) for ids in completion_ids]
        return [1.0] * len(completions)

    collector, buffer, _ = make(
        rewards=remember,
        advantage=lambda rewards: [[float(t + 1) for t in range(n)] for n in lengths[:-1]] + [7.0],
        groups=1,
    )
    next(iter(collector))
    *first, last = buffer.sample().unbind(0)
    for row in first:
        trained = row["advantage"][row["loss_mask"]].tolist()
        assert trained == [float(t + 1) for t in range(len(trained))]
        assert row["advantage"][~row["loss_mask"]].tolist() == [0.0] * int((~row["loss_mask"]).sum())
    assert last["advantage"] == 7.0


def test_leave_one_out_of_a_group_of_one_reaches_the_reader(beside):
    collector, buffer, _ = make(advantage=make_estimator("leave_one_out"), n=1)
    beside(collector)
    with pytest.raises(ValueError, match="leave_one_out on a group of 1"):
        buffer.sample()


def test_failed_completions_of_a_group_do_not_end_a_run():
    """G6: subsets of 3 of the 2 survivors."""
    engine = ScriptedEngine()
    engine.fail_completions = {0: 2}
    collector, buffer, _ = make(
        engine=engine, advantage=make_estimator("pass_at_k", k=3, group_size=4), n=4, groups=1, rewards=counts
    )
    next(iter(collector))
    assert [float(r["advantage"]) for r in buffer.sample().unbind(0)] == [0.0, 0.0]
    assert collector.counters["completions_failed"] == 2
