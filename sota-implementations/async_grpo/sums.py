"""The task: single-digit sums, rewarded when the last number of the answer is right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np


def make_prompts(count: int, seed: int, template: str | None = None) -> list[dict[str, Any]]:
    """Prompts with the column ``answer``: chats, or texts where a template with ``{question}`` is given."""
    rows = []
    for a, b in np.random.default_rng(seed).integers(1, 10, (count, 2)).tolist():
        question = f"What is {a} + {b}? Reply with the number only."
        chat = [{"role": "user", "content": question}]
        rows.append({"prompt": chat if template is None else template.format(question=question), "answer": a + b})
    return rows


def last_number_is_sum(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 where the last number of a completion is the sum, else 0."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    numbers = [re.findall(r"\d+", text) for text in texts]
    return [float(found[-1:] == [str(right)]) for found, right in zip(numbers, answer, strict=True)]
