"""What the tests of pushes into a real server share: changed weights, sampled tokens, and who computes them again."""

import asyncio
import os
import threading
import urllib.request

import torch
from engines.fake_vllm import wait_until

from torchrl_asyncgrpo import SamplingParams, TreeActor, TreePacker, make_rollout
from torchrl_asyncgrpo.data.schema import ENTRY_NODE, ENTRY_SAMPLE_LOG_PROB, NODE_LOG_PROB

PROMPT = [1, 34, 19, 17, 31, 21, 34, 12, 21, 35, 47]


@torch.no_grad()
def perturb(model, scale=0.02, seed=0, share=1.0):
    """Move every weight, or a share of the elements, by noise in proportion to its spread."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2**14, generator=generator)
    for parameter in model.parameters():
        flat, size = parameter.view(-1), parameter.numel()
        where = slice(None)
        if share < 1:
            where = torch.randint(size, (int(size * share) + 1,), generator=generator).unique()
        moved = flat[where]
        flat[where] = moved + noise.repeat(len(moved) // len(noise) + 1)[: len(moved)] * (parameter.std() * scale)


def sample(engine, **options):
    params = SamplingParams(**{"max_tokens": 16, "seed": 3, "ignore_eos": True, **options})
    return asyncio.run(engine.generate(PROMPT, params))


def own_log_probs(model, completions):
    """Log-probs of sampled tokens as training computes them: packed, through the actor."""
    blank = [0] * len(PROMPT)
    rollouts = [
        make_rollout(
            PROMPT + c.token_ids, blank + [1] * len(c.token_ids), blank + c.log_probs, group_id=0, rollout_id=i
        )
        for i, c in enumerate(completions)
    ]
    (batch,) = TreePacker()(rollouts)
    batch = batch.to(model.device)
    with torch.no_grad():
        TreeActor(model)(batch)
    return batch[NODE_LOG_PROB][batch[ENTRY_NODE]].cpu(), batch[ENTRY_SAMPLE_LOG_PROB].cpu()


class in_background:  # noqa: N801 - reads as the statement that it is
    """Run a function in a thread beside the block; its result, or its exception, at the end."""

    def __init__(self, call):
        self._call = call

    def _run(self):
        try:
            self.result = self._call()
        except BaseException as failure:  # noqa: BLE001 - raised below
            self.failure = failure

    def __enter__(self):
        self.failure = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, kind, *_):
        self._thread.join()
        if self.failure is not None and kind is None:
            raise self.failure


def sampled_tokens(server):
    """Tokens that a server has sampled so far."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


def wait_for_tokens(server, total):
    assert wait_until(lambda: sampled_tokens(server) >= total)


def resident_bytes(pid):
    """Resident memory of a process and all its descendants."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as fields:
        own = int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    children = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as pids:
            children += pids.read().split()
    return own + sum(resident_bytes(child) for child in children if pid != os.getpid())
