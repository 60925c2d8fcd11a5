"""The layout: what it accepts, what it derives, and how it travels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracle import NaiveTrie, random_rollouts

from torchrl_asyncgrpo.modules.tree_attention import TreeLayout


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(1, 30), window=st.none() | st.integers(1, 30))
def test_parents_and_visibility_equal_the_walk_along_each_path(seed: int, num: int, window: int | None) -> None:
    trie = NaiveTrie(random_rollouts(seed, num=num))
    layout = trie.layout()
    assert layout.parent_T.tolist() == trie.parent
    assert torch.equal(layout.visible_TT(window), trie.visible_TT(window))
    given_parents = TreeLayout(*map(torch.tensor, (trie.depth, trie.end, trie.parent)))
    assert torch.equal(given_parents.visible_TT(window), trie.visible_TT(window))


@pytest.mark.parametrize(
    ("depth", "end", "node"),
    [
        ([0, 1, 1], [2, 3, 3], 1),  # two subtrees that cross
        ([0, 1, 2], [3, 3, 2], 2),  # ends before it begins
        ([0, 1, 1], [3, 3, 3], 2),  # a sibling counted as a descendant
        ([0, 1], [2, 3], 1),  # ends outside the batch
        ([0, 2], [2, 2], 1),  # a level is skipped
        ([1, 2], [2, 2], 0),  # no root
        ([0, 1, 2], [2, 2, 3], 2),  # a child outside its parent
        ([0, 1], [1, 2], 1),
    ],
)
def test_what_is_no_forest_in_preorder_is_refused_at_its_node(depth: list[int], end: list[int], node: int) -> None:
    with pytest.raises(ValueError, match=rf"pre-order at node {node}"):
        TreeLayout(torch.tensor(depth), torch.tensor(end))


def test_a_wrong_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="at node 2"):
        TreeLayout(torch.tensor([0, 1, 2]), torch.tensor([3, 3, 3]), torch.tensor([-1, 0, 0]))


@pytest.mark.parametrize("shape", [(0,), (2, 1)])
def test_shapes_are_checked(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one value per node"):
        TreeLayout(torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64))


def test_model_inputs_carry_no_quadratic_tensor() -> None:
    layout = NaiveTrie(random_rollouts(0)).layout()
    inputs = layout.model_inputs()
    assert inputs["attention_mask"].numel() == 0
    assert inputs["tree"] is layout
    assert inputs["position_ids"].shape == (1, layout.num_nodes)
    assert inputs["use_cache"] is False
