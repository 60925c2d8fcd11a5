"""Makes the helper beside the tests importable (``from push_tools import ...``); who pushes to a test's ``server``."""

import sys
from pathlib import Path

import pytest
from fakes import character_tokenizer

from torchrl_asyncgrpo import VLLMEngine, VLLMWeightSyncSender
from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def adapter_server(tmp_path_factory):
    """A server of adapters, which starts again once."""
    from adapter_tools import MAX_STALENESS, served_model

    path = tmp_path_factory.mktemp("base")
    served_model().save_pretrained(path)
    character_tokenizer(chat=False).save_pretrained(path)
    options = ["--max-num-seqs", "16", "--block-size", "32"]
    adapters = dict(backend=None, max_loras=MAX_STALENESS + 2, max_lora_rank=6)
    with VLLMServer(path, max_model_len=1024, kv_cache_gib=0.25, max_restarts=1, options=options, **adapters) as server:
        yield server


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
