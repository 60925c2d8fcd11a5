"""Adapter pushes into a real vLLM server: what it samples from, what requests see of them, what it refuses."""

import asyncio
import contextlib
import copy
import os
import signal
import threading
import time
import urllib.request

import pytest
import torch
from adapted import bits_of, lora, randomize, same_bits
from adapter_tools import MAX_STALENESS, assert_served, listed, served_model
from fakes import character_tokenizer, tiny_qwen3
from peft import LoraConfig, get_peft_model
from push_tools import PROMPT, in_background, own_log_probs, perturb, sample, sampled_tokens
from safetensors import safe_open

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    GRPOLoss,
    PromptSource,
    SamplingParams,
    TreeActor,
    VLLMAdapterSyncSender,
    VLLMEngine,
    VLLMWeightSyncSender,
    make_replay_buffer,
)
from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.engines.vllm_http import RequestRefused, ServerFailed, ServerHung
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
LONG = 800  # tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """It starts again once."""
    path = tmp_path_factory.mktemp("base")
    served_model().save_pretrained(path)
    character_tokenizer(chat=False).save_pretrained(path)
    options = ["--max-num-seqs", "16", "--block-size", "32"]
    adapters = dict(backend=None, max_loras=MAX_STALENESS + 2, max_lora_rank=6)
    with VLLMServer(path, max_model_len=1024, kv_cache_gib=0.25, max_restarts=1, options=options, **adapters) as server:
        yield server


@pytest.fixture
def policy():
    return lora(served_model())


@pytest.fixture
def sender(policy, server):
    sender = VLLMAdapterSyncSender(policy, server.url, max_staleness=MAX_STALENESS, timeout=60)
    yield sender
    sender.destroy()


@pytest.fixture
def engine(server):
    engine = VLLMEngine(server.url, restart_timeout=30)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        dict(r=4),
        dict(r=6, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
        dict(rank_pattern={"k_proj": 2}, alpha_pattern={"gate_proj": 3}, exclude_modules=r".*layers\.0.*"),
    ],
)
def test_served_log_probs_are_the_trainers_after_each_push(options, server, engine, http):
    policy = lora(served_model(), **options)
    before = bits_of(policy)
    sender = VLLMAdapterSyncSender(policy, server.url, max_staleness=MAX_STALENESS)
    for version in range(1, 5):
        assert sender.update_weights() == sender.policy_version == version
        assert_served(policy, engine, version)
        assert same_bits(before, bits_of(policy)), "the trained weights are only read"
        randomize(policy, seed=version)
        before = bits_of(policy)
    assert listed(http) == [3, 4], "older ones can be named no more"
    sender.destroy()
    assert listed(http) == [4]
    engine.policy_version = 0


