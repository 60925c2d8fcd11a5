import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_asyncgrpo.objectives import functional as f


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def ratios(log_prob, sample, advantage, low=0.2, high=0.2, count=None):
    count = torch.tensor(len(log_prob) if count is None else count)
    return {k: v.item() for k, v in f.ratio_metrics(log_prob, sample, advantage, count, low, high).items()}


def test_anchor_is_what_the_sampler_recorded():
    """L10."""
    assert f.importance_ratio(tensor(-0.5), tensor(-1.0)).item() == pytest.approx(1.6487, abs=5e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.1, 1.0, -1.1, -1.0),
        (1.5, 1.0, -1.2, 0.0),
        (1.5, -1.0, 1.5, 1.0),
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -1.0),
        (1.25, 1.0, -1.25, -1.0),
    ],
)
def test_clipped_surrogate_is_pessimistic(ratio, advantage, expected, slope):
    high = 0.28 if ratio == 1.25 else 0.2
    ratio = tensor(ratio).requires_grad_()
    term = f.clipped_surrogate(ratio, tensor(advantage), 0.2, high)
    assert term.item() == pytest.approx(expected)
    assert torch.autograd.grad(term.sum(), ratio)[0].item() == pytest.approx(slope)


@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_any_two_policies_give_finite_values_and_gradients(gap, advantage):
    log_prob = torch.tensor([-1.0 + min(gap, 0.0)], requires_grad=True)
    sample = torch.tensor([-1.0 - max(gap, 0.0)])
    ratio = f.importance_ratio(log_prob, sample)
    loss = f.clipped_surrogate(ratio, torch.tensor([advantage]), 0.2, 0.2) + f.k3_kl(log_prob, sample)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(log_prob.grad).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [(0.14, 1.0, 0, 0), (0.14, -1.0, 1, 0), (3.0, 1.0, 0, 1), (3.0, -1.0, 0, 0), (1.1, 1.0, 0, 0), (3.0, 0.0, 0, 0)],
)
def test_only_the_side_that_binds_counts_as_clipped(ratio, advantage, low, high):
    """L5."""
    metrics = ratios(tensor(math.log(ratio) - 1), tensor(-1.0), tensor(advantage))
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (low, high)


def test_kl_estimates_equal_their_formulas():
    log_prob, other = tensor(-1.0, -2.0), tensor(-1.5, -0.5)
    d = other - log_prob
    torch.testing.assert_close(f.k3_kl(log_prob, other), d.exp() - d - 1)
    metrics = ratios(log_prob, other, tensor(1.0, 1.0))
    assert metrics["kl_approx"] == pytest.approx(((-d).exp() - 1 + d).mean().item())


def test_weights_of_every_aggregation():
    rollout, length = torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1])
    entries, rollouts = torch.tensor(10), torch.tensor(5)

    def weights(**kind):
        return f.entry_weights(rollout, length, entries, rollouts, **kind).tolist()

    assert weights(aggregation="token-mean") == pytest.approx([0.1] * 4)
    assert weights(aggregation="sequence-mean") == pytest.approx([1 / 15] * 3 + [1 / 5])
    assert weights(aggregation="constant", constant=8.0) == pytest.approx([1 / 40] * 4)


def test_mean_of_a_window_is_not_a_mean_of_means():
    """L1: 100 tokens with term 2.0 and 900 with 0.5 in two micro-batches."""
    total, one = torch.tensor(1000), torch.tensor(1)
    shares = []
    for count, term in ((100, 2.0), (900, 0.5)):
        rollout, length = torch.zeros(count, dtype=torch.long), torch.tensor([count])
        weight = f.entry_weights(rollout, length, total, one, aggregation="token-mean")
        shares.append((weight * term).sum().item())
    assert sum(shares) == pytest.approx(0.65)


def test_metrics_of_micro_batches_add_up_to_those_of_the_window():
    torch.manual_seed(0)
    log_prob, sample, advantage = (-torch.rand(12).double() for _ in range(3))
    whole = f.reduce_window([TensorDict({k: torch.tensor(v) for k, v in ratios(log_prob, sample, advantage).items()})])
    parts = []
    for rows in (slice(0, 2), slice(2, 11), slice(11, 12)):
        part = ratios(log_prob[rows], sample[rows], advantage[rows], count=12)
        parts.append(TensorDict({k: torch.tensor(v) for k, v in part.items()}))
    split = f.reduce_window(parts)
    for key in whole.keys():
        assert split[key].item() == pytest.approx(whole[key].item(), rel=1e-12)
    w = (log_prob - sample).exp()
    assert split["ESS"].item() == pytest.approx((w.sum() ** 2 / (w**2).sum() / 12).item())


def test_metrics_of_nothing_are_zero():
    """L9."""
    none = torch.empty(0)
    metrics = f.reduce_window([TensorDict({k: torch.tensor(v) for k, v in ratios(none, none, none).items()})])
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize(
    ("aggregation", "constant", "message"),
    [
        ("mean", None, "'mean'.*'token-mean', 'sequence-mean', 'constant'"),
        ("constant", None, "needs constant=C"),
        ("token-mean", 3.0, "take none"),
        ("constant", 0.0, "constant=0.0.*above 0"),
    ],
)
def test_bad_aggregation(aggregation, constant, message):
    with pytest.raises(ValueError, match=message):
        f.check_aggregation(aggregation, constant)
