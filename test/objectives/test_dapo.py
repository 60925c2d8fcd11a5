from objective_rollouts import PathActor

from torchrl_asyncgrpo import DAPOLoss


def test_defaults():
    loss = DAPOLoss(PathActor([[0]]))
    assert (loss.clip_epsilon_low, loss.clip_epsilon_high, loss.aggregation) == (0.2, 0.28, "token-mean")
