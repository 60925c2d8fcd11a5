"""Whole runs with group filters, steps on the window's advantages, and a KL coefficient that adapts."""

import copy

import pytest
import torch
from fakes import character_tokenizer, tiny_qwen3
from torchrl.checkpoint import Checkpoint

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    GRPOLoss,
    LocalWeightSyncSender,
    RolloutScorer,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    TreePacker,
    make_replay_buffer,
)
from torchrl_asyncgrpo.data.advantages import group_advantages
from torchrl_asyncgrpo.data.group_filters import DropFlatGroups
from torchrl_asyncgrpo.data.window_advantages import batch_normalised, batch_scaled, kl_in_reward
from torchrl_asyncgrpo.trainers.kl_control import AdaptiveKLControl

PROMPTS = [{"prompt": f"{i}+{i}=", "flat": i % 3 == 2} for i in range(9)]


def reward(completions, flat, **_):
    return [0.0 if is_flat else sum(map(ord, c)) / 500 for c, is_flat in zip(completions, flat, strict=True)]


class Parts:
    """A run against a frozen copy of its policy; ``seen`` has the advantages of every window as they are packed."""

    def __init__(self, *, sync=False, step=list, adapt=False, max_staleness=0, **trainer):
        self.model = tiny_qwen3()
        self.engine = TransformersEngine(self.model, max_length=32)
        self.buffer = make_replay_buffer(
            batch_size=2,
            max_staleness=max_staleness,
            current_version=lambda: self.engine.policy_version,
            timeout=60,
            transform=DropFlatGroups(give_up_after=5),
        )
        self.collector = AsyncLLMCollector(
            self.engine,
            PROMPTS,
            reward,
            tokenizer=character_tokenizer(),
            sampling_params=SamplingParams(max_tokens=4, n=3),
            groups_per_step=2,
            replay_buffer=self.buffer,
            max_staleness=max_staleness,
        )
        packer, self.seen, self.logged = TreePacker(), [], []
        reference = RolloutScorer(TreeActor(copy.deepcopy(self.model)), packer, key="ref_log_prob")

        def pack(rollouts):
            rollouts = step(reference(rollouts))
            self.seen.append({int(r["rollout_id"]): float(r["advantage"]) for r in rollouts})
            return packer(rollouts)

        self.loss = GRPOLoss(TreeActor(self.model), kl_to_ref_coeff=0.5)
        self.trainer = AsyncGRPOTrainer(
            collector=self.collector,
            loss_module=self.loss,
            optimizer=torch.optim.AdamW(self.model.parameters(), lr=1e-2),
            weight_sync_sender=LocalWeightSyncSender(self.model, self.engine),
            replay_buffer=self.buffer,
            packer=pack,
            log_interval=0,
            progress_bar=False,
            logger=self,
            async_collection=not sync,
            **trainer,
        )
        if adapt:
            AdaptiveKLControl(self.loss, target=0.02, horizon=2).register(self.trainer)

    def log_scalar(self, name, value, step=None):
        self.logged.append((name, float(value)))

    def series(self, name):
        return [value for key, value in self.logged if key == name]

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.fixture
def run():
    made = []

    def make(**options):
        made.append(Parts(**options))
        return made[-1]

    yield make
    for parts in made:
        parts.collector.shutdown()
        parts.engine.shutdown()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_filtered_runs_of_both_kinds_are_equal_bit_for_bit(run):
    """S2: dropped groups are made up for in turn and beside, and every window is full."""
    results = []
    for sync in (True, False):
        parts = run(sync=sync, total_frames=24)
        parts.trainer.train()
        assert [len(window) for window in parts.seen] == [6] * 4
        groups = sorted({rollout // 3 for window in parts.seen for rollout in window})
        assert groups == [0, 1, 3, 4, 6, 7, 9, 10]
        assert parts.series("zero_advantage") == [0.0] * 4
        assert parts.series("count/groups_dropped_flat")[-1] >= 2
        results.append((parts.weights(), parts.seen))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    "step",
    [
        batch_scaled,
        batch_normalised,
        lambda rollouts: kl_in_reward(rollouts, coeff=0.1, advantage=group_advantages),
        lambda rollouts: batch_normalised(kl_in_reward(rollouts, coeff=0.1, advantage=group_advantages)),
    ],
    ids=["batch_scaled", "batch_normalised", "kl_in_reward", "composed"],
)
def test_every_epoch_on_a_window_has_its_advantages(run, step):
    parts = run(step=step, total_frames=12, num_epochs=3, sync=True)
    parts.trainer.train()
    plain = run(total_frames=6, sync=True)
    plain.trainer.train()
    assert len(parts.seen) == 6
    assert parts.seen[0] == parts.seen[1] == parts.seen[2] != parts.seen[3]
    assert parts.seen[3] == parts.seen[4] == parts.seen[5]
    assert parts.seen[0].keys() == plain.seen[0].keys()
    assert parts.seen[0] != plain.seen[0]


def ziegler(coeff, divergence, target, horizon):
    return coeff * (1 + max(-0.2, min(0.2, divergence / target - 1)) / horizon)


@pytest.mark.parametrize("epochs", [1, 3])
def test_coefficient_adapts_to_the_divergence_that_is_logged(run, epochs):
    parts = run(adapt=True, total_frames=24, num_epochs=epochs)
    used = []
    parts.trainer.register_op("pre_optim", lambda: used.append(parts.loss.kl_to_ref_coeff))
    parts.trainer.train()
    divergences, coefficients = parts.series("kl_to_ref"), parts.series("kl_to_ref_coeff")
    assert len(divergences) == len(coefficients) == 4
    assert max(divergences) > 0.02
    expected = 0.5
    for item, divergence in enumerate(divergences):
        assert used[item * epochs : (item + 1) * epochs] == pytest.approx([expected] * epochs, rel=1e-5)
        for _ in range(epochs):
            expected = ziegler(expected, divergence, 0.02, 2)
        assert coefficients[item] == pytest.approx(expected, rel=1e-5)
    assert parts.loss.kl_to_ref_coeff == coefficients[-1]


@pytest.mark.parametrize("kind", ["unified", "legacy"])
@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_resumed_run_continues_exactly(run, kind, tmp_path):
    """S7: coefficient, counters and draws of a run that was stopped are those of one that was not."""
    straight = run(adapt=True, sync=True, total_frames=30)
    straight.trainer.train()
    first = run(adapt=True, sync=True, total_frames=12)
    if kind == "unified":
        first.trainer.checkpoint = first.trainer._sync_checkpoint_components(Checkpoint())
    first.trainer.save_trainer_file = tmp_path / "checkpoint"
    first.trainer.train()
    second = run(adapt=True, sync=True, total_frames=30)
    second.trainer.load_from_file(tmp_path / "checkpoint")
    assert second.loss.kl_to_ref_coeff == first.loss.kl_to_ref_coeff != 0.5
    second.trainer.train()
    assert same(straight.weights(), second.weights())
    assert straight.seen[2:] == second.seen
    assert straight.buffer.dropped == second.buffer.dropped
    assert straight.loss.kl_to_ref_coeff == second.loss.kl_to_ref_coeff
