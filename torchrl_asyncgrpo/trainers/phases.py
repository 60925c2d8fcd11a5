"""Where the time of a step goes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class PhaseTimer:
    """Seconds per named phase since the last ``reset``."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to ``phase``, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def reset(self) -> dict[str, float]:
        """Return the seconds per phase and of everything (``"total"``), and start anew."""
        now = time.perf_counter()
        seconds = {**self.seconds, "total": now - self._start}
        self.seconds.clear()
        self._start = now
        return seconds
