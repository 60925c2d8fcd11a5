"""Pushes of a LoRA adapter into a real vLLM server on this machine: python benchmarks/adapter_push.py [MODEL_DIR].

SmolLM2-135M-Instruct in float32 with an adapter of rank 16 on all linear layers but the head. Ours sends the adapter
alone; the peer is this package's push of all weights, the adapter merged on the way, through shared memory. Each has a
server of its own, one after the other, pushes after every weight of the adapter has moved, and medians are compared.
Then, for each: what it takes to sample, where vLLM computes the adapter beside each layer or finds it in the weights,
and sampled log-probs against the trainer's.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from engine import sum_prompts
from vllm_push import log_prob_difference, sampled_rollouts

from torchrl_asyncgrpo import (
    ModelConfig,
    VLLMAdapterSyncSender,
    VLLMWeightSyncSender,
    WeightSyncSender,
    load_policy,
    model_kwargs,
    peft_config,
)
from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

RANK, PUSHES, MAX_STALENESS = 16, 5, 1
BAR = 2e-3


def run(model_dir: str = SMOLLM2) -> list[dict]:
    """Rows of the benchmark table; see ``run.py``."""
    model_dir = resolve_model(model_dir)
    config = ModelConfig(dtype="float32", lora_r=RANK)
    policy = load_policy(model_dir, model_kwargs(config), peft_config=peft_config(config))
    options = dict(dtype="float32", max_model_len=1024)
    with VLLMServer(model_dir, backend=None, max_loras=MAX_STALENESS + 2, max_lora_rank=RANK, **options) as server:
        alone = pushes(policy, VLLMAdapterSyncSender(policy, server.url, max_staleness=MAX_STALENESS), model_dir)
    with VLLMServer(model_dir, **options) as server:
        merged = pushes(policy, VLLMWeightSyncSender(policy, server.url), model_dir)
    work = f"adapter of rank {RANK}"
    rows = [
        {
            "name": f"bytes of an {work}, share of a push of all weights",
            "ours": alone["bytes"] / merged["bytes"],
            "peer": None,
            "unit": "",
            "ratio": None,
            "bar": "ours < 0.05",
        },
        {
            "name": f"push of an {work} alone, against a push of all weights with it merged",
            "ours": alone["seconds"],
            "peer": merged["seconds"],
            "unit": "s",
            "ratio": merged["seconds"] / alone["seconds"],
            "bar": None,
        },
        {
            "name": f"sample {alone['tokens']} tokens under an {work}, against under weights with it merged",
            "ours": alone["sampling"],
            "peer": merged["sampling"],
            "unit": "s",
            "ratio": merged["sampling"] / alone["sampling"],
            "bar": None,
        },
    ]
    for name, result in ((f"{work} alone", alone), (f"{work}, merged", merged)):
        rows.append(
            {
                "name": f"{name}: largest difference of log-probs, vLLM's and the trainer's, {result['tokens']} tokens",
                "ours": result["difference"],
                "peer": None,
                "unit": "nats",
                "ratio": None,
                "bar": f"ours <= {BAR}",
            }
        )
    return rows


def pushes(policy: torch.nn.Module, sender: WeightSyncSender, model_dir: str) -> dict[str, float]:
    """Median seconds and bytes of a push, seconds to sample behind the last one, and how far log-probs are apart."""
    seconds = []
    for turn in range(PUSHES + 2):
        move_adapter(policy, seed=turn)
        started = time.perf_counter()
        sender.update_weights()
        if turn > 1:  # the first ones check the server and map memory
            seconds.append(time.perf_counter() - started)
    prompts = sum_prompts(model_dir)
    sampled_rollouts(sender.url, prompts)  # vLLM compiles for new shapes
    started = time.perf_counter()
    sampled_rollouts(sender.url, prompts)
    sampling = time.perf_counter() - started
    difference_L = log_prob_difference(policy, sender.url, prompts)
    sent = sender.sent_bytes
    sender.destroy()
    return {
        "seconds": statistics.median(seconds),
        "bytes": sent,
        "sampling": sampling,
        "tokens": len(difference_L),
        "difference": float(difference_L.max()),
    }


@torch.no_grad()
def move_adapter(policy: torch.nn.Module, seed: int) -> None:
    """Give every trained weight another value, of the size that training gives it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)


if __name__ == "__main__":
    for row in run(*sys.argv[1:]):
        print(row)
