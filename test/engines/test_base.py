import math

import pytest

from torchrl_asyncgrpo import SamplingParams


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, 2.5, math.inf, math.nan]),
        ("n", [0, 1.5]),
        ("temperature", [0.0, -1.0, math.inf, math.nan]),
        ("top_p", [0.0, -0.1, 1.5, math.nan]),
        ("top_k", [-2, 0.5]),
        ("min_p", [-0.1, 1.5, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}={value};"):
            SamplingParams(**{"max_tokens": 4, name: value})


def test_limits_themselves_are_taken():
    whole = SamplingParams(max_tokens=1, n=1, temperature=0.1, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
    assert whole.keeps_whole_vocabulary
    assert not SamplingParams(max_tokens=1, top_p=1e-3, top_k=1, min_p=1, repetition_penalty=0.1).keeps_whole_vocabulary
