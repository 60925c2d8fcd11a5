"""What a run leaves for people: a plot of its course, and the same prompts answered before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_scalar(log_dir: Path, name: str) -> tuple[list[float], list[float]]:
    """Frames and values of one series of torchrl's CSV logger."""
    rows = [line.split(",") for line in (log_dir / "scalars" / f"{name}.csv").read_text().splitlines()]
    return [float(frames) for frames, _ in rows], [float(value) for _, value in rows]


def plot_course(log_dir: Path, picture: Path, title: str) -> None:
    """Draw reward (mean and spread over the rollouts of a step) and staleness over optimizer steps."""
    _, reward = read_scalar(log_dir, "reward")
    _, spread = read_scalar(log_dir, "reward_std")
    _, staleness = read_scalar(log_dir, "staleness")
    steps = range(1, len(reward) + 1)
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained")
    above.plot(steps, reward, color="tab:blue", marker=".", label="mean reward")
    low, high = ([r + sign * s for r, s in zip(reward, spread, strict=True)] for sign in (-1, 1))
    above.fill_between(steps, low, high, color="tab:blue", alpha=0.15, label="± standard deviation")
    above.set(ylabel="reward", ylim=(min(0.0, min(reward)) - 0.02, max(1.0, max(reward)) + 0.05))
    above.legend(loc="lower right")
    above.grid(alpha=0.3)
    below.step(steps, staleness, where="mid", color="tab:orange")
    below.set(
        xlabel="optimizer step", ylabel="staleness\n(policy versions)", ylim=(-0.1, max(1.0, max(staleness)) + 0.1)
    )
    below.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


@torch.no_grad()
def sampled_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[dict[str, Any]],
    max_tokens: int,
    temperature: float,
) -> list[str]:
    """One answer to each prompt, sampled as in training and with the same seed at every call."""
    answers = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for row in prompts:
            prompt, options = row["prompt"], {}
            if not isinstance(prompt, str):
                prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
                options["add_special_tokens"] = False
            inputs = tokenizer(prompt, return_tensors="pt", **options).to(model.device)
            output = model.generate(
                **inputs, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=max_tokens
            )
            answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def recoveries_line(recoveries: int) -> str:
    """How often the engine's server came back without its weights, if it did."""
    times = {1: "once", 2: "twice"}.get(recoveries, f"{recoveries} times")
    return f"\n\nThe server was restarted {times}, and given its weights again." if recoveries else ""


def comparison_table(prompts: Sequence[dict[str, Any]], before: Sequence[str], after: Sequence[str]) -> str:
    """A table in Markdown: prompt, right answer, answer before and after training."""
    lines = ["| prompt | answer | before | after |", "|---|---|---|---|"]
    for prompt, old, new in zip(prompts, before, after, strict=True):
        text = prompt["prompt"] if isinstance(prompt["prompt"], str) else prompt["prompt"][-1]["content"]
        cells = [text, str(prompt["answer"]), old, new]
        lines.append("| " + " | ".join(cell.strip().replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)