def test_adapter_alone_travels_in_the_dtype_that_is_served(policy, sender):
    sender.update_weights()
    (path,) = sender._served.values()
    with safe_open(path / "adapter_model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    assert sender.sent_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert sender.sent_bytes == 4 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("step", ["publish", "load_adapter"])
@pytest.mark.parametrize("failure", [ServerFailed("injected"), ServerHung("injected"), KeyboardInterrupt("injected")])
def test_a_push_that_fails_leaves_the_version_and_the_next_one_starts_clean(
    step, failure, policy, sender, engine, http, monkeypatch
):
    sender.restart_timeout = 1
    sender.update_weights()
    before = bits_of(policy)
    holder = sender._files if step == "publish" else sender._http
    done = getattr(holder, step)

    def fails(*arguments, **options):
        done(*arguments, **options)  # it happened all the same, and nobody was told
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(holder, step, fails)
        with pytest.raises(type(failure), match="injected"):
            sender.update_weights()
    assert sender.policy_version == 1
    assert listed(http) == [1]
    assert same_bits(before, bits_of(policy))
    randomize(policy, seed=9)
    version = 3 if step == "load_adapter" else 2  # a request may have named version 2
    assert sender.update_weights() == version
    assert_served(policy, engine, version)
    for _ in range(3):
        sender.update_weights()
    contents = [path for path in sender._files.directory.iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(contents) <= MAX_STALENESS + 2, "files of versions that are gone are gone"


def test_a_directory_that_the_server_does_not_see_is_named(sender, tmp_path, monkeypatch):
    sender.init_weight_transfer()
    monkeypatch.setattr(sender._files, "publish", lambda *_: (tmp_path / "elsewhere", 1))
    with pytest.raises(ServerFailed, match="does not find the adapter in .*elsewhere. Pass directory=..."):
        sender.update_weights()


def test_files_go_where_they_are_wanted_and_away_at_the_end(policy, server, tmp_path):
    sender = VLLMAdapterSyncSender(policy, server.url, max_staleness=0, directory=tmp_path / "shared")
    sender.update_weights()
    (directory,) = (tmp_path / "shared").iterdir()
    assert list(directory.glob("policy-v1-*/adapter_config.json"))
    sender.destroy()
    assert not list((tmp_path / "shared").iterdir())


def test_a_new_trainer_takes_away_what_another_one_left(policy, server, sender, engine, http):
    dead = VLLMAdapterSyncSender(policy, server.url, max_staleness=MAX_STALENESS)
    dead.next_version = 7
    assert [dead.update_weights(), dead.update_weights()] == [7, 8]
    randomize(policy, seed=4)
    assert sender.update_weights() == 1
    assert listed(http) == [1]
    assert_served(policy, engine, 1)
    dead.destroy()


def test_a_resumed_run_pushes_under_the_version_that_its_weights_had(policy, sender, engine, http):
    sender.next_version = 41
    assert [sender.update_weights(), sender.update_weights()] == [41, 42]
    assert listed(http) == [41, 42]
    assert_served(policy, engine, 42)


def test_the_verbs_by_hand_make_a_push(policy, sender, engine):
    sender.init_weight_transfer()
    sender.pause()
    sender.send_weights(sender.named_weights())
    sender.resume(1)
    assert sender.policy_version == 1
    assert_served(policy, engine, 1)


def test_adapters_that_are_gone_are_pushed_again(policy, sender, engine, http):
    sender.update_weights()
    assert not sender.lost()
    assert [http.unload_adapter(adapter) for adapter in http.adapters()] == [True]
    assert sender.lost()
    sender.next_version = 1
    assert sender.update_weights() == 1
    assert sender.counters["server_recoveries"] == 1
    assert not sender.lost()
    assert_served(policy, engine, 1)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: lora(served_model(), r=16), {}, r"room for rank 8 and the adapter has 16: .*--max-lora-rank 16"),
        (None, {"max_staleness": 3}, r"room for 3 adapters at once and max_staleness=3 needs 5: .*--max-loras 5"),
        (None, {"serving_dtype": torch.bfloat16}, r"serves float32 .* --dtype bfloat16"),
        (lambda: lora(tiny_qwen3()), {}, r"serves another model.*hidden_size 128 \(here 32\)"),
        (lambda: lora(perturbed()), {}, r"serves another base than that of the adapter: .*--model DIRECTORY"),
    ],
)
def test_a_server_that_cannot_serve_the_adapter_is_found_at_the_handshake(make, options, message, policy, server):
    options = {"max_staleness": MAX_STALENESS, **options}
    sender = VLLMAdapterSyncSender(make() if make else policy, server.url, **options)
    with pytest.raises(ValueError, match=message):
        sender.update_weights()
    assert sender.policy_version == 0


def perturbed():
    model = served_model()
    perturb(model)
    return model


def test_layers_that_the_served_model_lacks_are_named_by_the_server(server):
    model = served_model()
    model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    policy = get_peft_model(model, LoraConfig(r=4, target_modules=["extra", "q_proj"]))
    sender = VLLMAdapterSyncSender(policy, server.url, max_staleness=0, verify="none")
    with pytest.raises(ServerFailed, match="expected target modules in .*mlp.extra"):
        sender.update_weights()
    sender.destroy()


def test_merged_weights_are_not_pushed_into_a_server_of_adapters(policy, server):
    sender = VLLMWeightSyncSender(policy, server.url)
    with pytest.raises(ValueError, match="started with --enable-lora.*VLLMAdapterSyncSender"):
        sender.update_weights()


