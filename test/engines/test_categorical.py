"""The sampler: the right distribution, the right log-prob, and never a token that cannot be drawn."""

import math

import numpy as np
import pytest
import torch

from torchrl_asyncgrpo.engines.categorical import BLOCK_WIDTH, sample_categorical


def draw(logits, uniforms, temperature=1.0):
    rows = len(uniforms)
    return sample_categorical(
        torch.as_tensor(logits)[None],
        torch.zeros(rows, dtype=torch.int64),
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.as_tensor(uniforms, dtype=torch.float64),
    )


@pytest.mark.parametrize(("temperature", "expected"), [(0.6, -1.8692), (1.0, -1.4076)], ids=["T1", "temperature 1"])
def test_log_prob_is_that_of_the_tempered_distribution(temperature, expected):
    token, log_prob = draw([2.0, 1.0, 0.0], [0.9], temperature)
    assert token.tolist() == [1]
    assert log_prob.item() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("vocabulary", [3, BLOCK_WIDTH, BLOCK_WIDTH + 1, 3 * BLOCK_WIDTH - 1])
def test_every_uniform_draws_the_token_whose_interval_holds_it(vocabulary):
    logits = torch.randn(vocabulary, dtype=torch.float64) * 2
    probability = logits.softmax(-1)
    edge = torch.cat([torch.zeros(1, dtype=torch.float64), probability.cumsum(-1)])
    middle = (edge[:-1] + edge[1:]) / 2
    token, log_prob = draw(logits, middle)
    assert token.tolist() == list(range(vocabulary))
    torch.testing.assert_close(log_prob, probability.log(), rtol=0, atol=1e-12)
    inside = probability > 1e-9
    nearly_all = 1 - 1e-6
    token_low, _ = draw(logits, (edge[:-1] + probability * 1e-6)[inside])
    token_high, _ = draw(logits, (edge[:-1] + probability * nearly_all)[inside])
    assert token_low.tolist() == token_high.tolist() == torch.arange(vocabulary)[inside].tolist()


def test_frequencies_pass_a_chi_square_test():
    logits = torch.randn(120) * 1.5
    draws = 20_000
    uniforms = np.random.default_rng(0).random(draws)
    token, _ = draw(logits, uniforms)
    expected = logits.double().softmax(-1) * draws
    often = expected > 20
    observed = torch.bincount(token, minlength=120).double()
    statistic = ((observed - expected)[often] ** 2 / expected[often]).sum().item()
    freedom = int(often.sum()) - 1
    assert freedom > 60
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(dtype, uniform):
    vocabulary = 2 * BLOCK_WIDTH
    for possible in ([BLOCK_WIDTH - 1], [BLOCK_WIDTH], [BLOCK_WIDTH + 5], [3, vocabulary - 2]):
        logits = torch.full((vocabulary,), -math.inf, dtype=dtype)
        logits[possible] = torch.randn(len(possible)).to(dtype)
        token, log_prob = draw(logits, [uniform])
        assert token.item() in possible
        assert math.isfinite(log_prob.item())


def test_the_largest_uniform_draws_a_token_of_the_vocabulary():
    vocabulary, rows = 2 * BLOCK_WIDTH, 100
    logits = torch.randn(rows, vocabulary)
    uniform = torch.full((rows,), 1 - 2**-53, dtype=torch.float64)
    token, _ = sample_categorical(logits, torch.arange(rows), torch.ones(rows, dtype=torch.float64), uniform)
    assert token.tolist() == [vocabulary - 1] * rows


def test_a_row_far_from_zero_keeps_its_precision():
    logits = torch.tensor([1e4, 1e4 - 1, 1e4 - 2])
    _, log_prob = draw(logits, [0.999])
    assert log_prob.item() == pytest.approx(-2 - math.log(1 + math.exp(-1) + math.exp(-2)), abs=1e-6)


def test_many_rows_draw_as_each_alone(monkeypatch):
    monkeypatch.setattr("torchrl_asyncgrpo.engines.categorical.LOGITS_AT_ONCE", 64 * 300)
    logits = torch.randn(5, 300, dtype=torch.float64)
    source = torch.randint(5, (150,))
    temperature = torch.rand(150, dtype=torch.float64) + 0.5
    uniform = torch.rand(150, dtype=torch.float64)
    token, log_prob = sample_categorical(logits, source, temperature, uniform)
    for row in range(150):
        one = slice(row, row + 1)
        alone = sample_categorical(logits[source[row]][None], source[one] * 0, temperature[one], uniform[one])
        assert alone[0] == token[row]
        torch.testing.assert_close(alone[1], log_prob[one], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_without_a_distribution_are_an_error(bad):
    with pytest.raises(FloatingPointError, match="1 of 1 rows"):
        draw(bad, [0.5])
