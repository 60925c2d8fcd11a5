"""The main job end to end on a tiny model: what it leaves behind, its configuration, its errors, and the comparison."""

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
from adapted import lora
from fakes import character_tokenizer, tiny_qwen3
from jobs import check_what_is_left

from torchrl_asyncgrpo import GRPOLoss, make_rollout
from torchrl_asyncgrpo.objectives import OBJECTIVES

SCRIPT = Path(__file__).parent.parent / "sota-implementations/async_grpo/async_grpo.py"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def script(monkeypatch):
    """Imports a module beside the script as the script itself does."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module


def small(model_dir, output, *overrides):
    return [
        f"model.name={model_dir}", f"output={output}", "task.num_prompts=8", "sampling.group_size=2",
        "sampling.max_tokens=4", "train.groups_per_step=2", "train.total_frames=12", "optim.lr=1e-3", *overrides,
    ]  # fmt: skip


def run(model_dir, output, *overrides):
    command = [sys.executable, SCRIPT, *small(model_dir, output, *overrides)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})


def configuration(*overrides):
    with hydra.initialize_config_dir(str(SCRIPT.parent), version_base=None):
        return hydra.compose("async_grpo", overrides=list(overrides))


@pytest.fixture
def run_here(script, monkeypatch, model_dir, tmp_path):
    """The job in this process, which has imported everything already, with a reward that a random model can earn."""
    module, read_scalar = script("async_grpo"), script("report").read_scalar
    monkeypatch.setattr(
        module, "last_number_is_sum", lambda completion_ids, **_: [ids[0] % 7 for ids in completion_ids]
    )

    def run_here(*overrides):
        output = tmp_path / "run"
        output.mkdir()
        with contextlib.ExitStack() as cleanup:
            module.run(configuration(*small(model_dir, output, *overrides)), cleanup)
        logs = (output / "csv/scalars").glob("*.csv")
        return {log.stem: read_scalar(output / "csv", log.stem)[1] for log in logs}

    return run_here


@pytest.mark.parametrize("overrides", [(), ("train.async_collection=false", "task.template='{question}='")])
def test_leaves_logs_picture_answers_and_a_model(model_dir, tmp_path, overrides):
    done = run(model_dir, tmp_path, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    check_what_is_left(tmp_path, model_dir, ["4", "8", "12"])


def test_a_wrong_value_ends_the_job_with_its_message(model_dir, tmp_path):
    done = run(model_dir, tmp_path, "model.name=./nowhere")
    assert done.returncode != 0
    assert "'./nowhere' is not a directory" in done.stderr


def test_by_default_the_loss_is_grpo_with_its_own_defaults(script):
    loss = script("async_grpo").make_loss(configuration(), tiny_qwen3(), sender=None)
    assert type(loss) is GRPOLoss
    assert (loss.clip_epsilon_low, loss.clip_epsilon_high) == (0.2, 0.2)
    assert (loss.aggregation, loss.anchor, loss.corrections) == ("token-mean", "sample", ())
    assert (loss.entropy_coeff, loss.kl_to_ref_coeff, loss.top_entropy) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_key_swaps_the_objective(script, name):
    loss = script("async_grpo").make_loss(configuration(f"loss.name={name}"), tiny_qwen3(), sender=None)
    assert type(loss) is OBJECTIVES[name]
    assert loss.constant == (12 if name == "dr_grpo" else None)


def test_options_of_the_objective_and_the_estimator_reach_them(run_here):
    logs = run_here(
        "loss.name=cispo", "+loss.options.epsilon_high=0.0",
        "+loss.options.epsilon_low=0.0", "+loss.options.anchor=current",
        "+loss.options.correction={_target_: torchrl_asyncgrpo.SequenceRejection, low: 0.0, high: 1e6}",
        "advantage.name=leave_one_out", "+advantage.options.clip=0.25", "train.async_collection=false",
    )  # fmt: skip
    assert len(logs["reward"]) == 3
    assert logs["rejected"] == [0.0] * 3  # the correction is there
    assert logs["ratio"] == [1.0] * 3  # the anchor is the current policy
    assert logs["clip_fraction_low"] == [0.0] * 3  # CISPO has one only where it is asked for


def test_decoupled_ppo_trains_from_its_name_alone(run_here):
    logs = run_here("loss.name=decoupled_ppo", "optim.lr=1e-2")
    # the proximal policy is the trained one at the only step of a window, whatever the sampler was
    torch.testing.assert_close(logs["ratio"], [1.0] * 3, rtol=0, atol=1e-5)
    assert len(logs["tis_weight"]) == 3


@pytest.mark.parametrize(("option", "scored"), [("anchor=proximal", True), ("entropy_coeff=0.1", False)])
def test_a_window_is_scored_where_the_loss_reads_it(script, option, scored):
    module, cfg, model = script("async_grpo"), configuration(f"+loss.options.{option}"), tiny_qwen3()
    pack = module.make_packer(cfg, module.make_loss(cfg, model, sender=None))
    rollouts = [
        make_rollout([1, 2, last, 4], [False, False, True, True], [-9.0] * 4, group_id=0, advantage=1.0)
        for last in (5, 6)
    ]
    (batch,) = pack(rollouts)
    assert (("entry", "proximal_log_prob") in batch.keys(True)) == scored
    if scored:
        ids = torch.stack([rollout["token_ids"] for rollout in rollouts])
        expected = model(ids).logits.log_softmax(-1)[:, 1:3].gather(-1, ids[:, 2:, None]).flatten()
        torch.testing.assert_close(batch["entry", "proximal_log_prob"], expected, rtol=0, atol=1e-5)


def test_decoupled_ppo_interpolates_by_the_version_of_the_sender(script):
    class Sender:
        policy_version = 3

    options = ("loss.name=decoupled_ppo", "+loss.options.proximal=interpolated")
    module, cfg, model = script("async_grpo"), configuration(*options), tiny_qwen3()
    loss = module.make_loss(cfg, model, Sender())
    assert loss.current_version() == 3
    Sender.policy_version = 4
    assert loss.current_version() == 4
    assert ("entry", "policy_version") in loss.in_keys


@pytest.mark.parametrize("policy", [(), ("+model.options.lora_r=4",)], ids=["whole", "adapter"])
def test_a_kl_coefficient_brings_a_frozen_reference(run_here, tmp_path, policy):
    logs = run_here(
        "+loss.options.kl_to_ref_coeff=0.1", "optim.lr=1e-2",
        "train.async_collection=false", *policy,
    )  # fmt: skip
    assert (tmp_path / "run/model/adapter_config.json").exists() == bool(policy)
    assert abs(logs["kl_to_ref"][0]) < 1e-6  # before the first step the policy is the reference
    assert logs["kl_to_ref"][2] > 1e-5


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("sampling.temperature=0", ValueError, "training needs a temperature above 0"),
        ("train.token_budget=0", ValueError, "token_budget=0"),
        ("sampling.max_tokens=0", ValueError, "max_tokens=0; it must be at least 1"),
        ("loss.name=trpo", ValueError, "objective 'trpo' is unknown; choose one of 'grpo', 'dr_grpo'"),
        ("+loss.options.clip_epsilon=1.5", ValueError, "clip_epsilon=1.5"),
        ("+loss.options.epsilon_high=0.3", TypeError, "epsilon_high"),
        ("+loss.options.proximal=recomputed", TypeError, "proximal"),
        ("advantage.name=gae", ValueError, "'gae' is unknown; choose one of 'group'"),
        ("+advantage.options.k=2", ValueError, "options ['k'] for the advantage estimator 'group'"),
    ],
)
def test_wrong_values_and_unknown_names_and_options_are_named(run_here, override, error, message):
    with pytest.raises(error) as caught:
        run_here(override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "key"), [("dtype=bfloat16", "model.dtype"), ("attention=flex", "model.attention"),
                        ("device_map=auto", "model.device")],
)  # fmt: skip
def test_options_of_the_model_that_have_a_key_of_their_own_are_refused(script, option, key):
    cfg = configuration(f"+model.options.{option}")
    with pytest.raises(ValueError, match=rf"model\.options\.{option}; set {key} instead"):
        script("async_grpo").model_settings(cfg, "cpu")


def test_policy_is_on_its_device_under_several_processes_too(script, model_dir, monkeypatch):
    """Meta stands for cuda here."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    module = script("async_grpo")
    settings = module.model_settings(configuration(), "meta")
    assert module.model_kwargs(settings)["device_map"] is None
    assert module.make_policy(str(model_dir), settings, "meta").device.type == "meta"


