"""The stand-in for a vLLM server, for whoever asks for ``fake``."""

import pytest
from engines.fake_vllm import FakeVLLM


@pytest.fixture
def fake():
    server = FakeVLLM()
    yield server
    server.stop()