def test_an_unknown_adapter_is_refused_by_the_server(http):
    with pytest.raises(RequestRefused) as refused:
        http.load_adapter(PolicyAdapter(5, 1), "/nowhere")
    assert refused.value.status == 404
    assert not http.unload_adapter(PolicyAdapter(5, 1))


@contextlib.contextmanager
def held_in_the_middle(server, http, engine, n):
    """A request of which some tokens are sampled and not all, and that stands still, so that the test can be sure."""

    def pause():
        http.pause("keep", clear_cache=False)

    for _ in range(10):  # this process may get no turn until the server has ended it
        before = sampled_tokens(server)
        pause()
        with in_background(lambda: sample(engine, n=n, max_tokens=LONG)) as request:
            try:
                while sampled_tokens(server) == before:
                    assert request.failure is None
                    with in_background(http.resume):  # answered late while the server is busy
                        time.sleep(0.01)
                        pause()
                pause()
                if sampled_tokens(server) < before + n * LONG:
                    yield request
                    return
            finally:
                http.resume()
    raise AssertionError("the server was faster each time")


def test_a_request_keeps_the_version_that_it_named_and_the_next_one_names_the_new(policy, sender, engine, server, http):
    sender.update_weights()
    old = copy.deepcopy(policy)
    with held_in_the_middle(server, http, engine, n=2) as request:
        randomize(policy, seed=3)
        sender.update_weights()
        http.resume()
        assert_served(policy, engine, 2)
    assert [completion.policy_versions for completion in request.result] == [[1] * LONG, [1] * LONG]
    own_L, sampled_L = own_log_probs(old, request.result)
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)


def test_a_request_whose_adapter_had_to_leave_the_servers_memory_ends_and_is_too_stale_to_be_trained(
    policy, sender, engine, server, http
):
    """vLLM reads its path again, which stands for the newest version: from then on its tokens are of other weights."""
    sender.update_weights()
    old = copy.deepcopy(policy)
    with held_in_the_middle(server, http, engine, n=1) as request:
        for version in range(2, MAX_STALENESS + 6):  # more than there are slots, and older than any that stays
            randomize(policy, seed=version)
            sender.update_weights()
    (completion,) = request.result
    assert completion.policy_versions == [1] * LONG
    assert sender.policy_version - 1 > sender.max_staleness, "what the replay buffer drops"
    own_L, sampled_L = own_log_probs(old, [completion])
    different_L = (own_L - sampled_L).abs() > 0.05
    assert not different_L[0]
    assert different_L.any(), "else it never had to leave"
    assert http.health()


def test_a_version_that_is_pushed_again_is_another_adapter(policy, sender, engine, server, http):
    sender.update_weights()
    old = copy.deepcopy(policy)
    with held_in_the_middle(server, http, engine, n=1) as request:
        randomize(policy, seed=3)
        sender.next_version = 1
        sender.update_weights()
        http.resume()
        assert_served(policy, engine, 1)
    assert listed(http) == [1]
    own_L, sampled_L = own_log_probs(old, request.result)
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)


def test_two_publications_of_a_version_run_beside_each_other_and_may_leave_the_servers_memory(
    policy, sender, engine, server, http, monkeypatch
):
    """vLLM dies of two adapters of one name in the requests of one step, once one of them has left its slot."""
    sender.update_weights()
    named = threading.Event()
    newest = engine._watch.newest_adapter

    async def noted():
        adapter = await newest()
        named.set()
        return adapter

    with held_in_the_middle(server, http, engine, n=1) as first:
        sender.next_version = 1
        sender.update_weights()
        monkeypatch.setattr(engine._watch, "newest_adapter", noted)
        monkeypatch.setattr(sender, "_unload", lambda *_: True)  # before the request is there, it would be asked again
        with in_background(lambda: sample(engine, max_tokens=LONG, seed=4)) as second:
            assert named.wait(30)
            for _ in range(MAX_STALENESS + 4):
                sender.update_weights()
            http.resume()
    assert {v for request in (first, second) for v in request.result[0].policy_versions} == {1}
    assert http.health()


