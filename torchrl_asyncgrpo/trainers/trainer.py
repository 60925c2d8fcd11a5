"""Asynchronous GRPO as a torchrl Trainer: the data path, and who waits for whom.

::

    PromptSource ─▶ AsyncLLMCollector ◀─▶ Engine                       (collector's thread, engine's thread)
                          │ scored groups          ▲
                          ▼                        │ weights, version + 1
                    GroupReplayBuffer         WeightSyncSender
                          │ whole groups, once,    ▲
                          ▼ fresh enough           │
    Trainer   draw ─▶ pack ─▶ loss, backward per micro-batch ─▶ [pre_optim] ─▶ optimizer ─▶ [post_optim]
                                                                                             └▶ slots released

=========== ============================== ==================================================================
who         waits for                      until
=========== ============================== ==================================================================
collector   a free slot                    the trainer released groups, or the buffer dropped stale ones
trainer     a window of groups             the buffer holds them, or the collector ended (its exception is raised)
sender      the engine's decoding step     no step runs; none starts before the push is confirmed
=========== ============================== ==================================================================
"""

from __future__ import annotations

import contextlib
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import optim
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.objectives import LossModule
from torchrl.record.loggers import Logger
from torchrl.trainers import LRSchedulerHook, MixedPrecisionOptimizationStepper, OptimizationStepper, Trainer

from torchrl_asyncgrpo.collectors.llm_collector import AsyncLLMCollector
from torchrl_asyncgrpo.packing import TreePacker
from torchrl_asyncgrpo.trainers.checks import check_counts, check_parts, check_stage
from torchrl_asyncgrpo.trainers.logger_group import LoggerGroup
from torchrl_asyncgrpo.trainers.step_log import StepLog, bar_text, mean_of_steps
from torchrl_asyncgrpo.trainers.stepper import WindowOptimizationStepper
from torchrl_asyncgrpo.trainers.weight_push import WeightPush
from torchrl_asyncgrpo.trainers.window import NoWindow, Packer, WindowReader
from torchrl_asyncgrpo.weight_sync.base import WeightSyncSender


