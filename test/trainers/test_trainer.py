"""The whole loop on a tiny model: stages, counting, equality of both modes, failures, resume."""

import asyncio
import copy
import inspect
import warnings
from collections import Counter

import pytest
import torch
from fakes import character_tokenizer, tiny_qwen3
from torchrl.checkpoint import Checkpoint
from torchrl.trainers.algorithms import GRPOTrainer

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    GRPOLoss,
    LocalWeightSyncSender,
    PromptSource,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    TreePacker,
    make_replay_buffer,
)

PROMPTS = [f"{a}+{b}=" for a in range(3) for b in range(3)]


def reward(completions, **_):
    return [sum(map(ord, c)) / 500 for c in completions]


class Parts:
    """All parts of a run, assembled like the script does it, on a model that trains in milliseconds."""

    def __init__(
        self,
        *,
        groups=2,
        max_staleness=0,
        max_gate=None,
        prompts=None,
        rewards=reward,
        batch_size=None,
        n=3,
        max_tokens=5,
        mask_truncated=False,
        sync=False,
        **trainer,
    ):
        self.model = tiny_qwen3()
        self.actor = TreeActor(self.model)
        self.loss = GRPOLoss(self.actor)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.engine = TransformersEngine(self.model, max_length=32)
        self.sender = LocalWeightSyncSender(self.model, self.engine)
        self.buffer = make_replay_buffer(
            batch_size=batch_size or groups,
            max_staleness=max_staleness if max_gate is None else max_gate,
            current_version=lambda: self.engine.policy_version,
            timeout=15,
        )
        self.collector = AsyncLLMCollector(
            self.engine,
            PROMPTS if prompts is None else prompts,
            rewards,
            tokenizer=character_tokenizer(),
            sampling_params=SamplingParams(max_tokens=max_tokens, n=n),
            mask_truncated=mask_truncated,
            groups_per_step=groups,
            replay_buffer=self.buffer,
            max_staleness=max_staleness,
        )
        options = {
            "total_frames": 12,
            "log_interval": 0,
            "progress_bar": False,
            "async_collection": not sync,
            **trainer,
        }
        if not options.pop("push", True):
            self.sender = None
        self.logged = []
        self.trainer = AsyncGRPOTrainer(
            collector=self.collector,
            loss_module=self.loss,
            optimizer=self.optimizer,
            weight_sync_sender=self.sender,
            replay_buffer=self.buffer,
            logger=Recorder(self.logged),
            **options,
        )

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def series(self, name):
        return [value for key, value, _ in self.logged if key == name]


class Recorder:
    def __init__(self, rows):
        self.rows = rows

    def log_scalar(self, name, value, step=None):
        self.rows.append((name, float(value), step))


@pytest.fixture
def run():
    made = []

    def make(**options):
        parts = Parts(**options)
        made.append(parts)
        return parts

    yield make
    for parts in made:
        parts.collector.shutdown()
        parts.engine.shutdown()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_on_policy_equals_the_synchronous_run_bit_for_bit(run):
    """S2."""
    results = []
    for sync in (True, False):
        parts = run(sync=sync, total_frames=30)
        before = parts.weights()
        parts.trainer.train()
        assert not same(before, parts.weights())
        results.append((parts.weights(), parts.series("reward"), parts.series("staleness")))
    assert same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert set(results[0][2]) == {0.0}


@pytest.mark.parametrize("sync", [True, False])
def test_training_ends_after_trained_not_collected_rollouts(run, sync):
    parts = run(sync=sync, max_staleness=0 if sync else 2, total_frames=18)
    parts.trainer.train()
    assert parts.trainer.collected_frames == 18
    assert parts.optimizer.state_dict()["state"][0]["step"] == 3
    assert len(parts.series("reward")) == 3
    if not sync:
        assert max(parts.series("staleness_max")) <= 2


