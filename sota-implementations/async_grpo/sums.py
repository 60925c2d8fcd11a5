"""The task: single-digit sums, rewarded when the last number of the answer is right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np


def make_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Chat prompts with the column ``answer``."""
    summands = np.random.default_rng(seed).integers(1, 10, (count, 2)).tolist()
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Reply with the number only."}],
            "answer": a + b,
        }
        for a, b in summands
    ]


def last_number_is_sum(completions: list[list[dict[str, str]]], answer: list[int], **_: Any) -> list[float]:
    """1 where the last number of a completion is the sum, else 0."""
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(found[-1:] == [str(right)]) for found, right in zip(numbers, answer, strict=True)]
