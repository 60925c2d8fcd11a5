"""Rollouts to try objectives on, policies whose gradient is easy to follow, and the comparison with the oracle."""

import math

import torch
from objective_oracle import CURRENT_VERSION, number
from tensordict.nn import TensorDictModuleBase

from torchrl_asyncgrpo import make_rollout
from torchrl_asyncgrpo.objectives.functional import reduce_window


def random_rollouts(seed, *, per_token=False, policy=None):
    """A window of every kind of rollout: identical ones, prefixes of others, holes, one trained token, none.

    Log-probs of sampler, reference and proximal policy stray around those of the policy, ``PathActor(rollouts, seed)``
    unless another is given, so far that every clip binds somewhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, n):
        return torch.randint(low, high, (n,), generator=generator).tolist()

    def integer(low, high):
        return integers(low, high, 1)[0]

    completions = [integers(1, 4, integer(1, 7)) for _ in range(3)] + [integers(1, 4, 6)]
    completions.append(completions[3])
    completions.append(completions[3])
    completions.append(completions[3][:3])
    completions.append(completions[3][:1])
    completions.append([*completions[0], *integers(1, 4, 3)])
    masks = [[1] * len(c) if integer(0, 2) else integers(0, 2, len(c)) for c in completions]
    masks[4] = masks[3] = [1, 1, 0, 1, 1, 0]
    masks[1] = [0] * len(masks[1])
    masks[2] = [0] * (len(masks[2]) - 1) + [1]
    rows = [([0] * 2 if integer(0, 4) == 0 else [0], c, m) for c, m in zip(completions, masks, strict=True)]
    policy = policy or PathActor([[*prompt, *completion] for prompt, completion, _ in rows], seed).alone
    rollouts = []
    for i, (prompt, completion, mask) in enumerate(rows):
        ids, trained = [*prompt, *completion], [0] * len(prompt) + mask

        scored = policy({"token_ids": torch.tensor(ids)})

        def near(spread, trained=trained, scored=scored):
            noise = (torch.randn(len(trained), generator=generator) * spread).tolist()
            own = [number(s[0]) if t else math.nan for s, t in zip(scored, trained, strict=True)]
            return [min(-1e-3, p + e) if p == p else math.nan for p, e in zip(own, noise, strict=True)]

        tokens = [round(a, 3) for a in (torch.randn(len(ids), generator=generator) * 2).tolist()]
        advantage = [a if t else math.nan for a, t in zip(tokens, trained, strict=True)] if per_token else tokens[0]
        rollout = make_rollout(
            ids,
            trained,
            near(0.5),
            group_id=len(prompt),
            rollout_id=100 + i,
            advantage=advantage if any(mask) else 0.0,
            policy_version=integers(0, CURRENT_VERSION + 1, len(ids)),
            ref_log_prob=near(0.7),
        )
        rollouts.append(rollout.set("proximal_log_prob", torch.tensor(near(0.3))))
    return rollouts


class PathActor(TensorDictModuleBase):
    """A policy with one log-prob and one entropy for every distinct path of tokens, its parameters."""

    def __init__(self, rollouts, seed=0):
        super().__init__()
        rows = [r if isinstance(r, list) else r["token_ids"].tolist() for r in rollouts]
        paths = sorted({tuple(row[: n + 1]) for row in rows for n in range(len(row))})
        self.index = {path: i for i, path in enumerate(paths)}
        generator = torch.Generator().manual_seed(seed + 1)
        self.log_prob = torch.nn.Parameter(-3 * torch.rand(len(paths), dtype=torch.float64, generator=generator))
        self.entropy = torch.nn.Parameter(2 * torch.rand(len(paths), dtype=torch.float64, generator=generator))
        self.in_keys = [("node", "input_ids"), ("node", "parent")]
        self.out_keys = [("node", "log_prob"), ("node", "entropy")]

    def score(self, ids):
        i = self.index[tuple(ids)]
        return self.log_prob[i], self.entropy[i]

    def alone(self, rollout):
        """The policy of ``window``: log-prob and entropy of each position of a rollout."""
        ids = rollout["token_ids"].tolist()
        return [self.score(ids[: n + 1]) for n in range(len(ids))]

    def index_of_nodes(self, batch):
        paths = []
        for token, parent in zip(batch["node", "input_ids"].tolist(), batch["node", "parent"].tolist(), strict=True):
            paths.append((*paths[parent], token) if parent >= 0 else (token,))
        return torch.tensor([self.index[path] for path in paths])

    def forward(self, batch):
        index_T = self.index_of_nodes(batch)
        batch["node", "log_prob"], batch["node", "entropy"] = self.log_prob[index_T], self.entropy[index_T]
        return batch


class RoutedActor(PathActor):
    """A mixture of four experts in two layers, one set of router logits for every path."""

    def __init__(self, rollouts, seed=0):
        super().__init__(rollouts, seed)
        generator = torch.Generator().manual_seed(seed)
        self.out_keys = [*self.out_keys, ("node", "router_logits")]
        self.router = torch.nn.Parameter(torch.randn(len(self.index), 2, 4, dtype=torch.float64, generator=generator))

    def forward(self, batch):
        batch["node", "router_logits"] = self.router[self.index_of_nodes(batch)]
        return super().forward(batch)

    def routed(self, ids):
        """Router logits of the tokens of a rollout, [N, 2, 4]."""
        return self.router[[self.index[tuple(ids[: n + 1].tolist())] for n in range(len(ids))]]


def alone(model, temperature=1.0):
    """The policy of ``window`` for a model: each rollout through its own forward."""

    def policy(rollout):
        ids = rollout["token_ids"]
        logits = model(ids[None]).logits[0].double() / temperature
        scored = [None]
        for n in range(1, len(ids)):
            log_p = torch.log_softmax(logits[n - 1], -1)
            scored.append((log_p[ids[n]], -(log_p.exp() * log_p).sum()))
        return scored

    return policy


def run(loss, batches):
    """Loss terms and metrics of a window from those of its micro-batches."""
    outputs = [loss(batch) for batch in batches]
    losses = {key: sum(output[key] for output in outputs) for key in outputs[0].keys() if key.startswith("loss_")}
    reduced = reduce_window(outputs)
    return losses, {key: reduced[key].item() for key in reduced.keys() if key not in losses}


def gradients(value, parameters):
    """The gradient of a loss, one tensor per parameter; zeros for one that it does not depend on."""
    grads = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def assert_equal(ours, expected, parameters, tolerance, expected_parameters=None):
    """Losses, their gradients and all metrics agree, relative to what is above 1."""
    (losses, metrics), (expected_losses, expected_metrics) = ours, expected
    assert losses.keys() == expected_losses.keys()
    assert metrics.keys() == expected_metrics.keys()
    for name, value in [*expected_losses.items(), *expected_metrics.items()]:
        own, other = number(losses[name] if name in losses else metrics[name]), number(value)
        assert abs(own - other) <= tolerance * max(1.0, abs(other)), (name, own, other)
    for name, loss in losses.items():
        others = gradients(expected_losses[name], expected_parameters or parameters)
        for own, other in zip(gradients(loss, parameters), others, strict=True):
            scale = max(1.0, float(other.abs().max()))
            assert float((own - other).abs().max()) <= tolerance * scale, (name, own, other)
