"""One optimizer step over a whole window, exact for any number of micro-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl._utils import logger as torchrl_logger
from torchrl.trainers import MixedPrecisionOptimizationStepper

from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.modules.optimizers import check_eps
from torchrl_asyncgrpo.objectives.functional import reduce_window
from torchrl_asyncgrpo.remote.optimizer import RemoteOptimizer

if TYPE_CHECKING:
    from torchrl_asyncgrpo.trainers.trainer import AsyncGRPOTrainer


class WindowOptimizationStepper(MixedPrecisionOptimizationStepper):
    """Forward and backward every micro-batch of a window, then step the optimizer once.

    The losses of the micro-batches are shares of the window's loss and are summed, nothing divides them again. When
    all gradients are there they are unscaled and clipped, the trainer's ``pre_optim`` stage runs, and the optimizer
    steps. A window whose loss or gradient norm is not finite, or that trains no token, is skipped and counted.

    Args:
        optimizer: the optimizer; with a ``RemoteOptimizer`` gradients are where the model is, and are clipped there.
        mixed_precision: run forward and loss under autocast; with ``torch.float16`` losses are scaled.
        autocast_dtype: dtype of autocast.
        clip_norm: largest gradient norm; None does not clip, non-finite gradients are caught all the same.
        device_type: device type of autocast; by default that of the first parameter.

    Raises:
        ValueError: if ``clip_norm`` is out of range, autocast is asked for where the model is elsewhere, or the
            optimizer's ``eps`` is 0 in the dtype of the weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        mixed_precision: bool = False,
        autocast_dtype: torch.dtype = torch.bfloat16,
        clip_norm: float | None = 1.0,
        device_type: str | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm}; give a norm above 0, or None not to clip.")
        if mixed_precision and isinstance(optimizer, RemoteOptimizer):
            raise ValueError(
                "mixed_precision=True with a RemoteOptimizer: forwards run in the backend, and autocast here would not "
                "reach them. Build the backend with autocast_dtype=torch.bfloat16 instead."
            )
        check_eps(optimizer)
        super().__init__(
            optimizer,
            mixed_precision=mixed_precision,
            autocast_dtype=autocast_dtype,
            clip_norm=clip_norm,
            device_type=device_type,
        )

    @property
    def skipped_steps(self) -> int:
        """Windows that were skipped: a loss or gradient was not finite, or nothing was trained."""
        return self._skipped_nonfinite_steps

    def step(self, trainer: AsyncGRPOTrainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Train one window.

        Args:
            trainer: gives the loss and the ``pre_optim`` stage.
            sub_batch: [K] lazy stack of micro-batches.

        Returns:
            Loss and metrics of the window, and ``grad_norm`` before clipping; nothing for a window that was skipped.
        """
        self.optimizer.zero_grad(set_to_none=True)
        outputs: list[TensorDictBase] = []
        micro_batches = sub_batch.unbind(0)
        if not any(int(batch[schema.WINDOW_NUM_ENTRIES]) for batch in micro_batches):
            return self._skip("the window trains no token")
        for micro_batch in micro_batches:
            output, loss = self._loss(trainer, micro_batch)
            outputs.append(output)
            if not torch.isfinite(loss):
                return self._skip(f"the loss of a micro-batch is {float(loss.detach())}")
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        if not math.isfinite(grad_norm):
            self.scaler.update()
            return self._skip(f"the gradient norm is {grad_norm}")
        trainer.pre_optim()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._optimizer_step_count += 1
        self.optimizer.zero_grad(set_to_none=True)
        metrics = reduce_window(outputs)
        metrics["grad_norm"] = torch.tensor(grad_norm)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scaler and counters; allowed at any moment, since gradients never outlive a window."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "optimizer_step_count": self._optimizer_step_count,
            "skipped_nonfinite_steps": self._skipped_nonfinite_steps,
        }
        return {**state, "scaler": self.scaler.state_dict()} if self._use_scaler else state

    def _loss(self, trainer: AsyncGRPOTrainer, micro_batch: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
        with torch.autocast(self.device_type, enabled=self.mixed_precision, dtype=self.autocast_dtype):
            output = trainer.compute_loss(micro_batch)
        losses = [value for key, value in output.items() if key.startswith("loss")]
        if not losses:
            raise RuntimeError(
                f"the loss module returned {sorted(output.keys())}; at least one key must start with 'loss' to be "
                "trained."
            )
        return output.detach(), torch.stack(losses).sum()

    def _clip(self) -> float:
        if isinstance(self.optimizer, RemoteOptimizer):
            return self.optimizer.clip_grad_norm(self.clip_norm)
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.clip_norm is not None:
            return float(nn.utils.clip_grad_norm_(params, self.clip_norm))
        return float(nn.utils.get_total_norm([p.grad for p in params]))

    def _skip(self, reason: str) -> TensorDictBase:
        self._skipped_nonfinite_steps += 1
        torchrl_logger.warning(f"Skipped an optimizer step, {self._skipped_nonfinite_steps} so far: {reason}.")
        self.optimizer.zero_grad(set_to_none=True)
        return TensorDict({}, batch_size=[])  # shares of some micro-batches are no metrics of a window
