"""The remote job end to end on a tiny model: what it leaves behind, and its errors."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import hydra
import pytest
import torch
import transformers
from fakes import character_tokenizer, save_as_hub, save_with_own_code, tiny_qwen3
from jobs import check_what_is_left

from torchrl_asyncgrpo.adapters import has_quantized_layers

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "sota-implementations/remote_grpo/remote_grpo.py"
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


def run(model_dir, output, *overrides):
    options = [
        f"model.name={model_dir}", f"output={output}", "task.num_prompts=8", "sampling.group_size=2",
        "sampling.max_tokens=4", "train.groups_per_step=2", "train.total_frames=12", "optim.lr=1e-3",
        "+loss.options.entropy_coeff=0.1",  # no answer of such a model is right, and advantages are 0
        "remote.options={num_cpus: 0}", "engine.options={num_cpus: 0}", *overrides,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "remote.workers=2",
            "remote.contract=flat",
            "remote.loss=here",
            "train.async_collection=false",
            "+loss.options.kl_to_ref_coeff=0.1",
        ),
    ],
    ids=["tree", "flat"],
)
def test_leaves_logs_picture_answers_and_a_trained_model(model_dir, tmp_path, overrides):
    done = run(model_dir, tmp_path, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    trained, before = check_what_is_left(tmp_path, model_dir, ["4", "8", "12"])
    moved = [float((trained[name] - value).abs().max()) for name, value in before.items()]
    assert 1e-4 < max(moved) < 1e-2


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("remote_grpo")


def configuration(*overrides):
    with hydra.initialize_config_dir(str(SCRIPT.parent), version_base=None):
        return hydra.compose("remote_grpo", overrides=list(overrides))


def test_policy_engine_and_tokenizer_are_of_one_revision(script, model_dir, tmp_path, monkeypatch):
    """Of the two branches, only one has a tokenizer."""
    (tmp_path / "main").mkdir()
    tiny_qwen3(seed=1).save_pretrained(tmp_path / "main")
    save_as_hub(tmp_path / "hub", "someone/tiny", main=tmp_path / "main", v2=model_dir)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cfg = configuration("model.name=someone/tiny", "+model.options.revision=v2", f"output={tmp_path}")

    engine = script.make_engine(cfg, "someone/tiny")
    engine.shutdown()
    served, trained = engine._model.state_dict(), script.load(cfg, "someone/tiny").state_dict()
    expected = tiny_qwen3().state_dict()
    assert all(torch.equal(trained[name], value) for name, value in expected.items())
    assert all(torch.equal(served[name], value) for name, value in expected.items() if name in served)
    assert "model.norm.weight" in served

    def stop(*_, **__):
        raise RuntimeError("the tokenizer was loaded")

    monkeypatch.setattr(script.ray, "init", stop)
    with contextlib.ExitStack() as cleanup, pytest.raises(RuntimeError, match="the tokenizer was loaded"):
        script.run(cfg, cleanup)


def test_engine_runs_the_models_own_code_and_holds_no_few_bits(script, tmp_path, monkeypatch):
    save_with_own_code(tmp_path / "own")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    options = ("+model.options.trust_remote_code=true", "+model.options.load_in_4bit=true", "+model.options.lora_r=2")
    engine = script.make_engine(configuration(*options), str(tmp_path / "own"))
    engine.shutdown()
    assert type(engine._model).__name__ == "OwnForCausalLM"
    assert not has_quantized_layers(engine._model)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        script.make_engine(configuration(), str(tmp_path / "own"))


def test_an_adapter_begins_as_the_seed_says(script, model_dir):
    cfg = configuration("+model.options.lora_r=2")
    first, second = (dict(script.make_actor(cfg, str(model_dir)).named_parameters()) for _ in range(2))
    assert any("lora_A" in name for name in first)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.name=vllm", "engine.name=vllm with engine.url=null"),
        ("remote.contract=padded", "remote.contract=padded; choose tree or flat"),
        ("+model.options.dtype=bfloat16", "model.options.dtype=bfloat16; set model.dtype instead"),
    ],
)
def test_wrong_values_are_named_before_any_work(script, override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        script.check(configuration(override))


def test_a_wrong_value_ends_the_job_with_its_message(model_dir, tmp_path):
    done = run(model_dir, tmp_path, "model.name=./nowhere")
    assert done.returncode != 0
    assert "'./nowhere' is not a directory" in done.stderr
