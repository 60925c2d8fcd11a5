import pytest

from torchrl_asyncgrpo.trainers.weight_push import WeightPush


class Sender:
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


def test_failed_push_is_due_again():
    sender, taken, push = make()
    push.start()
    taken[0], sender.fail = 1, True
    with pytest.raises(ConnectionError):
        push()
    sender.fail = False
    push()
    assert sender.policy_version == 2


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
