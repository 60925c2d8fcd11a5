"""The trained rollouts of one window: checked, trimmed, in lexicographic order, as flat columns.

Suffixes: R rollouts as given, S rollouts kept, M tokens of all rollouts as given, L entries, N tokens of one rollout,
K tokens that the sampler kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_asyncgrpo.data.schema import (
    ADVANTAGE,
    GROUP_ID,
    KEPT_COUNT,
    KEPT_TOKEN_IDS,
    LOSS_MASK,
    POLICY_VERSION,
    PROXIMAL_LOG_PROB,
    REF_LOG_PROB,
    ROLLOUT_ID,
    SAMPLE_LOG_PROB,
    TOKEN_IDS,
    check_kept,
)

Array = NDArray[Any]

_PER_TOKEN = {
    TOKEN_IDS: torch.int64,
    LOSS_MASK: torch.bool,
    SAMPLE_LOG_PROB: torch.float32,
    POLICY_VERSION: torch.int64,
}
_OPTIONAL_LOG_PROBS = (REF_LOG_PROB, PROXIMAL_LOG_PROB)
_KEPT = {KEPT_TOKEN_IDS: torch.int64, KEPT_COUNT: torch.int64}
_PER_ROLLOUT = {ADVANTAGE: torch.float32, ROLLOUT_ID: torch.int64, GROUP_ID: torch.int64}


@dataclass(frozen=True)
class Window:
    """What packing needs of a window, independent of the order in which the rollouts came.

    Rollouts without a trained token are left out, and the others end at their last trained token: what stands behind
    it influences no loss term. Rows are sorted by tokens, then ``rollout_id``, then everything else.

    Attributes:
        rows: S arrays of [N] int64 tokens.
        entry_bounds: [S + 1] int64; the entries of row ``r`` are ``entry_bounds[r] .. entry_bounds[r + 1] - 1``.
        entry_depth: [L] int64, position of the trained token in its rollout.
        sample_log_prob: [L] float32.
        ref_log_prob: [L] float32, or None where no rollout has it.
        proximal_log_prob: [L] float32, or None where no rollout has it.
        entry_version: [L] int64, policy version that sampled the token.
        entry_advantage: [L] float32, or None where no rollout of the window has several advantages.
        kept_bounds: [L + 1] int64; the sampler kept ``kept_bounds[e] .. kept_bounds[e + 1] - 1`` for entry ``e``, none
            where it drew from the whole vocabulary; or None where it did so for every entry.
        kept_token: [K] int64, or None with ``kept_bounds``.
        policy_version: [S] int64, of the oldest trained token.
        advantage: [S] float32, mean over the trained tokens.
        rollout_id: [S] int64.
        group_id: [S] int64.
        first_token: the smallest first token, kept or not.
    """

    rows: list[Array]
    entry_bounds: Array
    entry_depth: Array
    sample_log_prob: Array
    ref_log_prob: Array | None
    proximal_log_prob: Array | None
    entry_version: Array
    entry_advantage: Array | None
    kept_bounds: Array | None
    kept_token: Array | None
    policy_version: Array
    advantage: Array
    rollout_id: Array
    group_id: Array
    first_token: int


def read_window(rollouts: TensorDictBase | Iterable[TensorDictBase]) -> Window:
    """Read the rollouts of a window.

    Args:
        rollouts: rollouts with the keys of the data contract: any iterable, or a stack along dimension 0.

    Raises:
        ValueError: if there is no rollout, or one breaks the data contract.
    """
    if isinstance(rollouts, TensorDictBase):
        if len(rollouts.batch_size) != 1:
            raise ValueError(
                f"rollouts has batch_size {tuple(rollouts.batch_size)}; give a list of rollouts or a stack of them, "
                "batch_size [S]."
            )
        rollouts = rollouts.unbind(0)
    items = [dict(rollout.items()) for rollout in rollouts]
    if not items:
        raise ValueError("the window holds no rollout; give at least one (an empty step has nothing to optimize).")
    keys = _checked_keys(items)
    lengths = [item[TOKEN_IDS].shape[0] for item in items]
    bounds_R = np.concatenate([[0], np.cumsum(lengths)])
    tokens_M, mask_M = _column(items, TOKEN_IDS), _column(items, LOSS_MASK)
    if (lowest := int(tokens_M.min())) < 0:
        raise ValueError(f"a rollout holds the token id {lowest}; token ids are 0 or more.")
    stop_R = _trimmed_lengths(mask_M, bounds_R)
    order = _sorted_rows(items, keys, tokens_M, bounds_R, stop_R)
    starts, stops = bounds_R.tolist(), stop_R.tolist()
    window = _entries([items[r] for r in order], keys) if order else _no_entries(keys)
    return Window(
        rows=[tokens_M[starts[r] : starts[r] + stops[r]] for r in order],
        first_token=int(tokens_M[bounds_R[:-1]].min()),
        **window,
    )


def _checked_keys(items: list[dict[str, Tensor]]) -> list[str]:
    """The per-token keys of the window, after a check that every rollout has all keys, each of the right shape."""
    keys = [*_PER_TOKEN, *(key for key in _OPTIONAL_LOG_PROBS if any(key in item for item in items))]
    for item in items:
        missing = [key for key in (*keys, *_PER_ROLLOUT) if key not in item]
        if missing:
            raise ValueError(
                f"a rollout has no {missing[0]!r}, only {sorted(item)}; build rollouts with make_rollout, "
                f"and give {' and '.join(_OPTIONAL_LOG_PROBS)} to every rollout of a window or to none."
            )
        shape = item[TOKEN_IDS].shape
        if len(shape) != 1 or not shape[0]:
            raise ValueError(f"{TOKEN_IDS} of a rollout has shape {tuple(shape)}; it is [N] with N >= 1.")
        for key in keys:
            if item[key].shape != shape:
                raise ValueError(
                    f"rollout {_id(item)} has {key} of shape {tuple(item[key].shape)} and {TOKEN_IDS} of "
                    f"{tuple(shape)}; give one value per token."
                )
        if item[ADVANTAGE].ndim and item[ADVANTAGE].shape != shape:
            raise ValueError(
                f"rollout {_id(item)} has {ADVANTAGE} of shape {tuple(item[ADVANTAGE].shape)} and {TOKEN_IDS} of "
                f"{tuple(shape)}; give one value, or one per token."
            )
        if any(key in item for key in _KEPT):
            _check_kept_columns(item)
    return keys


def _check_kept_columns(item: dict[str, Tensor]) -> None:
    """Raise ``ValueError`` unless both columns of a sampling mask are there and fit each other."""
    missing = [key for key in _KEPT if key not in item]
    if missing:
        raise ValueError(
            f"rollout {_id(item)} has a sampling mask without {missing[0]!r}; pass sampling_mask to make_rollout."
        )
    count_N, token_K = item[KEPT_COUNT], item[KEPT_TOKEN_IDS]
    if count_N.shape != item[TOKEN_IDS].shape or (count_N < 0).any() or token_K.shape != (int(count_N.sum()),):
        raise ValueError(
            f"rollout {_id(item)} has {KEPT_COUNT} of shape {tuple(count_N.shape)} and sum {int(count_N.sum())}, and "
            f"{KEPT_TOKEN_IDS} of shape {tuple(token_K.shape)}; give one count of 0 or more per token, and as many "
            "token ids as they sum to."
        )


def _column(items: list[dict[str, Tensor]], key: str) -> Array:
    """A per-token column [M] of the rollouts one behind the other, or a per-rollout column [R]."""
    tensors = [item[key] for item in items]
    if key in _PER_ROLLOUT:
        return torch.stack(tensors).detach().to("cpu", _PER_ROLLOUT[key]).numpy()
    return torch.cat(tensors).detach().to("cpu", (_PER_TOKEN | _KEPT).get(key, torch.float32)).numpy()


def _trimmed_lengths(mask_M: Array, bounds_R: Array) -> Array:
    """[R]: tokens up to the last trained one; 0 where none is trained."""
    trained_L = np.flatnonzero(mask_M)
    entries_R = np.searchsorted(trained_L, bounds_R)
    stop_R = np.zeros(len(bounds_R) - 1, dtype=np.int64)
    kept = np.flatnonzero(np.diff(entries_R))
    stop_R[kept] = trained_L[entries_R[kept + 1] - 1] + 1 - bounds_R[kept]
    return stop_R


def _sorted_rows(
    items: list[dict[str, Tensor]], keys: list[str], tokens_M: Array, bounds_R: Array, stop_R: Array
) -> list[int]:
    """The rollouts to keep, in lexicographic order of their trimmed tokens: big-endian bytes compare alike."""
    big_endian_M = tokens_M.astype(">u4" if tokens_M.max() < 1 << 32 else ">u8")
    data, width = big_endian_M.data.cast("B"), big_endian_M.itemsize
    starts, stops = (bounds_R * width).tolist(), (stop_R * width).tolist()
    row_keys = {
        r: (data[starts[r] : starts[r] + stop].tobytes(), _id(items[r])) for r, stop in enumerate(stops) if stop
    }
    order = sorted(row_keys, key=row_keys.__getitem__)
    if len(set(row_keys.values())) < len(order):
        every = (*keys, *_KEPT, *_PER_ROLLOUT)
        order.sort(key=lambda r: (row_keys[r], _content(items[r], every)))
    return order


def _content(item: dict[str, Tensor], keys: Iterable[str]) -> list[bytes]:
    """What a rollout holds, as something that can be ordered."""
    return [_column([item], key).tobytes() if key in item else b"" for key in keys]


def _entries(items: list[dict[str, Tensor]], keys: list[str]) -> dict[str, Any]:
    """Entry and rollout columns of the kept rollouts, in the order given."""
    mask_M = _column(items, LOSS_MASK)
    lengths = [item[LOSS_MASK].shape[0] for item in items]
    start_S = np.cumsum(lengths) - lengths
    if (untrainable := mask_M[start_S]).any():
        raise ValueError(
            f"rollout {_id(items[untrainable.argmax()])} has loss_mask[0] True, but its first token has none before "
            "it to predict it; mask it out."
        )
    depth_L = np.flatnonzero(mask_M)
    bounds_S = np.append(np.searchsorted(depth_L, start_S), len(depth_L))
    depth_L -= np.repeat(start_S, np.diff(bounds_S))
    log_probs = {key: _column(items, key)[mask_M] for key in (SAMPLE_LOG_PROB, *_OPTIONAL_LOG_PROBS) if key in keys}
    for key, log_prob_L in log_probs.items():
        if not (finite_L := np.isfinite(log_prob_L)).all():
            at = int(finite_L.argmin())
            item = items[int(np.searchsorted(bounds_S, at, side="right")) - 1]
            raise ValueError(
                f"rollout {_id(item)}: {key}[{depth_L[at]}] of a trained token is {log_prob_L[at]}; mask a token "
                "without a log-prob out of the loss."
            )
    version_L = _column(items, POLICY_VERSION)[mask_M]
    return {
        **_kept_sets(items, mask_M, bounds_S),
        **_advantages(items, mask_M, bounds_S),
        "entry_bounds": bounds_S,
        "entry_depth": depth_L,
        "sample_log_prob": log_probs[SAMPLE_LOG_PROB],
        "ref_log_prob": log_probs.get(REF_LOG_PROB),
        "proximal_log_prob": log_probs.get(PROXIMAL_LOG_PROB),
        "entry_version": version_L,
        "policy_version": np.minimum.reduceat(version_L, bounds_S[:-1]),
        "rollout_id": _column(items, ROLLOUT_ID),
        "group_id": _column(items, GROUP_ID),
    }


def _advantages(items: list[dict[str, Tensor]], mask_M: Array, bounds_S: Array) -> dict[str, Array | None]:
    """Advantages of the rollouts, and those of their entries where they vary within a rollout."""
    if not any(item[ADVANTAGE].ndim for item in items):
        advantage_S = _column(items, ADVANTAGE)
        if not (finite_S := np.isfinite(advantage_S)).all():
            _refuse_advantage(items[int(finite_S.argmin())], advantage_S[finite_S.argmin()])
        return {"advantage": advantage_S, "entry_advantage": None}
    advantage_M = torch.cat([item[ADVANTAGE].expand(item[TOKEN_IDS].shape) for item in items])
    advantage_L = advantage_M.detach().to("cpu", torch.float32).numpy()[mask_M]
    if not (finite_L := np.isfinite(advantage_L)).all():
        at = int(finite_L.argmin())
        _refuse_advantage(items[int(np.searchsorted(bounds_S, at, side="right")) - 1], advantage_L[at])
    first_S = advantage_L[bounds_S[:-1]]
    length_S = np.diff(bounds_S)
    if (advantage_L == np.repeat(first_S, length_S)).all():
        return {"advantage": first_S, "entry_advantage": None}
    mean_S = np.add.reduceat(advantage_L.astype(np.float64), bounds_S[:-1]) / length_S
    return {"advantage": mean_S.astype(np.float32), "entry_advantage": advantage_L}


def _refuse_advantage(item: dict[str, Tensor], advantage: float) -> NoReturn:
    raise ValueError(
        f"rollout {_id(item)} has trained tokens and advantage {advantage}; mask the tokens of a rollout that was not "
        "scored out of the loss."
    )


def _kept_sets(items: list[dict[str, Tensor]], mask_M: Array, bounds_S: Array) -> dict[str, Array | None]:
    """Kept-set columns of the entries of the rollouts; None where no entry has a kept set."""
    masked = [item for item in items if KEPT_COUNT in item]
    if not masked:
        return {"kept_bounds": None, "kept_token": None}
    count_M = _column([{KEPT_COUNT: torch.zeros_like(item[TOKEN_IDS]), **item} for item in items], KEPT_COUNT)
    count_L, kept_K = count_M[mask_M], _column(masked, KEPT_TOKEN_IDS)[np.repeat(mask_M, count_M)]
    if not len(kept_K):
        return {"kept_bounds": None, "kept_token": None}
    token_L, entry_K = _column(items, TOKEN_IDS)[mask_M], np.repeat(np.arange(len(count_L)), count_L)
    unordered_K, outside_L = check_kept(*map(torch.from_numpy, (token_L, entry_K, kept_K)))
    bad_L = outside_L.numpy()
    bad_L[entry_K[unordered_K.numpy()]] = True
    if bad_L.any():
        at = int(bad_L.argmax())
        item = items[int(np.searchsorted(bounds_S, at, side="right")) - 1]
        raise ValueError(
            f"rollout {_id(item)}: the set kept for a trained token {token_L[at]} is not of ascending token ids, each "
            f"once, 0 or more, and {token_L[at]} among them; pass sampling_mask to make_rollout."
        )
    return {"kept_bounds": np.concatenate([[0], np.cumsum(count_L)]), "kept_token": kept_K}


def _no_entries(keys: list[str]) -> dict[str, Any]:
    """The columns of a window in which nothing is trained."""
    none = np.zeros(0, dtype=np.int64)
    log_prob = none.astype(np.float32)
    return {
        "entry_bounds": np.zeros(1, dtype=np.int64),
        "entry_depth": none,
        "sample_log_prob": log_prob,
        "ref_log_prob": log_prob if REF_LOG_PROB in keys else None,
        "proximal_log_prob": log_prob if PROXIMAL_LOG_PROB in keys else None,
        "entry_version": none,
        "entry_advantage": None,
        "kept_bounds": None,
        "kept_token": None,
        "policy_version": none,
        "advantage": log_prob,
        "rollout_id": none,
        "group_id": none,
    }


def _id(item: dict[str, Tensor]) -> int:
    return int(item[ROLLOUT_ID])
