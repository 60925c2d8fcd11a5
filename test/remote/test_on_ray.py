"""Ray for real: training in other processes equals training here, and a process that dies is noticed."""

import asyncio
import itertools
import os
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fakes import character_tokenizer, save_with_own_code, tiny_qwen3
from remote.windows import (
    ACTORS,
    PACKERS,
    adamw,
    assert_close,
    entropic_grpo,
    gradients,
    grpo,
    make_engine,
    recurrent_actor,
    train,
    tree_actor,
    weights,
    window,
)

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    LocalWeightSyncSender,
    RayBackend,
    RayEngine,
    RemoteActor,
    RemoteLoss,
    RemoteOptimizer,
    RemoteWeightSyncSender,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    TreePacker,
    load_policy,
    make_replay_buffer,
)
from torchrl_asyncgrpo.remote import on_ray as on_ray_module

pytestmark = pytest.mark.ray
NO_CPU = {"num_cpus": 0}


def in_worker(ray, backend, index, function):
    return ray.get(backend.workers[index].__ray_call__.remote(function))


def await_end(ray, actor):
    """An actor that is killed takes a moment."""
    while True:
        try:
            ray.get(actor.__ray_ready__.remote())
        except ray.exceptions.RayActorError:
            return


@pytest.fixture(scope="module", params=["tree-1", "tree-2", "flat-1", "flat-2"])
def trained(request, workers):
    """A backend of that contract and so many workers, its contract, and its state before any step."""
    contract, count = request.param.split("-")
    backend = RayBackend(
        ACTORS[contract], make_optimizer=adamw, make_loss=grpo, workers=int(count), actor_options=NO_CPU
    )
    return backend, contract, {part: backend.save(part) for part in ("model", "optimizer")}


@pytest.mark.parametrize("where", ["here", "there"])
def test_remote_training_equals_local_training(on_ray, trained, where):
    """Gradient, weights and course of 5 steps, the learning rate falling; with several workers each holds the same."""
    backend, contract, start = trained
    for part, state in start.items():
        backend.load(part, state)
    actor = RemoteActor(backend)
    ours, theirs = [], []
    course = train(
        grpo(actor) if where == "here" else RemoteLoss(actor),
        RemoteOptimizer(backend, lr=1e-3),
        PACKERS[contract],
        at_gradient=lambda: ours.append(in_worker(on_ray, backend, -1, lambda worker: gradients(worker.policy.model))),
    )
    local = ACTORS[contract]()
    expected = train(
        grpo(local),
        adamw(local.model.parameters(), lr=1e-3),
        PACKERS[contract],
        at_gradient=lambda: theirs.append(gradients(local.model)),
    )
    for mine, other in zip(course, expected, strict=True):
        assert_close(mine, other)
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other)
    assert_close(backend.save("model"), weights(local.model))
    assert_close(in_worker(on_ray, backend, -1, lambda worker: worker.policy.save("model")), weights(local.model))
    assert not torch.equal(weights(local.model)["lm_head.weight"], weights(tiny_qwen3())["lm_head.weight"])


def test_micro_batches_go_round_the_workers(on_ray, trained):
    backend, contract, _ = trained
    backend.step(None)
    loss = grpo(RemoteActor(backend))
    for batch in PACKERS[contract](window()):
        loss(batch)
    kept = [
        in_worker(on_ray, backend, i, lambda worker: len(worker.policy._forwards)) for i in range(len(backend.workers))
    ]
    assert kept == ([3] if len(kept) == 1 else [2, 1])
    backend.step(None)


def test_failure_in_a_worker_is_raised_here_in_its_own_type(trained):
    """At once where its answer is waited for, by the step where it is not; the backend goes on."""
    backend, contract, _ = trained
    with pytest.raises(ValueError, match="without make_sender"):
        backend.push_weights(1)
    backend.backward((0, 12345), {})
    with pytest.raises(RuntimeError, match="forward 12345 was backpropagated already"):
        backend.clip_grad_norm(None)
    grpo(RemoteActor(backend))(PACKERS[contract](window())[0])["loss_objective"].backward()
    assert backend.clip_grad_norm(None) > 0
    backend.step(None)


def test_a_backward_that_failed_is_known_before_a_step(trained):
    backend, contract, _ = trained
    before = backend.save("model")
    grpo(RemoteActor(backend))(PACKERS[contract](window())[0])["loss_objective"].backward()
    backend.backward((0, 12345), {})
    with pytest.raises(RuntimeError, match="forward 12345"):
        backend.step([{"lr": 1.0}])
    assert_close(backend.save("model"), before, 0)
    backend.step(None)


