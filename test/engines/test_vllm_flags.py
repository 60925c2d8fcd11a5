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
        ((None, 3, 513), "max_lora_rank=513"),
    ],
)
def test_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        check_adapters(*arguments, dtype="float32", on_cpu=True)


def test_adapters_in_float32_are_refused_on_a_gpu_where_vllm_would_die_of_them():
    for dtype in ("float32", "float"):
        with pytest.raises(ValueError, match=f"dtype='{dtype}'.*on a GPU, vLLM dies.*Pass dtype='bfloat16'"):
            check_adapters(None, 3, 8, dtype=dtype, on_cpu=False)
        check_adapters(None, 3, 8, dtype=dtype, on_cpu=True)
        check_adapters("shm", None, 8, dtype=dtype, on_cpu=False)
    check_adapters(None, 3, 8, dtype="bfloat16", on_cpu=False)


@pytest.mark.parametrize("arguments", [("shm", None, 16), ("shm", None, 1024), (None, 1, 512)])
def test_accepted(arguments):
    check_adapters(*arguments, dtype="float32", on_cpu=True)
