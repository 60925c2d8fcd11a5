"""Where prompts come from: one interface over lists, generators and datasets, with a cursor that can be saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Messages = list[dict[str, Any]]

_END = object()  # behind the last item of an iterable


@dataclass(frozen=True)
class PromptDraw:
    """One draw of one prompt.

    Args:
        group_id: identity of the draw: its number since the start of training. The same prompt drawn twice has two.
        prompt: text, or chat messages.
        columns: what else the source knows about the prompt; handed to the reward functions.
    """

    group_id: int
    prompt: str | Messages
    columns: dict[str, Any] = field(default_factory=dict)


class PromptSource:
    """Draws prompts in a reproducible order and remembers how far it came.

    Args:
        data: a sequence (a list or a dataset with ``__len__`` and ``__getitem__``) or any other iterable. An item is
            a text, a list of chat messages, or a mapping with ``"prompt"`` (text or messages) and columns.
        num_epochs: passes over a sequence, >= 1; None for ever. An iterable is read once.
        shuffle: draw every pass over a sequence in another order.
        seed: seed of the order.

    Raises:
        ValueError: if the sequence is empty, an iterable is to be shuffled or repeated, or ``num_epochs`` < 1.
        TypeError: if ``data`` cannot be iterated.
    """

    def __init__(
        self,
        data: Any,
        *,
        num_epochs: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self._is_sequence = isinstance(data, Sequence) or (
            callable(getattr(data, "__len__", None)) and callable(getattr(data, "__getitem__", None))
        )
        if not self._is_sequence and not isinstance(data, Iterable):
            kind = type(data).__name__
            raise TypeError(f"prompts are a {kind}; give a list, a dataset or another iterable of prompts.")
        if isinstance(data, str):
            raise TypeError("prompts are one string; give a list of prompts, [prompt] for a single one.")
        if num_epochs is not None and num_epochs < 1:
            raise ValueError(f"num_epochs={num_epochs}; give a number of passes >= 1, or None for ever.")
        if self._is_sequence and len(data) == 0:
            raise ValueError("prompts are empty; give at least one prompt.")
        if not self._is_sequence and (shuffle or num_epochs is not None):
            raise ValueError(
                f"shuffle={shuffle}, num_epochs={num_epochs} with a {type(data).__name__}; an iterable without "
                "length is read once and in its own order. Give a list or a dataset instead."
            )
        self._data: Any = data
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._order: tuple[int, list[int]] | None = None
        self.num_epochs = num_epochs
        self.shuffle = shuffle
        self.seed = seed
        self.cursor = 0

    def draw(self) -> PromptDraw | None:
        """Return the next draw, or None when the source is exhausted.

        Raises:
            ValueError: if the item is not a prompt.
        """
        if self.exhausted:
            return None
        item = self._sequence_item(self.cursor) if self._is_sequence else self._ahead.pop()
        self.cursor += 1
        return _as_draw(self.cursor - 1, item)

    @property
    def exhausted(self) -> bool:
        """True when ``draw`` would return None."""
        if self._is_sequence:
            return self.num_epochs is not None and self.cursor >= self.num_epochs * len(self._data)
        if not self._ahead:
            self._ahead = [self._next_of_iterable()]
        return self._ahead[0] is _END

    def head(self, count: int) -> list[PromptDraw]:
        """The first prompts of a sequence, at most ``count``, without drawing them; none of an iterable."""
        if not self._is_sequence:
            return []
        return [_as_draw(index, self._data[index]) for index in range(min(count, len(self._data)))]

    def state_dict(self) -> dict[str, Any]:
        """Position of the source: the number of draws so far."""
        return {"cursor": self.cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any], unfinished: Sequence[int] = ()) -> list[PromptDraw]:
        """Go to a saved position and draw once more what was drawn before it and not finished.

        Args:
            state_dict: what ``state_dict`` returned.
            unfinished: ids of earlier draws to repeat.

        Returns:
            The repeated draws, in order of their ids.
        """
        cursor = int(state_dict["cursor"])
        wanted = sorted(int(group_id) for group_id in unfinished)
        if self._is_sequence:
            repeated = [_as_draw(group_id, self._sequence_item(group_id)) for group_id in wanted]
            self.cursor = cursor
            return repeated
        if self.cursor:
            raise RuntimeError(
                f"the iterable was already read {self.cursor} prompts far and cannot be rewound; load the state into a "
                "collector over a fresh iterable."
            )
        passed = [draw for _ in range(cursor) if (draw := self.draw()) is not None]
        return [draw for draw in passed if draw.group_id in set(wanted)]

    def _sequence_item(self, index: int) -> Any:
        epoch, offset = divmod(index, len(self._data))
        if self.shuffle:
            if self._order is None or self._order[0] != epoch:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._order = (epoch, torch.randperm(len(self._data), generator=generator).tolist())
            offset = self._order[1][offset]
        return self._data[offset]

    def _next_of_iterable(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._data)
        item = next(self._iterator, _END)
        if item is _END and self.cursor == 0:
            raise ValueError("prompts are empty: the iterable ended before its first prompt.")
        return item


def _as_draw(group_id: int, item: Any) -> PromptDraw:
    columns: dict[str, Any] = {}
    prompt = item
    if isinstance(item, Mapping):
        if "prompt" not in item:
            raise ValueError(f"prompt {group_id} has the columns {sorted(item)}; a mapping needs the column 'prompt'.")
        columns = {key: value for key, value in item.items() if key != "prompt"}
        prompt = item["prompt"]
    is_chat = isinstance(prompt, list) and bool(prompt) and all(isinstance(m, Mapping) and "role" in m for m in prompt)
    if not is_chat and not (isinstance(prompt, str) and prompt):
        raise ValueError(
            f"prompt {group_id} is {prompt!r}; give a non-empty text or a list of chat messages with 'role' and "
            "'content'."
        )
    return PromptDraw(group_id, [dict(m) for m in prompt] if is_chat else prompt, columns)
