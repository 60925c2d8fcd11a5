"""torch.compile of the pure functions gives the values and gradients that they have without."""

import shutil

import pytest
import torch

from torchrl_asyncgrpo.objectives import functional as f
from torchrl_asyncgrpo.objectives.cispo import cispo_term
from torchrl_asyncgrpo.objectives.decoupled import interpolated_log_prob
from torchrl_asyncgrpo.objectives.dual_clip import dual_clipped_surrogate
from torchrl_asyncgrpo.objectives.gmpo import gmpo_term
from torchrl_asyncgrpo.objectives.gspo import sequence_ratio
from torchrl_asyncgrpo.objectives.kl import kl_term
from torchrl_asyncgrpo.objectives.load_balance import load_balance_terms
from torchrl_asyncgrpo.objectives.sapo import sapo_term

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")


def terms(log_prob, sample, ref, advantage, rollout, length, staleness):
    """Every pure function of log-probs, [L] each."""
    log_ratio = log_prob - sample
    ratio = f.bounded_exp(log_ratio)
    kl = [kl_term(log_prob, ref, sample, estimator=estimator) for estimator in ("k1", "k2", "k3", "unbiased")]
    s = [sequence_ratio(log_ratio, rollout, length, level) for level in ("sequence", "token")]
    return [
        f.clipped_surrogate(ratio, advantage, 0.2, 0.28),
        dual_clipped_surrogate(ratio, advantage, 0.2, 0.28, 1.5),
        cispo_term(log_prob, log_ratio, advantage, None, 0.28),
        sapo_term(ratio, advantage, 1.0, 1.05),
        gmpo_term(log_ratio, advantage, rollout, length, 0.4, 0.3),
        *(f.clipped_surrogate(value, advantage, 0.02, 0.03) for value in s),
        *kl,
    ]


def constants(log_prob, sample, ref, advantage, rollout, length, staleness):
    """Those without a gradient."""
    entries, rollouts = length.sum(), torch.tensor(len(length))
    weights = [
        f.entry_weights(rollout, length, entries, rollouts, aggregation=kind, constant=constant)
        for kind, constant in (("token-mean", None), ("sequence-mean", None), ("constant", 7.0))
    ]
    log_ratio = log_prob - sample
    return [
        interpolated_log_prob(log_prob, sample, staleness),
        f.top_of_rollout(ref, rollout, length, 0.4),
        f.mean_by_rollout(log_prob, rollout, length),
        *weights,
        *f.ratio_values(log_ratio).values(),
        *f.mismatch_values(log_ratio).values(),
        *f.clip_values(f.bounded_exp(log_ratio), advantage, 0.8, 1.28).values(),
    ]


def inputs():
    length = torch.tensor([5, 1, 9, 4])
    rollout = torch.arange(len(length)).repeat_interleave(length)
    log_prob = -3 * torch.rand(len(rollout), dtype=torch.float64)
    sample, ref = (log_prob + 0.5 * torch.randn(len(rollout), dtype=torch.float64) for _ in range(2))
    advantage = torch.tensor([1.5, -0.7, -2.0, 0.3], dtype=torch.float64)[rollout]
    sample[0], sample[1] = log_prob[0] - 1e4, log_prob[1] + 1e4
    return log_prob.requires_grad_(), sample, ref, advantage, rollout, length, torch.arange(len(rollout)) % 4


def test_compiled_terms_and_their_gradients_are_the_same():
    arguments = inputs()
    weights = torch.randn(11, len(arguments[0]), dtype=torch.float64)
    gradients = []
    for function in (terms, torch.compile(terms, fullgraph=True)):
        values = torch.stack(function(*arguments))
        gradients.append((values.detach(), *torch.autograd.grad((weights * values).sum(), arguments[0])))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_compiled_weights_and_metrics_are_the_same():
    arguments = inputs()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(constants, fullgraph=True)(*arguments), constants(*arguments), rtol=1e-12, atol=1e-12
        )


def test_compiled_load_balance_is_the_same():
    logits = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    end, leaf = torch.tensor([5, 3, 3, 5, 5]), torch.tensor([2, 4, 3])
    values = []
    for function in (load_balance_terms, torch.compile(load_balance_terms, fullgraph=True)):
        value = function(logits, end, leaf, 2)
        values.append((value.detach(), *torch.autograd.grad(value.sum(), logits)))
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=1e-12)