def test_stages_frame_every_optimizer_step(run):
    parts = run(total_frames=12)
    calls = []
    trainer, optimizer = parts.trainer, parts.optimizer
    trainer.register_op(
        "pre_optim", lambda: calls.append(("pre", all(p.grad is not None for p in parts.model.parameters())))
    )
    trainer.register_op(
        "post_optim", lambda: calls.append(("post", optimizer.state[next(parts.model.parameters())]["step"].item()))
    )
    trainer.register_op("post_steps", lambda: calls.append("post_steps"))
    trainer.register_op("pre_optim_steps", lambda: calls.append("pre_optim_steps"))
    trainer.train()
    step = ["pre_optim_steps", ("pre", True), ("post", 1.0), "post_steps"]
    assert calls == [*step, *step[:2], ("post", 2.0), step[3]]
    assert all(p.grad is None for p in parts.model.parameters())


def test_gradients_reach_pre_optim_clipped(run):
    parts = run(total_frames=6, clip_norm=1e-3)
    norms = []

    def norm():
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in parts.model.parameters()]).item())

    parts.trainer.register_op("pre_optim", norm)
    parts.trainer.train()
    assert norms == [pytest.approx(1e-3, rel=1e-3)]
    assert parts.series("grad_norm")[0] > 1e-3


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_pushes_before_the_first_request_and_every_so_many_steps(run, frequency):
    """W1, S2: no hang between pushes."""
    parts = run(total_frames=36, weight_update_frequency=frequency)
    versions = []
    generate = parts.engine.generate

    async def watched(*arguments):
        versions.append(parts.engine.policy_version)
        return await generate(*arguments)

    parts.engine.generate = watched
    parts.trainer.train()
    assert versions[0] == 1
    assert parts.engine.policy_version == 1 + 6 // frequency


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_gradient_that_is_not_finite_skips_the_step(run, clip_norm):
    """L13, W7: weights unchanged, counted, not pushed, slots released."""
    parts = run(total_frames=12, clip_norm=clip_norm)
    parameter = next(parts.model.parameters())
    hits = []

    def poison(grad):
        hits.append(1)
        if len(hits) == 1:
            grad = grad.clone()
            grad.view(-1)[0] = float("nan")
        return grad

    parameter.register_hook(poison)
    snapshots = []
    parts.trainer.register_op("post_steps", lambda: snapshots.append(parts.weights()))
    before = parts.weights()
    parts.trainer.train()
    assert same(before, snapshots[0])
    assert not same(before, snapshots[1])
    assert parts.trainer.optimization_stepper.skipped_steps == 1
    assert parts.trainer.optimizer_steps() == 1
    assert parts.engine.policy_version == 2
    assert parts.series("count/optim_steps_skipped") == [1.0, 1.0]
    assert parts.trainer.collected_frames == 12


def test_loss_that_is_not_finite_skips_the_window(run):
    parts = run(total_frames=6, packer=TreePacker(min_micro_batches=3))
    term, calls = parts.loss.policy_term, []

    def poisoned(*arguments):
        calls.append(1)
        return term(*arguments) * (float("nan") if len(calls) == 2 else 1.0)

    parts.loss.policy_term = poisoned
    before = parts.weights()
    parts.trainer.train()
    assert same(before, parts.weights())
    assert parts.trainer.optimization_stepper.skipped_steps == 1


@pytest.mark.parametrize(
    "options",
    [
        dict(packer=TreePacker(token_budget=12)),
        dict(packer=TreePacker(min_micro_batches=4)),
        dict(gradient_accumulation_steps=2, batch_size=1),
    ],
    ids=["budget", "micro-batches", "accumulation"],
)
def test_gradient_does_not_depend_on_the_split_of_a_window(run, options):
    """L2: the gradient that the optimizer sees, not Adam's step, which does not see its scale."""
    gradients = []
    for changes in ({}, options):
        parts = run(total_frames=6, clip_norm=None, **changes)
        seen = []
        parts.trainer.register_op(
            "pre_optim", lambda p=parts, s=seen: s.extend(q.grad.clone() for q in p.model.parameters())
        )
        parts.trainer.train()
        assert parts.trainer.optimizer_steps() == 1
        gradients.append(seen)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_accumulated_window_needs_enough_slots(run):
    with pytest.raises(ValueError, match="takes 8 groups.*holds at most 2.*groups_per_step=8"):
        run(gradient_accumulation_steps=4)


