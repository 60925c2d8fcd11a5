import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrl_asyncgrpo.collectors.overlong import SoftOverlongPunishment, soft_overlong_punishment
from torchrl_asyncgrpo.collectors.rewards import RewardFunctions


def by_cases(length, max_length, cache):
    """DAPO, eq. 13, case by case."""
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return ((max_length - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("max_length", "cache"), [(20, 5), (20, 20), (7, 1), (1, 1)])
def test_equals_the_formula(max_length, cache):
    lengths = list(range(3 * max_length))
    expected = [by_cases(length, max_length, cache) for length in lengths]
    assert soft_overlong_punishment(lengths, max_length=max_length, cache=cache) == expected
    assert min(expected) == -1.0 and max(expected) == 0.0


def test_reward_function_counts_tokens_not_characters():
    functions = RewardFunctions([SoftOverlongPunishment(10, 4), lambda completions, **_: [1.0] * 3], [0.5, 1.0])
    ids = [[7] * n for n in (6, 8, 12)]
    with ThreadPoolExecutor(1) as pool:
        rewards = asyncio.run(functions(["p"] * 3, ["x", "y", "z" * 99], ids, {"answer": [1, 2, 3]}, pool))
    assert rewards == [1.0, 0.75, 0.5]


def test_name_in_errors():
    assert SoftOverlongPunishment(10, 4).__name__ == "soft_overlong_punishment"


@pytest.mark.parametrize(("max_length", "cache"), [(10, 0), (10, 11), (0, 0), (10, -1)])
def test_bad_input(max_length, cache):
    message = f"cache={cache} with max_length={max_length}"
    with pytest.raises(ValueError, match=message):
        SoftOverlongPunishment(max_length, cache)
    with pytest.raises(ValueError, match=message):
        soft_overlong_punishment([3], max_length=max_length, cache=cache)
