"""Every objective once more, by plain loops over rollouts and their tokens in float64.

Nothing of the package computes here: what it reads off a rollout is read off again, one token at a time, and each
formula is written out for one rollout. Autograd differentiates the loops.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from torchrl_asyncgrpo import make_objective

CURRENT_VERSION = 5


@dataclass
class Row:
    """What an objective sees of one rollout: a list of values for each quantity, one per trained token."""

    new: list
    anchor: list
    sample: list
    entropy: list
    advantage: list
    ref: list

    @property
    def log_ratio(self):
        return [new - anchor for new, anchor in zip(self.new, self.anchor, strict=True)]

    @property
    def ratio(self):
        return [difference.exp() for difference in self.log_ratio]

    def __len__(self):
        return len(self.new)


def read(rollout, policy, anchor):
    """The trained tokens of a rollout; ``anchor`` is "sample", "proximal", "current" or "interpolated"."""
    where = [n for n, trained in enumerate(rollout["loss_mask"].tolist()) if trained]

    def numbers(key):
        return [rollout[key].tolist()[n] for n in where] if key in rollout.keys() else [math.nan] * len(where)

    scored, sample = policy(rollout), numbers("sample_log_prob")
    new = [scored[n][0] for n in where]
    advantage = rollout["advantage"].tolist()
    anchors = {
        "sample": lambda: sample,
        "proximal": lambda: numbers("proximal_log_prob"),
        "current": lambda: [number(log_prob) for log_prob in new],
        "interpolated": lambda: [
            between(number(log_prob), old, max(0, CURRENT_VERSION - version))
            for log_prob, old, version in zip(new, sample, numbers("policy_version"), strict=True)
        ],
    }
    return Row(
        new=new,
        anchor=anchors[anchor](),
        sample=sample,
        entropy=[scored[n][1] for n in where],
        advantage=[advantage[n] for n in where] if isinstance(advantage, list) else [advantage] * len(where),
        ref=numbers("ref_log_prob"),
    )


def number(value):
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def between(new, old, stale):
    return new if stale == 0 else old / stale + (1 - 1 / stale) * new


# --- terms: a function of a row that gives the terms of its tokens, and metrics, one value per token


def clip(x, low, high):
    return max(low, min(x, high))


def clip_metrics(values, advantage, low, high):
    pairs = list(zip([number(v) for v in values], advantage, strict=True))
    return {
        "clip_fraction_low": [a < 0 and v < low for v, a in pairs],
        "clip_fraction_high": [a > 0 and v > high for v, a in pairs],
    }


def surrogate(values, advantage, low, high):
    return [-min(v * a, clip(v, low, high) * a) for v, a in zip(values, advantage, strict=True)]


def grpo(low, high):
    def term(row):
        bounds = 1 - low, 1 + high
        return surrogate(row.ratio, row.advantage, *bounds), clip_metrics(row.ratio, row.advantage, *bounds)

    return term


def cispo(low, high):
    def term(row):
        ratio = [number(r) for r in row.ratio]
        metrics = {"clip_fraction_high": [r > 1 + high for r in ratio]}
        if low is not None:
            metrics["clip_fraction_low"] = [r < 1 - low for r in ratio]
        lowest = -math.inf if low is None else 1 - low
        weights = [clip(r, lowest, 1 + high) for r in ratio]
        return [-w * a * p for w, a, p in zip(weights, row.advantage, row.new, strict=True)], metrics

    return term


def gspo(low, high, level):
    def term(row):
        s = (sum(row.log_ratio) / len(row)).exp()
        values = [s] * len(row) if level == "sequence" else [number(s) * (p - number(p)).exp() for p in row.new]
        bounds = 1 - low, 1 + high
        return surrogate(values, row.advantage, *bounds), clip_metrics(values, row.advantage, *bounds)

    return term


def sapo(positive, negative):
    def term(row):
        terms = []
        for r, a in zip(row.ratio, row.advantage, strict=True):
            tau = positive if a > 0 else negative
            terms.append(-(4 / tau) / (1 + (-tau * (r - 1)).exp()) * a)
        return terms, {}

    return term


def gmpo(low, high):
    def term(row):
        side = min if row.advantage[0] > 0 else max
        mean = torch.as_tensor(sum(side(x, clip(x, -low, high)) for x in row.log_ratio) / len(row), dtype=torch.float64)
        terms = [-a * mean.exp() for a in row.advantage]
        return terms, clip_metrics(row.log_ratio, row.advantage, -low, high)

    return term


def dual_clip(low, high, bound):
    def term(row):
        terms, metrics = grpo(low, high)(row)
        pairs = list(zip(terms, row.ratio, row.advantage, strict=True))
        metrics["clip_fraction_dual"] = [a < 0 and number(r) > bound for _, r, a in pairs]
        return [-max(-t, bound * a + 0 * t) if a < 0 else t for t, _, a in pairs], metrics

    return term


def reinforce(row):
    return [-p * a for p, a in zip(row.new, row.advantage, strict=True)], {}


# Each objective with options under which every clip binds in the rollouts below, and its term. Those that choose an
# anchor of their own name it.
@dataclass
class Variant:
    name: str
    options: dict
    term: Callable
    anchor: str | None = None
    sequence: bool = False  # it needs one advantage per rollout


VARIANTS = {
    "grpo": Variant("grpo", dict(clip_epsilon=(0.3, 0.28)), grpo(0.3, 0.28)),
    "grpo-default": Variant("grpo", {}, grpo(0.2, 0.2)),
    "dr_grpo": Variant("dr_grpo", {}, grpo(0.2, 0.2)),
    "dapo": Variant("dapo", {}, grpo(0.2, 0.28)),
    "cispo": Variant("cispo", {}, cispo(None, 0.28)),
    "cispo-low": Variant("cispo", dict(epsilon_high=0.1, epsilon_low=0.2), cispo(0.2, 0.1)),
    "gspo": Variant("gspo", dict(clip_epsilon=(0.1, 0.05)), gspo(0.1, 0.05, "sequence"), sequence=True),
    "gspo-default": Variant("gspo", {}, gspo(3e-4, 4e-4, "sequence"), sequence=True),
    "gspo-token": Variant("gspo", dict(clip_epsilon=(0.1, 0.05), level="token"), gspo(0.1, 0.05, "token")),
    "sapo": Variant("sapo", {}, sapo(1.0, 1.05)),
    "sapo-sharp": Variant("sapo", dict(temperature_positive=3.0, temperature_negative=7.0), sapo(3.0, 7.0)),
    "gmpo": Variant("gmpo", {}, gmpo(0.4, 0.4), sequence=True),
    "gmpo-pair": Variant("gmpo", dict(clip_epsilon=(0.3, 0.1)), gmpo(0.3, 0.1), sequence=True),
    "dual_clip": Variant("dual_clip_ppo", dict(dual_clip=1.3), dual_clip(0.2, 0.2, 1.3)),
    "reinforce": Variant("reinforce", {}, reinforce),
    "decoupled": Variant("decoupled_ppo", {}, grpo(0.2, 0.2), "proximal"),
    "decoupled-interpolated": Variant(
        "decoupled_ppo",
        dict(proximal="interpolated", current_version=lambda: CURRENT_VERSION, clip_epsilon=0.1),
        grpo(0.1, 0.1),
        "interpolated",
    ),
}


def objective(name, actor, anchor, **options):
    """The objective of a variant, token-mean by default; the anchor goes to those that have none of their own.

    Objectives with one term per rollout refuse to choose tokens: they go without ``top_entropy``, here and in
    ``window``.
    """
    variant = VARIANTS[name]
    if variant.sequence and 0 < options.get("top_entropy", 1) < 1:
        options = options | {"top_entropy": 1.0}
    options = {"aggregation": "token-mean"} | options | ({} if variant.anchor else {"anchor": anchor})
    return make_objective(variant.name, actor, **variant.options, **options)


# --- corrections: a function of a row and its gaps that gives weights and metrics


def truncated(cap, level):
    def correct(row, gaps):
        ratios = ratios_of(gaps, level)
        weights = [min(r, cap) for r in ratios]
        return weights, {"tis_truncated": [r > cap for r in ratios], "tis_weight": weights}

    return correct


def masked(low, high, level):
    def correct(row, gaps):
        ratios = ratios_of(gaps, level)
        weights = [r if low <= r <= high else 0.0 for r in ratios]
        return weights, {"icepop_masked": [not low <= r <= high for r in ratios], "icepop_weight": weights}

    return correct


def rejected(low, high, measure):
    def correct(row, gaps):
        ratios = [math.exp(g) for g in gaps]
        values = {
            "mean": [sum(ratios) / len(gaps)],
            "max": ratios,
            "geometric": [math.exp(sum(gaps) / len(gaps))],
        }[measure]
        out = not all(low <= v <= high for v in values)
        return [0.0 if out else 1.0] * len(gaps), {"rejected": [out] * len(gaps)}

    return correct


def off_policy(max_kl):
    def correct(row, gaps):
        out = row.advantage[0] < 0 and sum(-g for g in gaps) / len(gaps) > max_kl
        return [0.0 if out else 1.0] * len(gaps), {"off_policy_masked": [out] * len(gaps)}

    return correct


def ratios_of(gaps, level):
    return [math.exp(g) for g in gaps] if level == "token" else [math.exp(sum(gaps))] * len(gaps)


# --- the window

KL = {
    "k1": lambda new, ref, sample: new - ref,
    "k2": lambda new, ref, sample: (new - ref) ** 2 / 2,
    "k3": lambda new, ref, sample: (ref - new).exp() - 1 + new - ref,
    "unbiased": lambda new, ref, sample: (new - sample).exp() * ((ref - new).exp() - 1 + new - ref),
}


def top(entropy, share):
    """Whether each token is among the share of highest entropy, the first ones of equal entropy before the others."""
    kept = math.ceil(Fraction(str(share)) * len(entropy))
    order = sorted(range(len(entropy)), key=lambda i: (-number(entropy[i]), i))
    return [i in order[:kept] for i in range(len(entropy))]


def window(
    rollouts,
    policy,
    variant,
    *,
    anchor="sample",
    aggregation="token-mean",
    constant=None,
    corrections=(),
    top_entropy=1.0,
    entropy_coeff=0.0,
    kl_to_ref_coeff=0.0,
    kl_estimator="k3",
):
    """Loss terms, with a gradient, and metrics of a window.

    ``policy`` is a function of a rollout that gives (log-prob, entropy) by position.
    """
    if variant.anchor:  # decoupled PPO weighs by the ratio of its anchor to the sampler
        anchor, corrections = variant.anchor, [truncated(math.inf, "token")]
    rows = [row for rollout in rollouts if len(row := read(rollout, policy, anchor))]
    entries = sum(map(len, rows))
    losses = {"loss_objective": torch.zeros((), dtype=torch.float64)}
    losses |= {"loss_entropy": 0.0} if entropy_coeff else {}
    losses |= {"loss_kl_to_ref": 0.0} if kl_to_ref_coeff else {}
    sums = {}

    def count(metrics):
        for name, values in metrics.items():
            assert len(values) == len(row)
            sums[name] = sums.get(name, 0.0) + sum(map(number, values))

    for row in rows:
        weight = {
            "token-mean": lambda: 1 / entries,
            "sequence-mean": lambda row=row: 1 / (len(row) * len(rows)),
            "constant": lambda: 1 / (constant * len(rows)),
        }[aggregation]()
        terms, metrics = variant.term(row)
        count(metrics)
        factors = [float(kept) for kept in top(row.entropy, 1.0 if variant.sequence else top_entropy)]
        trainer = row.new if anchor == "sample" else row.anchor
        gaps = [number(p) - q for p, q in zip(trainer, row.sample, strict=True)]
        for correct in corrections:
            weights, metrics = correct(row, gaps)
            factors = [f * w for f, w in zip(factors, weights, strict=True)]
            count(metrics)
        if corrections:
            count({"mismatch_ratio": [math.exp(g) for g in gaps], "mismatch_k1": [-g for g in gaps]})
            count({"mismatch_k3": [math.exp(g) - 1 - g for g in gaps]})
        differences = [number(d) for d in row.log_ratio]
        count({"ratio": [math.exp(d) for d in differences], "ratio_squared": [math.exp(2 * d) for d in differences]})
        count({"kl_approx": [math.exp(d) - 1 - d for d in differences], "entropy": row.entropy})
        for factor, t in zip(factors, terms, strict=True):
            losses["loss_objective"] = losses["loss_objective"] + weight * factor * t
        if entropy_coeff:
            losses["loss_entropy"] = losses["loss_entropy"] - entropy_coeff * weight * sum(row.entropy)
        if kl_to_ref_coeff:
            kl = [KL[kl_estimator](*values) for values in zip(row.new, row.ref, row.sample, strict=True)]
            losses["loss_kl_to_ref"] = losses["loss_kl_to_ref"] + kl_to_ref_coeff * weight * sum(kl)
            count({"kl_to_ref": kl})
    metrics = {name: value / entries for name, value in sums.items()}
    metrics["ESS"] = metrics["ratio"] ** 2 / metrics["ratio_squared"]
    return losses, metrics
