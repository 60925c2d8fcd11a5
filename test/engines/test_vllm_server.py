"""The launcher, on a real vLLM server of a tiny model, and on a stand-in where only flags, log or process count."""

import functools
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from fakes import character_tokenizer, tiny_qwen3

from torchrl_asyncgrpo.engines import vllm_server
from torchrl_asyncgrpo.engines.process_guard import GuardedProcess, _descendants
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="vLLM is started on Linux only")
END_TOKENS = [0, 7]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model whose generation config names two end tokens and asks for greedy decoding."""
    path = tmp_path_factory.mktemp("tiny")
    model = tiny_qwen3(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    model.generation_config.eos_token_id = END_TOKENS
    model.generation_config.update(do_sample=True, top_k=1)
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(model_dir):
    with VLLMServer(model_dir, max_model_len=64, max_restarts=1, options=["--max-num-seqs", "16"]) as server:
        yield server


@pytest.fixture
def standin(tmp_path):
    """Start a launcher whose vLLM is a program."""

    def start(program, model=None, **keywords):
        module = tmp_path / "vllm/entrypoints/openai/api_server.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        for package in list(module.parents)[:3]:
            (package / "__init__.py").touch()
        module.write_text(program)
        environment = {"PYTHONPATH": str(tmp_path)} | keywords.pop("environment", {})
        return VLLMServer(model or tmp_path, **{"device": "cpu"} | keywords, environment=environment)

    return start


def ask(server, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def family(pid):
    """The process, what it started, and what those started."""
    return {pid} | _descendants(pid)


def names(pids):
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids if runs(pid))


def maps(pid):
    return Path(f"/proc/{pid}/maps").read_text()


def wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


# A real server


@pytest.mark.vllm
def test_a_server_with_the_routes_and_settings_that_training_needs(server):
    assert server.running and runs(server.pid) and server.restarts == 0 and server.failure is None
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.url)
    assert not server.wait(0.0)
    config = ask(server, "/server_info?config_format=json")["vllm_config"]
    assert "float32" in config["model_config"]["dtype"]
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["max_model_len"] == 64
    assert config["weight_transfer_config"]["backend"] == "shm"
    assert config["scheduler_config"]["max_num_seqs"] == 16
    assert [model["id"] for model in ask(server, "/v1/models")["data"]] == ["policy"]
    assert ask(server, "/weight_info")["weight_version"] == "default"
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "logprobs": 0, "ignore_eos": True}}
    (choice,) = ask(server, "/inference/v1/generate", body)["choices"]
    assert len(choice["token_ids"]) == 4 and len(choice["logprobs"]["content"]) == 4


@pytest.mark.vllm
def test_the_models_sampling_defaults_are_left_out_but_not_its_end_tokens(server):
    body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4, "n": 8, "return_token_ids": True}
    sampled = [tuple(choice["token_ids"]) for choice in ask(server, "/v1/completions", body)["choices"]]
    assert len(set(sampled)) > 1
    for token in END_TOKENS:
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "logit_bias": {token: 100.0}}}
        (choice,) = ask(server, "/inference/v1/generate", body)["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([token], "stop")


@pytest.mark.vllm
def test_a_killed_server_comes_back_on_its_port_as_often_as_wanted(server, caplog):
    url = server.url
    for restarts in (1, 2):
        killed = family(server.pid)
        assert "EngineCore" in names(killed) and "Worker" in names(killed)
        shared_memory = set(re.findall(r"/dev/shm/psm_\w+", " ".join(map(maps, killed))))
        assert shared_memory
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.running, 10)
        if restarts == 1:
            wait_until(lambda: server.restarts == 1 or server.failure)
            assert server.running and server.failure is None and server.url == url
            assert ask(server, "/v1/models")
        else:
            assert server.wait(60)
        assert not any(map(runs, killed)) and not any(map(os.path.exists, shared_memory))
    assert server.restarts == 1 and not server.running and server.pid is None
    assert "stays down after max_restarts=1 restarts. vLLM ended with SIGKILL" in server.failure
    assert str(server.log_file) in server.failure and server.failure in caplog.text
    assert "Restart 1 of 1. vLLM ended with SIGKILL" in caplog.text
    server.stop()
    server.stop()
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.url


@pytest.mark.vllm
def test_a_directory_without_a_model(tmp_path):
    server = VLLMServer(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)ended with exit code 1 .*Specify a local directory") as caught:
        server.start()
    assert str(server.log_file) in str(caught.value)
    assert not server.running and server.pid is None


@pytest.mark.vllm
def test_too_slow_a_start_leaves_nothing(model_dir, monkeypatch):
    started = []

    class Recorded(GuardedProcess):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            started.append(self)

    monkeypatch.setattr(vllm_server, "GuardedProcess", Recorded)
    with pytest.raises(RuntimeError, match=r"within startup_timeout=2\.0 s"):
        VLLMServer(model_dir, startup_timeout=2.0).start()
    assert len(started) == 1 and not started[0].running


def command_line(model_dir, log_file):
    command = [sys.executable, "-m", "torchrl_asyncgrpo.engines.vllm_server", "--model", str(model_dir)]
    command += ["--max-model-len", "64", "--log-file", str(log_file), "--", "--max-num-seqs", "4"]
    # a test run that a shell put into the background ignores Ctrl-C, and so would its children
    heeds_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, preexec_fn=heeds_ctrl_c)


@pytest.mark.vllm
def test_ctrl_c_while_the_command_line_starts_one(model_dir, tmp_path):
    with command_line(model_dir, tmp_path / "log") as process:
        wait_until(lambda: "EngineCore" in names(family(process.pid)))
        started = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
        assert "Traceback" not in process.stderr.read()
    assert not any(map(runs, started))


@pytest.mark.vllm
def test_a_launcher_that_is_killed_takes_its_server_with_it(model_dir, tmp_path):
    with command_line(model_dir, tmp_path / "log") as process:
        said = process.stdout.readline()
        assert re.match(r"http://127\.0\.0\.1:\d+ serves 'policy'; Ctrl-C stops it\.", said), process.stderr.read()
        started = family(process.pid)
        assert "Worker" in names(started)
        process.kill()
    wait_until(lambda: not any(map(runs, started)), 60)


# A stand-in for it

SAY_ALL = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


SERVING = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def flags_and_environment(server):
    with pytest.raises(RuntimeError, match="exit code 0"):
        server.start()
    return json.loads(server.log_file.read_text())


def test_flags_and_environment_on_a_cpu(standin, tmp_path, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "VLLM_ALLOW_INSECURE_SERIALIZATION", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    keywords = dict(kv_cache_gib=0.5, port=None, options=["--dtype", "bfloat16"], environment={"A": "1"})
    flags, environment = flags_and_environment(standin(SAY_ALL, **keywords))
    assert flags[flags.index("--kv-cache-memory-bytes") + 1] == str(2**29)
    assert flags[flags.index("--model") + 1] == str(tmp_path)
    assert flags[flags.index("--host") + 1] == "127.0.0.1"
    assert flags[-2:] == ["--dtype", "bfloat16"] and "--enforce-eager" in flags and "--max-model-len" not in flags
    wanted = dict(VLLM_SERVER_DEV_MODE="1", HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="passive", A="1")
    assert wanted.items() <= environment.items()
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment and "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment


def test_flags_and_environment_on_a_gpu(standin, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    keywords = dict(device="cuda", backend="ipc", environment={"VLLM_SERVER_DEV_MODE": "0"})
    flags, environment = flags_and_environment(standin(SAY_ALL, "org/name", **keywords))
    assert "--enforce-eager" not in flags and "--kv-cache-memory-bytes" not in flags
    assert json.loads(flags[flags.index("--weight-transfer-config") + 1]) == {"backend": "ipc"}
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1" and environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert "OMP_WAIT_POLICY" not in environment and "HF_HUB_OFFLINE" not in environment


def test_the_users_own_settings_of_threads_stay(standin, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    flags, environment = flags_and_environment(standin(SAY_ALL, backend=None))
    assert environment["OMP_WAIT_POLICY"] == "active"
    assert "--weight-transfer-config" not in flags


def test_a_server_of_adapters_is_started_with_room_for_them(standin):
    flags, environment = flags_and_environment(standin(SAY_ALL, backend=None, max_loras=3, max_lora_rank=6))
    assert flags[flags.index("--enable-lora") :][:5] == ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"]
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(ValueError, match="max_loras=3 with backend='shm'"):
        standin(SAY_ALL, max_loras=3)
    with pytest.raises(ValueError, match="on a GPU, vLLM dies"):
        standin(SAY_ALL, backend=None, max_loras=3, device="cuda")


def test_the_error_has_the_cause_though_it_is_far_up_in_the_log(standin, tmp_path):
    (tmp_path / "log").write_text("OldError: of an earlier server\n")
    program = """
