"""Random models small enough to decode in milliseconds, one of every kind of attention, and ways to run an engine."""

import asyncio

import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    HrmTextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from torchrl_asyncgrpo.engines.base import SamplingParams

VOCABULARY = 41

_WIDTHS = dict(
    vocab_size=VOCABULARY,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    eos_token_id=0,
    pad_token_id=0,
    bos_token_id=None,
)
_SLIDING = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
_CONFIGS = {
    "llama": lambda **changes: LlamaConfig(**_WIDTHS, **changes),
    "qwen3": lambda: Qwen3Config(**_WIDTHS, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=0
    ),
    "mistral": lambda: MistralConfig(**_WIDTHS, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**_WIDTHS, **_SLIDING, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma3": lambda: Gemma3TextConfig(**_WIDTHS, **_SLIDING),
    "gpt_oss": lambda: GptOssConfig(**_WIDTHS, **_SLIDING, num_local_experts=2, num_experts_per_tok=1),
    # both call attention more than once for one layer_idx: in a layer, and in a loop over the layers
    "diffllama": lambda: DiffLlamaConfig(**{**_WIDTHS, "head_dim": 6}),
    "hrm_text": lambda: HrmTextConfig(**_WIDTHS, H_cycles=2, L_cycles=2),
}
KINDS = list(_CONFIGS)


_NOT_IN_SDPA = {"gemma2", "gpt_oss"}


def tiny_model(kind="gpt2", dtype=torch.float64, seed=0, **changes):
    """A model whose tokens are far from equally likely, with attention of transformers that is exact for its kind."""
    torch.manual_seed(seed)
    attention = "eager" if kind in _NOT_IN_SDPA else "sdpa"
    config = _CONFIGS[kind](**changes)
    # The grouped matrix products of experts know no float64.
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sink" in name:
                parameter.normal_(std=0.3)
    return model.eval()


def prompts_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def sample(engine, prompts, params):
    """Completions of each prompt, all requested in one tick; ``params`` is one for all or one for each."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)

    async def all_of_them():
        return await asyncio.gather(*(engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))

    return asyncio.run(all_of_them())


@torch.no_grad()
def naive_log_probs(model, prompt, completion, temperature=1.0):
    """Log-prob of each sampled token by one full forward of prompt and completion, nothing cached."""
    logits = model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_prob = (logits.double() / temperature).log_softmax(-1)
    return log_prob.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
