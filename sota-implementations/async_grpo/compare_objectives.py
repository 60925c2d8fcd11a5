"""Objectives against each other on the task of async_grpo.py: the same job and seeds, only the loss differs.

python compare_objectives.py                              # five objectives, seeds 0 1 2: 40 minutes on two cores
python compare_objectives.py --objectives grpo "cispo +loss.options.epsilon_high=1.0" --seeds 0 1 -- optim.lr=1e-5

An objective is a loss.name, and options of its own behind it; what stands behind -- is for all runs. Runs are made one
after another. What was finished before is not run again, so that an interrupted comparison goes on where it was. The
picture, its numbers and the page go to docs/.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from report import read_scalar

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OBJECTIVES = ("grpo", "cispo", "gspo", "sapo", "reinforce")
SEEDS = (0, 1, 2)
LAST = 5  # steps whose mean is the reward of a run
HALF = 0.5  # reward whose first step is counted
BEGIN, END = "<!-- comparison: begin -->", "<!-- comparison: end -->"


def course(directory: Path) -> list[float]:
    """Mean reward of every optimizer step of a finished run."""
    return read_scalar(directory / "csv", "reward")[1]


def make_run(directory: Path, overrides: Sequence[str]) -> None:
    """Make one run, unless it was made before with the same overrides."""
    finished = directory / "finished.json"
    if finished.exists() and json.loads(finished.read_text()) == list(overrides):
        print(f"{directory} is there already", flush=True)
        return
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, str(HERE / "async_grpo.py"), f"output={directory}", *overrides]
    subprocess.run(command, check=True, env={"OMP_WAIT_POLICY": "passive", **os.environ})
    shutil.rmtree(directory / "model")  # half a gigabyte each
    finished.write_text(json.dumps(list(overrides)))


def draw(courses: dict[str, list[list[float]]], picture: Path) -> None:
    """Mean over the seeds of every objective, and the range over them."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for objective, of_seeds in courses.items():
        steps = range(1, min(map(len, of_seeds)) + 1)
        at_steps = list(zip(*of_seeds, strict=False))
        (line,) = axes.plot(steps, [statistics.mean(rewards) for rewards in at_steps], label=objective)
        axes.fill_between(steps, list(map(min, at_steps)), list(map(max, at_steps)), color=line.get_color(), alpha=0.12)
    axes.set(xlabel="optimizer step", ylabel="mean reward")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def write_numbers(courses: dict[str, list[list[float]]], seeds: Sequence[int], table: Path) -> None:
    """Every reward behind the picture, one line for each step of each run."""
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("objective", "seed", "step", "reward"))
        for objective, of_seeds in courses.items():
            for seed, rewards in zip(seeds, of_seeds, strict=True):
                writer.writerows((objective, seed, step, round(r, 6)) for step, r in enumerate(rewards, 1))


def summary(courses: dict[str, list[list[float]]]) -> str:
    """A table in Markdown: for every objective the reward at the end and the step that reached half of it."""
    lines = [f"| objective | reward of the last {LAST} steps | range over seeds | first step above {HALF} |"]
    lines.append("|---|---|---|---|")
    for objective, of_seeds in courses.items():
        ends = [statistics.mean(rewards[-LAST:]) for rewards in of_seeds]
        first = [next((str(step) for step, r in enumerate(rewards, 1) if r > HALF), "never") for rewards in of_seeds]
        spread = f"{min(ends):.3f} to {max(ends):.3f}"
        lines.append(f"| `{objective}` | {statistics.mean(ends):.3f} | {spread} | {', '.join(first)} |")
    return "\n".join(lines)


def write_page(page: Path, text: str) -> None:
    """Put the text between the two markers of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no {BEGIN} … {END} to write between; put both lines where the comparison goes.")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, help="values of loss.name, with options")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="values of train.seed")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/compare_objectives", help="where runs go")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of objectives.md and figures/")
    parser.add_argument("overrides", nargs="*", help="of the configuration, for every run; behind --")
    options = parser.parse_args(arguments)
    runs = [(seed, objective) for seed in options.seeds for objective in options.objectives]
    courses: dict[str, list[list[float]]] = {objective: [] for objective in options.objectives}
    start = time.monotonic()
    for i, (seed, objective) in enumerate(runs, 1):
        print(f"\n== {i} of {len(runs)}: {objective}, seed {seed}, {time.monotonic() - start:.0f} s so far", flush=True)
        name, *own = objective.split()
        directory = options.output.resolve() / re.sub(r"[^\w.-]+", "_", objective) / f"seed_{seed}"
        make_run(directory, [f"loss.name={name}", f"train.seed={seed}", *own, *options.overrides])
        courses[objective].append(course(directory))

    figures = options.docs / "figures"
    figures.mkdir(exist_ok=True)
    draw(courses, figures / "objectives.png")
    write_numbers(courses, options.seeds, figures / "objectives.csv")
    seeds = ", ".join(map(str, options.seeds))
    text = (
        f"![Mean reward of every objective over the optimizer steps](figures/objectives.png)\n\n"
        f"Lines are means over the seeds {seeds}, bands their range; "
        f"[every number](figures/objectives.csv).\n\n{summary(courses)}"
    )
    write_page(options.docs / "objectives.md", text)
    print(f"\n{summary(courses)}\n\nThe picture, its numbers and this table are in {options.docs}")


if __name__ == "__main__":
    main()
