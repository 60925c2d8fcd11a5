"""Between the tables of a flat batch and the one row of tokens that models without tree attention take.

Suffixes: T tokens of all rollouts, L entries, S rollouts, C sequences (a row in which nothing is trained has one, and
no rollout), K tokens that the sampler kept.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.schema import TreeBatch

# What an entry may hold besides, by its name in a row
_OPTIONAL = {
    schema.FLAT_REF_LOG_PROBS: schema.ENTRY_REF_LOG_PROB,
    schema.FLAT_PROXIMAL_LOG_PROBS: schema.ENTRY_PROXIMAL_LOG_PROB,
}


def to_padding_free(batch: TreeBatch) -> TensorDict:
    """Lay a flat batch out as one row.

    Args:
        batch: a micro-batch of ``FlatPacker``.

    Returns:
        The keys that ``FlatPacker`` documents, ``batch_size=[]``, sharing memory with the batch where they can.

    Raises:
        ValueError: if rollouts share nodes.
    """
    T, node_L = batch.num_nodes, batch[schema.ENTRY_NODE]
    start_C = chain_starts(batch[schema.NODE_PARENT])
    if len(start_C) < batch.num_rollouts:
        raise ValueError(f"{batch.num_rollouts} rollouts lie on {len(start_C)} chains of nodes; pack with FlatPacker.")

    def per_token(value_L: Tensor) -> Tensor:
        return value_L.new_zeros(T).index_put((node_L,), value_L)

    advantage_L = batch.get(schema.ENTRY_ADVANTAGE, None)
    if advantage_L is None:
        advantage_L = batch[schema.ROLLOUT_ADVANTAGE][batch[schema.ENTRY_ROLLOUT]]
    row = {
        schema.FLAT_INPUT_IDS: batch[schema.NODE_INPUT_IDS],
        schema.FLAT_POSITION_IDS: batch[schema.NODE_POSITION_IDS],
        schema.FLAT_CU_SEQLENS: torch.cat([start_C, start_C.new_tensor([T])]).int(),
        schema.FLAT_COMPLETION_MASK: per_token(torch.ones_like(node_L, dtype=torch.bool)),
        schema.FLAT_OLD_LOG_PROBS: per_token(batch[schema.ENTRY_SAMPLE_LOG_PROB]),
        schema.FLAT_ADVANTAGES: per_token(advantage_L),
        schema.FLAT_POLICY_VERSIONS: per_token(batch[schema.ENTRY_POLICY_VERSION]),
        schema.FLAT_NUM_ENTRIES: batch[schema.WINDOW_NUM_ENTRIES],
        schema.FLAT_NUM_ROLLOUTS: batch[schema.WINDOW_NUM_ROLLOUTS],
    }
    for name, key in _OPTIONAL.items():
        if (value_L := batch.get(key, None)) is not None:
            row[name] = per_token(value_L)
    if (entry_K := batch.get(schema.KEPT_ENTRY, None)) is not None:
        row[schema.FLAT_KEPT_COUNT] = per_token(torch.bincount(entry_K, minlength=len(node_L)))
        row[schema.FLAT_KEPT_TOKEN_IDS] = batch[schema.KEPT_TOKEN]
    return TensorDict(row, batch_size=[])


def from_padding_free(flat: TensorDictBase) -> TreeBatch:
    """Read the tables back from a row, all but ``rollout_id`` and ``group_id``, which no row has.

    Args:
        flat: the keys that ``FlatPacker`` documents.

    Returns:
        The batch, one chain per sequence.
    """
    bound_C = flat[schema.FLAT_CU_SEQLENS].long()
    start_C, end_C = bound_C[:-1], bound_C[1:]
    token_T = flat[schema.FLAT_INPUT_IDS]
    parent_T = torch.arange(-1, len(token_T) - 1, device=token_T.device)
    parent_T[start_C] = -1
    sequence_T = torch.arange(len(start_C), device=token_T.device).repeat_interleave(end_C - start_C)
    node_L = flat[schema.FLAT_COMPLETION_MASK].nonzero()[:, 0]
    sequence_S, rollout_L, length_S = sequence_T[node_L].unique_consecutive(return_inverse=True, return_counts=True)
    version_L = flat[schema.FLAT_POLICY_VERSIONS][node_L]
    advantage_L = flat[schema.FLAT_ADVANTAGES][node_L]
    advantage_S = advantage_L[length_S.cumsum(0) - length_S]
    several = bool((advantage_L != advantage_S[rollout_L]).any())
    if several:
        sum_S = torch.zeros(len(length_S), dtype=torch.float64, device=token_T.device)
        advantage_S = (sum_S.index_add_(0, rollout_L, advantage_L.double()) / length_S).to(advantage_L.dtype)
    entry = {
        "node": node_L,
        "rollout": rollout_L,
        "policy_version": version_L,
        "sample_log_prob": flat[schema.FLAT_OLD_LOG_PROBS][node_L],
    }
    entry |= {key[1]: flat[name][node_L] for name, key in _OPTIONAL.items() if name in flat.keys()}
    entry |= {"advantage": advantage_L} if several else {}
    tables = {
        "node": {
            "input_ids": token_T,
            "position_ids": flat[schema.FLAT_POSITION_IDS],
            "parent": parent_T,
            "subtree_end": end_C[sequence_T],
        },
        "entry": entry,
        "rollout": {
            "advantage": advantage_S,
            "policy_version": torch.full_like(length_S, torch.iinfo(torch.int64).max).scatter_reduce(
                0, rollout_L, version_L, "amin"
            ),
            "length": length_S,
            "leaf": end_C[sequence_S] - 1,
        },
        "window": {name: flat[name] for name in (schema.FLAT_NUM_ENTRIES, schema.FLAT_NUM_ROLLOUTS)},
    }
    sizes = {"node": [len(token_T)], "entry": [len(node_L)], "rollout": [len(length_S)], "window": []}
    if schema.FLAT_KEPT_COUNT in flat.keys():
        count_L = flat[schema.FLAT_KEPT_COUNT][node_L]
        token_K = flat[schema.FLAT_KEPT_TOKEN_IDS]
        entry_K = torch.arange(len(node_L), device=token_T.device).repeat_interleave(count_L)
        tables["kept"], sizes["kept"] = {"token": token_K, "entry": entry_K}, [len(token_K)]
    return TreeBatch(
        **{name: TensorDict(table, batch_size=sizes[name]) for name, table in tables.items()}, batch_size=[]
    )


def chain_starts(parent_T: Tensor) -> Tensor:
    """First node of every chain of a flat batch, [C] int64.

    Raises:
        ValueError: if rollouts share nodes.
    """
    index_T = torch.arange(len(parent_T), device=parent_T.device)
    root_T = parent_T < 0
    branch_T = ~root_T & (parent_T != index_T - 1)
    if branch_T.any():
        raise ValueError(
            f"node {int(branch_T.nonzero()[0])} of the batch branches off node {int(parent_T[branch_T][0])}: rollouts "
            "share nodes, which only tree attention can run. Pack with FlatPacker, or use an actor with tree attention "
            "(TreeActor)."
        )
    return root_T.nonzero()[:, 0]
