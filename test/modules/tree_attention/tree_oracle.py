"""Random forests, a naive trie, tiny models, and the oracle: each rollout alone through the plain model.

Suffixes: T nodes, N tokens of one rollout, V vocabulary.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_asyncgrpo.modules.tree_attention import TreeLayout

VOCABULARY = 23
WINDOW = 5

_SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_ALTERNATING = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict] = {
    "llama": dict(_SMALL),
    "qwen2": dict(_SMALL, use_sliding_window=True, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "qwen3": dict(_SMALL, head_dim=8),
    "mistral": dict(_SMALL, head_dim=8, sliding_window=WINDOW),
    "gemma2": dict(_SMALL, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=0.5),
    "gemma3_text": dict(_SMALL, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=_ALTERNATING),
    "gpt_oss": dict(
        _SMALL,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt2": dict(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=24,
        n_layer=2,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
}


def tiny_model(model_type: str, dtype: torch.dtype = torch.float64, **overrides):
    """A random two-layer model of an architecture, in evaluation mode; sdpa is its oracle where sdpa can be.

    Eager attention of most architectures works in float32 inside.
    """
    torch.manual_seed(0)
    oracle = "eager" if model_type in ("gemma2", "gpt_oss") else "sdpa"
    config = AutoConfig.for_model(model_type, **{**MODELS[model_type], **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=oracle).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.ndim > 1:
                # Large enough that attention is far from uniform and its gradients are not lost in rounding.
                parameter.mul_(5.0)
    if model_type == "gpt_oss":
        model.set_experts_implementation("eager")
    return model


def random_rollouts(seed: int, *, num: int = 8, max_new: int = 12, roots: int = 2) -> list[list[int]]:
    """Rollouts that leave earlier ones at random places: inside, at the end, or not at all."""
    rng = random.Random(seed)
    rollouts: list[list[int]] = []
    for i in range(num):
        stem = [] if i < roots else rng.choice(rollouts)
        stem = stem[: rng.randint(min(1, len(stem)), len(stem))]
        fresh = rng.randint(0 if stem else 1, max_new)
        rollouts.append(stem + [rng.randrange(3, VOCABULARY) for _ in range(fresh)])
    return rollouts


class NaiveTrie:
    """Nested dictionaries, walked depth first: the tree of a batch in the most obvious way."""

    def __init__(self, rollouts: list[list[int]]) -> None:
        children: dict = {}
        for rollout in rollouts:
            below = children
            for token in rollout:
                below = below.setdefault(token, {})
        self.tokens: list[int] = []
        self.depth: list[int] = []
        self.parent: list[int] = []
        child_of: dict[tuple[int, int], int] = {}
        pending = [(-1, token, below) for token, below in reversed(children.items())]
        while pending:
            parent, token, below = pending.pop()
            node = child_of[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parent.append(parent)
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            pending += [(node, t, b) for t, b in reversed(below.items())]
        T = len(self.tokens)
        self.end = [next((j for j in range(i + 1, T) if self.depth[j] <= self.depth[i]), T) for i in range(T)]
        self.nodes_of: list[list[int]] = []
        for rollout in rollouts:
            self.nodes_of.append([])
            node = -1
            for token in rollout:
                node = child_of[node, token]
                self.nodes_of[-1].append(node)

    def layout(self, device: torch.device | str = "cpu") -> TreeLayout:
        return TreeLayout(torch.tensor(self.depth, device=device), torch.tensor(self.end, device=device))

    def visible_TT(self, window: int | None) -> Tensor:
        """Dense visibility by walking every node's path to its root."""
        T = len(self.tokens)
        visible_TT = torch.zeros(T, T, dtype=torch.bool)
        for query in range(T):
            key, distance = query, 0
            while key >= 0 and (window is None or distance < window):
                visible_TT[query, key] = True
                key, distance = self.parent[key], distance + 1
        return visible_TT


def log_prob_and_entropy(logits_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """[N - 1] log-prob of each next token, [N] entropy of each distribution."""
    log_prob_NV = logits_NV.log_softmax(-1)
    next_N = log_prob_NV[:-1].gather(-1, tokens_N[1:, None])[:, 0]
    return next_N, -(log_prob_NV.exp() * log_prob_NV).sum(-1)


def _loss(logits_NV: Tensor, tokens_N: Tensor, weight: int) -> Tensor:
    """Log-probs and entropies of one rollout under weights that differ per rollout and token."""
    log_prob_N, entropy_N = log_prob_and_entropy(logits_NV, tokens_N)
    scale_N = torch.cos(torch.arange(len(tokens_N), dtype=logits_NV.dtype) + weight)
    return (log_prob_N * scale_N[1:]).sum() + (entropy_N * scale_N).sum()


def run_alone(model, rollouts: list[list[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of each rollout run alone, and all parameter gradients of their summed losses."""
    model.zero_grad()
    logits = []
    for weight, rollout in enumerate(rollouts):
        tokens_N = torch.tensor(rollout, device=model.device)
        logits.append(model(input_ids=tokens_N[None], use_cache=False).logits[0])
        _loss(logits[-1], tokens_N, weight).backward()
    return [x.detach().cpu() for x in logits], _gradients(model)


def run_tree(model, rollouts: list[list[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same of one forward and backward over the tree."""
    model.zero_grad()
    trie = NaiveTrie(rollouts)
    tokens_T = torch.tensor(trie.tokens, device=model.device)
    logits_TV = model(input_ids=tokens_T[None], **trie.layout(model.device).model_inputs()).logits[0]
    logits = [logits_TV[nodes] for nodes in trie.nodes_of]
    sum(_loss(x, tokens_T[n], w) for w, (x, n) in enumerate(zip(logits, trie.nodes_of, strict=True))).backward()
    return [x.detach().cpu() for x in logits], _gradients(model)


def _gradients(model) -> dict[str, Tensor]:
    return {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(alone, tree, rollouts: list[list[int]], tolerance: float) -> None:
    """Log-probs, entropies and gradients agree to ``tolerance``, gradients relative to the largest of their tensor."""
    for a_NV, b_NV, rollout in zip(alone[0], tree[0], rollouts, strict=True):
        for a_N, b_N in zip(
            log_prob_and_entropy(a_NV, torch.tensor(rollout)),
            log_prob_and_entropy(b_NV, torch.tensor(rollout)),
            strict=True,
        ):
            torch.testing.assert_close(b_N, a_N, rtol=0, atol=tolerance)
    assert alone[1].keys() == tree[1].keys()
    for name, grad in alone[1].items():
        scale = max(float(grad.abs().max()), 1.0)
        error = float((tree[1][name] - grad).abs().max()) / scale
        assert error <= tolerance, f"gradient of {name} is off by {error:.2e}"
