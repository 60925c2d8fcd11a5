"""Time and peak memory of loss + backward against torchrl's GRPOLoss: python benchmarks/loss_step.py.

SmolLM2-135M-Instruct in float32, 1 group × 8 rollouts, prompt 256, completions 32–64. Each contender runs in a process
of its own, on the same draw of tokens, old log-probs and advantages; the loss, and the gradient norm of one layer, must
agree to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model

GROUPS, ROLLOUTS, PROMPT, COMPLETION = 1, 8, 256, 64
VOCABULARY = 49_000
CLIP_EPSILON = 0.2
WARM_UP, REPEATS = 1, 5
THREADS = 2


@dataclass
class Row:
    """One rollout as numbers: tokens, which are trained, old log-probs, advantage."""

    tokens_N: np.ndarray
    trained_N: np.ndarray
    old_log_prob_N: np.ndarray
    advantage: float
    group: int


def draw_rows(seed: int = 0) -> list[Row]:
    """The same rollouts for every contender; completions of COMPLETION / 2 .. COMPLETION tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(GROUPS):
        prompt = rng.integers(10, VOCABULARY, PROMPT)
        for _ in range(ROLLOUTS):
            completion = rng.integers(10, VOCABULARY, rng.integers(COMPLETION // 2, COMPLETION + 1))
            tokens_N = np.concatenate([prompt, completion])
            rows.append(Row(tokens_N, np.arange(len(tokens_N)) >= PROMPT, np.zeros(0), 0.0, group))
    for row, advantage in zip(rows, rng.normal(size=len(rows)), strict=True):
        row.advantage = float(advantage)
        row.old_log_prob_N = rng.normal(-10, 0.1, len(row.tokens_N))
    return rows


def ours(model: Any, path: str) -> tuple[Callable[[], Tensor], float]:
    """The loss as a function, and the packing ratio."""
    from torchrl_asyncgrpo.data.schema import make_rollout
    from torchrl_asyncgrpo.modules.actor import TreeActor
    from torchrl_asyncgrpo.objectives.grpo import GRPOLoss
    from torchrl_asyncgrpo.packing import TreePacker, packing_ratio

    rollouts = [
        make_rollout(row.tokens_N, row.trained_N, row.old_log_prob_N, group_id=row.group, advantage=row.advantage)
        for row in draw_rows()
    ]
    batches = TreePacker()(rollouts)
    loss_module = GRPOLoss(TreeActor(model, temperature=1.0, attention="auto"), clip_epsilon=CLIP_EPSILON)

    def loss() -> Tensor:
        (batch,) = TreePacker()(rollouts)
        return sum(value for key, value in loss_module(batch).items() if key.startswith("loss_"))

    return loss, packing_ratio(batches)


def torchrl(model: Any, path: str) -> tuple[Callable[[], Tensor], float]:
    """Torchrl's own loss over its model wrapper: every rollout a left-padded row of its own."""
    from tensordict import TensorDict, set_list_to_stack
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss

    set_list_to_stack(True).set()
    tokenizer = AutoTokenizer.from_pretrained(path)
    actor = TransformersWrapper(model, tokenizer=tokenizer, generate=False, pad_output=True, input_mode="tokens")
    loss_module = GRPOLoss(actor, clip_epsilon=CLIP_EPSILON, masking_strategy="rlhf", entropy_bonus=False)
    rows = draw_rows()
    longest = max(len(row.tokens_N) for row in rows)

    def padded(values: list[np.ndarray], fill: float, dtype: torch.dtype) -> Tensor:
        tensor = torch.full((len(values), longest), fill, dtype=dtype)
        for line, value in zip(tensor, values, strict=True):
            line[longest - len(value) :] = torch.as_tensor(value, dtype=dtype)
        return tensor

    batch = TensorDict(
        {
            "tokens": {"full": padded([row.tokens_N for row in rows], tokenizer.pad_token_id, torch.int64)},
            "masks": {
                "all_attention_mask": padded([np.ones(len(row.tokens_N)) for row in rows], 0, torch.bool),
                "all_assistant_mask": padded([row.trained_N for row in rows], 0, torch.bool),
            },
            "log_probs": {"full": padded([row.old_log_prob_N for row in rows], 0.0, torch.float32)},
            "advantage": torch.tensor([row.advantage for row in rows])[:, None, None].repeat(1, longest, 1),
        },
        batch_size=[len(rows)],
    )
    return lambda: loss_module(batch.clone()).loss_objective, 1.0


CONTENDERS = {"ours": ours, "torchrl": torchrl}


def measure(contender: str, path: str) -> dict[str, float]:
    """Loss, gradient norm of one layer, least seconds per step, peak memory of this process."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    loss, ratio = CONTENDERS[contender](model, path)

    def step() -> float:  # nothing of a step outlives it, so that the peak is that of one step
        value = loss()
        value.backward()
        return value.item()

    seconds = []
    for _ in range(WARM_UP + REPEATS):
        model.zero_grad()
        start = time.perf_counter()
        value = step()
        seconds.append(time.perf_counter() - start)
    return {
        "loss": value,
        "gradient": model.model.layers[3].self_attn.q_proj.weight.grad.norm().item(),
        "seconds": statistics.median(seconds[WARM_UP:]),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "packing_ratio": ratio,
    }


def in_own_process(contender: str, path: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", path, "--contender", contender]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def run(model: str = SMOLLM2) -> list[dict[str, Any]]:
    """Rows of the benchmark table; see ``run.py``."""
    path = resolve_model(model)
    mine, peer = in_own_process("ours", path), in_own_process("torchrl", path)
    speed_up = peer["seconds"] / mine["seconds"]
    return [
        {
            "name": f"loss + backward, {GROUPS} × {ROLLOUTS}, prompt {PROMPT}, against torchrl GRPOLoss",
            "ours": mine["seconds"],
            "peer": peer["seconds"],
            "unit": "s",
            "ratio": speed_up,
            "bar": "ratio >= 4.3",
        },
        {
            "name": "same, peak memory",
            "ours": mine["peak"],
            "peer": peer["peak"],
            "unit": "GB",
            "ratio": peer["peak"] / mine["peak"],
            "bar": f"ratio >= {1 / 0.36:.2f}",
        },
        {
            "name": f"same, achieved speed-up ÷ ρ (ρ = {mine['packing_ratio']:.2f})",
            "ours": speed_up / mine["packing_ratio"],
            "peer": None,
            "unit": "",
            "ratio": None,
            "bar": None,
        },
        {
            "name": f"same, difference of loss and gradient norm ({mine['loss']:.6f}, {mine['gradient']:.6f})",
            "ours": max(abs(mine[key] - peer[key]) for key in ("loss", "gradient")),
            "peer": None,
            "unit": "",
            "ratio": None,
            "bar": "ours <= 1e-5",
        },
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=SMOLLM2, help="local directory or hub name")
    parser.add_argument(
        "--contender", choices=CONTENDERS, help="measure one alone, in this process, and print it as JSON"
    )
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(measure(options.contender, resolve_model(options.model))))
    else:
        for row in run(options.model):
            print(row)
