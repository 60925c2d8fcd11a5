"""Whole groups, once, oldest first, fresh enough; blocking, slots and state."""

import threading

import pytest
import torch
from torchrl.envs.transforms import Transform

from torchrl_asyncgrpo import make_replay_buffer, make_rollout


def group(group_id, size=2, versions=0, length=3):
    rows = []
    for i in range(size):
        n = length + i
        version = versions[i] if isinstance(versions, list) else versions
        rows.append(
            make_rollout(
                range(n), [0] + [1] * (n - 1), [0.0] + [-1.0] * (n - 1), group_id=group_id, policy_version=version
            )
        )
    return rows


class Clock:
    version = 0

    def __call__(self):
        return self.version


def make(batch_size=2, max_staleness=0, timeout=0.05, **options):
    clock = Clock()
    return clock, make_replay_buffer(
        batch_size=batch_size, max_staleness=max_staleness, current_version=clock, timeout=timeout, **options
    )


def ids(sample):
    return [int(row["group_id"]) for row in sample.unbind(0)]


def test_whole_groups_oldest_first_each_once():
    _, buffer = make()
    for i in range(5):
        buffer.extend(group(i, size=i + 1))
    assert ids(buffer.sample()) == [0, 1, 1]
    assert ids(buffer.sample()) == [2] * 3 + [3] * 4
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for 2 groups and 1 are there.*timeout"):
        buffer.sample()


def test_rollouts_come_back_ragged_and_unchanged():
    _, buffer = make(batch_size=1)
    rows = group(0, size=3)
    buffer.extend(rows)
    for ours, theirs in zip(buffer.sample().unbind(0), rows, strict=True):
        assert (ours == theirs).all()


def test_stale_groups_are_dropped_as_a_whole():
    """S1: a group whose rollouts were sampled before and after a push is all or none."""
    clock, buffer = make(batch_size=1)
    clock.version = 1
    buffer.extend(group(0, size=4, versions=[1, 1, 0, 1]))
    buffer.extend(group(1, size=4, versions=1))
    assert ids(buffer.sample()) == [1] * 4
    assert buffer.dropped == {"stale": 1}


def test_staleness_is_that_of_the_oldest_trained_token():
    """S3: versions 3, 3, 5 at current 6 are stale by 3; an untrained prompt does not count."""
    row = make_rollout([7, 1, 2, 3], [0, 1, 1, 1], [0, -1, -1, -1], group_id=0, policy_version=[0, 3, 3, 5])
    for max_staleness, fresh in ((2, False), (3, True)):
        clock, buffer = make(batch_size=1, max_staleness=max_staleness)
        clock.version = 6
        buffer.extend([row])
        if fresh:
            assert ids(buffer.sample()) == [0]
        else:
            with pytest.raises(TimeoutError):
                buffer.sample()


def test_group_that_gets_stale_while_it_waits_is_dropped_when_drawn():
    clock, buffer = make(batch_size=1, max_staleness=1)
    buffer.extend(group(0))
    clock.version = 2
    buffer.extend(group(1, versions=1))
    assert ids(buffer.sample()) == [1, 1]
    assert buffer.dropped == {"stale": 1}


def test_sample_waits_for_a_writer():
    _, buffer = make(timeout=30)
    buffer.extend(group(0))
    result = []
    reader = threading.Thread(target=lambda: result.append(ids(buffer.sample())))
    reader.start()
    assert result == []
    buffer.extend(group(1))
    reader.join(30)
    assert result == [[0, 0, 1, 1]]


def test_failure_reaches_a_waiting_reader_as_itself():
    """S6."""
    _, buffer = make(timeout=30)
    failure, caught = OSError("disk"), []

    def read():
        try:
            buffer.sample()
        except OSError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    buffer.close(failure)
    reader.join(30)
    assert caught == [failure]


def test_exhausted_source_leaves_a_shorter_window_and_then_stops():
    _, buffer = make()
    for i in range(3):
        buffer.extend(group(i))
    buffer.close()
    assert [ids(buffer.sample()) for _ in range(2)] == [[0, 0, 1, 1], [2, 2]]
    with pytest.raises(StopIteration):
        buffer.sample()
    buffer.reopen()
    buffer.extend(group(3))
    buffer.extend(group(4))
    assert ids(buffer.sample()) == [3, 3, 4, 4]


def test_iteration_takes_the_full_windows_that_wait():
    _, buffer = make()
    for i in range(5):
        buffer.extend(group(i))
    assert [ids(window) for window in buffer] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert list(buffer) == []
    buffer.close()
    assert [ids(window) for window in buffer] == [[4, 4]]


def test_slots_are_occupied_until_released_and_all_are_freed_at_once():
    clock, buffer = make()
    seen = []
    buffer.on_free(lambda: seen.append(buffer.occupied))
    for i in range(3):
        buffer.extend(group(i))
    assert buffer.occupied == 3
    buffer.sample()
    assert buffer.occupied == 3
    assert seen == []
    buffer.release()
    assert seen == [1]
    buffer.release()
    assert seen == [1]
    clock.version = 1
    with pytest.raises(TimeoutError):
        buffer.sample()
    assert seen == [1, 0]