@pytest.mark.parametrize(
    ("push", "rank", "expected"),
    [
        ("weights", 600, {"backend": "shm"}),
        ("adapter", 4, {"backend": None, "max_loras": 3, "max_lora_rank": 4}),
    ],
)
def test_a_server_makes_room_for_adapters_where_they_are_pushed(server_options, push, rank, expected):
    """A merged push has any rank."""
    given = server_options(push, lora(r=rank))
    assert {key: value for key, value in given.items() if key == "backend" or "lora" in key} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), []),
        (("revision=v2",), ["--revision", "v2"]),
        (("revision=v2", "trust_remote_code=true", "lora_r=4"), ["--revision", "v2", "--trust-remote-code"]),
    ],
)
def test_a_server_serves_the_files_of_the_policy_and_further_options_win(server_options, options, expected):
    overrides = [f"+model.options.{option}" for option in options]
    given = server_options("weights", tiny_qwen3(), *overrides, "engine.options=[--revision,v3]")
    assert given["options"] == [*expected, "--revision", "v3"]


def test_without_an_adapter_to_push_no_server_is_started(server_options):
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no adapter to push"):
        server_options("adapter", tiny_qwen3())


@pytest.fixture
def server_options(script, monkeypatch):
    """What the server of a policy would be started with."""
    module, given = script("async_grpo"), {}

    def start(path, **options):
        given.update(options)
        raise RuntimeError("started")

    monkeypatch.setattr(module, "VLLMServer", start)

    def server_options(push, policy, *overrides):
        with hydra.initialize_config_dir(str(SCRIPT.parent), version_base=None):
            cfg = hydra.compose("async_grpo_vllm", overrides=[f"engine.push={push}", *overrides])
        with contextlib.suppress(RuntimeError), contextlib.ExitStack() as cleanup:
            module.make_engine(cfg, policy, "path", 8, cleanup)
        return given

    return server_options


