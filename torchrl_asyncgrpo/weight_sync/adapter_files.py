"""Versions of an adapter as files that a server reads: published whole, and taken away so that no reader misses them.

Each publication has a path of its own, a symbolic link, so that a path never stands for two sets of weights while they
are in use::

    directory/policy-v7-1003   ->  1003       version 7, published at the time 1003
    directory/policy-v5-1001   ->  newest     taken away: whoever still reads this path gets the newest one
    directory/newest           ->  1003

vLLM dies if it cannot read an adapter that it had to drop from its memory, and that a request of long ago still has.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter

_PREFIX = "torchrl_asyncgrpo-adapters-"
_LOCK = "lock"
_IN_MEMORY = "/dev/shm"
# Seconds
_YOUNG = 60.0


class AdapterFiles:
    """Adapters in a new directory, which is there until :meth:`remove` or the end of the process.

    In the default place it is this user's alone, and what a process leaves that was killed is deleted by the next one
    that makes such a directory there. Elsewhere the umask decides who may read it, and nobody deletes what is left:
    a file system of several machines need not keep locks between them.

    Args:
        parent: where to make it; None for memory (``/dev/shm``) where there is such, else the temporary directory.

    Raises:
        OSError: if it cannot be made there.
    """

    def __init__(self, parent: str | Path | None = None) -> None:
        self._lock: FileLock | None = None
        if parent is None:
            parent = _default_parent()
            _remove_left_behind(parent)
            self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = FileLock(self.directory / _LOCK)
            self._lock.acquire()
        else:
            self.directory = Path(parent).absolute() / f"{_PREFIX}{uuid.uuid4().hex}"
            self.directory.mkdir(parents=True)
        self._owner = os.getpid()
        atexit.register(self.remove)
        self._contents: dict[Path, Path] = {}  # of each path that was not taken away
        self._unused: list[Path] = []

    def publish(
        self,
        adapter: PolicyAdapter,
        tensors: Iterable[tuple[str, Tensor]],
        config: Mapping[str, Any],
        dtype: torch.dtype,
    ) -> tuple[Path, int]:
        """Write an adapter, complete before it has its path.

        Args:
            adapter: its version and publication; none that was published here before.
            tensors: names and tensors, as peft words them.
            config: content of ``adapter_config.json``.
            dtype: of the tensors in the file.

        Returns:
            The path, and the bytes of the tensors.

        Raises:
            OSError: if there is no room; nothing of it is left then.
        """
        path = self.directory / adapter.name
        content = self.directory / str(adapter.publication)
        content.mkdir()
        try:
            held = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors}
            nbytes = sum(tensor.nbytes for tensor in held.values())
            weights, settings = content / "adapter_model.safetensors", content / "adapter_config.json"
            try:
                save_file(held, weights, metadata={"format": "pt"})
                settings.write_text(json.dumps(dict(config)), encoding="utf-8")
                shutil.copymode(settings, weights)  # safetensors leaves the umask out, and others with nothing to read
            except (SafetensorError, OSError) as error:  # the first is of the file system, too
                raise OSError(
                    f"an adapter of {nbytes} bytes cannot be written to {self.directory}, where "
                    f"{shutil.disk_usage(self.directory).free} are free: {error}. Make room there, or pass "
                    "directory=..., a directory of a larger file system that trainer and server share."
                ) from error
        except BaseException:
            shutil.rmtree(content, ignore_errors=True)
            raise
        self._contents[path] = content
        path.symlink_to(content.name)
        return path, nbytes

    def keep(self, paths: Sequence[Path]) -> None:
        """Take all other versions away; their paths stand for the newest one from now on.

        What they stood for until now is deleted at the next call, when nobody can be about to open it any more.

        Args:
            paths: of the versions that requests may name, the newest one last.
        """
        deleted, self._unused = self._unused, []
        _point(self.directory / "newest", self._contents[paths[-1]].name)
        for path in [path for path in self._contents if path not in paths]:
            _point(path, "newest")
            self._unused.append(self._contents.pop(path))
        for content in deleted:
            shutil.rmtree(content, ignore_errors=True)

    def remove(self) -> None:
        """Delete everything; again is fine."""
        if os.getpid() != self._owner:  # a fork of the process
            return
        atexit.unregister(self.remove)
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.directory, ignore_errors=True)


def _point(link: Path, target: str) -> None:
    """Let a link point elsewhere, without a moment in which it does not exist."""
    new = link.with_name(f"{link.name}.new")
    new.symlink_to(target)
    new.replace(link)


def _default_parent() -> Path:
    return Path(_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else tempfile.gettempdir())


def _remove_left_behind(parent: Path) -> None:
    """Delete the directories whose locks nobody holds, unless they were made just now and are about to be locked."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(Timeout, OSError):  # in use, or another user's
            if time.time() - directory.stat().st_mtime > _YOUNG:
                with FileLock(directory / _LOCK, timeout=0):
                    shutil.rmtree(directory, ignore_errors=True)
