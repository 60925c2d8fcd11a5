"""What a collector needs of an inference engine, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How the completions of one request are sampled.

    Args:
        max_tokens: most tokens of a completion, >= 1; the engine shortens it to what its context leaves.
        n: completions of the request, >= 1: the group.
        temperature: > 0, finite. Log-probs are reported at this temperature, and the trainer must use the same.
        seed: seed of the request; completion ``i`` of it draws from a stream derived from ``(seed, i)``.
            None draws a fresh seed.
        stop_token_ids: token ids that end a completion, in addition to the model's own end tokens. The end
            token is part of the completion and is trained.
        ignore_eos: sample on to ``max_tokens`` whatever is drawn.
        top_p: nucleus sampling, in (0, 1]; only 1.0 unless the engine reports the kept set.
        top_k: most likely tokens that are kept, 0 or -1 for all; only these two unless the engine reports the kept set.
        min_p: in [0, 1]; only 0.0 unless the engine reports the kept set.
        repetition_penalty: > 0, finite; only 1.0: the trainer's distribution has no penalty.

    Raises:
        ValueError: if a value is outside its range, naming value, range and remedy.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, holds, limits in (
            ("max_tokens", _whole(self.max_tokens, 1), "it must be at least 1, and whole"),
            ("n", _whole(self.n, 1), "it must be at least 1, and whole"),
            ("temperature", self.temperature < math.inf, "give a finite number above 0"),
            ("top_p", 0 < self.top_p <= 1, "it lies in (0, 1], and 1 keeps every token"),
            ("top_k", _whole(self.top_k, -1), "give a whole number of tokens, or 0 to keep every token"),
            ("min_p", 0 <= self.min_p <= 1, "it lies in [0, 1], and 0 keeps every token"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "give a finite number above 0; 1 for none"),
        ):
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)}; {limits}.")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature}; training needs a temperature above 0: greedy decoding has no "
                "log-probs to learn from. Use a small value such as 0.1 instead."
            )

    @property
    def keeps_whole_vocabulary(self) -> bool:
        """True when nothing truncates or reshapes the distribution, so that log-probs are the policy's own."""
        return self.top_p == 1.0 and self.top_k <= 0 and self.min_p == 0.0 and self.repetition_penalty == 1.0


def _whole(value: float, low: int) -> bool:
    return value >= low and value % 1 == 0


@dataclass
class Completion:
    """One sampled completion.

    Args:
        token_ids: sampled tokens, end token included.
        log_probs: nats, of each sampled token at the sampling temperature; NaN where the engine has none.
        policy_versions: version of the weights that sampled each token.
        finish_reason: ``"stop"`` an end token, ``"length"`` no room or budget left, ``"abort"`` cut off.
        sampling_mask: the token ids that top-p, top-k or min-p kept for each sampled token, the sampled one among
            them; empty where nothing was cut. None where the whole vocabulary was sampled from. Log-probs are then
            those within the kept sets.
    """

    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    sampling_mask: list[list[int]] | None = None


class Engine(Protocol):
    """An inference engine: token ids in, sampled tokens with log-probs and versions out."""

    #: version of the weights that sample the next token; +1 at each confirmed push
    policy_version: int
    #: most tokens of prompt and completion together
    max_length: int

    def check(self, params: SamplingParams) -> None:
        """Raise ``ValueError``, naming what and why, if the engine cannot sample so that log-probs are the policy's."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Sample ``params.n`` completions of one prompt; requests made in one tick of the event loop are batched."""
        ...

    def shutdown(self) -> None:
        """Stop the engine and free what it holds; requests that still run are cancelled."""
        ...


class LocalEngine(Engine, Protocol):
    """An engine in this process, whose weights a ``LocalWeightSyncSender`` replaces between two decoding steps."""

    #: True when the engine decodes with the trainer's own tensors, so that a push copies nothing
    shares_weights: bool

    def pause(self) -> None:
        """Return once no decoding step runs; none starts until ``resume``."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy named tensors into the engine's own; only while paused. Tied weights come once."""
        ...

    def resume(self, policy_version: int | None = None) -> None:
        """Go on decoding, from now on under ``policy_version`` (None: the version before)."""
        ...
