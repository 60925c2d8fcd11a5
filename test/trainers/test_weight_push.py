import threading

import pytest

from torchrl_asyncgrpo.trainers import weight_push
from torchrl_asyncgrpo.trainers.weight_push import WeightPush


class Sender:
    engine_may_restart = False

    def __init__(self):
        self.policy_version, self.next_version, self.fail = 0, None, False

    def update_weights(self):
        if self.fail:
            raise ConnectionError("gone")
        self.policy_version = self.policy_version + 1 if self.next_version is None else self.next_version
        self.next_version = None


def make(frequency=1, steps=0):
    taken = [steps]
    sender = Sender()
    return sender, taken, WeightPush(sender, lambda: taken[0], frequency=frequency, stage="post_optim")


def test_starts_once_however_often_training_is_started():
    sender, _, push = make()
    push.start()
    push.start()
    assert sender.policy_version == 1


def test_counts_steps_taken_not_calls():
    sender, taken, push = make(frequency=2)
    push.start()
    versions = []
    for step in (1, 1, 2, 2, 3, 4):
        taken[0] = step
        push()
        versions.append(sender.policy_version)
    assert versions == [1, 1, 2, 2, 2, 3]


@pytest.fixture
def failed():
    """A sender whose second push failed, and which could push again."""
    sender, taken, push = make()
    push.start()
    taken[0], sender.fail = 1, True
    with pytest.raises(ConnectionError):
        push()
    sender.fail = False
    return sender, push


def test_failed_push_is_due_again(failed):
    sender, push = failed
    push()
    assert sender.policy_version == 2


def test_push_that_failed_comes_before_training_goes_on(failed):
    """Or the rollouts of the next step would wait for an engine that waits for whole weights."""
    sender, push = failed
    push.start(under_way=True)
    assert sender.policy_version == 1
    push.start()
    push.start()
    assert sender.policy_version == 2


def test_version_that_was_loaded_is_saved_again_before_anything_is_pushed():
    sender, _, push = make()
    push.load_state_dict({"policy_version": 4})
    assert push.state_dict() == {"policy_version": 4}
    push.start()
    assert sender.policy_version == 4


@pytest.mark.parametrize(("steps_after_push", "version"), [(0, 5), (1, 6)])
def test_resume_gives_weights_the_version_they_had_or_would_have_had(steps_after_push, version):
    sender, taken, push = make(frequency=3, steps=9)
    sender.policy_version = 4
    push.start()
    taken[0] += steps_after_push
    state = push.state_dict()
    assert state == {"policy_version": version}
    sender_2, _, resumed = make(frequency=3, steps=taken[0])
    resumed.load_state_dict(state)
    resumed.start()
    assert sender_2.policy_version == version


class RestartedSender(Sender):
    """Loses its weights when told to, and says when it got them again."""

    engine_may_restart = True

    def __init__(self):
        super().__init__()
        self.is_lost, self.pushed, self.failures = False, threading.Event(), 0

    def lost(self):
        return self.is_lost

    def update_weights(self):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("not up yet")
        super().update_weights()
        self.is_lost = False
        self.pushed.set()


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(weight_push, "WATCH_INTERVAL", 0.001)
    taken, sender = [3], RestartedSender()
    push = WeightPush(sender, lambda: taken[0], frequency=2, stage="post_optim")
    push.start()
    sender.pushed.clear()
    return sender, taken, push


@pytest.mark.parametrize(("steps_since", "version"), [(0, 1), (1, 2)])
def test_weights_that_a_restarted_engine_lost_are_pushed_while_the_trainer_waits(watched, steps_since, version):
    sender, taken, push = watched
    taken[0] += steps_since
    with push.watching():
        sender.is_lost = True
        assert sender.pushed.wait(10)
    assert sender.policy_version == version
    taken[0] += 2
    push()
    assert sender.policy_version == version + 1


def test_nothing_is_pushed_while_nobody_waits_or_nothing_is_lost(watched):
    sender, _, push = watched
    with push.watching():
        assert not sender.pushed.wait(0.1)
    sender.is_lost = True
    assert not sender.pushed.wait(0.1)


def test_a_push_to_a_restarted_engine_that_fails_is_tried_again_and_leaves_no_version_behind(watched):
    sender, taken, push = watched
    sender.failures = 2
    with push.watching():
        sender.is_lost = True
        assert sender.pushed.wait(10)
    assert (sender.failures, sender.policy_version) == (0, 1)
    sender.failures = 10**9
    with push.watching():
        sender.is_lost = True
        while sender.failures == 10**9:
            pass
    assert sender.next_version is None
    sender.failures = 0
    taken[0] += 2
    push()
    assert sender.policy_version == 2


def test_waiting_ends_only_after_a_push_that_has_begun(watched):
    sender, _, push = watched
    begun, order = threading.Event(), []

    def slow_push():
        begun.set()
        threading.Event().wait(0.3)  # the block has long been left
        order.append("push")
        sender.is_lost = False

    sender.update_weights = slow_push
    with push.watching():
        sender.is_lost = True
        begun.wait(10)
    order.append("waited")
    assert order == ["push", "waited"]
