"""Files of adapters: complete before they have a path, and never missing for who reads them late."""

import json
import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.weight_sync import adapter_files
from torchrl_asyncgrpo.weight_sync.adapter_files import AdapterFiles

CONFIG = {"r": 2}


@pytest.fixture
def files(tmp_path):
    files = AdapterFiles(tmp_path / "shared")
    yield files
    files.remove()


def publish(files, version, publication=None, value=None, dtype=torch.float32):
    adapter = PolicyAdapter(version, publication or version)
    return files.publish(adapter, [("a", torch.full((3, 2), float(value or version)))], CONFIG, dtype)


def read(path):
    assert json.loads((path / "adapter_config.json").read_text()) == CONFIG
    return float(load_file(path / "adapter_model.safetensors")["a"].unique())


def contents(files):
    return sorted(p.name for p in files.directory.iterdir() if p.is_dir() and not p.is_symlink())


def test_each_publication_has_its_own_path_dtype_and_bytes(files):
    first, first_bytes = publish(files, 1)
    second, second_bytes = publish(files, 2, dtype=torch.bfloat16)
    assert (read(first), read(second)) == (1.0, 2.0)
    assert (first_bytes, second_bytes) == (24, 12)
    assert load_file(second / "adapter_model.safetensors")["a"].dtype == torch.bfloat16
    again, _ = publish(files, 2, publication=3, value=7)
    assert again != second, "a path never stands for two sets of weights in use"
    assert (read(second), read(again)) == (2.0, 7.0)


def test_what_is_not_kept_stands_for_the_newest_and_its_content_is_deleted_one_call_later(files):
    paths = [publish(files, version)[0] for version in (1, 2, 3)]
    files.keep(paths[1:])
    assert [read(path) for path in paths] == [3.0, 2.0, 3.0]
    assert contents(files) == ["1", "2", "3"], "somebody may be about to open it"
    paths.append(publish(files, 4)[0])
    files.keep(paths[2:])
    assert [read(path) for path in paths] == [4.0, 4.0, 3.0, 4.0]
    assert contents(files) == ["2", "3", "4"]
    for version in range(5, 30):
        paths.append(publish(files, version)[0])
        files.keep(paths[-2:])
        assert {read(path) for path in paths[:-2]} == {float(version)}
    assert len(contents(files)) == 3


def test_a_path_is_there_only_when_it_is_complete(files):
    def breaks():
        yield "a", torch.ones(2)
        assert not list(files.directory.glob("policy-*"))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        files.publish(PolicyAdapter(1, 1), breaks(), CONFIG, torch.float32)
    assert contents(files) == []
    assert read(publish(files, 1)[0]) == 1.0


@pytest.mark.parametrize("error", [SafetensorError("I/O error: no space left"), OSError(28, "no space left")])
def test_a_file_system_that_is_full_is_named_with_what_was_needed(error, files, monkeypatch):
    def full(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(adapter_files, "save_file", full)
        message = (
            rf"24 bytes cannot be written to {re.escape(str(files.directory))}.*no space left.*pass directory=\.\.\."
        )
        with pytest.raises(OSError, match=message):
            publish(files, 1)
    assert contents(files) == []
    assert read(publish(files, 1)[0]) == 1.0


@pytest.mark.parametrize(("umask", "directories", "tensors"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_in_a_directory_of_its_own_the_umask_decides_who_may_read(umask, directories, tensors, tmp_path):
    before = os.umask(umask)
    try:
        files = AdapterFiles(tmp_path / "shared")
        path, _ = publish(files, 1)
    finally:
        os.umask(before)
    assert [mode(files.directory), mode(path)] == [directories, directories]
    assert {mode(file) for file in path.iterdir()} == {tensors}
    assert not (files.directory / "lock").exists(), "nobody looks at it here"
    files.remove()


def test_in_the_default_place_nobody_else_may_read(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "_default_parent", lambda: tmp_path)
    files = AdapterFiles()
    assert mode(files.directory) == 0o700
    files.remove()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_removed_with_all_there_was(files, tmp_path):
    publish(files, 1)
    files.remove()
    files.remove()
    assert list((tmp_path / "shared").iterdir()) == []


PROGRAM = """
import os, signal, sys, torch
from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.weight_sync import adapter_files
adapter_files._default_parent = lambda: adapter_files.Path(sys.argv[1])
files = adapter_files.AdapterFiles()
files.publish(PolicyAdapter(1, 1), [("a", torch.ones(2))], {}, torch.float32)
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit()
if sys.argv[2] == "fork":
    os.wait()
    print(len(list(files.directory.glob("policy-*"))))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(parent, how):
    command = [sys.executable, "-c", PROGRAM, str(parent), how]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_nothing_is_left_by_a_process_that_ends_and_a_fork_of_it_takes_nothing_away(tmp_path):
    assert run(tmp_path, "fork").stdout.strip() == "1"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_deleted_by_the_next_and_what_is_in_use_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "_default_parent", lambda: tmp_path)
    run(tmp_path, "killed")
    (left,) = tmp_path.iterdir()
    in_use = AdapterFiles()
    assert left.exists(), "it is young: it might be about to be locked"
    for directory in (left, in_use.directory):
        os.utime(directory, (0, 0))
    new = AdapterFiles()
    assert not left.exists()
    assert in_use.directory.exists()
    new.remove()
    in_use.remove()
