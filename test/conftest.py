"""Settings of the whole suite: no model hub, no deadlines on a busy machine, a reason for every skip."""

import importlib.util
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

from torchrl_asyncgrpo.data.pretrained import SMOLLM2
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "no CUDA device"
    if importlib.util.find_spec("vllm") is None:
        reasons["vllm"] = "vLLM is not installed"
    if importlib.util.find_spec("ray") is None:
        reasons["ray"] = "Ray is not installed"
    for item in items:
        if "smollm2_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.vllm)
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Random tensors of a test do not depend on which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_server() -> Iterator[VLLMServer]:
    """A vLLM server of SmolLM2-135M-Instruct in float32, for every test that does not end it or leave it changed.

    Tests push weights to it, so each starts with a push of the weights that it needs. A test that uses it is marked
    ``vllm``.
    """
    with VLLMServer(SMOLLM2, dtype="float32", max_model_len=1024, backend="shm") as server:
        yield server