def test_asking_for_the_next_window_releases_the_last():
    _, buffer = make(batch_size=1)
    for i in range(2):
        buffer.extend(group(i))
    buffer.sample()
    assert buffer.occupied == 2
    buffer.sample()
    assert buffer.occupied == 1


def test_empty_drops_and_counts():
    _, buffer = make()
    buffer.extend(group(0))
    buffer.empty()
    assert buffer.occupied == 0
    assert buffer.dropped == {"emptied": 1}


def test_overflow_is_an_error_not_a_loss():
    _, buffer = make(capacity=3, batch_size=1)
    buffer.extend(group(0))
    with pytest.raises(RuntimeError, match="2 rollouts do not fit: 2 wait and the capacity is 3"):
        buffer.extend(group(1))
    assert ids(buffer.sample()) == [0, 0]
    buffer.extend(group(2))
    assert ids(buffer.sample()) == [2, 2]


def test_ring_keeps_every_group_over_many_rounds():
    _, buffer = make(capacity=7, batch_size=1)
    for i in range(40):
        buffer.extend(group(i, size=1 + i % 3))
        rows = buffer.sample()
        assert ids(rows) == [i] * (1 + i % 3)


def test_groups_behind_stale_ones_are_not_overwritten():
    """The stale groups in the middle leave room, but not behind the last row."""
    clock, buffer = make(batch_size=1, capacity=8)
    buffer.extend(group(0, versions=1))
    for i in (1, 2, 3):
        buffer.extend(group(i))
    clock.version = 1
    assert buffer.can_sample()
    assert buffer.dropped == {"stale": 3}
    for i in (4, 5, 6):
        buffer.extend(group(i, versions=1))
    assert [ids(buffer.sample()) for _ in range(4)] == [[0, 0], [4, 4], [5, 5], [6, 6]]


def test_rows_leave_with_their_group():
    """Neither memory nor checkpoints grow with what was handed out or dropped."""
    clock, buffer = make(batch_size=1)
    stored = []

    def look():
        state = buffer.state_dict()
        stored.append((len(buffer), len(state["_storage"]["_storage"]), len(state["_sampler"]["groups"])))

    for i in range(4):
        buffer.extend(group(i, versions=min(i, 1)))
        look()
    buffer.sample()
    look()
    clock.version = 1
    buffer.extend(group(4, versions=0))
    buffer.sample()
    look()
    clock.version = 2
    buffer.can_sample()
    look()
    assert stored == [(2, 2, 1), (4, 4, 2), (6, 6, 3), (8, 8, 4), (6, 6, 3), (4, 4, 2), (0, 0, 0)]
    assert buffer.write_count == 10


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
def test_groups_of_a_window_that_a_transform_raised_on_wait_on(error):
    class Double(Transform):
        """Changes every rollout, then raises on the first window that it sees."""

        calls = 0

        def forward(self, rollouts):
            self.calls += 1
            for rollout in rollouts.unbind(0):
                rollout["reward"] = 2 * rollout["reward"] + 1
            if self.calls == 1:
                raise error("mine")
            return rollouts

    _, buffer = make(transform=Double())
    for i in range(3):
        buffer.extend(group(i))
    # StopIteration would say that the source is exhausted; torchrl makes a RuntimeError of KeyboardInterrupt
    with pytest.raises(ValueError if error is ValueError else RuntimeError):
        buffer.sample()
    assert buffer.waiting_group_ids == [0, 1, 2]
    assert buffer.occupied == len(buffer.state_dict()["_sampler"]["groups"]) == 3
    window = buffer.sample()
    assert ids(window) == [0, 0, 1, 1]
    assert window["reward"].tolist() == [1.0] * 4
    assert buffer.occupied == 3


def test_state_of_version_0_1_loads():
    """It holds the rows of groups that were handed out, and the rows of others in the order of a ring."""
    _, buffer = make()
    for i in range(4):
        buffer.extend(group(i))
    state = buffer.state_dict()
    groups = state["_sampler"]["groups"]
    state["_sampler"]["groups"] = [groups[2], groups[0]]
    _, restored = make(capacity=6)
    restored.load_state_dict(state)
    assert len(restored) == 4
    restored.extend(group(4))
    assert ids(restored.sample()) == [2, 2, 0, 0]
    restored.extend(group(5))
    assert ids(restored.sample()) == [4, 4, 5, 5]


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_state_holds_what_waits(how, tmp_path):
    _clock, buffer = make()
    for i in range(4):
        buffer.extend(group(i))
    buffer.sample()
    _clock_2, restored = make()
    if how == "state_dict":
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        buffer.dumps(tmp_path)
        restored.loads(tmp_path)
    assert restored.waiting_group_ids == [2, 3]
    assert restored.occupied == 2
    assert ids(restored.sample()) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(batch_size=0), "batch_size=0"),
        (dict(max_staleness=-1), "max_staleness=-1"),
        (dict(timeout=0.0), "timeout=0.0"),
        (dict(capacity=0), "capacity=0"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