def test_last_window_is_normalised_by_its_own_totals(run):
    """S5."""
    source = PromptSource(PROMPTS[:3], num_epochs=1)
    parts = run(prompts=source, total_frames=100, sync=True)
    totals = []
    parts.trainer.register_op(
        "post_optim_log", lambda batches: totals.append([int(b["window", "num_rollouts"]) for b in batches.unbind(0)])
    )
    with pytest.warns(UserWarning, match="exhausted after 9 of 100 frames"):
        parts.trainer.train()
    assert totals == [[6], [3]]
    assert all(p.grad is None for p in parts.model.parameters())


def test_exhausted_source_ends_asynchronous_training_too(run):
    parts = run(prompts=PromptSource(PROMPTS[:3], num_epochs=1), total_frames=100, max_staleness=1)
    with pytest.warns(UserWarning, match="exhausted after 9 of 100 frames"):
        parts.trainer.train()
    assert parts.trainer.optimizer_steps() == 2


@pytest.mark.parametrize("sync", [True, False])
def test_epochs_repeat_every_window(run, sync):
    parts = run(num_epochs=3, total_frames=12, sync=sync)
    parts.trainer.train()
    assert parts.trainer.optimizer_steps() == 6
    assert parts.trainer.collected_frames == 12
    assert len(parts.series("reward")) == 2, "one row of the log per window"
    assert parts.series("staleness") == [0.0, 0.0], "measured when the window was drawn"


def groups_of(batches):
    return sorted({g for batch in batches.unbind(0) for g in batch["rollout", "group_id"].tolist()})


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("failing_step", [2, 3, 5])
def test_interrupted_epochs_go_on_where_they_were(run, sync, failing_step):
    parts = run(num_epochs=3, total_frames=12, sync=sync, clip_norm=None)
    taken = Counter()
    parts.trainer.register_op("post_optim_log", lambda batches: taken.update(groups_of(batches)))
    term, calls = parts.loss.policy_term, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == failing_step:
            raise KeyboardInterrupt
        return term(*arguments)

    parts.loss.policy_term = interrupted
    with pytest.raises(KeyboardInterrupt):
        parts.trainer.train()
    parts.trainer.train()
    assert taken == {0: 3, 1: 3, 2: 3, 3: 3}
    assert parts.trainer.collected_frames == 12


