"""Tiny policies with adapters and quantised layers, for the tests of everything that meets them."""

import copy

import torch
from fakes import tiny_gpt2, tiny_qwen3
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from torchrl_asyncgrpo import make_rollout

# rows of 4-bit blocks are 64 long
WIDE = dict(hidden_size=64, intermediate_size=64, head_dim=16)


def randomize(policy, std=0.1, seed=0):
    """Give every trained tensor noise, so that no adapter is the zero that it begins with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return policy


def lora(model=None, *, r=4, std=0.1, **options):
    """A model with an adapter that changes what it computes."""
    config = LoraConfig(**{"r": r, "lora_alpha": 8, "target_modules": "all-linear", **options})
    return randomize(get_peft_model(tiny_qwen3() if model is None else model, config), std)


def quantized(directory, bits, **options):
    """A tiny model, loaded in 4 or 8 bits as a user's own code would load it."""
    if not (directory / "config.json").exists():
        tiny_qwen3(**WIDE).save_pretrained(directory)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, **options)
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)


def quantized_gpt2(directory, bits):
    if not (directory / "config.json").exists():
        tiny_gpt2(n_embd=64).save_pretrained(directory)
    return quantized(directory, bits)


def merged(policy):
    """peft's own merge, on a copy."""
    return copy.deepcopy(policy).merge_and_unload().requires_grad_(False)


def rollouts():
    """Two groups that share prompts, with an advantage each; as likely as under a model that knows nothing."""
    rows = []
    for group, prompt in enumerate(([5, 6, 7, 8], [9, 3, 4])):
        for i, answer in enumerate(([11, 12, 13], [11, 12, 30, 31], [40], [11, 12, 13])):
            row, mask = prompt + answer, [0] * len(prompt) + [1] * len(answer)
            advantage = (1.0, -1.0, 0.5, -0.5)[i]
            rows.append(make_rollout(row, mask, [-4.3] * len(row), group_id=group, advantage=advantage))
    return rows


def bits_of(module):
    """Every parameter and buffer, as bytes: what must not change."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone() for name, tensor in tensors}


def same_bits(before, after):
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