@pytest.mark.parametrize("failing", ["step", "load"])
def test_workers_that_a_failure_left_different_do_not_go_on(on_ray, trained, failing):
    """A step or a load that one of them did not do; a checkpoint makes them equal again, and alone none differs."""
    backend, contract, start = trained
    several = len(backend.workers) > 1

    def break_it(worker):
        policy = worker.policy
        if failing == "load":
            policy.load = lambda *_: 1 / 0
        else:
            policy.optimizer.step = lambda: 1 / 0

    def mend(worker):
        vars(worker.policy).pop("load", None)
        vars(worker.policy.optimizer).pop("step", None)

    def window_of_one():
        grpo(RemoteActor(backend))(PACKERS[contract](window())[0])["loss_objective"].backward()
        backend.clip_grad_norm(1.0)

    for part, state in start.items():
        backend.load(part, state)
    backend.step(None)
    window_of_one()
    in_worker(on_ray, backend, -1, break_it)
    with pytest.raises(ZeroDivisionError):
        backend.step([{"lr": 1e-2}]) if failing == "step" else backend.load("model", start["model"])
    in_worker(on_ray, backend, -1, mend)
    backend.step(None)
    calls = [
        window_of_one,
        lambda: backend.clip_grad_norm(None),
        lambda: backend.step([{"lr": 1e-2}]),
        lambda: backend.save("model"),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="one of the 2 workers.*load a checkpoint") if several else nullcontext():
            call()
    for part, state in start.items():
        backend.load(part, state)
    window_of_one()
    backend.step([{"lr": 1e-2}])
    assert_close(in_worker(on_ray, backend, -1, lambda worker: worker.policy.save("model")), backend.save("model"), 0)


def test_model_with_its_own_code(workers, tmp_path):
    """Its configuration is read here, where that code was never loaded."""
    save_with_own_code(tmp_path)
    environment = {"env_vars": {"HF_MODULES_CACHE": str(tmp_path / "modules")}}
    backend = RayBackend(
        lambda: TreeActor(load_policy(str(tmp_path), {"trust_remote_code": True})),
        actor_options={**NO_CPU, "runtime_env": environment},
    )
    assert backend.info.config.model_type == "own"
    actor = RemoteActor(backend)
    (batch,) = TreePacker()(window())
    torch.testing.assert_close(actor(batch.copy())["node", "log_prob"], tree_actor()(batch)["node", "log_prob"])
    backend.shutdown()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(workers=0), ValueError, "workers=0; a backend has at least one"),
        (dict(collective="mpi"), ValueError, "collective='mpi'; choose 'gloo' or 'nccl'"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        RayBackend(tree_actor, **options)


def reward(completions, **_):
    return [sum(map(ord, text)) / 500 for text in completions]


def make_run(engine, optimizer, sender, loss, **options):
    """A run in turn: 6 rollouts a step, logged into ``trainer.logged``."""
    buffer = make_replay_buffer(batch_size=2, max_staleness=0, current_version=lambda: sender.policy_version)
    collector = AsyncLLMCollector(
        engine,
        [f"{a}+{b}=" for a in range(3) for b in range(4)],
        reward,
        tokenizer=character_tokenizer(),
        sampling_params=SamplingParams(max_tokens=5, n=3),
        groups_per_step=2,
        replay_buffer=buffer,
        max_staleness=0,
    )
    logged = []
    trainer = AsyncGRPOTrainer(
        collector=collector,
        loss_module=loss,
        optimizer=optimizer,
        weight_sync_sender=sender,
        replay_buffer=buffer,
        packer=TreePacker(min_micro_batches=2),
        total_frames=30,
        log_interval=0,
        progress_bar=False,
        logger=SimpleNamespace(log_scalar=lambda name, value, step=None: logged.append((name, float(value)))),
        **options,
    )
    trainer.logged = logged
    return trainer


def series(trainer, name):
    return [value for key, value in trainer.logged if key == name]


@pytest.fixture(scope="module")
def engines(on_ray):
    """Engines of the module, started when one is needed and none lives."""
    living = []
    yield living
    for engine in living:
        engine.shutdown()


@pytest.fixture
def engine(engines):
    if not engines:
        engines.append(RayEngine(make_engine, actor_options=NO_CPU))
    return engines[0]


@pytest.mark.filterwarnings("ignore:The (default|legacy):")
def test_killed_worker_ends_the_run_and_a_checkpoint_goes_on_as_if_nothing_had_been(on_ray, workers, engine, tmp_path):
    """Sampling, training and pushes in other processes; SIGKILL in the third window; resumed with fewer workers."""
    model = tiny_qwen3()
    local_engine = TransformersEngine(model, max_length=32)
    straight = make_run(
        local_engine,
        adamw(model.parameters(), lr=1e-2),
        LocalWeightSyncSender(model, local_engine),
        entropic_grpo(TreeActor(model)),
    )
    straight.train()
    local_engine.shutdown()

    def remote_run(count):
        backend = RayBackend(
            tree_actor,
            make_optimizer=adamw,
            make_loss=entropic_grpo,
            make_sender=lambda model: LocalWeightSyncSender(model, engine),
            workers=count,
            actor_options=NO_CPU,
        )
        actor = RemoteActor(backend)
        trainer = make_run(
            engine,
            RemoteOptimizer(backend, lr=1e-2),
            RemoteWeightSyncSender(actor),
            RemoteLoss(actor),
            save_trainer_file=tmp_path / "checkpoint",
            save_trainer_interval=6,
        )
        return backend, trainer

    backend, first = remote_run(2)
    process = in_worker(on_ray, backend, 1, lambda worker: os.getpid())
    windows = itertools.count(1)

    def kill_in_the_third(window):
        if next(windows) == 3:
            os.kill(process, signal.SIGKILL)

    first.register_op("process_optim_batch", kill_in_the_third)
    started = time.monotonic()
    with pytest.raises(on_ray.exceptions.RayActorError):
        first.train()
    assert time.monotonic() - started < 60
    assert first.collected_frames == 12

    backend, second = remote_run(1)
    second.load_from_file(tmp_path / "checkpoint")
    assert second.collected_frames == 12
    second.train()
    assert second.optimizer_steps() == 5
    assert second.weight_sync_sender.policy_version == engine.policy_version == 6
    for name in ("loss_objective", "grad_norm", "reward", "entropy"):
        course = series(first, name) + series(second, name)
        assert course == pytest.approx(series(straight, name), rel=1e-5, abs=1e-6), name
        assert len(course) == 5
    assert_close(backend.save("model"), weights(model), 1e-5)


def test_model_that_the_backend_cannot_run_is_an_error_at_construction(on_ray, workers):
    """The features of a model are checked where it is; the process is ended."""
    with pytest.raises(ValueError, match=r"cannot honour recurrent layers.* no tree attention backend can"):
        RayBackend(recurrent_actor, actor_options=NO_CPU)
    (worker, *_) = on_ray_module._start_workers.workers
    await_end(on_ray, worker)


@pytest.mark.parametrize("what", ["worker", "engine"])
def test_a_cluster_without_room_is_said_and_ends(on_ray, what, monkeypatch, caplog):
    monkeypatch.setattr(on_ray_module, "_HINT_AFTER", 0.1)
    options = dict(actor_options={"num_cpus": 64}, start_timeout=0.3)
    with pytest.raises(TimeoutError, match=r"num_cpus': 64.*within start_timeout=0.3 s. It has .* of 2 CPU.* free"):
        RayBackend(tree_actor, **options) if what == "worker" else RayEngine(make_engine, **options)


def test_the_senders_end_comes_with_that_of_the_workers(on_ray, workers, tmp_path):
    """It may have files, and versions of an adapter on a server."""
    ended = tmp_path / "ended"

    class Sender(LocalWeightSyncSender):
        def destroy(self):
            ended.touch()

    backend = RayBackend(
        tree_actor,
        make_sender=lambda model: Sender(model, SimpleNamespace(shares_weights=False)),
        actor_options=NO_CPU,
    )
    backend.shutdown()
    assert ended.exists()


def test_requests_of_one_tick_are_one_cohort_of_the_engine(engine):
    params = [SamplingParams(max_tokens=6, n=2, seed=seed) for seed in range(3)]

    async def ask(engine):
        return await asyncio.gather(*(engine.generate([5, 6, 7 + p.seed], p) for p in params))

    local = make_engine()
    try:
        expected = asyncio.run(ask(local))
    finally:
        local.shutdown()
    engine.pause()
    engine.load_weights(tiny_qwen3().named_parameters())
    engine.resume(engine.policy_version)
    answers = asyncio.run(ask(engine))
    for mine, other in zip(itertools.chain(*answers), itertools.chain(*expected), strict=True):
        assert mine.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(mine.log_probs), torch.tensor(other.log_probs))
    assert engine._call("cohorts")[-1] == 3


