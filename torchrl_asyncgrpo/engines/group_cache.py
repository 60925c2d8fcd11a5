"""Keys and values of a cohort: each distinct prompt once, and of every completion only its own tokens.

Shapes: G groups (distinct prompts), R rows (completions still running), N most rows of a group, P longest prompt,
S own tokens of a row, H query heads, K key-value heads, J query heads per key-value head, Q queries of a pass,
D head width (values may have another).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_asyncgrpo.engines.group_attention import attend_partially, merge_partials, prompt_attention

FIRST_CAPACITY = 64


@dataclass
class _Layer:
    prompt_key_GKPD: Tensor
    prompt_value_GKPD: Tensor
    own_key_RKSD: Tensor | None = None
    own_value_RKSD: Tensor | None = None


class GroupCache:
    """The key-value cache of one cohort.

    Prompts are written by :class:`PromptPass`, own tokens by :class:`StepPass`; rows advance in lockstep, so that every
    row holds the same number of own tokens. Keys stay when weights change between two passes.

    Args:
        prompt_lengths: [G] tokens of each distinct prompt.
        max_own_tokens: most own tokens that a row may come to hold.
    """

    def __init__(self, prompt_lengths: Sequence[int], max_own_tokens: int, device: torch.device) -> None:
        self.length_G = torch.tensor(prompt_lengths, device=device)
        self.longest = max(prompt_lengths)
        self.equal_lengths = min(prompt_lengths) == self.longest
        self.max_own_tokens = max_own_tokens
        self.own_tokens = 0
        self.groups_of_rows: list[int] = []
        # one for each call of attention in a pass: some layers attend twice, some models loop over their layers
        self.layers: list[_Layer] = []
        self.calls_per_pass: int | None = None

    def layer(self, call: int, key: Tensor, value: Tensor) -> _Layer:
        """Storage of the call of attention that is number ``call`` of its pass, allocated on its first use."""
        if call == len(self.layers):
            shape = (len(self.length_G), key.shape[1], self.longest)
            self.layers.append(_Layer(key.new_zeros(*shape, key.shape[-1]), value.new_zeros(*shape, value.shape[-1])))
        return self.layers[call]

    def start_rows(self, groups_of_rows: Sequence[int]) -> None:
        """Say which prompt each row continues, once all prompts are written."""
        self.groups_of_rows = list(groups_of_rows)
        self._index_rows()

    def keep_rows(self, kept: Sequence[int]) -> list[int]:
        """Drop all rows but ``kept``; returns, for each row that is left, which one it was.

        Rows from the end move into the holes, so that the copy costs as much as what left, not as what stayed.
        """
        count = len(kept)
        tail = [row for row in kept if row >= count]
        order = list(range(count))
        for hole, row in zip(sorted(set(range(count)) - set(kept)), tail, strict=True):
            order[hole] = row
        holes = [place for place, row in enumerate(order) if place != row]
        for layer in self.layers:
            if holes and layer.own_key_RKSD is not None and layer.own_value_RKSD is not None:
                for own_RKSD in (layer.own_key_RKSD, layer.own_value_RKSD):
                    own_RKSD[holes, :, : self.own_tokens] = own_RKSD[tail, :, : self.own_tokens]
        self.groups_of_rows = [self.groups_of_rows[row] for row in order]
        self._drop_finished_groups()
        self._index_rows()
        return order

    def _drop_finished_groups(self) -> None:
        """Free the prompts without rows, once they are half of all."""
        live = sorted(set(self.groups_of_rows))
        if 2 * len(live) > len(self.length_G):
            return
        live_G = torch.tensor(live, device=self.length_G.device)
        self.length_G = self.length_G[live_G]
        self.longest = int(self.length_G.max()) if live else 0
        self.equal_lengths = bool((self.length_G == self.longest).all())
        for layer in self.layers:
            layer.prompt_key_GKPD = layer.prompt_key_GKPD[live_G, :, : self.longest]
            layer.prompt_value_GKPD = layer.prompt_value_GKPD[live_G, :, : self.longest]
        place = {group: index for index, group in enumerate(live)}
        self.groups_of_rows = [place[group] for group in self.groups_of_rows]

    def _index_rows(self) -> None:
        """Lay the rows out as groups × rows of a group, and back; unused places repeat row 0 and are never read."""
        members: list[list[int]] = [[] for _ in range(len(self.length_G))]
        for row, group in enumerate(self.groups_of_rows):
            members[group].append(row)
        widest = max((len(rows) for rows in members), default=0)
        place_of_row = [0] * len(self.groups_of_rows)
        for group, rows in enumerate(members):
            for index, row in enumerate(rows):
                place_of_row[row] = group * widest + index
        device = self.length_G.device
        self.row_GN = torch.tensor([rows + [0] * (widest - len(rows)) for rows in members], device=device)
        self.place_R = torch.tensor(place_of_row, device=device)
        self.group_R = torch.tensor(self.groups_of_rows, device=device)


class _Pass:
    """One forward of the model, whose calls of attention come in the same order in every pass."""

    def __init__(self, cache: GroupCache) -> None:
        self.cache = cache
        self._calls = 0

    def finish(self) -> None:
        """Check, after the forward, that it attended as often as every other pass.

        Raises:
            ValueError: if it did not.
        """
        expected = self.cache.calls_per_pass
        if expected not in (None, self._calls):
            raise ValueError(
                f"the model called attention {self._calls} times in this pass and {expected} times in the one before: "
                "it chooses its layers by what it reads, so that TransformersEngine cannot decode it exactly. Serve it "
                "with VLLMEngine."
            )
        self.cache.calls_per_pass = self._calls

    def _next_layer(self, key: Tensor, value: Tensor) -> _Layer:
        self._calls += 1
        return self.cache.layer(self._calls - 1, key, value)


class PromptPass(_Pass):
    """One forward over positions ``start:stop`` of some prompts, handed to the attention function as ``cache``.

    The queries come from groups ``first:last``, or from a single sequence that all of those groups share.
    """

    def __init__(self, cache: GroupCache, first: int, last: int, start: int, stop: int) -> None:
        super().__init__(cache)
        self.first, self.last, self.start, self.stop = first, last, start, stop
        self._mask_by_window: dict[int | None, Tensor | None] = {}

    def attend(
        self,
        query_BHQD: Tensor,
        key_BKQD: Tensor,
        value_BKQD: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sink_H: Tensor | None,
    ) -> Tensor:
        """Store keys and values, and return the attention output [B, Q, H, D]."""
        layer = self._next_layer(key_BKQD, value_BKQD)
        layer.prompt_key_GKPD[self.first : self.last, :, self.start : self.stop] = key_BKQD
        layer.prompt_value_GKPD[self.first : self.last, :, self.start : self.stop] = value_BKQD
        last = self.first + len(query_BHQD)
        return prompt_attention(
            query_BHQD,
            layer.prompt_key_GKPD[self.first : last, :, : self.stop],
            layer.prompt_value_GKPD[self.first : last, :, : self.stop],
            self._mask(window),
            scaling=scaling,
            softcap=softcap,
            sink_H=sink_H,
        )

    def _mask(self, window: int | None) -> Tensor | None:
        """[Q, P] True where a query sees a key; None for plain causality from position 0."""
        if window not in self._mask_by_window:
            key_P = torch.arange(self.stop, device=self.cache.length_G.device)
            query_Q1 = key_P[self.start :, None]
            causal_QP = key_P <= query_Q1
            if window is not None and window < self.stop:
                self._mask_by_window[window] = causal_QP & (key_P > query_Q1 - window)
            else:
                self._mask_by_window[window] = causal_QP if self.start else None
        return self._mask_by_window[window]


class StepPass(_Pass):
    """One decoding step of every row, handed to the attention function as ``cache``."""

    def __init__(self, cache: GroupCache) -> None:
        super().__init__(cache)
        self.step = cache.own_tokens
        self._bias_by_window: dict[int | None, Tensor | None] = {}

    def attend(
        self,
        query_RH1D: Tensor,
        key_RK1D: Tensor,
        value_RK1D: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sink_H: Tensor | None,
    ) -> Tensor:
        """Store keys and values, and return the attention output [R, 1, H, D].

        The queries of a group meet its prompt in one matrix product and their own tokens in another; the two softmaxes
        are merged by their log-sum-exp.
        """
        cache = self.cache
        layer = self._next_layer(key_RK1D, value_RK1D)
        own_key_RKSD, own_value_RKSD = self._store(layer, key_RK1D, value_RK1D, window)
        rows, kv_heads = key_RK1D.shape[:2]
        query_RKJD = query_RH1D.reshape(rows, kv_heads, -1, query_RH1D.shape[-1])
        own = attend_partially(query_RKJD, own_key_RKSD, own_value_RKSD, None, scaling, softcap)

        widest = cache.row_GN.shape[1]
        query_GKMD = query_RKJD[cache.row_GN].transpose(1, 2).flatten(2, 3)
        bias_G11P = self._bias(window, own[1].dtype)
        prompt = attend_partially(
            query_GKMD, layer.prompt_key_GKPD, layer.prompt_value_GKPD, bias_G11P, scaling, softcap
        )
        out_RKJD, lse_RKJ1 = (
            part.unflatten(2, (widest, -1)).transpose(1, 2).flatten(0, 1)[cache.place_R] for part in prompt
        )
        merged_RKJD = merge_partials(own, (out_RKJD, lse_RKJ1), sink_H)
        return merged_RKJD.to(query_RH1D.dtype).reshape(rows, 1, -1, merged_RKJD.shape[-1])

    def finish(self) -> None:
        """Check the pass as the other ones, and count the stored tokens."""
        super().finish()
        self.cache.own_tokens = self.step + 1

    def _store(self, layer: _Layer, key_RK1D: Tensor, value_RK1D: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        rows = len(key_RK1D)
        layer.own_key_RKSD = self._room(layer.own_key_RKSD, key_RK1D)
        layer.own_value_RKSD = self._room(layer.own_value_RKSD, value_RK1D)
        layer.own_key_RKSD[:rows, :, self.step] = key_RK1D[:, :, 0]
        layer.own_value_RKSD[:rows, :, self.step] = value_RK1D[:, :, 0]
        first = 0 if window is None else max(0, self.step - window + 1)
        return (
            layer.own_key_RKSD[:rows, :, first : self.step + 1],
            layer.own_value_RKSD[:rows, :, first : self.step + 1],
        )

    def _room(self, stored_RKSD: Tensor | None, new_RK1D: Tensor) -> Tensor:
        """Storage with a free place for this step, doubled when full."""
        if stored_RKSD is not None and stored_RKSD.shape[2] > self.step:
            return stored_RKSD
        rows, heads, _, width = new_RK1D.shape
        capacity = min(self.cache.max_own_tokens, max(FIRST_CAPACITY, 2 * self.step))
        grown_RKSD = new_RK1D.new_empty(rows, heads, capacity, width)
        if stored_RKSD is not None:
            grown_RKSD[:, :, : self.step] = stored_RKSD[:rows, :, : self.step]
        return grown_RKSD

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[G, 1, 1, P] 0 at prompt tokens that the rows of a group see now, else a number that no score reaches."""
        cache = self.cache
        reaches_all = window is None or cache.longest + self.step < window
        if cache.equal_lengths and reaches_all:
            return None
        if window not in self._bias_by_window:
            key_P = torch.arange(cache.longest, device=cache.length_G.device)
            length_G1 = cache.length_G[:, None]
            seen_GP = key_P < length_G1
            if window is not None:
                seen_GP = seen_GP & (key_P > length_G1 + self.step - window)
            bias_GP = torch.zeros(seen_GP.shape, dtype=dtype, device=key_P.device).masked_fill_(~seen_GP, -1e30)
            self._bias_by_window[window] = bias_GP[:, None, None, :]
        return self._bias_by_window[window]
