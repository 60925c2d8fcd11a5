"""From the rollouts of a window to its micro-batches, shared (tree) or not (flat)."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_asyncgrpo.data.schema import (
    ENTRY_ADVANTAGE,
    ENTRY_NODE,
    ENTRY_POLICY_VERSION,
    ENTRY_PROXIMAL_LOG_PROB,
    ENTRY_REF_LOG_PROB,
    ENTRY_ROLLOUT,
    ENTRY_SAMPLE_LOG_PROB,
    FLAT,
    KEPT_ENTRY,
    KEPT_TOKEN,
    NODE_INPUT_IDS,
    NODE_PARENT,
    NODE_POSITION_IDS,
    NODE_SUBTREE_END,
    ROLLOUT_ADVANTAGE,
    ROLLOUT_GROUP_ID,
    ROLLOUT_LEAF,
    ROLLOUT_LENGTH,
    ROLLOUT_POLICY_VERSION,
    ROLLOUT_ROLLOUT_ID,
    WINDOW_NUM_ENTRIES,
    WINDOW_NUM_ROLLOUTS,
    TreeBatch,
)
from torchrl_asyncgrpo.packing.padding_free import to_padding_free
from torchrl_asyncgrpo.packing.planner import Ints, plan
from torchrl_asyncgrpo.packing.trie import common_prefixes, fold
from torchrl_asyncgrpo.packing.window import Window, read_window


class _Packer(ABC):
    def __init__(self, token_budget: int | None = None, min_micro_batches: int = 1) -> None:
        if token_budget is not None and token_budget < 1:
            raise ValueError(
                f"token_budget={token_budget}: a micro-batch holds at least one token; "
                "give 1 or more, or None for no limit."
            )
        if min_micro_batches < 1:
            raise ValueError(
                f"min_micro_batches={min_micro_batches}: a window has at least one micro-batch; give 1 or more."
            )
        self.token_budget = token_budget
        self.min_micro_batches = min_micro_batches
        self._warned = False

    def __call__(self, rollouts: TensorDictBase | Iterable[TensorDictBase]) -> list[TreeBatch]:
        """Pack one window.

        Args:
            rollouts: the rollouts of one optimizer step, in any order: a list, a ``LazyStackedTensorDict`` or another
                iterable of the ``TensorDict`` that ``make_rollout`` returns.

        Returns:
            The micro-batches, on the CPU, each with the totals of the whole window. Together they hold every trained
            token of every rollout exactly once.

        Raises:
            ValueError: if the window is empty or a rollout breaks the data contract.
        """
        window = read_window(rollouts)
        shared_S = self._shared(window)
        if not window.rows:
            return [self._batch(window, shared_S, 0, 0)]
        length_S = np.fromiter(map(len, window.rows), dtype=np.int64, count=len(window.rows))
        self._warn_of_long(window, length_S)
        cuts = plan(
            length_S,
            shared_S,
            np.diff(window.entry_bounds),
            token_budget=self.token_budget,
            min_micro_batches=self.min_micro_batches,
        )
        return [self._batch(window, shared_S, start, stop) for start, stop in pairwise(cuts)]

    def _batch(self, window: Window, shared_S: Ints, start: int, stop: int) -> TreeBatch:
        return _batch(window, shared_S, start, stop)

    @abstractmethod
    def _shared(self, window: Window) -> Ints:
        """[S]: the leading tokens of each row that lie on nodes of the row before it."""

    def _warn_of_long(self, window: Window, length_S: Ints) -> None:
        r = int(length_S.argmax())
        if self._warned or self.token_budget is None or length_S[r] <= self.token_budget:
            return
        self._warned = True
        warnings.warn(
            f"rollout {window.rollout_id[r]} has {length_S[r]} tokens and token_budget is {self.token_budget}: a "
            "rollout over the budget is a micro-batch of its own and may run out of memory; raise token_budget or "
            "shorten the rollouts. Further ones are packed without a warning.",
            stacklevel=3,
        )


class TreePacker(_Packer):
    """Pack the rollouts of a window into micro-batches, each the minimal prefix trie of its rollouts.

    Rollouts are sorted by their tokens, so the result does not depend on the order in which they come; a micro-batch
    is a range of the sorted rollouts. The cuts give the fewest micro-batches within ``token_budget``, among those the
    fewest forwarded nodes, among those the most even split.

    Tokens behind the last trained token of a rollout influence no loss term and get no node. A rollout without any
    trained token is in no micro-batch and not in ``window.num_rollouts``; a window in which nothing is trained gives
    one micro-batch of one node, no entry and no rollout, so that its loss of 0 still has a graph.

    Args:
        token_budget: the most nodes, and the most entries, of one micro-batch: neither its forwarded tokens nor its
            loss terms exceed it. A rollout that alone exceeds it gets a micro-batch of its own, with one warning per
            packer; it is never dropped. None: no limit.
        min_micro_batches: split the window into at least so many micro-batches, but never more than it has rollouts
            with a trained token.

    Raises:
        ValueError: if ``token_budget`` or ``min_micro_batches`` is below 1.
    """

    def _shared(self, window: Window) -> Ints:
        return common_prefixes(window.rows)


class FlatPacker(_Packer):
    """Pack the rollouts of a window one behind the other, one chain of nodes per rollout: nothing is shared.

    For backends without tree attention, and to compare with ``TreePacker``, whose order, trimming and results it has.

    With ``padding_free=True`` a batch has a table ``flat`` besides, the same micro-batch for a model that runs it by
    its own attention: the S rollouts one behind the other as one row of T tokens, without padding. Where nothing is
    trained, its row is one token. Objectives read the other tables and run unchanged.

    =========================== ========== =========================================================================
    ``flat`` key                shape      meaning
    =========================== ========== =========================================================================
    ``input_ids``               [T] int64  the tokens
    ``position_ids``            [T] int64  position in the rollout, 0 at its first token: where transformers' models
                                           see that a sequence begins
    ``cu_seqlens``              [S + 1]    int32, where each rollout begins, and T: what varlen kernels take; [0, 1]
                                           where nothing is trained
    ``completion_mask``         [T] bool   True on trained tokens; what follows is 0 elsewhere
    ``old_log_probs``           [T]        float32 nats, as sampled
    ``advantages``              [T]        float32
    ``policy_versions``         [T] int64  version that sampled the token
    ``ref_log_probs``,          [T]        float32 nats, where the rollouts have them
    ``proximal_log_probs``
    ``kept_count``              [T] int64  where the sampler's kept sets are known: tokens that it kept
    ``kept_token_ids``          [K] int64  these tokens, one set behind the other
    ``num_entries``,            [] int64   totals of the window over all its micro-batches: trained tokens, rollouts
    ``num_rollouts``
    =========================== ========== =========================================================================

    Log-probs are those of a token itself, predicted by the token before it: ``completion_mask[t]`` asks for
    log p(``input_ids[t]`` | what stands before it in its rollout).

    Args:
        token_budget: the most nodes, here the most rollout tokens, of one micro-batch, as in ``TreePacker``.
        min_micro_batches: as in ``TreePacker``.
        padding_free: write the table ``flat``.

    Raises:
        ValueError: if ``token_budget`` or ``min_micro_batches`` is below 1.
    """

    def __init__(
        self, token_budget: int | None = None, min_micro_batches: int = 1, *, padding_free: bool = False
    ) -> None:
        super().__init__(token_budget, min_micro_batches)
        self.padding_free = padding_free

    def _batch(self, window: Window, shared_S: Ints, start: int, stop: int) -> TreeBatch:
        batch = super()._batch(window, shared_S, start, stop)
        if self.padding_free:
            batch[FLAT] = to_padding_free(batch)
        return batch

    def _shared(self, window: Window) -> Ints:
        return np.zeros(len(window.rows), dtype=np.int64)


def _batch(window: Window, shared_S: Ints, start: int, stop: int) -> TreeBatch:
    """The micro-batch of the rollouts ``start .. stop - 1``; one root where there are none."""
    rollouts, size = slice(start, stop), stop - start
    entries = slice(window.entry_bounds[start], window.entry_bounds[stop])
    rows = window.rows[rollouts] or [np.array([window.first_token])]
    shared_in_batch_S = np.zeros(len(rows), dtype=np.int64)
    shared_in_batch_S[1:] = shared_S[start + 1 : stop]
    length_S = np.diff(window.entry_bounds[start : stop + 1])
    entries_S = length_S if size else np.zeros(1, dtype=np.int64)
    trie = fold(rows, shared_in_batch_S, entries_S, window.entry_depth[entries])
    columns = {
        NODE_INPUT_IDS: trie.input_ids,
        NODE_POSITION_IDS: trie.position_ids,
        NODE_PARENT: trie.parent,
        NODE_SUBTREE_END: trie.subtree_end,
        ENTRY_NODE: trie.entry_node,
        ENTRY_ROLLOUT: trie.entry_row,
        ENTRY_POLICY_VERSION: window.entry_version[entries],
        ENTRY_SAMPLE_LOG_PROB: window.sample_log_prob[entries],
        ROLLOUT_ADVANTAGE: window.advantage[rollouts],
        ROLLOUT_POLICY_VERSION: window.policy_version[rollouts],
        ROLLOUT_LENGTH: length_S,
        ROLLOUT_LEAF: trie.leaf[:size],
        ROLLOUT_ROLLOUT_ID: window.rollout_id[rollouts],
        ROLLOUT_GROUP_ID: window.group_id[rollouts],
        WINDOW_NUM_ENTRIES: np.array(len(window.entry_depth)),
        WINDOW_NUM_ROLLOUTS: np.array(len(window.rows)),
    }
    optional = {
        ENTRY_REF_LOG_PROB: window.ref_log_prob,
        ENTRY_PROXIMAL_LOG_PROB: window.proximal_log_prob,
        ENTRY_ADVANTAGE: window.entry_advantage,
    }
    columns |= {key: column[entries] for key, column in optional.items() if column is not None}
    sizes = {"node": [len(trie.parent)], "entry": [len(trie.entry_row)], "rollout": [size], "window": []}
    if window.kept_bounds is not None and window.kept_token is not None:
        bounds = window.kept_bounds[entries.start : entries.stop + 1]
        columns[KEPT_TOKEN] = window.kept_token[bounds[0] : bounds[-1]]
        columns[KEPT_ENTRY] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        sizes["kept"] = [len(columns[KEPT_ENTRY])]
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for (table, key), column in columns.items():
        tables.setdefault(table, {})[key] = torch.from_numpy(column)
    return TreeBatch(
        **{name: TensorDict(table, batch_size=sizes[name]) for name, table in tables.items()}, batch_size=[]
    )