def test_window_is_trained_once_though_its_push_was_interrupted(run):
    parts = run(total_frames=18)
    trained = []
    parts.trainer.register_op(
        "pre_optim", lambda: trained.append(parts.trainer.reader.window[0]["group_id"].item() // 2)
    )
    send, calls = parts.sender.send_weights, []

    def interrupted(weights):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        send(weights)

    parts.sender.send_weights = interrupted
    with pytest.raises(KeyboardInterrupt):
        parts.trainer.train()
    parts.trainer.train()
    assert trained == [0, 1, 2]
    assert parts.buffer.dropped == {}


def test_masked_completions_do_not_make_their_group_stale(run):
    """Versions of an untrained completion count from its own tokens, not from 0."""
    parts = run(total_frames=36, max_staleness=1, mask_truncated=True)
    parts.trainer.train()
    assert parts.buffer.dropped == {}
    assert parts.trainer.collected_frames == 36


def test_window_without_trained_tokens_steps_nothing(run):
    parts = run(total_frames=6, mask_truncated=True, max_tokens=1, sync=True)
    parts.optimizer.param_groups[0]["weight_decay"] = 0.1
    before = parts.weights()
    parts.trainer.train()
    assert parts.trainer.optimization_stepper.skipped_steps == 1
    assert same(before, parts.weights())


def test_stale_leftovers_do_not_hang_the_run_in_turn(run):
    parts = run(sync=True, groups=3, batch_size=4, total_frames=24)
    parts.trainer.train()
    assert parts.trainer.collected_frames == 24
    assert parts.buffer.dropped["stale"] > 0


@pytest.mark.parametrize("sync", [True, False])
def test_reward_that_raises_cancelled_is_a_failure_not_an_end(run, sync):
    async def cancelled(**_):
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled from outside"):
        run(rewards=cancelled, sync=sync).trainer.train()


def test_no_draw_is_lost_when_a_reward_fails_in_turn(run):
    calls = []

    def fails_once(completions, **_):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("judge is down")
        return reward(completions)

    parts = run(rewards=fails_once, sync=True, total_frames=12)
    trained = []
    parts.trainer.register_op("post_optim_log", lambda batches: trained.extend(groups_of(batches)))
    with pytest.raises(OSError, match="judge is down"):
        parts.trainer.train()
    assert parts.collector.state_dict()["unfinished"] == [0, 1]
    parts.trainer.train()
    assert trained == [0, 1, 2, 3]


def test_training_goes_on_with_more_prompts_after_the_end(run):
    source = PromptSource(PROMPTS[:4], num_epochs=1)
    parts = run(prompts=source, total_frames=100)
    with pytest.warns(UserWarning, match="exhausted after 12"):
        parts.trainer.train()
    source.num_epochs, parts.trainer.total_frames = 2, 24
    parts.trainer.train()
    assert parts.trainer.collected_frames == 24


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float16, True)])
def test_mixed_precision_trains(run, dtype, scaled):
    parts = run(mixed_precision=True, autocast_dtype=dtype, total_frames=12)
    full = run(total_frames=12)
    before = parts.weights()
    parts.trainer.train()
    full.trainer.train()
    assert parts.trainer.optimization_stepper.scaler.is_enabled() is scaled
    assert not same(before, parts.weights())
    assert all(torch.isfinite(value).all() for value in parts.weights().values())
    assert parts.series("grad_norm")[0] == pytest.approx(full.series("grad_norm")[0], rel=0.1)


def test_overflow_of_the_loss_scale_skips_and_lowers_it(run):
    parts = run(mixed_precision=True, autocast_dtype=torch.float16, total_frames=12)
    parts.trainer.optimization_stepper.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    parts.trainer.train()
    stepper = parts.trainer.optimization_stepper
    assert stepper.skipped_steps == 2
    assert stepper.scaler.get_scale() == 2.0**58


def test_lr_scheduler_steps_once_per_optimizer_step(run):
    parts = run(push=False, total_frames=6)
    optimizer = parts.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    parts.trainer = AsyncGRPOTrainer(
        collector=parts.collector,
        loss_module=parts.loss,
        optimizer=optimizer,
        replay_buffer=parts.buffer,
        total_frames=18,
        async_collection=True,
        progress_bar=False,
        lr_scheduler=scheduler,
    )
    parts.trainer.train()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)


def test_request_stop_ends_at_the_next_boundary(run):
    parts = run(total_frames=10**6)
    parts.trainer.register_op("post_optim", lambda: parts.trainer.request_stop("enough"))
    parts.trainer.train()
    assert parts.trainer.collected_frames == 6


@pytest.mark.parametrize("sync", [True, False])
def test_exception_of_the_collection_is_raised_itself(run, sync):
    """S6."""
    error = LookupError("mine")

    def broken(**_):
        raise error

    parts = run(rewards=broken, sync=sync)
    with pytest.raises(LookupError) as caught:
        parts.trainer.train()
    assert caught.value is error


def test_failed_push_ends_training_and_leaves_the_version(run):
    parts = run(total_frames=60)
    send, calls = parts.sender.send_weights, []

    def breaks(weights):
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("engine gone")
        send(weights)

    parts.sender.send_weights = breaks
    with pytest.raises(ConnectionError, match="engine gone"):
        parts.trainer.train()
    assert parts.engine.policy_version == 2


