"""Flags and environment of a server of adapters; those of the others are seen in test_vllm_server.py."""

import pytest

from torchrl_asyncgrpo.engines.vllm_flags import adapter_flags, check_adapters, server_environment


@pytest.mark.parametrize(("rank", "reserved"), [(1, "1"), (2, "8"), (8, "8"), (9, "16"), (300, "320"), (512, "512")])
def test_the_rank_is_the_next_that_vllm_knows(rank, reserved):
    assert adapter_flags(3, rank) == ["--enable-lora", "--max-loras", "3", "--max-lora-rank", reserved]


def test_adapters_are_taken_while_the_server_runs(monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    keywords = dict(on_cpu=False, is_directory=True)
    assert server_environment(None, adapters=True, **keywords)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server_environment("shm", adapters=False, **keywords)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("shm", 3, 8), "max_loras=3 with backend='shm'.*Pass backend=None.*VLLMAdapterSyncSender"),
        ((None, 0, 8), "max_loras=0"),
        ((None, 3, 0), "max_lora_rank=0; it must be from 1 to 512"),
        (("shm", None, 513), "max_lora_rank=513"),
    ],
)
def test_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        check_adapters(*arguments)


def test_accepted():
    check_adapters("shm", None, 16)
    check_adapters(None, 1, 512)
