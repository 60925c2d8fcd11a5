"""The remote job end to end on a tiny model: what it leaves behind, and its errors."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from fakes import character_tokenizer, tiny_qwen3
from jobs import check_what_is_left

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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.name=vllm", "engine.name=vllm with engine.url=null"),
        ("remote.contract=padded", "remote.contract=padded; choose tree or flat"),
        ("+model.options.dtype=bfloat16", "model.options.dtype=bfloat16; set model.dtype instead"),
    ],
)
def test_wrong_values_are_named_before_any_work(monkeypatch, override, message):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module("remote_grpo")
    with hydra.initialize_config_dir(str(SCRIPT.parent), version_base=None):
        cfg = hydra.compose("remote_grpo", overrides=[override])
    with pytest.raises(ValueError, match=re.escape(message)):
        module.check(cfg)


def test_a_wrong_value_ends_the_job_with_its_message(model_dir, tmp_path):
    done = run(model_dir, tmp_path, "model.name=./nowhere")
    assert done.returncode != 0
    assert "'./nowhere' is not a directory" in done.stderr
