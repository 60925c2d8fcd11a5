"""What a policy elsewhere costs the trainer's process, against one that it holds itself: python benchmarks/remote.py.

SmolLM2-135M-Instruct in float32 with AdamW, windows of 2 groups of 8 rollouts, 96 tokens each, of which 64 are shared
within a group and 32 trained. Each side runs in a process of its own: on Ray with one worker that has all cores, which
computes the loss too, or with model and optimizer in the trainer's process. Memory is what the process holds after two
steps beyond what it held before it had a policy (resident, Ray already started); time is that of the second step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import lazy_stack
from transformers import AutoModelForCausalLM

from torchrl_asyncgrpo import (
    GRPOLoss,
    RayBackend,
    RemoteActor,
    RemoteLoss,
    RemoteOptimizer,
    TreeActor,
    TreePacker,
    make_rollout,
)
from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model
from torchrl_asyncgrpo.trainers.stepper import WindowOptimizationStepper

GROUPS, ROLLOUTS, SHARED, TRAINED = 2, 8, 64, 32
MEGABYTE = 2**20


def make_actor(model: str) -> TreeActor:
    return TreeActor(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))


def window(seed: int) -> list:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for group in range(GROUPS):
        prompt = torch.randint(1, 1000, (SHARED,), generator=generator).tolist()
        for _ in range(ROLLOUTS):
            tokens = [*prompt, *torch.randint(1, 1000, (TRAINED,), generator=generator).tolist()]
            mask = [False] * SHARED + [True] * TRAINED
            advantage = float(torch.randn((), generator=generator))
            rows.append(make_rollout(tokens, mask, [-7.0] * len(tokens), group_id=group, advantage=advantage))
    return rows


def resident() -> float:
    """Megabytes that this process holds."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MEGABYTE


def two_steps(build: Callable[[], tuple[Any, torch.optim.Optimizer]]) -> dict[str, float]:
    """Megabytes that policy and optimizer cost this process, and seconds of the second step."""
    packer = TreePacker()
    micro_batches = [lazy_stack(packer(window(seed))) for seed in range(2)]
    before = resident()
    loss, optimizer = build()
    stepper = WindowOptimizationStepper(optimizer)
    trainer = SimpleNamespace(compute_loss=loss, pre_optim=lambda: None)
    for batch in micro_batches:
        start = time.perf_counter()
        stepper.step(trainer, batch)
        seconds = time.perf_counter() - start
    return {"megabytes": resident() - before, "seconds": seconds}


def here(model: str) -> dict[str, float]:
    def build() -> tuple[Any, torch.optim.Optimizer]:
        actor = make_actor(model)
        return GRPOLoss(actor), torch.optim.AdamW(actor.model.parameters(), lr=1e-5)

    return two_steps(build)


def elsewhere(model: str) -> dict[str, float]:
    import ray

    ray.init(include_dashboard=False, log_to_driver=False)
    try:

        def build() -> tuple[Any, torch.optim.Optimizer]:
            options = {"num_cpus": len(os.sched_getaffinity(0))}
            backend = RayBackend(partial(make_actor, model), make_loss=GRPOLoss, actor_options=options)
            return RemoteLoss(RemoteActor(backend)), RemoteOptimizer(backend, lr=1e-5)

        return two_steps(build)
    finally:
        ray.shutdown()


def in_own_process(side: str, model: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", model, "--side", side]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def run(model: str = SMOLLM2) -> list[dict[str, Any]]:
    """Rows of the benchmark table; see ``run.py``."""
    if find_spec("ray") is None:
        return []
    path = resolve_model(model)
    ours, peer = in_own_process("elsewhere", path), in_own_process("here", path)
    work = f"{GROUPS} × {ROLLOUTS} rollouts"
    return [
        {
            "name": f"memory of the trainer's process for policy and optimizer, {work}, on Ray against here",
            "ours": ours["megabytes"],
            "peer": peer["megabytes"],
            "unit": "MB",
            "ratio": peer["megabytes"] / ours["megabytes"],
            "bar": "ours < 50",
        },
        {
            "name": f"seconds per step, {work}, on Ray against here",
            "ours": ours["seconds"],
            "peer": peer["seconds"],
            "unit": "s",
            "ratio": peer["seconds"] / ours["seconds"],
            "bar": None,
        },
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="local directory or hub name")
    parser.add_argument("--side", choices=["here", "elsewhere"], help="measure one alone and print it as JSON")
    options = parser.parse_args()
    if options.side:
        print(json.dumps({"here": here, "elsewhere": elsewhere}[options.side](resolve_model(options.model))))
    else:
        for row in run(options.model):
            print(row)
