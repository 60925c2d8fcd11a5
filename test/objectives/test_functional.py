import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_oracle import top
from tensordict import TensorDict

from torchrl_asyncgrpo.objectives import functional as f


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def ratios(log_prob, sample, advantage, low=0.2, high=0.2, count=None):
    """Shares of the window's means, as a loss module forms them."""
    values = f.ratio_values(log_prob - sample)
    values |= f.clip_values(f.bounded_exp(log_prob - sample), advantage, 1 - low, 1 + high)
    count = max(1, len(log_prob) if count is None else count)
    return {name: value.double().sum().item() / count for name, value in values.items()}


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
    ratio = f.bounded_exp(log_prob - sample)
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


@pytest.mark.parametrize("values", [f.ratio_values, f.mismatch_values])
def test_divergence_of_policies_that_hardly_differ_is_not_rounding_noise(values):
    """Two implementations of one model in float32: d² / 2 of each token, and not what is left of 1 - 1."""
    difference = torch.tensor([1e-4, -2e-4, 3e-5])
    (estimate,) = [value for key, value in values(difference).items() if key in ("kl_approx", "mismatch_k3")]
    torch.testing.assert_close(estimate, difference.square() / 2, rtol=1e-2, atol=0)


def test_mismatch_estimates_equal_their_formulas():
    gap = tensor(0.3, -0.7, 0.0)
    values = f.mismatch_values(gap)
    torch.testing.assert_close(values["mismatch_ratio"], gap.exp())
    torch.testing.assert_close(values["mismatch_k1"], -gap)
    torch.testing.assert_close(values["mismatch_k3"], gap.exp() - 1 - gap)


@pytest.mark.parametrize(
    ("low", "high", "keys"), [(None, 1.2, {"clip_fraction_high"}), (0.8, None, {"clip_fraction_low"})]
)
def test_a_bound_that_is_not_there_is_not_counted(low, high, keys):
    assert f.clip_values(tensor(0.1, 9.0), tensor(-1.0, 1.0), low, high).keys() == keys


def test_sums_and_means_of_rollouts_do_not_depend_on_their_order_or_length():
    """10,000 float32 values: a float32 sum would be off in the fourth digit."""
    rollout = torch.cat([torch.zeros(10_000, dtype=torch.long), torch.tensor([2, 2])])
    value = torch.cat([torch.full((10_000,), 0.1), torch.tensor([3.0, 5.0])])
    order = torch.randperm(len(value))
    for index in (torch.arange(len(value)), order):
        total = f.sum_by_rollout(value[index], rollout[index], 3)
        mean = f.mean_by_rollout(value[index], rollout[index], torch.tensor([10_000, 0, 2]))
        assert total.tolist() == pytest.approx([10_000 * float(torch.tensor(0.1)), 0.0, 8.0], rel=1e-12)
        assert mean.tolist() == pytest.approx([float(torch.tensor(0.1)), 0.0, 4.0], rel=1e-12)


@given(data=st.data())
def test_top_of_rollouts_equals_sorting_each(data):
    """Few different values, so that many are equal; entries of the rollouts stand in any order."""
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    values = [data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=n, max_size=n)) for n in lengths]
    share = data.draw(st.sampled_from([1e-12, 0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]))
    rollout = data.draw(st.permutations([s for s, n in enumerate(lengths) for _ in range(n)]))
    entries = [iter(row) for row in values]
    value_L = torch.tensor([next(entries[s]) for s in rollout], dtype=torch.float64)
    rollout_L = torch.tensor(rollout, dtype=torch.long)
    kept_L = f.top_of_rollout(value_L, rollout_L, torch.tensor(lengths), share)
    for s, row in enumerate(values):
        assert kept_L[rollout_L == s].tolist() == top(row, share)


@pytest.mark.parametrize(
    ("length", "share", "kept"),
    [(5, 0.2, 1), (5, 0.21, 2), (5, 1e-12, 1), (1, 0.2, 1), (10, 0.3, 3), (7, 1.0, 7), (49, 1 / 49, 1), (100, 0.07, 7)],
)
def test_share_of_a_rollout_is_rounded_up_and_the_first_of_equals_stay(length, share, kept):
    mark = f.top_of_rollout(torch.ones(length), torch.zeros(length, dtype=torch.long), torch.tensor([length]), share)
    assert mark.tolist() == [True] * kept + [False] * (length - kept)


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


@pytest.mark.parametrize(
    "widths", [1.0, -0.1, math.nan, (0.2, -0.1), (1.5, 0.2), (0.2, math.nan), (0.2,), (0.1, 0.2, 0.3)]
)
def test_bad_clip_widths(widths):
    with pytest.raises(ValueError, match=r"clip_epsilon=.*\[0, 1\)"):
        f.check_clip_epsilon(widths)


def test_clip_widths_are_one_number_or_a_pair():
    assert f.check_clip_epsilon(0) == (0.0, 0.0)
    assert f.check_clip_epsilon([0.2, 3]) == (0.2, 3.0)
    assert f.check_clip_epsilon((0.2, math.inf)) == (0.2, math.inf)
