"""The sliding window of an attention layer, as its configuration has it."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def layer_window(module: nn.Module) -> int | None:
    """The window that the configuration gives to one attention layer, in tokens; None for none.

    A layer that does not pass it to its attention function leaves it to the mask: who makes his own mask would lose it.

    Args:
        module: the layer, with ``config`` and ``layer_idx``.
    """
    config: Any = module.config
    window, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or layer_types is None:
        return window
    return window if layer_types[cast(int, module.layer_idx)] == "sliding_attention" else None
