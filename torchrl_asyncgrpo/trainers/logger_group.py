"""Several torchrl loggers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torchrl.record.loggers import Logger


class LoggerGroup(Logger):
    """Hand everything that is logged to each of several loggers, for example CSV and TensorBoard.

    Args:
        loggers: torchrl loggers, at least one.

    Raises:
        ValueError: if there is none.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        if not loggers:
            raise ValueError("loggers is empty; give at least one torchrl logger, or logger=None to the trainer.")
        self.loggers = list(loggers)
        super().__init__(exp_name=loggers[0].exp_name, log_dir=loggers[0].log_dir)

    def _create_experiment(self) -> None:
        return None

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        """Log a number."""
        for logger in self.loggers:
            logger.log_scalar(name, value, step=step)

    def log_video(self, name: str, video: Tensor, step: int | None = None, **kwargs: Any) -> None:
        """Log a video."""
        for logger in self.loggers:
            logger.log_video(name, video, step=step, **kwargs)

    def log_hparams(self, cfg: Mapping[str, Any]) -> None:
        """Log hyper-parameters."""
        for logger in self.loggers:
            logger.log_hparams(cfg)

    def log_histogram(self, name: str, data: Sequence[float], **kwargs: Any) -> None:
        """Log a histogram."""
        for logger in self.loggers:
            logger.log_histogram(name, data, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """States of the loggers, by position."""
        return {str(i): logger.state_dict() for i, logger in enumerate(self.loggers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        for i, logger in enumerate(self.loggers):
            logger.load_state_dict(state_dict[str(i)])

    def __repr__(self) -> str:
        return f"LoggerGroup({self.loggers})"
