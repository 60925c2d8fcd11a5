"""From nodes back to rollouts: values per token, and how much was shared.

Suffixes: T nodes, S rollouts, N tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_asyncgrpo.data.schema import NODE_PARENT, NODE_POSITION_IDS, ROLLOUT_LEAF, TreeBatch


def unpack(batch: TreeBatch, values_T: Tensor | NestedKey) -> list[Tensor]:
    """Give per-node values back per rollout and token, the inverse of packing.

    ``unpack(batch, NODE_INPUT_IDS)`` are the tokens of the rollouts; gradients flow back to ``values_T``.

    Args:
        batch: a micro-batch of a packer.
        values_T: [T, ...], one value per node, or the key under which the batch holds it.

    Returns:
        One tensor [N, ...] per rollout, in the order of the batch's rollout table (``("rollout", "rollout_id")`` names
        them). N counts the tokens up to the rollout's last trained one: the packers keep nothing behind it.

    Raises:
        ValueError: if there is not one value per node, or the batch has no ``("rollout", "leaf")``.
    """
    if not isinstance(values_T, Tensor):
        values_T = batch[values_T]
    if values_T.ndim == 0 or len(values_T) != batch.num_nodes:
        raise ValueError(
            f"values of shape {tuple(values_T.shape)} for {batch.num_nodes} nodes; give one per node, [T, ...]."
        )
    return [values_T[path_N] for path_N in node_paths(batch)]


def node_paths(batch: TreeBatch) -> list[Tensor]:
    """The nodes of each rollout from the root to its last kept token.

    Returns:
        S tensors [N] int64, on the device of the batch.

    Raises:
        ValueError: if the batch has no ``("rollout", "leaf")``, as one made by hand may.
    """
    parent_T = batch[NODE_PARENT]
    index_T = torch.arange(len(parent_T), device=parent_T.device)
    chain_start_T = torch.where(parent_T != index_T - 1, index_T, 0).cummax(0).values
    starts, above = chain_start_T.tolist(), parent_T[chain_start_T].tolist()
    paths = []
    for leaf in _leaf(batch).tolist():
        chains, node = [], leaf
        while node >= 0:
            chains.append(index_T[starts[node] : node + 1])
            node = above[node]
        paths.append(torch.cat(chains[::-1]))
    return paths


def packing_ratio(batches: Iterable[TreeBatch]) -> float:
    """Packing ratio ρ of micro-batches: rollout tokens ÷ forwarded nodes; 1 where nothing is shared.

    Tokens behind a rollout's last trained one, and rollouts without any, count on neither side.

    Args:
        batches: micro-batches of a packer, at least one.
    """
    batches = list(batches)
    tokens = sum(int((batch[NODE_POSITION_IDS][_leaf(batch)] + 1).sum()) for batch in batches)
    return tokens / sum(batch.num_nodes for batch in batches)


def _leaf(batch: TreeBatch) -> Tensor:
    if ROLLOUT_LEAF not in batch.keys(include_nested=True):
        raise ValueError(
            f"the batch has no {ROLLOUT_LEAF}, the node at which each rollout ends; pack it with a packer."
        )
    return batch[ROLLOUT_LEAF]
