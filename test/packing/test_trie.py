import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrl_asyncgrpo.packing.trie import common_prefixes, fold

token_rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=10)


def naive_trie(rows):
    """Depth-first pre-order of the prefixes of sorted rows, with the index of each prefix."""
    return {
        prefix: i for i, prefix in enumerate(sorted({tuple(row[: n + 1]) for row in rows for n in range(len(row))}))
    }


def folded(rows, shared=None, depths=None):
    arrays = [np.array(row) for row in rows]
    depths = [[] for _ in rows] if depths is None else depths
    return fold(
        arrays,
        common_prefixes(arrays) if shared is None else np.array(shared),
        np.array([len(row) for row in depths]),
        np.array([depth for row in depths for depth in row], dtype=np.int64),
    )


@given(token_rows)
def test_a_folded_trie_is_the_naive_one(rows):
    rows = sorted(rows)
    nodes = naive_trie(rows)
    trie = folded(rows)
    assert trie.input_ids.tolist() == [prefix[-1] for prefix in nodes]
    assert trie.position_ids.tolist() == [len(prefix) - 1 for prefix in nodes]
    assert trie.parent.tolist() == [nodes.get(prefix[:-1], -1) for prefix in nodes]
    assert trie.subtree_end.tolist() == [
        1 + max(i for other, i in nodes.items() if other[: len(prefix)] == prefix) for prefix in nodes
    ]
    assert trie.leaf.tolist() == [nodes[tuple(row)] for row in rows]


@given(token_rows, st.data())
def test_entries_lie_on_the_path_of_their_row(rows, data):
    rows = sorted(rows)
    nodes = naive_trie(rows)
    depths = [sorted(data.draw(st.sets(st.integers(0, len(row) - 1)))) for row in rows]
    trie = folded(rows, depths=depths)
    assert trie.entry_node.tolist() == [
        nodes[tuple(row[: depth + 1])] for row, at in zip(rows, depths, strict=True) for depth in at
    ]
    assert trie.entry_row.tolist() == [r for r, at in enumerate(depths) for _ in at]


def test_without_sharing_every_row_is_a_chain():
    trie = folded([[5, 6], [5, 6], [5]], shared=[0, 0, 0])
    assert trie.input_ids.tolist() == [5, 6, 5, 6, 5]
    assert trie.parent.tolist() == [-1, 0, -1, 2, -1]
    assert trie.subtree_end.tolist() == [2, 2, 4, 4, 5]
    assert trie.leaf.tolist() == [1, 3, 4]


@given(token_rows)
def test_common_prefixes_count_equal_leading_tokens(rows):
    shared = common_prefixes([np.array(row) for row in rows])
    for above, row, n in zip(rows, rows[1:], shared[1:].tolist(), strict=False):
        assert above[:n] == row[:n]
        assert above[n : n + 1] != row[n : n + 1] or n == min(len(above), len(row))
    assert shared[0] == 0
