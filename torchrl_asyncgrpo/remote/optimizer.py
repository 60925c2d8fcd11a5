"""The optimizer as a trainer sees it when it is elsewhere: its options here, its state and steps there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torchrl_asyncgrpo.remote.protocol import RemoteBackend


class RemoteOptimizer(torch.optim.Optimizer):
    """Steps the optimizer of a backend with the options of its own ``param_groups``.

    There is one parameter group for each of the backend's, with the same options and a placeholder for parameters.
    Learning-rate schedulers and whatever else writes ``param_groups`` work as on any optimizer: each step is taken with
    the options of that moment. ``state_dict`` holds the backend's state.

    Args:
        backend: holds the optimizer.
        options: options of every group, instead of the backend's own, such as ``lr=1e-5``.

    Raises:
        ValueError: if the backend's optimizer has no such option.
    """

    def __init__(self, backend: RemoteBackend, **options: Any) -> None:
        groups: list[dict[str, Any]] = [dict(group) for group in backend.info.param_groups]
        known = {name for group in groups for name in group}
        if unknown := sorted(set(options) - known):
            raise ValueError(
                f"{unknown[0]}={options[unknown[0]]!r}: the backend's optimizer has no such option, only "
                f"{', '.join(sorted(known))}."
            )
        self.backend = backend
        placed = [{**group, **options, "params": [nn.Parameter(torch.zeros(()))]} for group in groups]
        # some schedulers look at the defaults for what kind of optimizer it is
        super().__init__(placed, {**groups[0], **options})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients and forwards of the backend.

        Args:
            set_to_none: must be True.
        """
        if not set_to_none:
            raise ValueError("set_to_none=False: the backend drops its gradients; leave it True.")
        self.backend.step(None)

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Scale the gradient down to ``max_norm`` where it is longer; None leaves it. Returns the norm before."""
        return self.backend.clip_grad_norm(max_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the backend's optimizer; its gradients are dropped behind it.

        Args:
            closure: not supported.
        """
        if closure is not None:
            raise ValueError("closure: an optimizer that is elsewhere cannot evaluate the loss again; leave it None.")
        options = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        self.backend.step(options)

    def state_dict(self) -> dict[str, Any]:
        """Options of the groups, and the state of the backend's optimizer as ``"remote"``."""
        return {**super().state_dict(), "remote": self.backend.save("optimizer")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned, here and in the backend."""
        own = dict(state_dict)
        self.backend.load("optimizer", own.pop("remote"))
        super().load_state_dict(own)
