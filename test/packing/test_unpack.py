import pytest
import torch

from torchrl_asyncgrpo.data.schema import NODE_POSITION_IDS, ROLLOUT_LEAF, make_rollout
from torchrl_asyncgrpo.packing import FlatPacker, TreePacker, node_paths, packing_ratio, unpack


def rollout(tokens):
    return make_rollout(tokens, [False] + [True] * (len(tokens) - 1), [-1.0] * len(tokens), group_id=0)


@pytest.fixture
def batch():
    """Nodes 1 2 3 | 4 | 5 6: the second row branches off behind 1 2, the third has its own root."""
    (batch,) = TreePacker()([rollout([1, 2, 3]), rollout([1, 2, 4]), rollout([5, 6])])
    return batch


def test_paths_run_from_root_to_leaf(batch):
    assert [path.tolist() for path in node_paths(batch)] == [[0, 1, 2], [0, 1, 3], [4, 5]]


def test_values_of_any_shape_come_back_with_gradients(batch):
    values = torch.arange(12, dtype=torch.float64).view(6, 2).requires_grad_()
    rows = unpack(batch, values)
    assert [row.shape for row in rows] == [(3, 2), (3, 2), (2, 2)]
    torch.cat(rows).sum().backward()
    assert values.grad[:, 0].tolist() == [2, 2, 1, 1, 1, 1]


def test_values_can_be_named_by_key(batch):
    assert [row.tolist() for row in unpack(batch, NODE_POSITION_IDS)] == [[0, 1, 2], [0, 1, 2], [0, 1]]


def test_deep_combs_are_followed():
    rows = [[9] * n + [1, 2] for n in range(1, 60)]
    (batch,) = TreePacker()([rollout(row) for row in rows])
    assert sorted(row.tolist() for row in unpack(batch, ("node", "input_ids"))) == sorted(rows)


@pytest.mark.parametrize("values", [torch.tensor(1.0), torch.zeros(5), torch.zeros(7, 6)])
def test_another_number_of_values_than_nodes_is_refused(batch, values):
    with pytest.raises(ValueError, match="for 6 nodes"):
        unpack(batch, values)


def test_a_batch_without_leaves_is_refused(batch):
    batch["rollout"].pop(ROLLOUT_LEAF[1])
    with pytest.raises(ValueError, match="leaf"):
        unpack(batch, NODE_POSITION_IDS)


def test_packing_ratio_is_tokens_over_nodes():
    rows = [rollout([1, 2, 3]), rollout([1, 2, 4]), rollout([5, 6])]
    assert packing_ratio(TreePacker()(rows)) == pytest.approx(8 / 6)
    assert packing_ratio(FlatPacker(token_budget=3)(rows)) == 1.0
