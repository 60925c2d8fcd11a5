"""Sampling speed of TransformersEngine against ``model.generate``, on the same prompts, model and machine.

    python benchmarks/engine.py MODEL_DIR

16 chat prompts (single-digit sums) × 8 completions × 12 tokens, temperature 1, float32. Both are timed in turn, and the
medians compared. The last row checks log-probs: the importance ratio of unchanged weights is 1.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model
from torchrl_asyncgrpo.engines import cohort
from torchrl_asyncgrpo.engines.base import Completion, SamplingParams
from torchrl_asyncgrpo.engines.transformers import TransformersEngine

SAMPLES, MAX_TOKENS, PAIRS = 8, 12, 3


def run(model_dir: str = SMOLLM2) -> list[dict]:
    """Rows of the benchmark table; see ``run.py``."""
    model_dir = resolve_model(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    prompts = sum_prompts(model_dir)
    engine = TransformersEngine(model, seed=0)
    rows = []
    for label, ignore_eos in (("all 12 tokens", True), ("until an end token", False)):
        ours, peer = paired_seconds(
            lambda ignore_eos=ignore_eos: sample(engine, prompts, ignore_eos),
            lambda ignore_eos=ignore_eos: generate(model, prompts, ignore_eos),
        )
        rows.append(
            {
                "name": f"engine, {len(prompts)} x {SAMPLES} x {MAX_TOKENS}, {label}",
                "ours": ours,
                "peer": peer,
                "unit": "s",
                "ratio": peer / ours,
                "bar": "ratio >= 2",
            }
        )
    deviation = ratio_deviation(model, prompts, sample(engine, prompts, ignore_eos=False))
    rows.append(
        {
            "name": "engine, largest deviation of the importance ratio from 1",
            "ours": deviation,
            "peer": None,
            "unit": "",
            "ratio": None,
            "bar": "ours <= 1e-4",
        }
    )
    print_times(engine, prompts)
    engine.shutdown()
    return rows


def sum_prompts(model_dir: str, count: int = 16) -> list[list[int]]:
    """The chat prompts "What is a + b?"."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    questions = [f"What is {1 + i % 9} + {1 + 5 * i % 9}? Reply with the number only." for i in range(count)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]


def sample(engine: TransformersEngine, prompts: list[list[int]], ignore_eos: bool) -> list[list[Completion]]:
    """One cohort of all prompts."""

    async def all_of_them() -> list[list[Completion]]:
        requests = (
            engine.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS, n=SAMPLES, seed=index, ignore_eos=ignore_eos))
            for index, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*requests)

    return asyncio.run(all_of_them())


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: list[list[int]], ignore_eos: bool) -> torch.Tensor:
    """What a user would call instead."""
    input_ids = torch.tensor(prompts)
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        num_return_sequences=SAMPLES,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=MAX_TOKENS if ignore_eos else None,
    )


def paired_seconds(ours: Callable[[], Any], peer: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of both, timed in turn so that a busy machine slows both."""
    ours()
    seconds: dict[Callable[[], Any], list[float]] = defaultdict(list)
    for _ in range(PAIRS):
        for work in (ours, peer):
            start = time.perf_counter()
            work()
            seconds[work].append(time.perf_counter() - start)
    return statistics.median(seconds[ours]), statistics.median(seconds[peer])


@torch.inference_mode()
def ratio_deviation(model: PreTrainedModel, prompts: list[list[int]], groups: list[list[Completion]]) -> float:
    """Largest |exp(trainer's log-prob - engine's log-prob) - 1| over all sampled tokens."""
    largest = 0.0
    for prompt, completions in zip(prompts, groups, strict=True):
        lengths = [len(completion.token_ids) for completion in completions]
        # Padding on the right: causal attention keeps it out of everything before it.
        padded = [c.token_ids + [0] * (max(lengths) - len(c.token_ids)) for c in completions]
        logits_RSV = model(torch.tensor([prompt + tokens for tokens in padded])).logits[:, len(prompt) - 1 : -1]
        log_prob_RS = logits_RSV.double().log_softmax(-1).gather(-1, torch.tensor(padded)[..., None])[..., 0]
        for row, completion in enumerate(completions):
            sampled_S = torch.tensor(completion.log_probs, dtype=torch.float64)
            deviation_S = (log_prob_RS[row, : lengths[row]] - sampled_S).expm1().abs()
            largest = max(largest, float(deviation_S.max()))
    return largest


def print_times(engine: TransformersEngine, prompts: list[list[int]]) -> None:
    """Print where the seconds of one cohort go."""
    with measured(engine) as seconds:
        start = time.perf_counter()
        sample(engine, prompts, ignore_eos=True)
        total = time.perf_counter() - start
    seconds["decode forward"] -= seconds["head"]
    seconds["bookkeeping"] = total - sum(seconds.values())
    print(
        "one cohort: " + ", ".join(f"{name} {spent / total:.0%}" for name, spent in seconds.items()),
        f"of {total:.2f} s",
    )


@contextmanager
def measured(engine: TransformersEngine) -> Iterator[dict[str, float]]:
    """Seconds spent in the parts of a step while the context is open."""
    seconds: dict[str, float] = defaultdict(float)
    model = engine._model

    def timed(call: Callable, name: Callable[[tuple, dict], str]) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            seconds[name(args, kwargs)] += time.perf_counter() - start
            return result

        return wrapper

    def forward_phase(_: tuple, kwargs: dict) -> str:
        return "decode forward" if isinstance(kwargs["cache"], cohort.StepPass) else "prefill"

    head = model.get_output_embeddings()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(model, "forward", timed(model.forward, forward_phase)))
        patches.enter_context(mock.patch.object(head, "forward", timed(head.forward, lambda *_: "head")))
        patches.enter_context(
            mock.patch.object(cohort, "sample_categorical", timed(cohort.sample_categorical, lambda *_: "sampling"))
        )
        yield seconds


def main() -> None:
    """Print the rows."""
    for row in run(sys.argv[1]):
        print(
            f"{row['name']:55s} ours {row['ours']:.3g} {row['unit']}  peer {row['peer']:.3g} {row['unit']}  "
            f"ratio {row['ratio']:.2f}  bar {row['bar']}"
        )


if __name__ == "__main__":
    main()
