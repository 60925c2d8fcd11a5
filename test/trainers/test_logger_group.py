import pytest
from torchrl.record.loggers import CSVLogger

from torchrl_asyncgrpo.trainers.logger_group import LoggerGroup


def test_every_logger_gets_everything(tmp_path):
    group = LoggerGroup([CSVLogger(name, log_dir=str(tmp_path)) for name in ("a", "b")])
    group.log_scalar("reward", 0.5, step=3)
    group.log_metrics({"loss": 1.0}, step=4)
    for name in ("a", "b"):
        assert (tmp_path / name / "scalars/reward.csv").read_text() == "3,0.5\n"
        assert (tmp_path / name / "scalars/loss.csv").read_text() == "4,1.0\n"


def test_state_goes_through(tmp_path):
    group = LoggerGroup([CSVLogger("a", log_dir=str(tmp_path))])
    group.log_scalar("reward", 0.5)
    again = LoggerGroup([CSVLogger("b", log_dir=str(tmp_path))])
    again.load_state_dict(group.state_dict())
    again.log_scalar("reward", 0.6)
    assert (tmp_path / "b/scalars/reward.csv").read_text() == "1,0.6\n"


def test_no_logger_is_an_error():
    with pytest.raises(ValueError, match="loggers is empty"):
        LoggerGroup([])