def test_no_version_reads_the_prefix_cache_of_another_one(policy, sender, engine, server):
    long = (PROMPT * 7)[:70]
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)

    def hits():
        asyncio.run(engine.generate(long, params))
        return prefix_hits(server)

    sender.update_weights()
    start = hits()
    assert hits() - start >= 32, "the same version reads its own"
    start = prefix_hits(server)
    sender.update_weights()
    assert hits() == start
    sender.next_version = 2  # the same version once more, as of a trainer that went back
    sender.update_weights()
    assert hits() == start


def prefix_hits(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))


def test_pushes_beside_running_requests_cost_none_of_them(policy, sender, server):
    engine = VLLMEngine(server.url, retries=0)
    sender.update_weights()
    stop, failures, versions_of = threading.Event(), [], [[], [], []]

    def ask(versions):
        try:
            while not stop.is_set():
                completions = sample(engine, n=2, max_tokens=24, seed=None)
                versions.append([sorted(set(completion.policy_versions)) for completion in completions])
        except BaseException as failure:  # noqa: BLE001 - looked at below
            failures.append(failure)

    askers = [threading.Thread(target=ask, args=(versions,)) for versions in versions_of]
    for asker in askers:
        asker.start()
    for version in range(2, 14):
        assert sender.update_weights() == version
        done = [len(versions) for versions in versions_of]
        # nobody may be so late that the adapter which it named is gone before its request is there
        while any(len(versions) == n for versions, n in zip(versions_of, done, strict=True)) and not failures:
            time.sleep(0.01)
    stop.set()
    for asker in askers:
        asker.join()
    assert not failures
    versions = [versions_ for versions in versions_of for versions_ in versions]
    assert all(len(one) == 1 and one == versions_[0] for versions_ in versions for one in versions_)
    assert len({version for versions_ in versions for one in versions_ for version in one}) > 6
    assert engine.counters["retries"] == 0
    engine.shutdown()


def test_a_request_that_names_an_adapter_which_is_gone_is_asked_again(policy, sender, engine, monkeypatch):
    sender.update_weights()
    found = engine._watch.newest_adapter
    answers = [PolicyAdapter(99, 1)]

    async def late():
        return answers.pop() if answers else await found()

    monkeypatch.setattr(engine._watch, "newest_adapter", late)
    assert sample(engine)[0].policy_versions == [1] * 16
    assert engine.counters["retries"] == 1


def test_training_through_a_restart_of_the_server(policy, server, sender):
    """Last, because it ends the server: its adapters are lost, pushed again, and no draw is."""
    steps, groups, samples = 6, 4, 2
    engine = VLLMEngine(server.url)
    buffer = make_replay_buffer(
        batch_size=groups, max_staleness=MAX_STALENESS, current_version=lambda: sender.policy_version
    )
    collector = AsyncLLMCollector(
        engine,
        PromptSource([f"{i}+{i}=" for i in range(steps * groups)], shuffle=False),
        lambda completions, **_: [float(len(set(completion))) for completion in completions],
        tokenizer=character_tokenizer(chat=False),
        sampling_params=SamplingParams(n=samples, max_tokens=24, ignore_eos=True),
        groups_per_step=groups,
        replay_buffer=buffer,
        max_staleness=MAX_STALENESS,
    )
    trainer = AsyncGRPOTrainer(
        collector=collector,
        replay_buffer=buffer,
        loss_module=GRPOLoss(TreeActor(policy)),
        optimizer=torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3),
        weight_sync_sender=sender,
        async_collection=True,
        total_frames=steps * groups * samples,
        progress_bar=False,
    )
    killed = []

    def kill():
        if trainer.optimizer_steps() == 2 and not killed:
            killed.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)

    trainer.register_op("pre_optim", kill)
    trainer.train()
    assert killed
    assert trainer.optimizer_steps() == steps
    assert sender.counters["server_recoveries"] == 1
    assert sender.policy_version == steps + 1
    assert_served(policy, engine, steps + 1)
    engine.shutdown()
