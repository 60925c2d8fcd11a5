"""From one draw of a prompt to its rows of training data: encode, decode, score, assemble."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_asyncgrpo.data.prompts import PromptDraw
from torchrl_asyncgrpo.data.schema import make_rollout
from torchrl_asyncgrpo.engines.base import Completion


def encode_prompt(tokenizer: PreTrainedTokenizerBase, draw: PromptDraw, max_length: int) -> list[int]:
    """Token ids of a prompt; a chat through the tokenizer's template, up to the start of the answer.

    Args:
        tokenizer: the policy's tokenizer.
        draw: the prompt.
        max_length: most tokens of prompt and completion together.

    Raises:
        ValueError: if a chat meets a tokenizer without template, or the prompt is empty or leaves no room.
    """
    if isinstance(draw.prompt, str):
        prompt_ids = tokenizer(draw.prompt)["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError(
            f"prompt {draw.group_id} is a chat, but the tokenizer {type(tokenizer).__name__} has no chat template; set "
            "tokenizer.chat_template, use an instruction-tuned model, or give the prompts as text."
        )
    else:
        text = tokenizer.apply_chat_template(draw.prompt, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not prompt_ids:
        raise ValueError(f"prompt {draw.group_id} ({draw.prompt!r}) encodes to no token; give a prompt with some text.")
    if len(prompt_ids) >= max_length:
        raise ValueError(
            f"prompt {draw.group_id} has {len(prompt_ids)} tokens and the engine takes {max_length} for prompt and "
            "completion: no room for one token. Shorten or drop the prompt, or raise the engine's max_length."
        )
    return list(prompt_ids)


def request_seed(seed: int, group_id: int) -> int:
    """Seed of a group's request, derived so that groups, runs and engines do not repeat each other's samples.

    Raises:
        ValueError: if ``seed`` is negative or not whole.
    """
    if not (seed >= 0 and seed % 1 == 0):
        raise ValueError(f"seed={seed}; the seed of a collector is a whole number from 0 on.")
    return int(np.random.SeedSequence([seed, group_id]).generate_state(1, np.uint64)[0] >> 1)


def as_answers(tokenizer: PreTrainedTokenizerBase, draw: PromptDraw, completions: Sequence[Completion]) -> list[Any]:
    """Completions as reward functions read them: texts, or one assistant message each where the prompt is a chat."""
    texts = [tokenizer.decode(completion.token_ids, skip_special_tokens=True) for completion in completions]
    return texts if isinstance(draw.prompt, str) else [[{"role": "assistant", "content": text}] for text in texts]


def make_group(
    draw: PromptDraw,
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    advantages: Tensor | Sequence[Any],
    *,
    group_size: int,
    mask_truncated: bool,
) -> list[TensorDict]:
    """Assemble the rollouts of a group; completions that were not scored are left out.

    Args:
        draw: the prompt; its id becomes the group's.
        prompt_ids: token ids of the prompt.
        completions: [G] completions.
        rewards: [G] rewards, NaN where not scored.
        advantages: [G], for every completion one number, or one per token of it. Those of completions that were not
            scored are not read.
        group_size: completions asked for; with ``draw.group_id`` it makes the rollouts' ids.
        mask_truncated: do not train completions that ended for lack of room.

    Returns:
        The rollouts. A sampled token without a log-prob is part of its rollout and untrained.

    Raises:
        ValueError: if the advantages do not fit the completions.
    """
    if len(advantages) != len(completions):
        raise ValueError(
            f"advantage returned {len(advantages)} values for the {len(completions)} completions of group "
            f"{draw.group_id}; return one per completion, NaN where its reward is NaN."
        )
    rollouts = []
    for i, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        if math.isnan(reward):
            continue
        trained = not (mask_truncated and completion.finish_reason == "length")
        blank = [0] * len(prompt_ids)
        prompt_version = [min(completion.policy_versions)] * len(prompt_ids)
        kept = completion.sampling_mask
        rollouts.append(
            make_rollout(
                [*prompt_ids, *completion.token_ids],
                [*blank, *(trained and math.isfinite(log_prob) for log_prob in completion.log_probs)],
                [*blank, *completion.log_probs],
                group_id=draw.group_id,
                reward=reward,
                advantage=_of_rollout(advantages[i], len(prompt_ids), len(completion.token_ids)),
                policy_version=[*prompt_version, *completion.policy_versions],
                rollout_id=draw.group_id * group_size + i,
                sampling_mask=None if kept is None else [*[None] * len(prompt_ids), *kept],
            )
        )
    return rollouts


def _of_rollout(advantage: Any, prompt_length: int, completion_length: int) -> Tensor:
    """The advantage of a completion as that of its rollout: [], or [N] with 0 for the prompt."""
    advantage = torch.as_tensor(advantage, dtype=torch.float32)
    if advantage.ndim == 0:
        return advantage
    if advantage.shape != (completion_length,):
        raise ValueError(
            f"advantage returned the shape {tuple(advantage.shape)} for a completion of {completion_length} tokens; "
            f"return one number, or one per token of the completion, [{completion_length}]."
        )
    return torch.cat([torch.zeros(prompt_length), advantage])
