"""Windows between buffer and trainer: drawing, repeating over epochs, what is under way, packing."""

import pytest
import torch
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_asyncgrpo import TreePacker, make_replay_buffer, make_rollout
from torchrl_asyncgrpo.trainers.window import WindowReader


def group(group_id):
    return [make_rollout([1, 2, 3 + i], [0, 1, 1], [0.0, -1.0, -1.0], group_id=group_id) for i in range(2)]


def make(groups=1, blocking=False, waiting=4, packer=None):
    buffer = make_replay_buffer(batch_size=1, current_version=lambda: 0, timeout=0.05)
    for i in range(waiting):
        buffer.extend(group(i))
    return buffer, WindowReader(buffer, packer or TreePacker(), groups=groups, blocking=blocking, device=None)


def finish(reader, release=True):
    window = reader.finish()
    if release:
        reader.release(window)
    return window


def ids(window):
    return [int(row["group_id"]) for row in window.unbind(0)]


def test_in_turn_takes_what_waits_and_ends_the_epoch():
    buffer, reader = make(groups=2, waiting=5)
    reader.begin_epoch(0)
    for expected in ([0, 0, 1, 1], [2, 2, 3, 3]):
        assert ids(reader.draw(None)) == expected
        finish(reader)
    with pytest.raises(StopIteration):
        reader.draw(None)
    assert buffer.waiting_group_ids == [4]


def test_later_epochs_repeat_the_windows_and_only_the_last_releases():
    buffer, reader = make(groups=2)
    for epoch in range(3):
        reader.begin_epoch(epoch)
        for expected in ([0, 0, 1, 1], [2, 2, 3, 3]):
            assert ids(reader.draw(None)) == expected
            assert len(finish(reader, release=epoch == 2)) == 4
        assert buffer.occupied == (4 if epoch < 2 else 0)
    with pytest.raises(StopIteration):
        reader.draw(None)


def test_beside_waits_for_the_buffer_and_notes_its_end():
    buffer, reader = make(blocking=True, waiting=0)
    reader.begin_epoch(0)
    with pytest.raises(TimeoutError):
        reader.draw(None)
    assert not reader.exhausted
    assert reader.phase.seconds["wait"] > 0
    buffer.close()
    with pytest.raises(StopIteration):
        reader.draw(None)
    assert reader.exhausted


def test_without_a_buffer_the_batch_is_the_window():
    reader = WindowReader(None, TreePacker(), groups=None, blocking=False, device=None)
    batch = lazy_stack([*group(0), *group(1)])
    for epoch in range(2):
        reader.begin_epoch(epoch)
        assert ids(reader.draw(batch)) == [0, 0, 1, 1]
        finish(reader, release=False)
        with pytest.raises(StopIteration):
            reader.draw(batch)


def test_pack_gives_a_stack_of_micro_batches():
    _, reader = make(groups=4, packer=TreePacker(min_micro_batches=3))
    reader.begin_epoch(0)
    stack = reader.pack(reader.draw(None))
    assert len(stack) == 3
    assert [type(batch).__name__ for batch in stack.unbind(0)] == ["TreeBatch"] * 3


def test_unfinished_window_is_drawn_again():
    _, reader = make(groups=2)
    for _ in range(2):
        reader.begin_epoch(0)
        assert ids(reader.draw(None)) == [0, 0, 1, 1]
    finish(reader)
    assert ids(reader.draw(None)) == [2, 2, 3, 3]


def test_state_is_the_item_under_way(tmp_path):
    """Two windows, three epochs, interrupted in the second window of the second epoch."""
    _, reader = make(groups=2)
    empty = reader.state_dict()
    for epoch in range(2):
        reader.begin_epoch(epoch)
        for _ in range(2):
            window = reader.draw(None)
            if epoch == 0 or reader.position == 0:
                finish(reader, release=False)
    torch.save(reader.state_dict(), tmp_path / "state.pt")
    _, resumed = make(waiting=0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.interrupted
    assert (resumed.epoch, resumed.position) == (1, 1)
    resumed.begin_epoch(1)
    for ours, theirs in zip(resumed.draw(None).unbind(0), window.unbind(0), strict=True):
        assert (ours == theirs).all()
    finish(resumed)
    with pytest.raises(StopIteration):
        resumed.draw(None)
    resumed.begin_epoch(2)
    assert ids(resumed.draw(None)) == [0, 0, 1, 1]
    resumed.end_item()
    assert not resumed.interrupted
    assert resumed.state_dict() == empty


def test_what_is_written_onto_a_drawn_rollout_does_not_come_back_with_another_draw():
    """A plain torchrl buffer hands its rollouts out again; epochs of one item share what was written."""
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4, collate_fn=lambda rows: rows)
    buffer.extend(group(0) + group(1))

    def scored(rollouts):
        for rollout in rollouts:
            assert ("proximal_log_prob" in rollout.keys()) == (reader.epoch > 0)
            rollout["proximal_log_prob"] = torch.zeros(3)
        return TreePacker()(rollouts)

    reader = WindowReader(buffer, scored, groups=4, blocking=False, device=None)
    for _ in range(2):
        for epoch in range(2):
            reader.begin_epoch(epoch)
            reader.pack(reader.draw(None))
            finish(reader, release=False)
        reader.end_item()
    assert all("proximal_log_prob" not in rollout.keys() for rollout in buffer[:].unbind(0))
