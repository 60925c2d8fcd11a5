"""Stand-ins that tests control: an engine that answers from a script, a tokenizer of characters, tiny models."""

import asyncio
import json
import shutil
import threading

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from torchrl_asyncgrpo.engines.base import Completion

CHARACTERS = "0123456789+-= abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?.<>|"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def character_tokenizer(chat=True):
    vocabulary = {"<eos>": 0, **{c: i + 1 for i, c in enumerate(CHARACTERS)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


VOCABULARY = len(CHARACTERS) + 1


def tiny_qwen3(seed=0, **changes):
    torch.manual_seed(seed)
    fields = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(Qwen3Config(**{**fields, **changes}))


def tiny_moe(seed=0, **changes):
    torch.manual_seed(seed)
    fields = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=4)
    fields |= dict(num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**fields, "head_dim": 16, **changes}))


def served_qwen3():
    """A tiny model with a head size that vLLM's kernels take."""
    return tiny_qwen3(hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1)


def tiny_gpt2(seed=0, **changes):
    torch.manual_seed(seed)
    fields = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    fields |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, eos_token_id=0, bos_token_id=0, pad_token_id=0)
    return AutoModelForCausalLM.from_config(GPT2Config(**{**fields, **changes}))


def save_with_own_code(directory, seed=0):
    """Save a model whose classes are in a file beside its weights; returns the same model of transformers' own class.

    The file is copied to, and run from, ``transformers.dynamic_module_utils.HF_MODULES_CACHE``.
    """
    model = tiny_qwen3(seed)
    model.save_pretrained(directory)
    path = directory / "config.json"
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    fields = dict(model_type="own", architectures=["OwnForCausalLM"], auto_map=own)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (directory / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n\n\n"
        "class OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
    )
    return model


def save_as_hub(cache, name, **models):
    """Write a hub cache that holds the branches of a repository, as their files lie after a download."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for number, (branch, directory) in enumerate(models.items()):
        commit = f"{number:040x}"
        (repository / "refs" / branch).write_text(commit)
        shutil.copytree(directory, repository / "snapshots" / commit)


def kept_log_softmax(model, row, temperature):
    """The naive log-probs of a rollout: of every trained position its distribution within the kept set, and whole."""
    ids = row["token_ids"]
    counts = row.get("kept_count", torch.zeros_like(ids)).tolist()
    sets = row.get("kept_token_ids", ids[:0]).split(counts)
    logits = model(ids[None]).logits[0].double() / temperature
    for n in row["loss_mask"].nonzero().flatten().tolist():
        outside = torch.full_like(logits[n - 1], -torch.inf).index_fill(0, sets[n], 0.0) if counts[n] else 0.0
        yield n, torch.log_softmax(logits[n - 1] + outside, -1), torch.log_softmax(logits[n - 1], -1)


class ScriptedEngine:
    """Answers every request at once from its seed, or when the test opens the gate of that many requests."""

    def __init__(self, max_length=64, length=4, gated=False):
        self.policy_version = 0
        self.max_length = max_length
        self.length = length
        self.requests = []
        self.cohorts = []
        self.fail_completions = {}
        self.exception = None
        self._gate = threading.Semaphore(0) if gated else None
        self._pending = []

    def open(self, requests=1):
        """Let ``requests`` further requests finish, in the order they were made."""
        self._gate.release(requests)

    def check(self, params):
        if not params.keeps_whole_vocabulary:
            raise ValueError(f"top_p={params.top_p} is not sampled here")

    async def generate(self, prompt_ids, params):
        number = len(self.requests)
        self.requests.append((list(prompt_ids), params))
        self._pending.append(number)
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        version = self.policy_version
        await asyncio.sleep(0)
        if self._gate is not None:
            while not self._gate.acquire(blocking=False):
                await asyncio.sleep(0.001)
        if self.exception is not None:
            raise self.exception
        rng = np.random.default_rng(params.seed)
        failed = self.fail_completions.get(number, 0)
        completions = []
        for i in range(params.n):
            tokens = rng.integers(1, VOCABULARY, rng.integers(1, self.length + 1)).tolist()
            log_probs = (-rng.random(len(tokens)) - 0.1).tolist()
            reason = "abort" if i < failed else "stop"
            completions.append(Completion(tokens, log_probs, [version] * len(tokens), reason))
        return completions

    def _flush(self):
        self.cohorts.append(self._pending)
        self._pending = []

    def shutdown(self):
        pass
