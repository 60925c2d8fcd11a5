"""Makes the helper beside the tests importable (``from push_tools import ...``); who pushes to a test's ``server``."""

import sys
from pathlib import Path

import pytest

from torchrl_asyncgrpo import VLLMEngine, VLLMWeightSyncSender
from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def http(server):
    http = VLLMHTTP(server.url)
    yield http
    assert not http.is_paused()
    http.close()


@pytest.fixture
def sender(policy, server):
    sender = VLLMWeightSyncSender(policy, server.url, verify="checksum", timeout=60)
    yield sender
    sender.destroy()


@pytest.fixture
def engine(server):
    engine = VLLMEngine(server.url)
    yield engine
    engine.shutdown()
