from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_asyncgrpo.packing.planner import plan
from torchrl_asyncgrpo.packing.trie import common_prefixes


@st.composite
def windows(draw, max_size=8):
    """Lengths, shared prefixes and entries of sorted rows, as a packer would give them."""
    rows = sorted(draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=max_size)))
    entries = [draw(st.integers(1, len(row))) for row in rows]
    shared = common_prefixes([np.array(row) for row in rows]) if draw(st.booleans()) else np.zeros(len(rows), int)
    return np.array([len(row) for row in rows]), shared, np.array(entries)


def sizes(window, start, stop):
    length, shared, entries = window
    return int(length[start:stop].sum() - shared[start + 1 : stop].sum()), int(entries[start:stop].sum())


def fits(window, start, stop, budget):
    return budget is None or stop - start == 1 or max(sizes(window, start, stop)) <= budget


def cost(window, cuts):
    return len(cuts) - 1, sum(sizes(window, start, stop)[0] for start, stop in pairwise(cuts))


def brute_force(window, budget, least):
    """Cheapest (micro-batches, nodes) over every split."""
    S = len(window[0])
    splits = [(0, *inner, S) for count in range(min(least, S) - 1, S) for inner in combinations(range(1, S), count)]
    return min(cost(window, cuts) for cuts in splits if all(fits(window, *pair, budget) for pair in pairwise(cuts)))


@given(windows(), st.one_of(st.none(), st.integers(1, 30)), st.integers(1, 10))
@settings(max_examples=300)
def test_no_split_is_cheaper(window, budget, least):
    cuts = plan(*window, token_budget=budget, min_micro_batches=least)
    assert cuts[0] == 0
    assert cuts[-1] == len(window[0])
    assert all(start < stop for start, stop in pairwise(cuts))
    assert all(fits(window, *pair, budget) for pair in pairwise(cuts))
    assert cost(window, cuts) == brute_force(window, budget, least)


def textbook(window, budget, count):
    """Fewest nodes of exactly ``count`` micro-batches, one state per (micro-batch, position)."""
    S = len(window[0])
    least = {0: 0}
    for _ in range(count):
        least = {
            stop: min(
                least[start] + sizes(window, start, stop)[0]
                for start in least
                if start < stop and fits(window, start, stop, budget)
            )
            for stop in range(1, S + 1)
            if any(start < stop and fits(window, start, stop, budget) for start in least)
        }
    return least[S]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("least", [1, 7, 25])
def test_no_split_of_a_larger_window_is_cheaper(seed, least):
    rng = np.random.default_rng(seed)
    rows = sorted(rng.integers(0, 2, rng.integers(1, 40)).tolist() for _ in range(60))
    length = np.array([len(row) for row in rows])
    window = length, common_prefixes([np.array(row) for row in rows]), rng.integers(1, length + 1)
    budget = int(rng.integers(60, 300))
    cuts = plan(*window, token_budget=budget, min_micro_batches=least)
    assert cost(window, cuts) == (len(cuts) - 1, textbook(window, budget, len(cuts) - 1))


def test_entries_bound_a_micro_batch_too():
    identical = np.array([4] * 6), np.array([0] + [4] * 5), np.array([3] * 6)
    assert plan(*identical, token_budget=8) == [0, 2, 4, 6]


def test_a_row_over_the_budget_stands_alone():
    length, shared, entries = np.array([2, 9, 9, 2]), np.array([0, 2, 8, 0]), np.array([1, 1, 1, 1])
    assert plan(length, shared, entries, token_budget=4) == [0, 1, 2, 3, 4]


def test_equal_splits_are_broken_by_evenness():
    length, none = np.full(64, 10), np.zeros(64, int)
    assert plan(length, none, length, min_micro_batches=4) == [0, 16, 32, 48, 64]
    assert plan(length, none, length, token_budget=250) == [0, 21, 43, 64]


def test_cuts_fall_between_groups_where_the_budget_allows():
    shared = np.array([0, 50, 50, 50, 3, 50, 50, 50])
    assert plan(np.full(8, 60), shared, np.full(8, 10), token_budget=120) == [0, 4, 8]
