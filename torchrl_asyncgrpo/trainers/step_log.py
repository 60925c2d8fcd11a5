"""What is logged of every optimizer step, and what of it the progress bar shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict, TensorDictBase
from tqdm import tqdm

from torchrl_asyncgrpo.collectors.llm_collector import AsyncLLMCollector
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.replay_buffer import GroupReplayBuffer
from torchrl_asyncgrpo.trainers.stepper import WindowOptimizationStepper

if TYPE_CHECKING:
    from torchrl_asyncgrpo.trainers.trainer import AsyncGRPOTrainer


class StepLog:
    """Log a step: its window's rewards, lengths and staleness, the time of its phases, and the running counters.

    Args:
        trainer: whose log is written.
        log_rewards: log values that begin with ``reward``.
        log_kl: show ``kl_to_ref`` and ``kl_approx`` on the progress bar.
    """

    def __init__(self, trainer: AsyncGRPOTrainer, *, log_rewards: bool, log_kl: bool) -> None:
        self.trainer = trainer
        self.log_rewards = log_rewards
        self.log_kl = log_kl

    def window(self, window: Sequence[TensorDictBase], micro_batches: TensorDictBase) -> dict[str, float]:
        """Statistics of a window before it is trained, when its staleness is still that of the drawing."""
        sender = self.trainer.weight_sync_sender
        nodes = sum(batch["node"].batch_size[0] for batch in micro_batches.unbind(0))
        return {
            **window_statistics(window, None if sender is None else sender.policy_version),
            "micro_batches": float(len(micro_batches)),
            "packing_ratio": sum(len(rollout[schema.TOKEN_IDS]) for rollout in window) / nodes,
        }

    def step(self, statistics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """Log a step that was taken.

        Args:
            statistics: what ``window`` returned for it.
            seconds: per phase, and ``"total"`` since the step before.
        """
        trainer = self.trainer
        values = {k: v for k, v in statistics.items() if self.log_rewards or not k.startswith("reward")}
        on_bar: dict[str, float] = {name: values.pop(name) for name in ("reward", "staleness") if name in values}
        on_bar["tokens/s"] = statistics["trained_tokens"] / seconds["total"]
        trainer._log(log_pbar=True, **on_bar, **{f"time/{phase}": value for phase, value in seconds.items()})
        if trainer.optimizer is not None:
            values["learning_rate"] = trainer.optimizer.param_groups[0]["lr"]
        trainer._log(**values, **{f"count/{name}": float(count) for name, count in self._counters().items()})

    def kl(self, optim_steps: int, average_losses: TensorDictBase | None) -> None:
        """Show the KL divergences of a step on the progress bar; a ``post_optim_complete_log`` operation."""
        del optim_steps
        if self.log_kl and average_losses is not None:
            names = [name for name in ("kl_to_ref", "kl_approx") if name in average_losses]
            self.trainer._pbar_str |= {name: float(average_losses[name]) for name in names}

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """The trainer's progress bar, while it trains."""
        trainer = self.trainer
        trainer._pbar_str = {}
        if not trainer.progress_bar:
            yield
            return
        done, total = trainer.collected_frames, trainer.total_frames
        with tqdm(total=total, initial=done, unit="rollout", dynamic_ncols=True) as trainer._pbar:
            yield

    def _counters(self) -> dict[str, int]:
        trainer = self.trainer
        counters: dict[str, int] = {}
        if isinstance(trainer.collector, AsyncLLMCollector):
            counters |= trainer.collector.counters
        if isinstance(trainer.replay_buffer, GroupReplayBuffer):
            counters |= {f"groups_dropped_{reason}": n for reason, n in trainer.replay_buffer.dropped.items()}
            counters |= {f"rollouts_cut_{reason}": n for reason, n in trainer.replay_buffer.cut.items()}
        if isinstance(trainer.optimization_stepper, WindowOptimizationStepper):
            counters["optim_steps_skipped"] = trainer.optimization_stepper.skipped_steps
        if trainer.weight_sync_sender is not None:
            counters |= trainer.weight_sync_sender.counters
        return counters


def window_statistics(window: Sequence[TensorDictBase], current_version: int | None) -> dict[str, float]:
    """What a window's rollouts say: rewards, lengths and staleness.

    Args:
        window: rollouts, at least one.
        current_version: policy version that staleness is measured from; None leaves it out.

    Returns:
        ``reward``, ``reward_std`` and ``reward_max``; ``response_length`` (mean trained tokens) and
        ``trained_tokens``; ``zero_advantage``, the share of rollouts without signal; ``staleness`` and
        ``staleness_max``, in policy versions.
    """
    reward_R = torch.stack([rollout[schema.REWARD] for rollout in window])
    length_R = torch.stack([rollout[schema.LOSS_MASK].sum() for rollout in window]).float()
    flat_R = torch.stack([(_advantages(rollout) == 0).all() for rollout in window])
    statistics = {
        "reward": float(reward_R.mean()),
        "reward_std": float(reward_R.std(correction=0)),
        "reward_max": float(reward_R.max()),
        "response_length": float(length_R.mean()),
        "trained_tokens": float(length_R.sum()),
        "zero_advantage": float(flat_R.float().mean()),
    }
    if current_version is not None:
        staleness = [current_version - schema.oldest_version(rollout) for rollout in window]
        statistics |= {"staleness": sum(staleness) / len(staleness), "staleness_max": float(max(staleness))}
    return statistics


def _advantages(rollout: TensorDictBase) -> torch.Tensor:
    """[] the advantage of a rollout, or those of its trained tokens."""
    advantage = rollout[schema.ADVANTAGE]
    return advantage[rollout[schema.LOSS_MASK]] if advantage.ndim else advantage


def mean_of_steps(outputs: Sequence[TensorDictBase]) -> TensorDict:
    """Mean of every metric over the optimizer steps that have it."""
    names = dict.fromkeys(name for output in outputs for name in output.keys())
    rows = {name: [output[name].double() for output in outputs if name in output] for name in names}
    return TensorDict({name: torch.stack(values).mean() for name, values in rows.items()}, batch_size=[])


def bar_text(values: Mapping[str, float]) -> str:
    """Values for the end of a progress bar: each with its name, and the seconds of all phases together."""
    shown = [f"{name} {value:.3g}" for name, value in values.items() if not name.startswith("time/")]
    phases = [
        f"{name.removeprefix('time/')} {value:.1f}"
        for name, value in values.items()
        if name.startswith("time/") and name != "time/total"
    ]
    return ", ".join([*shown, "s: " + " ".join(phases)] if phases else shown)
