"""The combinations that would hang or train the wrong thing; see also the bad arguments of the trainer."""

from types import SimpleNamespace

import pytest

from torchrl_asyncgrpo.trainers.checks import check_parts


def check(**changes):
    buffer = object()
    parts = dict(
        collector=SimpleNamespace(replay_buffer=buffer),
        replay_buffer=buffer,
        loss_module=None,
        sender=None,
        groups=2,
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
