"""The plugin as a vLLM process finds and loads it."""

import importlib.metadata
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

TRAINERS_ONLY = ("torchrl", "tensordict", "httpx", "hydra", "matplotlib", "tensorboard", "platformdirs", "gguf")


def run(program, tmp_path):
    """In a process of its own, outside the source tree, where a stale build would hide the installed entry point."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)


def test_it_needs_no_package_that_only_a_trainer_needs(tmp_path):
    program = f"""
import sys
for name in {TRAINERS_ONLY!r}:
    sys.modules[name] = None
import torchrl_asyncgrpo.weight_sync.vllm_plugin as plugin
plugin.register()
plugin.register()
import torchrl_asyncgrpo.weight_sync.vllm_reload, torchrl_asyncgrpo.weight_sync.vllm_shm
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
assert WeightTransferEngineFactory._registry["shm"]() is plugin.SharedMemoryWeightTransferEngine
assert WeightTransferTrainerFactory._registry["shm"]().init_info_cls.backend == "shm"
"""
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_vllm_finds_it_by_its_entry_point(tmp_path):
    program = """
from vllm.plugins import load_general_plugins
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
load_general_plugins()
assert "shm" in WeightTransferEngineFactory._registry
"""
    assert [e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins", name="torchrl_asyncgrpo")]
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