@pytest.mark.parametrize("sync", [True, False])
def test_training_goes_on_after_a_push_that_broke_off(run, sync):
    """The engine holds a part of the new weights then, and samples nothing until it has all."""
    parts = run(total_frames=30, sync=sync)
    send, calls = parts.sender.send_weights, []

    def breaks(weights):
        calls.append(1)
        if len(calls) == 3:
            parts.engine.load_weights([next(iter(weights))])
            raise ConnectionError("transfer broke off")
        send(weights)

    parts.sender.send_weights = breaks
    with pytest.raises(ConnectionError):
        parts.trainer.train()
    parts.trainer.train()
    straight = run(total_frames=30, sync=sync)
    straight.trainer.train()
    assert (parts.trainer.collected_frames, parts.trainer.optimizer_steps(), parts.engine.policy_version) == (30, 5, 6)
    assert same(parts.weights(), straight.weights())


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("stage", ["packer", "process_optim_batch"])
def test_stop_iteration_of_a_packer_or_hook_is_a_failure_not_an_end(run, stage, sync):
    calls = []

    def broken(value):
        calls.append(1)
        if len(calls) == 2:
            raise StopIteration("mine")
        return TreePacker()(value) if stage == "packer" else value

    parts = run(total_frames=18, sync=sync, **({"packer": broken} if stage == "packer" else {}))
    if stage != "packer":
        parts.trainer.register_op(stage, broken)
    with pytest.raises(StopIteration, match="mine"):
        parts.trainer.train()
    parts.trainer.train()
    assert parts.trainer.collected_frames == 18
    assert parts.buffer.dropped == {}


def checkpointed(parts, path, kind):
    if kind == "legacy":
        parts.trainer.save_trainer_file = path
    else:
        parts.trainer.checkpoint = parts.trainer._sync_checkpoint_components(Checkpoint())
        parts.trainer.save_trainer_file = path
    return parts


@pytest.mark.parametrize("kind", ["unified", "legacy"])
@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_resumed_run_continues_exactly(run, kind, tmp_path):
    path = tmp_path / "checkpoint"
    straight = run(total_frames=30, sync=True)
    straight.trainer.train()
    first = checkpointed(run(total_frames=12, sync=True), path, kind)
    first.trainer.train()
    second = run(total_frames=30, sync=True)
    second.trainer.load_from_file(path)
    assert second.trainer.collected_frames == 12
    second.trainer.train()
    assert same(straight.weights(), second.weights())
    assert second.trainer.optimizer_steps() == straight.trainer.optimizer_steps() == 5
    assert second.engine.policy_version == straight.engine.policy_version
    assert straight.series("reward")[2:] == second.series("reward")


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_checkpoint_in_the_middle_of_a_window_is_allowed_and_exact(run, sync, tmp_path):
    """S4: saved between the micro-batches of a window; the resumed run trains that window first."""
    path = tmp_path / "checkpoint"
    straight = run(total_frames=18, sync=sync, packer=TreePacker(min_micro_batches=3))
    straight.trainer.train()
    first = checkpointed(run(total_frames=18, sync=sync, packer=TreePacker(min_micro_batches=3)), path, "legacy")
    term, calls = first.loss.policy_term, []

    class Killed(BaseException):
        pass

    def dies(*arguments):
        calls.append(1)
        if len(calls) == 5:
            first.trainer.save_trainer(force_save=True)
            raise Killed
        return term(*arguments)

    first.loss.policy_term = dies
    with pytest.raises(Killed):
        first.trainer.train()
    second = run(total_frames=18, sync=sync, packer=TreePacker(min_micro_batches=3))
    second.trainer.load_from_file(path)
    second.trainer.train()
    assert same(straight.weights(), second.weights())
    assert second.buffer.dropped == {}