print("(Worker pid=1) ERROR 01-31 12:00:00 [core.py:9] RuntimeError: the cause")
print("line\\n" * 1000, "RuntimeError: see above", sep="")
raise SystemExit(1)
"""
    with pytest.raises(RuntimeError) as caught:
        standin(program, log_file=tmp_path / "log").start()
    first, *said = str(caught.value).splitlines()
    assert first.startswith("vLLM ended with exit code 1") and str(tmp_path / "log") in first
    assert said[:3] == ["  RuntimeError: the cause", "  RuntimeError: see above", "  ..."]
    assert len(said) < 20
    assert (tmp_path / "log").read_text().startswith("OldError")


class Terminal(io.StringIO):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def isatty(self):
        return True

    def write(self, text):
        if "Loading" in text:
            self.seen.touch()
        return super().write(text)


WAITING = """
import os, time
print("(Worker pid=1) INFO 01-31 12:00:00 [core.py:9] Loading", flush=True)
while not os.path.exists("SEEN"):
    time.sleep(0.05)
raise SystemExit(1)
"""


def test_a_terminal_shows_in_one_line_how_far_it_is(standin, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", Terminal(tmp_path / "seen"))
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(RuntimeError, match="exit code 1"):
        standin(WAITING.replace("SEEN", str(tmp_path / "seen"))).start()
    said = sys.stderr.getvalue()
    assert re.search(r"\rStarting vLLM at http://127.0.0.1:\d+: 00:\d\d, Loading", said)
    assert said.count("\n") == 1 and said.endswith("\n")


def test_elsewhere_the_line_does_not_pile_up(standin, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    server = standin(WAITING, startup_timeout=2.0)
    with pytest.raises(RuntimeError, match="startup_timeout"):
        server.start()
    said = sys.stderr.getvalue()
    assert re.match(rf"\rStarting vLLM at http://127.0.0.1:\d+: 00:00\r.*, log {server.log_file}\r", said)
    assert said.count("\n") == 1 and said.endswith("\n") and said.count("\r") < 5


def test_a_server_that_keeps_dying_while_it_starts_is_not_started_for_ever(standin, tmp_path):
    """It answers once; the next times it dies at once."""
    program = """