@pytest.fixture
def comparison(script, monkeypatch, tmp_path):
    """``compare_objectives.main`` with runs that write a course of rewards in no time, and what they were asked for."""
    module = script("compare_objectives")
    asked = []

    def fake_run(command, **_):
        options = dict(option.split("=", 1) for option in command[2:])
        asked.append((options["loss.name"], int(options["train.seed"])))
        directory = Path(options["output"])
        assert not directory.exists()
        (directory / "csv/scalars").mkdir(parents=True)
        (directory / "model").mkdir()
        rewards = [asked[-1][1] / 10 + step / 10 for step in range(8)]
        lines = [f"{128 * step},{reward}" for step, reward in enumerate(rewards, 1)]
        (directory / "csv/scalars/reward.csv").write_text("\n".join(lines))

    monkeypatch.setattr(module.subprocess, "run", fake_run)
    page = tmp_path / "objectives.md"
    page.write_text(f"before\n\n{module.BEGIN}\nold\n{module.END}\n\nafter\n")

    def compare(*arguments):
        asked.clear()
        module.main([f"--output={tmp_path / 'runs'}", f"--docs={tmp_path}", *arguments])
        return list(asked)

    return compare


def test_a_comparison_runs_what_is_missing_and_writes_picture_numbers_and_page(comparison, tmp_path):
    choice = ("--objectives", "grpo", "cispo +loss.options.epsilon_high=0.4", "--seeds", "0", "2")
    assert comparison(*choice) == [("grpo", 0), ("cispo", 0), ("grpo", 2), ("cispo", 2)]
    assert (tmp_path / "figures/objectives.png").read_bytes()[:4] == b"\x89PNG"
    numbers = (tmp_path / "figures/objectives.csv").read_text().splitlines()
    assert numbers[0] == "objective,seed,step,reward"
    assert len(numbers) == 1 + 2 * 2 * 8
    assert numbers[1 + 8 + 2] == "grpo,2,3,0.4"
    page = (tmp_path / "objectives.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    # the last five steps of seed 0 have 0.3 .. 0.7, those of seed 2 0.5 .. 0.9; above a half at steps 7 and 5
    assert "| `grpo` | 0.600 | 0.500 to 0.700 | 7, 5 |" in page
    assert not list(tmp_path.glob("runs/*/*/model"))

    assert comparison(*choice) == []  # nothing is run twice,
    shutil.rmtree(tmp_path / "runs/grpo/seed_2")
    (tmp_path / "runs/grpo/seed_0/finished.json").unlink()  # what was interrupted is run again, from nothing,
    assert comparison(*choice) == [("grpo", 0), ("grpo", 2)]
    assert comparison(*choice, "--", "optim.lr=1e-5") == [("grpo", 0), ("cispo", 0), ("grpo", 2), ("cispo", 2)]
    finished = json.loads((tmp_path / "runs/grpo/seed_2/finished.json").read_text())
    assert finished == ["loss.name=grpo", "train.seed=2", "optim.lr=1e-5"]  # and so is another job


def test_a_comparison_needs_its_place_in_the_page(comparison, tmp_path):
    (tmp_path / "objectives.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="put both lines where the comparison goes"):
        comparison("--objectives", "grpo", "--seeds", "0")
