"""The trainer with its policy in a backend: the same course and guards, checkpoints; and parts that do not fit."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from fakes import character_tokenizer, tiny_qwen3
from torchrl.checkpoint import Checkpoint

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    FlatPacker,
    GRPOLoss,
    LocalWeightSyncSender,
    PaddingFreeActor,
    ReferenceLogProbs,
    RemoteActor,
    RemoteLoss,
    RemoteOptimizer,
    RemoteWeightSyncSender,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    TreePacker,
    make_replay_buffer,
)
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy


class Parts:
    """A run whose policy is in a backend of this process, or, as ``local``, in the trainer."""

    def __init__(
        self, kind="here", *, contract="tree", packer=None, optimizer=None, max_staleness=0, copy=True, **trainer
    ):
        self.model = tiny_qwen3()
        self.engine = TransformersEngine(self.model, max_length=32, copy_weights=copy)
        make_actor = {"tree": TreeActor, "flat": PaddingFreeActor}[contract]
        if kind == "local":
            actor = make_actor(self.model)
            self.sender = LocalWeightSyncSender(self.model, self.engine)
            optimizer = optimizer or torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.loss = GRPOLoss(actor)
        else:
            self.backend = HostedPolicy(
                lambda: make_actor(self.model),
                make_loss=GRPOLoss,
                make_sender=lambda model: LocalWeightSyncSender(model, self.engine),
            )
            actor = RemoteActor(self.backend)
            self.sender = RemoteWeightSyncSender(actor)
            optimizer = optimizer or RemoteOptimizer(self.backend, lr=1e-2)
            self.loss = GRPOLoss(actor) if kind == "here" else RemoteLoss(actor)
        buffer = make_replay_buffer(
            batch_size=2, max_staleness=max_staleness, current_version=lambda: self.sender.policy_version, timeout=15
        )
        collector = AsyncLLMCollector(
            self.engine,
            [f"{a}+{b}=" for a in range(3) for b in range(4)],
            lambda completions, **_: [sum(map(ord, text)) / 500 for text in completions],
            tokenizer=character_tokenizer(),
            sampling_params=SamplingParams(max_tokens=5, n=3),
            groups_per_step=2,
            replay_buffer=buffer,
            max_staleness=max_staleness,
        )
        flat = FlatPacker(min_micro_batches=2, padding_free=True)
        self.logged = []
        options = {
            "total_frames": 30,
            "packer": packer or {"tree": TreePacker(min_micro_batches=2), "flat": flat}[contract],
        }
        self.trainer = AsyncGRPOTrainer(
            collector=collector,
            loss_module=self.loss,
            optimizer=optimizer,
            weight_sync_sender=self.sender,
            replay_buffer=buffer,
            log_interval=0,
            progress_bar=False,
            logger=SimpleNamespace(log_scalar=lambda name, value, step=None: self.logged.append((name, float(value)))),
            **options | trainer,
        )

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def series(self, name):
        return [value for key, value in self.logged if key == name]


@pytest.fixture
def run():
    made = []

    def make(*arguments, **options):
        parts = Parts(*arguments, **options)
        made.append(parts)
        return parts

    yield make
    for parts in made:
        parts.trainer.collector.shutdown()
        parts.engine.shutdown()


def assert_same_run(ours, theirs):
    for name in ("loss_objective", "grad_norm", "reward", "staleness", "learning_rate"):
        assert ours.series(name) == pytest.approx(theirs.series(name), rel=1e-5, abs=1e-7), name
        assert len(ours.series(name)) == 5
    expected = theirs.weights()
    for name, value in ours.weights().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beside", [False, True], ids=["in turn", "beside"])
@pytest.mark.parametrize("contract", ["tree", "flat"])
@pytest.mark.parametrize("kind", ["here", "there"])
def test_runs_like_the_local_trainer(run, kind, contract, beside):
    ours = run(kind, contract=contract, async_collection=beside)
    theirs = run("local", contract=contract, async_collection=beside)
    for parts in (ours, theirs):
        parts.trainer.train()
    assert_same_run(ours, theirs)
    assert ours.engine.policy_version == theirs.engine.policy_version == 6


@pytest.mark.filterwarnings("ignore:The (default|legacy):")
@pytest.mark.parametrize("form", ["unified", "legacy"])
@pytest.mark.parametrize("kind", ["here", "there"])
def test_checkpoint_holds_the_model_and_the_optimizer_of_the_backend(run, kind, form, tmp_path):
    straight = run(kind)
    straight.trainer.train()
    first, second = run(kind, total_frames=12), run(kind)
    with torch.no_grad():
        next(second.model.parameters()).add_(1)
    for parts in (first, second):
        parts.trainer.save_trainer_file = tmp_path / "checkpoint"
        if form == "unified":
            parts.trainer.checkpoint = parts.trainer._sync_checkpoint_components(Checkpoint())
    first.trainer.train()
    second.trainer.load_from_file(tmp_path / "checkpoint")
    second.trainer.train()
    second.logged = first.logged + second.logged
    assert second.trainer.optimizer_steps() == 5
    assert_same_run(second, straight)


def spoiled(parts):
    """The loss of the second micro-batch of the second window is not finite."""
    calls, compute_loss = itertools.count(1), parts.trainer.compute_loss

    def compute(batch):
        output = compute_loss(batch)
        return output * float("nan") if next(calls) == 4 else output

    parts.trainer.compute_loss = compute
    before = []
    parts.trainer.register_op("pre_optim_steps", lambda: before.append(parts.weights()))
    parts.trainer.train()
    assert all(torch.equal(before[1][name], before[2][name]) for name in before[1])
    return parts


@pytest.mark.parametrize("kind", ["here", "there"])
def test_window_that_is_not_finite_is_skipped_and_leaves_no_trace(run, kind):
    ours, theirs = (spoiled(run(kind, total_frames=18)) for kind in (kind, "local"))
    for parts in (ours, theirs):
        assert parts.trainer.optimization_stepper.skipped_steps == 1
        assert parts.trainer.optimizer_steps() == 2
        assert parts.series("count/optim_steps_skipped") == [0, 1, 1]
    assert ours.series("grad_norm") == pytest.approx(theirs.series("grad_norm"), rel=1e-5)
    assert not ours.backend._forwards


@pytest.mark.parametrize("clip_norm", [None, 1e9])
def test_gradient_that_is_not_finite_in_the_backend_is_skipped(run, clip_norm):
    """L13: the loss is finite, one gradient is not."""
    parts = run(total_frames=6, clip_norm=clip_norm)
    parts.model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    before = parts.weights()
    parts.trainer.train()
    after = parts.weights()
    assert parts.trainer.optimization_stepper.skipped_steps == 1
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradients_are_clipped_in_the_backend_before_pre_optim(run):
    parts = run(total_frames=6, clip_norm=1e-3)
    norms = []
    parts.trainer.register_op(
        "pre_optim",
        lambda: norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in parts.model.parameters()]))),
    )
    parts.trainer.train()
    assert norms == [pytest.approx(1e-3, rel=1e-3)]
    assert parts.series("grad_norm")[0] > 1e-3


def test_backend_that_fails_ends_the_run_with_its_exception(run):
    class BackendError(Exception):
        pass

    parts = run()
    step, steps = parts.backend.step, []

    def fails(options):
        steps.append(options)
        if sum(options is not None for options in steps) == 3:
            raise BackendError
        step(options)

    parts.backend.step = fails
    with pytest.raises(BackendError):
        parts.trainer.train()
    assert parts.trainer.collected_frames == 12


@pytest.mark.parametrize("packer", [TreePacker(), FlatPacker(), None])
def test_packer_whose_batches_the_backend_cannot_run_is_refused(run, packer):
    parts = run(contract="flat")
    name = "TreePacker" if packer is None else type(packer).__name__
    with pytest.raises(ValueError, match=rf"packer={name} .*contract is 'flat'.*FlatPacker\(padding_free=True\)"):
        AsyncGRPOTrainer(
            collector=parts.trainer.collector, loss_module=parts.loss, optimizer=parts.trainer.optimizer,
            total_frames=6, packer=packer,
        )  # fmt: skip


def test_tree_batches_for_an_actor_without_tree_attention_are_refused(run):
    with pytest.raises(ValueError, match=r"packer=TreePacker makes trees, which PaddingFreeActor .*FlatPacker\(\)"):
        run("local", contract="flat", packer=TreePacker())


@pytest.mark.parametrize("kind", ["here", "there"])
def test_optimizer_that_cannot_reach_the_model_is_refused(run, kind):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))])
    with pytest.raises(ValueError, match=r"optimizer=AdamW .*RemoteOptimizer\(actor.backend\)"):
        run(kind, optimizer=optimizer)


@pytest.mark.parametrize("kind", ["here", "there", "local"])
def test_optimizer_of_another_backend_is_refused(run, kind):
    other = HostedPolicy(lambda: TreeActor(tiny_qwen3()))
    with pytest.raises(ValueError, match=r"optimizer=RemoteOptimizer cannot reach the model, which is in"):
        run(kind, optimizer=RemoteOptimizer(other, lr=1e-2))


@pytest.mark.parametrize("kind", ["here", "local"])
def test_sender_that_cannot_reach_the_model_is_refused(run, kind):
    parts = run(kind)
    actor = RemoteActor(HostedPolicy(lambda: TreeActor(tiny_qwen3()), make_sender=lambda model: parts.sender))
    senders = [
        RemoteWeightSyncSender(actor),
        LocalWeightSyncSender(actor, parts.engine),
        LocalWeightSyncSender(tiny_qwen3(), parts.engine),
    ]
    for sender in senders:
        with pytest.raises(ValueError, match=rf"weight_sync_sender={type(sender).__name__} cannot reach the model"):
            AsyncGRPOTrainer(
                collector=parts.trainer.collector, loss_module=parts.loss, optimizer=parts.trainer.optimizer,
                weight_sync_sender=sender, total_frames=6, packer=TreePacker(),
            )  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "here", "there"])
def test_engine_that_shares_weights_is_refused_beside_the_trainer_wherever_they_are(run, kind):
    with pytest.raises(ValueError, match="would decode while they are written"):
        run(kind, max_staleness=1, async_collection=True, copy=False)


def test_autocast_that_cannot_reach_the_model_is_refused(run):
    with pytest.raises(ValueError, match="mixed_precision=True with a RemoteOptimizer.*autocast_dtype"):
        run(mixed_precision=True)


@pytest.mark.parametrize("kind", ["local", "here", "there"])
def test_a_reference_at_another_temperature_is_refused(run, kind):
    """Whose KL to equal weights would not be 0."""
    trainer = run(kind).trainer

    def reference(**options):
        return ReferenceLogProbs(RemoteActor(HostedPolicy(lambda: TreeActor(tiny_qwen3(), **options))))

    trainer.register_op("process_optim_batch", reference())
    for register in (trainer.register_op, trainer.register_hook):
        with pytest.raises(ValueError, match=r"reference is scored at temperature 0\.6 and the policy trained at 1\.0"):
            register("process_optim_batch", reference(temperature=0.6))