import os, sys
open("COUNT", "a").write("x")
if os.path.getsize("COUNT") > 1:
    sys.exit("no second time")
""".replace("COUNT", str(tmp_path / "count"))
    with standin(program + SERVING, max_restarts=3) as server:
        assert server.running
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(60)
        assert server.restarts == 0 and "after max_restarts=3 restarts" in server.failure
        assert "no second time" in server.failure
    assert (tmp_path / "count").read_text() == "xxxx"


def test_a_log_that_is_gone_does_not_hide_the_failure(standin):
    with standin(SERVING) as server:
        server.log_file.unlink()
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(60)
        assert "ended with SIGKILL" in server.failure


def test_stop_while_it_is_started_again(standin, tmp_path):
    program = """
import os, time
if os.path.exists("FLAG"):
    time.sleep(600)
open("FLAG", "w").close()
""".replace("FLAG", str(tmp_path / "flag"))
    with standin(program + SERVING, max_restarts=1) as server:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.pid not in (None, first))
        second = server.pid
        assert not server.running
    assert not runs(second) and server.failure is None


def test_a_port_that_is_taken(standin):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"port={port}: Address already in use.*None for a free one"):
            standin(SAY_ALL, port=port).start()


def test_a_fork_does_not_stop_the_server_of_its_parent(standin):
    with standin(SERVING) as server:
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0)
        os.waitpid(child, 0)
        assert server.running


def test_a_stopped_server_can_be_started_again_but_a_running_one_cannot(standin, tmp_path):
    server = standin(SERVING, log_file=tmp_path / "new/log")
    for _ in range(2):
        with server:
            assert server.running and not server.wait(0.0)
            with pytest.raises(RuntimeError, match="started already"):
                server.start()
            assert server.running
        assert not server.running and server.wait(0.0) and server.failure is None


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        (dict(port=0), "port=0; it must be from 1 to 65535"),
        (dict(port=65536), "port=65536"),
        (dict(max_model_len=0), "max_model_len=0"),
        (dict(max_restarts=-1), "max_restarts=-1"),
        (dict(kv_cache_gib=0.0), "kv_cache_gib=0.0"),
        (dict(startup_timeout=-1.0), "startup_timeout=-1.0"),
        (dict(device="tpu"), "device='tpu'; it must be"),
        (dict(options="--dtype bfloat16"), r"one string a word: \['--dtype', 'bfloat16'\]"),
    ],
)
def test_wrong_arguments(tmp_path, keywords, match):
    with pytest.raises(ValueError, match=match):
        VLLMServer(tmp_path, **{"device": "cpu"} | keywords)


def test_a_path_without_a_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        VLLMServer(tmp_path / "missing", device="cpu")


def test_no_vllm_at_all(tmp_path, monkeypatch):
    def missing(name):
        raise vllm_server.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_server.importlib.metadata, "version", missing)
    with pytest.raises(RuntimeError, match="make install-vllm"):
        VLLMServer(tmp_path)


@pytest.mark.parametrize(
    ("installed", "device"),
    [({"vllm-cpu": "0.32.0"}, "cpu"), ({"vllm": "0.32.0+cpu"}, "cpu"), ({"vllm": "0.32.0"}, "cuda")],
)
def test_the_device_that_vllm_was_built_for(monkeypatch, installed, device):
    def version(name):
        if name not in installed:
            raise vllm_server.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm_server.importlib.metadata, "version", version)
    assert vllm_server._resolve_device("auto") == device
