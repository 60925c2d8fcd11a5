import pytest

from torchrl_asyncgrpo import make_rollout
from torchrl_asyncgrpo.trainers.step_log import bar_text, window_statistics


def rollout(reward, advantage, trained, versions):
    n = 1 + len(versions)
    mask = [0] + [1] * trained + [0] * (n - 1 - trained)
    return make_rollout(
        range(n), mask, [-1.0] * n, group_id=0, reward=reward, advantage=advantage, policy_version=[0, *versions]
    )


def test_statistics_of_a_window():
    window = [rollout(1.0, 0.5, 3, [3, 3, 5]), rollout(0.0, 0.0, 1, [6, 0, 0])]
    assert window_statistics(window, 6) == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": 0.5,
            "reward_max": 1.0,
            "response_length": 2.0,
            "trained_tokens": 4.0,
            "zero_advantage": 0.5,
            "staleness": 1.5,
            "staleness_max": 3.0,
        }
    )
    assert "staleness" not in window_statistics(window, None)


@pytest.mark.parametrize(
    ("advantage", "share"),
    [([9.0, 0.0, 0.0, 9.0], 1.0), ([float("nan"), 0.0, 0.0, 9.0], 1.0), ([0.0, 0.0, 0.5, 0.0], 0.0), ([0.0], 1.0)],
)
def test_a_rollout_without_signal_is_one_whose_trained_tokens_have_none(advantage, share):
    window = [rollout(1.0, advantage, 2, [0, 0, 0])]
    assert window_statistics(window, None)["zero_advantage"] == share


def test_bar_shows_values_then_phases():
    values = {"reward": 0.51234, "time/wait": 0.04, "tokens/s": 123.4, "time/train": 2.0, "time/total": 9.0}
    assert bar_text(values) == "reward 0.512, tokens/s 123, s: wait 0.0 train 2.0"
    assert bar_text({}) == ""
