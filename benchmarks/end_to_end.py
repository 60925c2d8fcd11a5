"""Seconds per step of ``make train`` against TRL's GRPOTrainer on the same job: python benchmarks/end_to_end.py.

SmolLM2-135M-Instruct in float32, single-digit sums without a system prompt, 16 prompts × 8 completions × 12 tokens,
AdamW at 5e-6, the reward of the main job. Each side trains in a process of its own; its first steps are left out, and
the mean of the others is compared, sampling, reward, loss, backward, update and weight push included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model

SCRIPT = Path(__file__).parent.parent / "sota-implementations/async_grpo/async_grpo.py"
STEP_SECONDS = "scalars/time/total.csv"
PROMPTS, SAMPLES, TOKENS = 16, 8, 12
TEMPLATE = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
# Steps of each side, and how many at the start are left out: ours begins with the sampling of two windows
OUR_STEPS, OUR_WARM_UP = 10, 2
TRL_STEPS, TRL_WARM_UP = 4, 1
LEARNING_RATE = 5e-6
THREADS = 2


def ours(model: str) -> list[float]:
    """Seconds of every step of the main job, from its own CSV log."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            f"model.name={model}",
            f"task.template='{TEMPLATE}'",
            f"train.total_frames={OUR_STEPS * PROMPTS * SAMPLES}",
            f"train.groups_per_step={PROMPTS}",
            f"sampling.group_size={SAMPLES}",
            f"sampling.max_tokens={TOKENS}",
            f"optim.lr={LEARNING_RATE}",
            f"output={directory}",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
        subprocess.run([sys.executable, str(SCRIPT), *overrides], check=True, stdout=sys.stderr, env=environment)
        logs = list(Path(directory).rglob(STEP_SECONDS))
        if len(logs) != 1:
            raise FileNotFoundError(f"{SCRIPT.name} wrote {len(logs)} logs {STEP_SECONDS}, expected one")
        return [float(line.split(",")[1]) for line in logs[0].read_text().splitlines()]


def trl(model: str, steps: int) -> list[float]:
    """Seconds of every step of TRL's trainer: sampling, reward, loss, backward and update, in this process."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(SCRIPT.parent))
    from sums import last_number_is_sum, make_prompts

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())
            print(f"TRL step {len(self.ends) - 1}: {self.ends[-1] - self.ends[-2]:.1f} s", file=sys.stderr, flush=True)

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            reward_funcs=last_number_is_sum,
            train_dataset=Dataset.from_list(make_prompts(PROMPTS * steps, 0, TEMPLATE)),
            args=GRPOConfig(
                output_dir=directory,
                per_device_train_batch_size=PROMPTS * SAMPLES,
                num_generations=SAMPLES,
                max_completion_length=TOKENS,
                max_steps=steps,
                temperature=1.0,
                beta=0.0,
                epsilon=0.2,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            callbacks=[clock],
        )
        trainer.train()
    return [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]


def trl_in_own_process(model: str, steps: int) -> list[float]:
    command = [sys.executable, __file__, "--model", model, "--trl", str(steps)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def run(model: str = SMOLLM2) -> list[dict[str, Any]]:
    """Rows of the benchmark table; see ``run.py``."""
    path = resolve_model(model)
    mine = statistics.mean(ours(path)[OUR_WARM_UP:])
    peer = statistics.mean(trl_in_own_process(path, TRL_STEPS)[TRL_WARM_UP:]) if find_spec("trl") else None
    return [
        {
            "name": f"seconds per step, {PROMPTS} × {SAMPLES} × {TOKENS} tokens, against TRL GRPOTrainer",
            "ours": mine,
            "peer": peer,
            "unit": "s",
            "ratio": None if peer is None else peer / mine,
            "bar": "ratio >= 4",
        }
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="local directory or hub name")
    parser.add_argument(
        "--trl", type=int, metavar="STEPS", help="time TRL alone, in this process, and print it as JSON"
    )
    options = parser.parse_args()
    if options.trl:
        print(json.dumps(trl(resolve_model(options.model), options.trl)))
    else:
        for row in run(options.model):
            print(row)
