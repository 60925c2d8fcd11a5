"""The combinations that would hang or train the wrong thing; see also the bad arguments of the trainer."""

from types import SimpleNamespace

import pytest

from torchrl_asyncgrpo.trainers.checks import check_counts, check_parts


def check(**changes):
    buffer = object()
    parts = dict(
        collector=SimpleNamespace(replay_buffer=buffer),
        replay_buffer=buffer,
        loss_module=None,
        sender=None,
        groups=2,
        pushes_per_window=1.0,
        async_collection=True,
    )
    check_parts(**{**parts, **changes})


def test_any_collector_may_share_a_buffer_with_the_trainer():
    check()
    check(replay_buffer=None, async_collection=False)


@pytest.mark.parametrize("buffer", [None, object()])
def test_beside_needs_one_buffer(buffer):
    with pytest.raises(ValueError, match="same object of make_replay_buffer"):
        check(replay_buffer=buffer)


COUNTS = dict(batch_size=None, gradient_accumulation_steps=1, num_epochs=1, optim_steps_per_batch=None)


@pytest.mark.parametrize("name", ["num_epochs", "optim_steps_per_batch", "batch_size"])
def test_counts_begin_at_one(name):
    check_counts(object(), **{**COUNTS, name: 1})
    with pytest.raises(ValueError, match=f"{name}=0; it must be at least 1"):
        check_counts(object(), **{**COUNTS, name: 0})


@pytest.mark.parametrize("change", [dict(batch_size=2), dict(gradient_accumulation_steps=2)])
def test_counts_of_groups_need_a_buffer(change):
    check_counts(object(), **{**COUNTS, **change})
    with pytest.raises(ValueError, match="there is none.*make_replay_buffer"):
        check_counts(None, **{**COUNTS, **change})