@pytest.mark.parametrize("stage", ["pre_steps_log", "pre_optim_steps", "pre_epoch"])
@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_item_that_was_collected_and_not_drawn_is_trained_before_another_is_collected(run, stage, tmp_path):
    """Saved there, or failed there and started again: course and versions are those of a straight run."""
    path, calls = tmp_path / "checkpoint", []
    straight = run(total_frames=24, sync=True)
    straight.trainer.train()
    first, second = checkpointed(run(total_frames=24, sync=True), path, "legacy"), run(total_frames=24, sync=True)

    def fails(*batch):
        calls.append(1)
        if len(calls) == 2:
            first.trainer.save_trainer(force_save=True)
            raise OSError("disk full")
        return batch[0] if batch else None

    first.trainer.register_op(stage, fails)
    with pytest.raises(OSError, match="disk full"):
        first.trainer.train()
    second.trainer.load_from_file(path)
    for parts in (first, second):
        parts.trainer.train()
        assert same(parts.weights(), straight.weights())
        assert parts.engine.policy_version == straight.engine.policy_version == 5


@pytest.mark.parametrize(("sync", "steps_per_item"), [(True, None), (False, 2)])
@pytest.mark.parametrize("dying_step", [1, 2])
@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_item_of_several_windows_resumes_at_the_window_that_was_interrupted(
    run, sync, steps_per_item, dying_step, tmp_path
):
    options = dict(
        sync=sync,
        groups=2,
        batch_size=1,
        max_staleness=0 if sync else 1,
        max_gate=3,
        optim_steps_per_batch=steps_per_item,
        total_frames=12,
    )
    path, trained = tmp_path / "checkpoint", []
    first = checkpointed(run(**options), path, "legacy")
    second = run(**options)
    for parts in (first, second):
        parts.trainer.register_op("post_optim_log", lambda batches: trained.extend(groups_of(batches)))
    term, calls = first.loss.policy_term, []

    class Killed(BaseException):
        pass

    def dies(*arguments):
        calls.append(1)
        if len(calls) == dying_step:
            first.trainer.save_trainer(force_save=True)
            raise Killed
        return term(*arguments)

    first.loss.policy_term = dies
    with pytest.raises(Killed):
        first.trainer.train()
    second.trainer.load_from_file(path)
    second.trainer.train()
    assert trained == [0, 1, 2, 3]
    assert second.trainer.collected_frames == 12


@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_interrupted_item_does_not_wait_for_a_collector_that_starts_behind_it(run, tmp_path):
    options = dict(groups=2, batch_size=1, max_staleness=1, max_gate=3, optim_steps_per_batch=2, total_frames=9)
    first = checkpointed(run(**options), tmp_path / "checkpoint", "legacy")

    def dies(*arguments):
        first.trainer.save_trainer(force_save=True)
        raise KeyboardInterrupt

    first.loss.policy_term = dies
    with pytest.raises(KeyboardInterrupt):
        first.trainer.train()
    second = run(**options)
    second.trainer.load_from_file(tmp_path / "checkpoint")
    second.buffer.empty()
    second.trainer.train()
    assert second.trainer.collected_frames == 9


@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_asynchronous_resume_trains_every_draw_once(run, tmp_path):
    """S7: whatever was recorded is neither lost nor repeated."""
    path = tmp_path / "checkpoint"
    trained = []

    def watch(parts):
        parts.trainer.register_op(
            "post_optim_log",
            lambda batches: trained.extend(
                g for b in batches.unbind(0) for g in b["rollout", "group_id"].unique().tolist()
            ),
        )
        return parts

    first = watch(checkpointed(run(total_frames=18, max_staleness=2), path, "legacy"))
    first.trainer.train()
    second = watch(run(total_frames=42, max_staleness=2))
    second.trainer.load_from_file(path)
    version = second.trainer.weight_push.sender.next_version
    assert version == first.engine.policy_version
    second.trainer.train()
    assert len(trained) == len(set(trained)) == 14
    missing = set(range(max(trained) + 1)) - set(trained)
    assert len(missing) <= first.buffer.dropped["stale"] + second.buffer.dropped["stale"]


def test_interrupted_window_is_trained_when_training_goes_on(run):
    trained = []

    def watch(batches):
        trained.extend(g for batch in batches.unbind(0) for g in batch["rollout", "group_id"].unique().tolist())

    parts = run(total_frames=18)
    parts.trainer.register_op("post_optim_log", watch)
    term, calls = parts.loss.policy_term, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return term(*arguments)

    parts.loss.policy_term = interrupted
    with pytest.raises(KeyboardInterrupt):
        parts.trainer.train()
    parts.trainer.train()
    assert trained == [0, 1, 2, 3, 4, 5]


