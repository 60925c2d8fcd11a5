"""The data contract: every key of a rollout and of a tree batch is spelled once, here.

Suffixes of tensor names, here and in the rest of the package:
T nodes, L entries, S rollouts, N tokens of one rollout, K kept tokens, D width, V vocabulary, H heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TypedTensorDict
from torch import Tensor
from typing_extensions import NotRequired

# --- keys of a rollout -------------------------------------------------------------------------
TOKEN_IDS = "token_ids"
LOSS_MASK = "loss_mask"
SAMPLE_LOG_PROB = "sample_log_prob"
POLICY_VERSION = "policy_version"
REWARD = "reward"
ADVANTAGE = "advantage"
GROUP_ID = "group_id"
ROLLOUT_ID = "rollout_id"
REF_LOG_PROB = "ref_log_prob"
PROXIMAL_LOG_PROB = "proximal_log_prob"
GROUP_ADVANTAGE = "group_advantage"  # what batch_normalised started from
KEPT_TOKEN_IDS = "kept_token_ids"
KEPT_COUNT = "kept_count"

# --- keys of a tree batch ----------------------------------------------------------------------
NODE_INPUT_IDS = ("node", "input_ids")
NODE_POSITION_IDS = ("node", "position_ids")
NODE_PARENT = ("node", "parent")
NODE_SUBTREE_END = ("node", "subtree_end")
NODE_LOG_PROB = ("node", "log_prob")
NODE_ENTROPY = ("node", "entropy")
NODE_ROUTER_LOGITS = ("node", "router_logits")
ENTRY_NODE = ("entry", "node")
ENTRY_ROLLOUT = ("entry", "rollout")
ENTRY_SAMPLE_LOG_PROB = ("entry", "sample_log_prob")
ENTRY_REF_LOG_PROB = ("entry", "ref_log_prob")
ENTRY_PROXIMAL_LOG_PROB = ("entry", "proximal_log_prob")
ENTRY_POLICY_VERSION = ("entry", "policy_version")
ENTRY_ADVANTAGE = ("entry", "advantage")
ENTRY_LOG_KEPT = ("entry", "log_kept")
KEPT_TOKEN = ("kept", "token")
KEPT_ENTRY = ("kept", "entry")
ROLLOUT_ADVANTAGE = ("rollout", "advantage")
ROLLOUT_POLICY_VERSION = ("rollout", "policy_version")
ROLLOUT_LENGTH = ("rollout", "length")
ROLLOUT_LEAF = ("rollout", "leaf")
ROLLOUT_ROLLOUT_ID = ("rollout", "rollout_id")
ROLLOUT_GROUP_ID = ("rollout", "group_id")
WINDOW_NUM_ENTRIES = ("window", "num_entries")
WINDOW_NUM_ROLLOUTS = ("window", "num_rollouts")

# --- keys of a padding-free batch, the table `flat` of a tree batch ----------------------------
FLAT = "flat"
FLAT_INPUT_IDS = "input_ids"
FLAT_POSITION_IDS = "position_ids"
FLAT_CU_SEQLENS = "cu_seqlens"
FLAT_COMPLETION_MASK = "completion_mask"
FLAT_OLD_LOG_PROBS = "old_log_probs"
FLAT_REF_LOG_PROBS = "ref_log_probs"
FLAT_PROXIMAL_LOG_PROBS = "proximal_log_probs"
FLAT_ADVANTAGES = "advantages"
FLAT_POLICY_VERSIONS = "policy_versions"
FLAT_KEPT_COUNT = "kept_count"
FLAT_KEPT_TOKEN_IDS = "kept_token_ids"
FLAT_NUM_ENTRIES = "num_entries"
FLAT_NUM_ROLLOUTS = "num_rollouts"

_next_rollout_id = itertools.count()


def make_rollout(
    token_ids: Any,
    loss_mask: Any,
    sample_log_prob: Any,
    *,
    group_id: int,
    reward: float = 0.0,
    advantage: Any = 0.0,
    policy_version: Any = 0,
    rollout_id: int | None = None,
    ref_log_prob: Any = None,
    sampling_mask: Sequence[Iterable[int] | None] | None = None,
) -> TensorDict:
    """Build one rollout, the row that a replay buffer stores and a packer folds.

    Args:
        token_ids: [N] integers, prompt and response tokens exactly as sampled; N >= 1.
        loss_mask: [N] booleans, True where the policy being trained sampled the token. The first
            token cannot be trained: nothing predicts it.
        sample_log_prob: [N] floats in nats, the log-prob of each token under the sampling policy at
            the sampling temperature, within the kept set where there is one. Ignored, and allowed to
            be NaN, where the mask is False; finite and <= 0 where it is True.
        group_id: identity of the draw of the prompt; rollouts of one draw share it.
        reward: raw reward of the rollout.
        advantage: one float, shared by every trained token; [N] floats, one per token, ignored where the
            mask is False; or one per turn, a turn being a run of tokens whose mask is True.
        policy_version: [N] integers, or one integer for all tokens: the version of the weights that
            sampled the token. Ignored where the mask is False.
        rollout_id: identity of the rollout; by default the next one of this process.
        ref_log_prob: [N] floats in nats under a frozen reference policy, or None.
        sampling_mask: for every token the distinct token ids that top-p, top-k or min-p kept when it
            was sampled, in any order; None or empty where nothing was cut, as for prompt tokens.

    Returns:
        A ``TensorDict`` with ``batch_size=[]`` and the keys of the data contract; those of the
        sampling mask only where it cuts something.

    Raises:
        ValueError: if the shapes differ, a trained first token is given, a trained token has a
            log-prob that is not finite or is positive or is not in its own kept set, or a kept set
            names an id twice or a negative one; or if ``advantage`` is of another length.
    """
    token_ids_N = torch.as_tensor(token_ids, dtype=torch.int64)
    loss_mask_N = torch.as_tensor(loss_mask, dtype=torch.bool)
    sample_log_prob_N = torch.as_tensor(sample_log_prob, dtype=torch.float32)
    if token_ids_N.ndim != 1 or not len(token_ids_N):
        raise ValueError(
            f"token_ids has shape {tuple(token_ids_N.shape)}; a rollout is one non-empty row of tokens, "
            "[N] with N >= 1."
        )
    version_N = torch.as_tensor(policy_version, dtype=torch.int64)
    version_N = version_N.expand(len(token_ids_N)).clone() if version_N.ndim == 0 else version_N
    rows = {LOSS_MASK: loss_mask_N, SAMPLE_LOG_PROB: sample_log_prob_N, POLICY_VERSION: version_N}
    if ref_log_prob is not None:
        rows[REF_LOG_PROB] = torch.as_tensor(ref_log_prob, dtype=torch.float32)
    for key, row in rows.items():
        if row.shape != token_ids_N.shape:
            raise ValueError(
                f"{key} has shape {tuple(row.shape)} and token_ids {tuple(token_ids_N.shape)}; "
                f"give one value per token (truncate or extend {key} together with the tokens)."
            )
    if loss_mask_N[0]:
        raise ValueError(
            "loss_mask[0] is True, but the first token has no token before it to predict it; "
            "start the rollout with a prompt or end-of-text token that is masked out."
        )
    for key in (SAMPLE_LOG_PROB, REF_LOG_PROB):
        if key not in rows:
            continue
        trained_L = rows[key][loss_mask_N]
        bad_L = ~torch.isfinite(trained_L) | (trained_L > 0)
        if bad_L.any():
            where = int(loss_mask_N.nonzero()[bad_L][0])
            raise ValueError(
                f"{key}[{where}] is {float(rows[key][where])} on a trained token; a log-prob lies in (-inf, 0]. "
                "Mask a token that the engine returned without a log-prob out of the loss."
            )
    if sampling_mask is not None:
        rows |= _kept_sets(sampling_mask, token_ids_N, loss_mask_N)
    return TensorDict(
        {
            TOKEN_IDS: token_ids_N,
            REWARD: torch.tensor(float(reward)),
            ADVANTAGE: _advantage(advantage, loss_mask_N),
            GROUP_ID: torch.tensor(int(group_id)),
            ROLLOUT_ID: torch.tensor(next(_next_rollout_id) if rollout_id is None else int(rollout_id)),
            **rows,
        },
        batch_size=[],
    )


def _advantage(advantage: Any, loss_mask_N: Tensor) -> Tensor:
    """An advantage of a rollout, its turns or its tokens as [] or [N]."""
    advantage = torch.as_tensor(advantage, dtype=torch.float32)
    if advantage.ndim == 0 or advantage.shape == loss_mask_N.shape:
        return advantage.clone()
    # the first token is not trained, so that a turn begins where the mask rises, and there are fewer turns than tokens
    turn_N = (loss_mask_N[1:] & ~loss_mask_N[:-1]).cumsum(0)
    turns = int(turn_N[-1]) if len(turn_N) else 0
    if advantage.shape != (turns,):
        raise ValueError(
            f"advantage has shape {tuple(advantage.shape)}; give one number, one per token [{len(loss_mask_N)}], or "
            f"one per turn [{turns}]: the loss_mask has {turns} runs of trained tokens."
        )
    per_token_N = torch.zeros(loss_mask_N.shape)
    per_token_N[loss_mask_N] = advantage[turn_N[loss_mask_N[1:]] - 1]
    return per_token_N


def _kept_sets(
    sampling_mask: Sequence[Iterable[int] | None], token_ids_N: Tensor, loss_mask_N: Tensor
) -> dict[str, Tensor]:
    """The keys of a sampling mask; none where it keeps the whole vocabulary everywhere."""
    if len(sampling_mask) != len(token_ids_N):
        raise ValueError(
            f"sampling_mask has {len(sampling_mask)} sets and token_ids {len(token_ids_N)} tokens; give one set per "
            "token, None for a token of the prompt."
        )
    sets = [[] if kept is None else sorted(kept) for kept in sampling_mask]
    count_N = torch.tensor([len(kept) for kept in sets])
    token_K = torch.tensor(list(itertools.chain.from_iterable(sets)), dtype=torch.int64)
    if not len(token_K):
        return {}
    of_K = torch.arange(len(count_N)).repeat_interleave(count_N)
    unordered_K, outside_N = check_kept(token_ids_N, of_K, token_K)
    if (unordered_K := unordered_K & loss_mask_N[of_K]).any():
        k = int(unordered_K.nonzero()[0])
        raise ValueError(
            f"sampling_mask[{int(of_K[k])}] holds the token id {int(token_K[k])}, negative or for the second time; a "
            "kept set is of distinct ids of 0 or more: pass the ids without padding."
        )
    if (outside_N := outside_N & loss_mask_N).any():
        n = int(outside_N.nonzero()[0])
        raise ValueError(
            f"sampling_mask[{n}] keeps {int(count_N[n])} token ids, and the trained token_ids[{n}], "
            f"{int(token_ids_N[n])}, is not one of them. Give each token the set that it was drawn from, or mask it "
            "out of the loss."
        )
    return {KEPT_TOKEN_IDS: token_K, KEPT_COUNT: count_N}


def check_kept(token_L: Tensor, of_K: Tensor, kept_K: Tensor) -> tuple[Tensor, Tensor]:
    """Find what breaks the rules of kept sets.

    Args:
        token_L: [L] int64, sampled tokens.
        of_K: [K] int64 in [0, L), the sampled token that each kept token belongs to.
        kept_K: [K] int64, kept tokens.

    Returns:
        [K] bool, True where a kept token is negative or does not stand in ascending order behind the one before it;
        [L] bool, True where a sampled token has a kept set and is not in it.
    """
    unordered_K = kept_K < 0
    unordered_K[1:] |= (of_K[1:] < of_K[:-1]) | ((of_K[1:] == of_K[:-1]) & (kept_K[1:] <= kept_K[:-1]))
    outside_L = torch.zeros_like(token_L, dtype=torch.bool)
    outside_L[of_K] = True
    outside_L[of_K[kept_K == token_L[of_K]]] = False
    return unordered_K, outside_L


def oldest_version(rollout: TensorDict) -> int:
    """Policy version of the oldest trained token of a rollout: what its staleness is measured from.

    Args:
        rollout: a rollout; ``loss_mask`` [N] bool and ``policy_version`` [N] int64 are read.

    Returns:
        The smallest version over trained tokens; over all tokens where none is trained.
    """
    version_N, mask_N = rollout[POLICY_VERSION], rollout[LOSS_MASK]
    return int((version_N[mask_N] if mask_N.any() else version_N).min())


class TreeBatch(TypedTensorDict):
    """One micro-batch: the prefix trie of its rollouts and the loss terms on it.

    ``batch_size=[]``; four nested tables, ``kept`` where an entry of the window has a kept set, and ``flat`` for
    backends that read no tables:

    ========== ========= ============================================================================
    table      size      keys
    ========== ========= ============================================================================
    node       [T]       ``input_ids``, ``position_ids`` (depth), ``parent`` (-1 at a root),
                         ``subtree_end`` int64; the actor adds ``log_prob``, ``entropy`` float, and
                         ``router_logits`` where it is asked for
    entry      [L]       ``node``, ``rollout``, ``policy_version`` int64; ``sample_log_prob``, optional
                         ``ref_log_prob`` and ``proximal_log_prob`` float32, nats; ``advantage`` float32
                         where it varies within a rollout of the window; the actor adds ``log_kept``
                         float where there is ``kept``
    kept       [K]       ``token``, ``entry`` int64: the tokens that the sampler kept for an entry; an
                         entry without any was drawn from the whole vocabulary
    rollout    [S]       ``advantage`` float32, the mean over its trained tokens where it varies;
                         ``policy_version`` (oldest trained token), ``length``
                         (trained tokens) int64; the packers add ``leaf`` (the node its path ends
                         at), ``rollout_id``, ``group_id`` int64
    window     []        ``num_entries``, ``num_rollouts`` int64: totals of the whole window
    flat       []        the same once more without tables, of ``FlatPacker(padding_free=True)`` only
    ========== ========= ============================================================================

    Nodes are in depth-first pre-order: the descendants of node ``i`` are ``i + 1 .. subtree_end[i] - 1``.
    A flat batch is the same structure with one chain per rollout.
    """

    node: TensorDict
    entry: TensorDict
    rollout: TensorDict
    window: TensorDict
    kept: NotRequired[TensorDict]  # type: ignore[valid-type]
    flat: NotRequired[TensorDict]  # type: ignore[valid-type]

    @property
    def num_nodes(self) -> int:
        """T, the number of tokens that are forwarded."""
        return self["node"].batch_size[0]

    @property
    def num_entries(self) -> int:
        """L, the number of loss terms of this micro-batch."""
        return self["entry"].batch_size[0]

    @property
    def num_rollouts(self) -> int:
        """S, the number of rollouts of this micro-batch."""
        return self["rollout"].batch_size[0]

    def validate(self) -> TreeBatch:
        """Check every structural invariant of the contract; for tests and for hand-made batches.

        Returns:
            The batch itself.

        Raises:
            ValueError: naming the first table, key and index that break the contract.
        """
        parent_T, end_T = self[NODE_PARENT], self[NODE_SUBTREE_END]
        depth_T, T = self[NODE_POSITION_IDS], self.num_nodes
        index_T = torch.arange(T, device=parent_T.device)
        root_T = parent_T < 0
        above_T = parent_T.clamp_min(0)
        _require(parent_T < index_T, NODE_PARENT, "a parent stands before its children")
        _require(parent_T >= -1, NODE_PARENT, "-1 marks a root, any other parent is an index")
        _require(
            torch.where(root_T, depth_T == 0, depth_T == depth_T[above_T] + 1),
            NODE_POSITION_IDS,
            "the depth of a root is 0, of a child one more than its parent's",
        )
        inside_T = (end_T > index_T) & (end_T <= T)
        _require(inside_T, NODE_SUBTREE_END, "a subtree ends behind its node and inside the batch")
        _require(
            root_T | ((index_T < end_T[above_T]) & (end_T <= end_T[above_T])),
            NODE_SUBTREE_END,
            "a subtree lies inside its parent's: nodes are in depth-first pre-order",
        )
        ended_T = torch.bincount(end_T, minlength=T + 1).cumsum(0)[:T]
        _require(depth_T == index_T - ended_T, NODE_SUBTREE_END, "a node lies in the subtrees of its ancestors alone")
        node_L, rollout_L = self[ENTRY_NODE], self[ENTRY_ROLLOUT]
        _require((node_L >= 0) & (node_L < T), ENTRY_NODE, f"an entry points at one of the {T} nodes")
        S = self.num_rollouts
        _require((rollout_L >= 0) & (rollout_L < S), ENTRY_ROLLOUT, f"an entry belongs to one of the {S} rollouts")
        _require(~root_T[node_L], ENTRY_NODE, "a root has no parent that could predict it and cannot be trained")
        for key in (ENTRY_SAMPLE_LOG_PROB, ENTRY_REF_LOG_PROB, ENTRY_PROXIMAL_LOG_PROB, ENTRY_ADVANTAGE):
            if key in self.keys(True):
                _require(torch.isfinite(self[key]), key, "log-probs and advantages are finite")
        _require(torch.isfinite(self[ROLLOUT_ADVANTAGE]), ROLLOUT_ADVANTAGE, "advantages are finite")
        length_S = torch.bincount(rollout_L, minlength=S)
        _require(length_S == self[ROLLOUT_LENGTH], ROLLOUT_LENGTH, "length counts the entries of the rollout")
        _require(length_S > 0, ROLLOUT_LENGTH, "a rollout without a trained token is in no micro-batch")
        self._validate_paths(end_T, node_L, rollout_L)
        _require(
            (self[WINDOW_NUM_ENTRIES] >= self.num_entries)[None], WINDOW_NUM_ENTRIES, "a window holds its micro-batches"
        )
        _require((self[WINDOW_NUM_ROLLOUTS] >= S)[None], WINDOW_NUM_ROLLOUTS, "a window holds its micro-batches")
        if "kept" in self.keys():
            self._validate_kept(self[NODE_INPUT_IDS][node_L])
        return self

    def _validate_paths(self, end_T: Tensor, node_L: Tensor, rollout_L: Tensor) -> None:
        """Check that the entries of a rollout are on one path, each once, and agree with the table of rollouts."""
        last_S = node_L.new_full((self.num_rollouts,), -1).scatter_reduce(0, rollout_L, node_L, "amax")
        _require(last_S[rollout_L] < end_T[node_L], ENTRY_NODE, "the entries of a rollout are nodes of one path")
        _, pair_L, count = (rollout_L * self.num_nodes + node_L).unique(return_inverse=True, return_counts=True)
        _require(count[pair_L] == 1, ENTRY_NODE, "a rollout trains a node once")
        if ROLLOUT_LEAF in self.keys(True):
            _require(last_S == self[ROLLOUT_LEAF], ROLLOUT_LEAF, "a rollout ends at the last node that it trains")
        version_S = self[ROLLOUT_POLICY_VERSION]
        oldest_S = version_S.scatter_reduce(0, rollout_L, self[ENTRY_POLICY_VERSION], "amin", include_self=False)
        _require(version_S == oldest_S, ROLLOUT_POLICY_VERSION, "it is the version of the oldest trained token")

    def _validate_kept(self, token_L: Tensor) -> None:
        entry_K, kept_K, L = self[KEPT_ENTRY], self[KEPT_TOKEN], self.num_entries
        _require((entry_K >= 0) & (entry_K < L), KEPT_ENTRY, f"a kept token belongs to one of the {L} entries")
        unordered_K, outside_L = check_kept(token_L, entry_K, kept_K)
        _require(~unordered_K, KEPT_TOKEN, "kept tokens are 0 or more, ascending by entry, then by token, each once")
        _require(~outside_L, ENTRY_NODE, "the token of an entry is in the entry's own kept set")


def _require(holds: Tensor, key: tuple[str, str], rule: str) -> None:
    if not bool(holds.all()):
        raise ValueError(f"TreeBatch {key} breaks its contract at index {int((~holds).nonzero()[0, 0])}: {rule}.")
