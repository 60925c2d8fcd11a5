"""Weight pushes into a real vLLM server on this machine: python benchmarks/vllm_push.py [MODEL_DIR].

SmolLM2-135M-Instruct, 538 MB in float32. The peer writes the same tensors to a safetensors file in memory, pauses, lets
vLLM reload its weights from that file, and resumes. Both push after every weight has moved, in turn, and medians are
compared. Then: sampled log-probs against the trainer's, and, on a server in bfloat16, what a real GRPO step at learning
rate 1e-6 leaves to send.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from engine import sum_prompts
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchrl_asyncgrpo import (
    GRPOLoss,
    SamplingParams,
    TreeActor,
    TreePacker,
    VLLMEngine,
    VLLMWeightSyncSender,
    group_advantages,
    make_rollout,
)
from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model
from torchrl_asyncgrpo.data.schema import ENTRY_NODE, ENTRY_SAMPLE_LOG_PROB, NODE_LOG_PROB
from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

PAIRS, TOKENS = 5, 12
LEARNING_RATE = 1e-6


def run(model_dir: str = SMOLLM2) -> list[dict]:
    """Rows of the benchmark table; see ``run.py``."""
    model_dir = resolve_model(model_dir)
    return [*float32_rows(model_dir), *delta_rows(model_dir)]


def float32_rows(model_dir: str) -> list[dict]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with VLLMServer(model_dir, dtype="float32", max_model_len=1024) as server:
        sender = VLLMWeightSyncSender(model, server.url)
        http = VLLMHTTP(server.url)
        pushes, pauses, files = [], [], []
        for turn in range(PAIRS + 2):
            move_weights(model)
            started = time.perf_counter()
            sender.update_weights()
            push = time.perf_counter() - started
            move_weights(model)
            file = push_file(model, http)
            if turn > 1:  # two slots are mapped by the first two pushes
                pushes.append(push)
                pauses.append(sender.pause_seconds)
                files.append(file)
        sender.update_weights()
        difference_L = log_prob_difference(model, server.url, sum_prompts(model_dir))
        sender.destroy()
    push, pause, file = map(statistics.median, (pushes, pauses, files))
    megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    print(f"pushes {pushes}\npauses {pauses}\nfile pushes {files}")
    return [
        {
            "name": f"push {megabytes:.0f} MB into vLLM through shared memory, against a safetensors file",
            "ours": push,
            "peer": file,
            "unit": "s",
            "ratio": file / push,
            "bar": "ratio >= 1.6",
        },
        {
            "name": "same, share of the push that holds generation",
            "ours": pause / push,
            "peer": None,
            "unit": "",
            "ratio": None,
            "bar": "ours <= 0.6",
        },
        {
            "name": f"vLLM's log-probs against the trainer's, {len(difference_L)} tokens, largest difference",
            "ours": float(difference_L.max()),
            "peer": None,
            "unit": "nats",
            "ratio": None,
            "bar": "ours <= 2e-3",
        },
        {
            "name": "same, mean difference",
            "ours": float(difference_L.mean()),
            "peer": None,
            "unit": "nats",
            "ratio": None,
            "bar": None,
        },
    ]


def delta_rows(model_dir: str) -> list[dict]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    with VLLMServer(model_dir, dtype="bfloat16", max_model_len=1024) as server:
        sender = VLLMWeightSyncSender(model, server.url, serving_dtype=torch.bfloat16, delta=True, verify="checksum")
        sender.update_weights()
        full = sender.sent_bytes
        before = [parameter.detach().to(torch.bfloat16) for parameter in model.parameters()]
        grpo_step(model, optimizer, server.url, sum_prompts(model_dir))
        sender.update_weights()
        sent = sender.sent_bytes
        http = VLLMHTTP(server.url)
        by_delta = http.checksums()
        sender.destroy()
        whole = VLLMWeightSyncSender(model, server.url, serving_dtype=torch.bfloat16)
        whole.update_weights()
        if http.checksums() != by_delta:
            raise AssertionError("the delta push left other weights than the full push")
        whole.destroy()
    same = sum(
        int((parameter.detach().to(torch.bfloat16) == old).sum())
        for parameter, old in zip(model.parameters(), before, strict=True)
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    return [
        {
            "name": "elements that a GRPO step at learning rate 1e-6 leaves the same in bfloat16",
            "ours": same / count,
            "peer": None,
            "unit": "",
            "ratio": None,
            "bar": "ours >= 0.95",
        },
        {
            "name": "bytes of its delta push, against a full push; equal checksums",
            "ours": sent / 1e6,
            "peer": full / 1e6,
            "unit": "MB",
            "ratio": full / sent,
            "bar": None,
        },
    ]


@torch.no_grad()
def move_weights(model: PreTrainedModel) -> None:
    """Change every element by a few parts in a million, back and forth."""
    move_weights.sign = -getattr(move_weights, "sign", 1)
    for parameter in model.parameters():
        parameter.mul_(1 + move_weights.sign * 4e-6)


def push_file(model: PreTrainedModel, http: VLLMHTTP) -> float:
    """Seconds of a push through a safetensors file in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        started = time.perf_counter()
        save_file({name: p.detach() for name, p in model.named_parameters()}, Path(directory) / "model.safetensors")
        http.pause("keep", clear_cache=True)
        http.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}}, timeout=100)
        http.resume()
        return time.perf_counter() - started


def sampled_rollouts(url: str, prompts: list[list[int]]) -> list:
    """Eight completions of each prompt, with rewards of their own kind: how many end tokens they avoid."""
    engine = VLLMEngine(url)
    params = SamplingParams(n=8, max_tokens=TOKENS, seed=0)

    async def sample() -> list:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    rollouts = []
    for group_id, (prompt, completions) in enumerate(zip(prompts, asyncio.run(sample()), strict=True)):
        rewards = torch.tensor([float(len(set(completion.token_ids))) for completion in completions])
        for completion, advantage in zip(completions, group_advantages(rewards).tolist(), strict=True):
            blank = [0] * len(prompt)
            rollouts.append(
                make_rollout(
                    prompt + completion.token_ids,
                    blank + [1] * len(completion.token_ids),
                    blank + completion.log_probs,
                    group_id=group_id,
                    advantage=advantage,
                )
            )
    engine.shutdown()
    return rollouts


def log_prob_difference(model: PreTrainedModel, url: str, prompts: list[list[int]]) -> torch.Tensor:
    """[L] absolute difference of vLLM's log-probs of sampled tokens and the actor's."""
    (batch,) = TreePacker()(sampled_rollouts(url, prompts))
    with torch.no_grad():
        TreeActor(model)(batch)
    return (batch[NODE_LOG_PROB][batch[ENTRY_NODE]] - batch[ENTRY_SAMPLE_LOG_PROB]).abs()


def grpo_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, url: str, prompts: list[list[int]]) -> None:
    """One optimizer step on completions that the server sampled."""
    loss_module = GRPOLoss(TreeActor(model))
    for batch in TreePacker(token_budget=8192)(sampled_rollouts(url, prompts)):
        loss_module(batch)["loss_objective"].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


if __name__ == "__main__":
    for row in run(*sys.argv[1:]):
        print(row)