def test_checkpoint_holds_weights_and_optimizer_once(run):
    parts = run()
    state = parts.trainer.state_dict()
    assert "optimizer" not in state
    assert "exp_avg" in str(state["optimization_stepper"]) or state["optimization_stepper"]["optimizer"]["state"] == {}
    assert parts.trainer._checkpoint_policy() is None


@pytest.mark.parametrize("stage", ["optimizer", "post_loss", "process_loss"])
def test_stages_that_would_never_run_are_refused(run, stage):
    with pytest.raises(ValueError, match=f"'{stage}'.*'pre_optim'"):
        run().trainer.register_op(stage, lambda *a: None)


def test_buffer_that_drops_what_the_collector_may_sample_is_refused(run):
    parts = run(max_staleness=1)
    parts.collector.max_staleness = 2
    with pytest.raises(ValueError, match="2 versions old.*older than 1.*one max_staleness for both"):
        AsyncGRPOTrainer(
            collector=parts.collector, loss_module=parts.loss, optimizer=parts.optimizer, replay_buffer=parts.buffer,
            total_frames=6, async_collection=True,
        )  # fmt: skip


def test_torchrl_grpo_trainer_accepts_our_parts(run):
    for sync in (True, False):
        parts = run(sync=sync, max_staleness=0 if sync else 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = GRPOTrainer(
                collector=parts.collector,
                total_frames=18,
                loss_module=parts.loss,
                optimizer=parts.optimizer,
                weight_sync_sender=parts.sender,
                replay_buffer=parts.buffer,
                optim_steps_per_batch=None if sync else 1,
                async_collection=not sync,
                progress_bar=False,
                log_rewards=False,
            )
        trainer.register_op("process_optim_batch", lambda rollouts: TreePacker()(rollouts)[0])
        before = parts.weights()
        trainer.train()
        assert not same(before, parts.weights())
        assert parts.engine.policy_version >= 1


def test_collector_without_a_buffer_feeds_the_trainer(run):
    plain = run(total_frames=12, sync=True)
    plain.trainer.train()
    for with_buffer in (True, False):
        parts = run(sync=True)
        parts.collector.replay_buffer = None
        trainer = AsyncGRPOTrainer(
            collector=parts.collector,
            loss_module=parts.loss,
            optimizer=parts.optimizer,
            weight_sync_sender=parts.sender,
            replay_buffer=parts.buffer if with_buffer else None,
            total_frames=12,
            progress_bar=False,
        )
        trainer.train()
        assert same(plain.weights(), parts.weights())


def test_packer_transforms_and_user_hooks_see_window_and_micro_batches(run):
    parts = run(total_frames=6, packer=TreePacker(min_micro_batches=2))
    seen = []
    parts.trainer.register_op(
        "process_optim_batch", lambda batches: seen.append([type(b).__name__ for b in batches.unbind(0)])
    )
    parts.trainer.train()
    assert seen == [["TreeBatch", "TreeBatch"]]


def test_progress_bar_shows_reward_staleness_rate_and_phases(run, capsys):
    parts = run(total_frames=12, progress_bar=True)
    parts.trainer.train()
    shown = capsys.readouterr().err
    for word in ("reward", "staleness", "tokens/s", "wait", "train", "push", "12/12"):
        assert word in shown


def test_logs_carry_what_a_run_is_judged_by(run):
    parts = run(total_frames=12)
    parts.trainer.train()
    names = {name for name, _, _ in parts.logged}
    assert {
        "reward", "reward_std", "staleness", "response_length", "packing_ratio", "tokens/s", "time/wait", "time/train",
        "time/push", "time/total", "learning_rate", "loss_objective", "grad_norm", "ESS", "entropy", "kl_approx",
        "clip_fraction_low", "clip_fraction_high", "optim_steps", "count/groups_finished",
    } <= names  # fmt: skip
    assert [step for name, _, step in parts.logged if name == "reward"] == [6, 12]


def test_training_goes_on_when_it_is_started_again(run):
    parts = run(total_frames=6)
    parts.trainer.train()
    version = parts.engine.policy_version
    parts.trainer.total_frames = 12
    parts.trainer.train()
    assert parts.trainer.collected_frames == 12
    assert parts.engine.policy_version == version + 1


def test_weights_of_a_finished_run_are_those_of_the_engine(run):
    parts = run(total_frames=12)
    parts.trainer.train()
    engine = parts.engine._model.state_dict()
    assert all(torch.equal(engine[name], value) for name, value in copy.copy(parts.weights()).items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(total_frames=0), "total_frames=0"),
        (dict(weight_update_frequency=0), "weight_update_frequency=0"),
        (dict(num_epochs=0), "num_epochs=0"),
        (dict(clip_norm=0.0), "clip_norm=0.0"),
    ],
)
def test_bad_arguments(run, options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_takes_every_argument_of_torchrl_s_grpo_trainer_with_its_default():
    theirs = inspect.signature(GRPOTrainer.__init__).parameters
    ours = inspect.signature(AsyncGRPOTrainer.__init__).parameters
    assert {name: p.default for name, p in theirs.items()} == {name: ours[name].default for name in theirs}
    assert set(ours) - set(theirs) == {"packer", "lr_scheduler"}


EPOCHS = dict(num_epochs=2, optim_steps_per_batch=2, groups=2, max_gate=100, total_frames=24)


@pytest.mark.parametrize("options", [dict(max_staleness=0), dict(max_staleness=1, gradient_accumulation_steps=2)])
def test_epochs_over_windows_that_hold_more_slots_than_there_are_are_refused(run, options):
    with pytest.raises(ValueError, match=r"optim_steps_per_batch=2 windows of \d groups.*set groups_per_step=[48]"):
        run(**EPOCHS, **options)


def test_epochs_over_windows_that_hold_all_slots_run(run):
    parts = run(**EPOCHS, max_staleness=1)
    parts.trainer.train()
    assert (parts.trainer.collected_frames, parts.trainer.optimizer_steps()) == (24, 8)


def test_optimizer_of_another_model_is_refused(run):
    parts = run()
    with pytest.raises(ValueError, match=r"optimizer=SGD has none of the parameters.*model.parameters\(\)"):
        AsyncGRPOTrainer(
            collector=parts.collector, loss_module=parts.loss, replay_buffer=parts.buffer, total_frames=6,
            optimizer=torch.optim.SGD(tiny_qwen3().parameters(), lr=1.0),
        )  # fmt: skip


def test_two_temperatures_are_refused(run):
    parts = run()
    parts.actor.temperature = 0.7
    with pytest.raises(ValueError, match="sampled at temperature 1.0 and trained at 0.7"):
        AsyncGRPOTrainer(
            collector=parts.collector, loss_module=parts.loss, optimizer=parts.optimizer, replay_buffer=parts.buffer,
            total_frames=6,
        )  # fmt: skip


def test_async_needs_one_buffer(run):
    parts = run()
    with pytest.raises(ValueError, match="one replay buffer"):
        AsyncGRPOTrainer(
            collector=parts.collector, loss_module=parts.loss, optimizer=parts.optimizer, total_frames=6,
            async_collection=True,
        )  # fmt: skip


def test_shared_weights_cannot_run_ahead(run):
    parts = run(max_staleness=1)
    engine = TransformersEngine(parts.model, copy_weights=False, max_length=32)
    with pytest.raises(ValueError, match=r"shares the trainer's weights.*copy_weights=True.*max_staleness=0"):
        AsyncGRPOTrainer(
            collector=parts.collector, loss_module=parts.loss, optimizer=parts.optimizer, total_frames=6,
            replay_buffer=parts.buffer, async_collection=True,
            weight_sync_sender=LocalWeightSyncSender(parts.model, engine),
        )  # fmt: skip
    engine.shutdown()
