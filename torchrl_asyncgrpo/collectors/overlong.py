"""A reward that lets completions end before they are cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def soft_overlong_punishment(lengths: Sequence[int], *, max_length: int, cache: int) -> list[float]:
    """Punish completions by how far they reach into the last tokens that they may have.

    0 up to ``max_length - cache`` tokens, from there in a straight line to -1 at ``max_length``, and -1 beyond: DAPO,
    arXiv:2503.14476, eq. 13.

    Args:
        lengths: [G] tokens of each completion.
        max_length: most tokens of a completion.
        cache: tokens over which the punishment rises, 1 <= cache <= max_length.

    Returns:
        [G] rewards in [-1, 0].

    Raises:
        ValueError: if ``cache`` is out of range.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(
            f"cache={cache} with max_length={max_length}; the punishment rises over the last 1 to {max_length} tokens."
        )
    free = max_length - cache
    return [max(-1.0, min(0.0, (free - length) / cache)) for length in lengths]


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """The reward function of :func:`soft_overlong_punishment`, for the ``reward_funcs`` of a collector or of TRL.

    With ``max_length`` the ``max_tokens`` of sampling, a completion that was cut off has the full punishment.

    Args:
        max_length: most tokens of a completion.
        cache: tokens over which the punishment rises, 1 <= cache <= max_length.

    Raises:
        ValueError: if ``cache`` is out of range.
    """

    max_length: int
    cache: int

    def __post_init__(self) -> None:
        soft_overlong_punishment([], max_length=self.max_length, cache=self.cache)

    @property
    def __name__(self) -> str:
        """Name in errors and logs."""
        return "soft_overlong_punishment"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Reward [G] completions, given as token ids."""
        lengths = [len(ids) for ids in completion_ids]
        return soft_overlong_punishment(lengths, max_length=self.max_length, cache=self.cache)
