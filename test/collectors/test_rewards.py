import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrl_asyncgrpo.collectors.rewards import RewardFunctions


def score(functions, weights=None, completions=("ab", "abc"), columns=None):
    with ThreadPoolExecutor(1) as pool:
        return asyncio.run(
            RewardFunctions(functions, weights)(
                ["p"] * len(completions), list(completions), [[1]] * len(completions), columns or {}, pool
            )
        )


def lengths(completions, **_):
    return [len(c) for c in completions]


async def ones_async(prompts, **_):
    await asyncio.sleep(0)
    return [1.0 for _ in prompts]


def test_columns_and_conventions_of_trl():
    seen = {}

    def reward(prompts, completions, answer, **more):
        seen.update(more, prompts=prompts, completions=completions, answer=answer)
        return [0.0, 1.0]

    assert score(reward, columns={"answer": [3, 3]}) == [0.0, 1.0]
    assert seen == {
        "prompts": ["p", "p"],
        "completions": ["ab", "abc"],
        "answer": [3, 3],
        "completion_ids": [[1], [1]],
    }


def test_weighted_sum_of_sync_and_async_functions():
    assert score([lengths, ones_async], [0.5, 10.0]) == [11.0, 11.5]


def test_components_are_unweighted_and_name_the_unscored():
    def score_components(functions, weights):
        with ThreadPoolExecutor(1) as pool:
            rewards = RewardFunctions(functions, weights)
            of_parts = asyncio.run(rewards.components(["p"] * 2, ["ab", "abc"], [[1]] * 2, {}, pool))
            return of_parts, rewards.weighted_sums(of_parts)

    components, sums = score_components([lengths, lambda **_: [None, 2.0], ones_async], [0.5, 3.0, 0.0])
    assert str(components) == "[[2.0, nan, 1.0], [3.0, 2.0, 1.0]]"
    assert sums == [1.0, 7.5]
    components, sums = score_components([lambda **_: [None, 2.0]] * 2, [0.5, 3.0])
    assert str(components) == "[[nan, nan], [2.0, 2.0]]"
    assert str(sums) == "[nan, 7.0]"


def test_object_with_an_async_call():
    class Judge:
        async def __call__(self, completions, **_):
            await asyncio.sleep(0)
            return [0.5 for _ in completions]

    assert score(Judge()) == [0.5, 0.5]


def test_none_leaves_a_completion_to_the_other_functions_or_unscored():
    assert score([lambda **_: [None, 2.0], lengths]) == [2.0, 5.0]
    first, second = score(lambda **_: [None, 2.0])
    assert math.isnan(first)
    assert second == 2.0


def test_booleans_and_tensors_are_numbers():
    import torch

    assert score([lambda **_: [True, False], lambda **_: torch.tensor([0.5, 0.25])]) == [1.5, 0.25]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "'reward' returned 1 values for 2 completions; return a list of 2"),
        ("ok", "returned a str; return a list of 2 numbers"),
        (None, "returned a NoneType"),
        (1.0, "returned a float"),
        ({0: 1.0, 1: 0.0}, "returned a dict; return a list of 2 numbers, in order of completions"),
        ({0.0: 1, 1.0: 0}.keys(), "returned a dict_keys"),
        ({0.0, 1.0}, "returned a set"),
        ([1.0, "2"], "returned '2' for completion 1 of 2.*finite number, or None"),
        ([math.inf, 1.0], "returned inf for completion 0"),
        ([math.nan, 1.0], "returned nan for completion 0"),
        ([1.0, [2.0, 3.0]], r"returned \[2.0, 3.0\] for completion 1"),
    ],
)
def test_wrong_values_are_named(returned, message):
    def reward(**_):
        return returned

    with pytest.raises(ValueError, match=message):
        score(reward)


def test_exception_of_a_function_is_raised_itself():
    error = LookupError("mine")

    def reward(**_):
        raise error

    with pytest.raises(LookupError) as caught:
        score(reward)
    assert caught.value is error


@pytest.mark.parametrize(
    ("functions", "weights", "error", "message"),
    [
        ([], None, ValueError, "empty"),
        ([3], None, TypeError, "3 is a int"),
        (lengths, [1.0, 2.0], ValueError, "1 reward functions"),
        (lengths, [math.nan], ValueError, "finite"),
    ],
)
def test_bad_arguments(functions, weights, error, message):
    with pytest.raises(error, match=message):
        RewardFunctions(functions, weights)


def next_of_nothing(**_):
    return next(iter([]))


async def next_of_nothing_async(**_):
    return next(iter([]))


@pytest.mark.parametrize("function", [next_of_nothing, next_of_nothing_async, lambda **_: next_of_nothing_async()])
def test_stop_iteration_ends_in_an_error(function):
    """S6: no future takes a StopIteration."""
    rewards = RewardFunctions(function)

    async def scored():
        with ThreadPoolExecutor(1) as pool:
            return await asyncio.wait_for(rewards(["p"], ["a"], [[1]], {}, pool), 5)

    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        asyncio.run(scored())
    assert isinstance(caught.value.__cause__, StopIteration)