class AsyncGRPOTrainer(Trainer):
    """Train a policy on groups of rollouts, beside a collector or in turn with it.

    Takes the keyword arguments of torchrl's ``GRPOTrainer`` with their meaning and defaults, and ``packer`` and
    ``lr_scheduler``. Frames are *trained* rollouts: training ends when ``total_frames`` of them were trained, and
    logs and checkpoints count in them.

    All stages of torchrl's ``register_op`` are there. Two of them frame every optimizer step, and run exactly once for
    each: ``pre_optim`` with the gradients of the window complete, unscaled and clipped, and ``post_optim`` with the
    weights stepped: learning-rate schedule, weight push, then what was registered. Skipped steps have no
    ``post_optim``. Behind it the slots of the window's groups are released.

    Args:
        collector: source of groups; ``AsyncLLMCollector``, or any torchrl collector that yields rollouts.
        total_frames: rollouts to train; those of skipped windows count. The item in which it is reached is finished.
        frame_skip: frames that a rollout counts for.
        optim_steps_per_batch: optimizer steps per item of the collector. None takes every window of the item, and one
            window with ``async_collection=True``.
        loss_module: maps a ``TreeBatch`` to ``loss_*`` shares and metrics.
        optimizer: required without ``optimization_stepper``.
        optimization_stepper: own stepper; gets the lazy stack [K] of a window's micro-batches.
        weight_sync_sender: pushes weights to the engine; None pushes nothing.
        weight_update_frequency: optimizer steps between pushes with ``async_collection=True``; in turn, weights are
            pushed once per item of the collector.
        empty_replay_buffer_on_weight_update: drop the groups that wait after every push.
        replay_buffer: where groups wait; None trains the collector's items themselves.
        batch_size: groups of one buffer batch, instead of the buffer's own.
        device: where micro-batches are trained; None leaves them where they are.
        mixed_precision: autocast, and loss scaling with ``torch.float16``.
        autocast_dtype: dtype of autocast.
        gradient_accumulation_steps: buffer batches that make one window, all drawn before its first forward.
        logger: torchrl logger, or several.
        clip_norm: largest gradient norm; None does not clip.
        progress_bar: show reward, staleness, tokens/s and time per phase.
        seed: seed of collector, torch and numpy.
        save_trainer_interval: frames between checkpoints.
        log_interval: frames between logs of a value.
        save_trainer_file: path of torchrl's legacy checkpoint.
        checkpoint: torchrl ``Checkpoint``.
        checkpoint_rotation: retention policy of ``checkpoint``.
        checkpoint_metadata: metadata of ``checkpoint``.
        num_epochs: optimizer steps on every window.
        async_collection: collect beside the trainer instead of in turn.
        log_timings: log the time of every hook.
        auto_log_optim_steps: log loss, metrics and the number of optimizer steps.
        log_rewards: log rewards.
        log_kl: show ``kl_to_ref`` and ``kl_approx`` on the progress bar.
        packer: a window's rollouts to its micro-batches; ``TreePacker()`` by default.
        lr_scheduler: stepped once per optimizer step.

    Raises:
        ValueError: if neither optimizer nor stepper is given, a count is below 1, collector and buffer do not fit each
            other, or sampling and training temperature differ.
    """

    def __init__(
        self,
        *,
        collector: BaseCollector,
        total_frames: int,
        frame_skip: int = 1,
        optim_steps_per_batch: int | None = None,
        loss_module: LossModule | Callable[[TensorDictBase], TensorDictBase],
        optimizer: optim.Optimizer | None = None,
        optimization_stepper: OptimizationStepper | None = None,
        weight_sync_sender: WeightSyncSender | None = None,
        weight_update_frequency: int = 1,
        empty_replay_buffer_on_weight_update: bool = False,
        replay_buffer: ReplayBuffer | None = None,
        batch_size: int | None = None,
        device: torch.device | str | int | None = None,
        mixed_precision: bool = False,
        autocast_dtype: torch.dtype = torch.bfloat16,
        gradient_accumulation_steps: int = 1,
        logger: Logger | Sequence[Logger] | None = None,
        clip_norm: float | None = 1.0,
        progress_bar: bool = True,
        seed: int | None = None,
        save_trainer_interval: int = 10000,
        log_interval: int = 10000,
        save_trainer_file: str | pathlib.Path | None = None,
        checkpoint: Checkpoint | None = None,
        checkpoint_rotation: CheckpointRotation | None = None,
        checkpoint_metadata: Callable[[Trainer], Mapping[str, Any]] | None = None,
        num_epochs: int = 1,
        async_collection: bool = False,
        log_timings: bool = False,
        auto_log_optim_steps: bool = True,
        log_rewards: bool = True,
        log_kl: bool = True,
        packer: Packer | None = None,
        lr_scheduler: optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        check_counts(
            replay_buffer,
            batch_size=batch_size,
            optim_steps_per_batch=optim_steps_per_batch,
            total_frames=total_frames,
            frame_skip=frame_skip,
            weight_update_frequency=weight_update_frequency,
            gradient_accumulation_steps=gradient_accumulation_steps,
            num_epochs=num_epochs,
        )
        if optimization_stepper is None:
            if optimizer is None:
                raise ValueError("neither optimizer nor optimization_stepper is given; pass one of them.")
            optimization_stepper = WindowOptimizationStepper(
                optimizer, mixed_precision=mixed_precision, autocast_dtype=autocast_dtype, clip_norm=clip_norm
            )
        # register_op fills it, and the parent's constructor registers already
        self._pre_optim_step_ops: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        # torchrl keeps it on the class, where two trainers would share it
        self._last_log: dict[str, int] = {}
        super().__init__(
            collector=collector,
            total_frames=total_frames,
            frame_skip=frame_skip,
            optim_steps_per_batch=optim_steps_per_batch,
            loss_module=loss_module,
            optimizer=optimizer,
            optimization_stepper=optimization_stepper,
            replay_buffer=replay_buffer,
            batch_size=batch_size,
            logger=LoggerGroup(logger) if isinstance(logger, Sequence) else logger,
            clip_norm=clip_norm,
            progress_bar=progress_bar,
            seed=seed,
            save_trainer_interval=save_trainer_interval,
            log_interval=log_interval,
            save_trainer_file=save_trainer_file,
            checkpoint=checkpoint,
            checkpoint_rotation=checkpoint_rotation,
            checkpoint_metadata=checkpoint_metadata,
            num_epochs=num_epochs,
            async_collection=async_collection,
            log_timings=log_timings,
            auto_log_optim_steps=auto_log_optim_steps,
        )
        self.weight_sync_sender = weight_sync_sender
        groups = batch_size or (replay_buffer.batch_size if replay_buffer is not None else None)
        groups = None if groups is None else groups * gradient_accumulation_steps
        check_parts(
            collector=collector,
            replay_buffer=replay_buffer,
            loss_module=loss_module,
            sender=weight_sync_sender,
            groups=groups,
            windows_held=1 if num_epochs == 1 else optim_steps_per_batch or 1,
            pushes_per_window=num_epochs / weight_update_frequency,
            async_collection=async_collection,
            packer=packer or TreePacker(),
            stepper=optimization_stepper,
        )
        self.step_log = StepLog(self, log_rewards=log_rewards, log_kl=log_kl)
        self.register_op("post_optim_complete_log", self.step_log.kl)
        self.reader = WindowReader(
            replay_buffer, packer or TreePacker(), groups=groups, blocking=async_collection, device=device
        )
        self.reader.register(self)
        self.register_module("rng", GlobalRNGState())
        if replay_buffer is not None:
            self.register_module("replay_buffer", replay_buffer)
        if lr_scheduler is not None:
            LRSchedulerHook(lr_scheduler, interval="optim").register(self)
        self.weight_push: WeightPush | None = None
        if weight_sync_sender is not None:
            self.weight_push = WeightPush(
                weight_sync_sender,
                self.optimizer_steps,
                frequency=weight_update_frequency if async_collection else 1,
                stage="post_optim" if async_collection else "post_steps",
                after=replay_buffer.empty
                if empty_replay_buffer_on_weight_update and replay_buffer is not None
                else None,
            )
            self.weight_push.register(self)
            self.reader.waiting = self.weight_push.watching
        self._statistics: dict[int, dict[str, float]] = {}

    # --- stages -----------------------------------------------------------------------------------
    def register_op(self, dest: str, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register an operation at a stage: torchrl's stages, and ``pre_optim``.

        Args:
            dest: name of the stage; ``pre_optim`` calls ``op()`` once per optimizer step, when the gradients of the
                window are complete, unscaled and clipped.
            op: the operation.
            kwargs: given to every call of ``op``.

        Raises:
            ValueError: if the stage is unknown here, or ``op`` scores a reference at another temperature.
        """
        check_stage(dest, op, self.loss_module)
        if dest == "pre_optim":
            self._pre_optim_step_ops.append((self._wrap_hook_with_timing(op), kwargs))
        else:
            super().register_op(dest, op, **kwargs)

    register_hook = register_op

    def pre_optim(self) -> None:
        """Run the ``pre_optim`` stage; the stepper calls it."""
        for op, kwargs in self._pre_optim_step_ops:
            op(**kwargs)

    def optimizer_steps(self) -> int:
        """Optimizer steps taken; skipped ones do not count."""
        stepper = self.optimization_stepper
        if isinstance(stepper, MixedPrecisionOptimizationStepper):
            return stepper.optimizer_step_count
        return self._optim_count

    # --- training ---------------------------------------------------------------------------------
    def train(self) -> None:
        """Train until ``total_frames`` rollouts were trained, ``request_stop``, or the prompts are exhausted.

        Raises:
            BaseException: what ended the collection, itself. A checkpoint taken before remains good.
        """
        self._stop_training = False
        if self.collected_frames >= self.total_frames:
            return
        self.reader.exhausted = False
        with self.step_log.progress():
            try:
                if self.weight_push is not None:
                    self.weight_push.start(under_way=self.reader.interrupted and not self.async_collection)
                self._setup_hook()
                for batch in self._batches():
                    self._train_on(batch)
                    if self._stop_training or self.collected_frames >= self.total_frames:
                        break
                    self.save_trainer()
                else:
                    warnings.warn(
                        f"the prompt source is exhausted after {self.collected_frames} of {self.total_frames} frames; "
                        "give more prompts or epochs to train further.",
                        stacklevel=2,
                    )
                self.save_trainer(force_save=True)
            finally:
                try:
                    self._shutdown_hook()
                finally:
                    self.collector.shutdown()

    def _batches(self) -> Iterator[TensorDictBase | None]:
        if self.reader.interrupted:
            self.reader.blocking = False
            yield None  # its windows first, before anything is collected for the next
        self.reader.blocking = self.async_collection
        if self.async_collection:
            self.collector.start()
            while not self.reader.exhausted:
                yield None
        else:
            yield from self.reader.wait_for_each(self.collector)

    def _train_on(self, batch: TensorDictBase | None) -> None:
        if batch is not None:
            batch = self._process_batch_hook(batch)
            if self.replay_buffer is not None:
                self.replay_buffer.extend(batch)
        self._pre_steps_log_hook(batch)
        self.optim_steps(batch)
        self._post_steps_hook()
        self._post_steps_log_hook(batch)
        self._pbar_description()

    def optim_steps(self, batch: TensorDictBase | None) -> None:
        """Take the optimizer steps of one item of the collector.

        Args:
            batch: the item; None where it is in the replay buffer.
        """
        self._pre_optim_hook()
        outputs = []
        limit = 1 if self.optim_steps_per_batch is None and self.async_collection else self.optim_steps_per_batch
        for epoch in range(self.reader.epoch, self.num_epochs):
            self.reader.begin_epoch(epoch)
            self._pre_epoch_log_hook(batch)
            batch = self._pre_epoch_hook(batch)
            while limit is None or self.reader.position < limit:
                metrics = self._optim_step(batch, last_epoch=epoch == self.num_epochs - 1)
                if metrics is None:
                    break
                outputs.append(metrics)
            self._post_epoch_log_hook(batch)
            self._post_epoch_hook()
        self.reader.end_item()
        self._statistics.clear()
        if outputs:
            self._post_optim_complete_log_hook(self._optim_count, mean_of_steps(outputs))

    def _optim_step(self, batch: TensorDictBase | None, *, last_epoch: bool) -> TensorDictBase | None:
        """Train one window; None when there is none."""
        reader, stepper, steps = self.reader, self.optimization_stepper, self.optimizer_steps()
        try:
            micro_batches = self._process_optim_batch_hook(batch)
        except NoWindow:
            return None
        if reader.position not in self._statistics:
            self._statistics[reader.position] = self.step_log.window(reader.window, micro_batches)
        statistics = self._statistics[reader.position]
        with reader.phase("train"):
            metrics = stepper.step(self, micro_batches)
        # From here on the window is trained, whatever becomes of the push.
        window = reader.finish()
        frames = len(window) * self.frame_skip if last_epoch else 0
        self.collected_frames += frames
        try:
            if not isinstance(stepper, MixedPrecisionOptimizationStepper) or self.optimizer_steps() > steps:
                self._optim_count += 1
                with reader.phase("push"):
                    self._post_optim_hook()
        finally:
            if last_epoch:
                reader.release(window)
        if last_epoch:
            self.step_log.step(statistics, reader.phase.reset())
        self._post_optim_log(micro_batches)
        if self.progress_bar:
            self._pbar.update(frames)
        return metrics

    def __del__(self) -> None:
        """Leave the collector alone: ``train`` has shut it down, and another trainer may use it by now."""

    # --- logs and checkpoints ---------------------------------------------------------------------
    def _pbar_description(self) -> None:
        """Show the values that are logged with ``log_pbar``; the seconds of the last step's phases together."""
        if self.progress_bar:
            self._pbar.set_postfix_str(bar_text(self._pbar_str))

    def _checkpoint_policy(self) -> None:
        """Nothing beside the loss module, which holds the policy's weights already."""

    def _checkpoint_optimizer(self) -> Any | None:
        """Nothing where the stepper saves the optimizer already."""
        own = isinstance(self.optimization_stepper, WindowOptimizationStepper)
        return None if own else super()._checkpoint_optimizer()

    def _save_trainer(self) -> None:
        holding = self.collector.pause() if isinstance(self.collector, AsyncLLMCollector) else contextlib.nullcontext()
        with holding:
            super()._save_trainer()
