"""KL estimators: each value and gradient, and what their expectation over sampled tokens is, by enumeration."""

import pytest
import torch
from objective_oracle import KL

from torchrl_asyncgrpo.objectives.kl import check_estimator, kl_term

ESTIMATORS = ("k1", "k2", "k3", "unbiased")


def policies(seed=0, size=6):
    """Logits of the policy with a gradient, and probabilities of another sampler and of a reference."""
    generator = torch.Generator().manual_seed(seed)
    logits, sampler, reference = (torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(3))
    return logits.requires_grad_(), sampler.softmax(0), reference.softmax(0)


def expectation(estimator, logits, sampler, reference):
    """Mean of the estimates over the tokens that the sampler draws: value and gradient."""
    terms = kl_term(logits.log_softmax(0), reference.log(), sampler.log(), estimator=estimator)
    value = (sampler.detach() * terms).sum()
    return value, torch.autograd.grad(value, logits)[0]


def divergence(p, q, logits):
    """KL(p || q), value and gradient."""
    value = (p * (p / q).log()).sum()
    return value, torch.autograd.grad(value, logits)[0]


def close(a, b):
    return float((a - b).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_token_has_the_value_and_gradient_of_its_formula(estimator):
    log_prob = -3 * torch.rand(20, dtype=torch.float64)
    ref, sample = (log_prob + torch.randn(20, dtype=torch.float64) for _ in range(2))
    log_prob.requires_grad_()
    values = kl_term(log_prob, ref, sample, estimator=estimator)
    expected = torch.stack([KL[estimator](*row) for row in zip(log_prob, ref.tolist(), sample.tolist(), strict=True)])
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(20, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((weights * v).sum(), log_prob)[0] for v in (values, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_unbiased_has_value_and_gradient_of_the_reverse_kl_for_any_sampler(seed):
    logits, sampler, reference = policies(seed)
    value, gradient = divergence(logits.softmax(0), reference, logits)
    for drawn_from in (sampler, logits.detach().softmax(0), reference):
        estimate, its_gradient = expectation("unbiased", logits, drawn_from, reference)
        assert close(estimate, value)
        assert close(its_gradient, gradient)


@pytest.mark.parametrize("seed", range(3))
def test_k3_has_neither_for_another_sampler_and_the_gradient_of_the_other_direction_on_policy(seed):
    logits, sampler, reference = policies(seed)
    value, gradient = divergence(logits.softmax(0), reference, logits)
    estimate, its_gradient = expectation("k3", logits, sampler, reference)
    assert not close(estimate, value)
    assert not close(its_gradient, gradient)
    on_policy, its_gradient = expectation("k3", logits, logits.detach().softmax(0), reference)
    assert close(on_policy, value)
    assert not close(its_gradient, gradient)
    _, forward = divergence(reference, logits.softmax(0), logits)
    assert close(its_gradient, forward)


@pytest.mark.parametrize("seed", range(3))
def test_k2_has_the_gradient_on_policy_and_not_the_value(seed):
    logits, sampler, reference = policies(seed)
    value, gradient = divergence(logits.softmax(0), reference, logits)
    estimate, its_gradient = expectation("k2", logits, logits.detach().softmax(0), reference)
    assert close(its_gradient, gradient)
    assert not close(estimate, value)
    assert not close(expectation("k2", logits, sampler, reference)[1], gradient)


@pytest.mark.parametrize("seed", range(3))
def test_k1_has_the_value_on_policy_and_trains_nothing(seed):
    logits, _, reference = policies(seed)
    value, _ = divergence(logits.softmax(0), reference, logits)
    estimate, its_gradient = expectation("k1", logits, logits.detach().softmax(0), reference)
    assert close(estimate, value)
    assert close(its_gradient, torch.zeros(()))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_two_policies_give_finite_values_and_gradients(estimator, dtype):
    far = torch.tensor([-1e4, 0.0, -1e4, 0.0], dtype=dtype, requires_grad=True)
    ref, sample = (torch.tensor(v, dtype=dtype) for v in ([0.0, -1e4, -1e4, 0.0], [0.0, -1e4, 0.0, -1e4]))
    values = kl_term(far, ref, sample, estimator=estimator)
    (gradient,) = torch.autograd.grad(values.sum(), far)
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient).all()
    if estimator != "k1":
        assert (values >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_no_divergence(estimator):
    log_prob = torch.tensor([-0.3, -2.0], requires_grad=True)
    assert kl_term(log_prob, log_prob.detach(), log_prob.detach(), estimator=estimator).tolist() == [0.0, 0.0]


def test_unknown_estimator():
    with pytest.raises(ValueError, match="'k4' is unknown.*'k1', 'k2', 'k3', 'unbiased'"):
        check_estimator("k4")
