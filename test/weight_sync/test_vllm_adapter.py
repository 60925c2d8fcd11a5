"""Adapter pushes into a real vLLM server: what it samples from, what a push that fails leaves, what it refuses."""

import os
import signal

import pytest
import torch
from adapted import bits_of, lora, randomize, same_bits
from adapter_tools import MAX_STALENESS, assert_served, listed, served_model
from fakes import character_tokenizer, tiny_qwen3
from peft import LoraConfig, get_peft_model
from push_tools import perturb
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

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def server(adapter_server):
    return adapter_server


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