def test_failure_of_one_request_leaves_the_others(engine):
    async def ask():
        params = SamplingParams(max_tokens=2)
        return await asyncio.gather(
            *(engine.generate(ids, params) for ids in ([5, 6], [10**6], [5, 7])), return_exceptions=True
        )

    good, bad, also_good = asyncio.run(ask())
    assert isinstance(bad, ValueError)
    assert good[0].token_ids
    assert also_good[0].token_ids
    with pytest.raises(ValueError, match="top_p=0.5"):
        engine.check(SamplingParams(max_tokens=2, top_p=0.5))


@pytest.mark.parametrize("ticks", [0, 1, 3], ids=["at once", "forming", "sent"])
def test_cancelled_requests_leave_no_task_and_spoil_no_other(engine, ticks):
    params = SamplingParams(max_tokens=2)

    async def ask():
        requests = [asyncio.create_task(engine.generate([5, 6 + i], params)) for i in range(2)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        for request in requests:
            request.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*requests, return_exceptions=True)
        )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        kept, cancelled = (asyncio.create_task(engine.generate([7, 6 + i], params)) for i in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await kept

    (completion,) = asyncio.run(ask())
    assert completion.token_ids


def test_engine_that_dies_fails_its_requests(on_ray, engines, engine):
    engines.clear()
    engine.shutdown()
    await_end(on_ray, engine._host)
    with pytest.raises(on_ray.exceptions.RayActorError):
        asyncio.run(engine.generate([5, 6], SamplingParams(max_tokens=2)))
