"""Settings of the whole suite: no model hub, no deadlines on a busy machine, a reason for every skip."""

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "no CUDA device"
    if importlib.util.find_spec("vllm") is None:
        reasons["vllm"] = "vLLM is not installed"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Random tensors of a test do not depend on which tests ran before it."""
    torch.manual_seed(0)
