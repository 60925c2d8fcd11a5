"""Nothing that a guarded command began outlives the command, its stop, or the process that started it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torchrl_asyncgrpo.engines import process_guard
from torchrl_asyncgrpo.engines.process_guard import GuardedProcess

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard uses Linux's /proc and prctl")

# Says its own process id and those of two children on a line. The first child is in a session of its own and deaf to
# SIGTERM, the second has nothing special about it.
FAMILY = """
import os, signal, subprocess, sys, time
deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
first = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
second = subprocess.Popen(["sleep", "600"])
first.stdout.readline()
print(os.getpid(), first.pid, second.pid, flush=True)
"""
SLEEPING = FAMILY + "time.sleep(600)"


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
    return value


def start(program, log, grace=0.3):
    with log.open("wb") as output:
        return GuardedProcess([sys.executable, "-c", program], environment=os.environ, output=output, grace=grace)


def pids_in(log):
    """The process ids that the program said, once it has said them."""
    return wait_until(lambda: log.read_text().endswith("\n") and [int(word) for word in log.read_text().split()])


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(0)", "exit code 0"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "SIGTERM"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_tells_how_the_command_ended(log, program, reason):
    process = start(program, log)
    process.wait()
    assert (process.running, process.pid, process.exit_reason) == (False, None, reason)


def test_a_command_that_is_not_there(log):
    with log.open("wb") as output:
        process = GuardedProcess(["/no/such/program"], environment=os.environ, output=output)
    process.wait()
    assert process.exit_reason == "exit code 1"
    assert "/no/such/program" in log.read_text()


def test_both_outputs_the_given_environment_and_a_session_of_its_own(log):
    program = """
    import os, sys
    print(os.environ.get("HOME"), os.environ["A"], flush=True)
    print(os.getsid(0), file=sys.stderr)
    """
    with log.open("wb") as output:
        command = [sys.executable, "-c", textwrap.dedent(program)]
        process = GuardedProcess(command, environment={"A": "1"}, output=output)
    process.wait()
    environment, session = log.read_text().splitlines()
    assert environment == "None 1"
    assert int(session) != os.getsid(0)


def test_signals_reach_the_command(log):
    """The guard holds signals back; a command that inherited that could not be asked to end."""
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True); signal.pause()"
    process = start(program, log, grace=60.0)
    wait_until(lambda: log.read_text().endswith("\n"))
    assert log.read_text() == "set()\n"
    started = time.monotonic()
    process.stop()
    assert process.exit_reason == "SIGTERM"
    assert time.monotonic() - started < 30


def test_stop_ends_what_is_deaf_and_what_left_the_session(log):
    process = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPING, log)
    pids = pids_in(log)
    assert process.pid == pids[0] and process.running and all(map(runs, pids))
    process.stop()
    assert not any(map(runs, pids)) and not process.running and process.pid is None
    assert process.exit_reason == "SIGKILL"
    process.stop()


@pytest.mark.parametrize("last_words", ["raise SystemExit(0)", "os.kill(os.getpid(), 9)"])
def test_a_command_that_ends_takes_its_children_with_it(log, last_words):
    process = start(FAMILY + last_words, log)
    process.wait()
    assert not any(map(runs, pids_in(log)))


def test_a_guard_that_is_killed(log):
    """The command is told by the kernel, and what it leaves is found by its session."""
    process = start(SLEEPING, log)
    command, deaf, child = pids_in(log)
    os.kill(process._guard.pid, signal.SIGKILL)
    process.wait()
    assert process.exit_reason == "SIGKILL"
    assert not runs(command) and not runs(child)
    os.kill(deaf, signal.SIGKILL)  # no guard, and in a session of its own: out of reach


@pytest.mark.parametrize("guard_too", [False, True])
def test_a_parent_that_is_killed(log, guard_too):
    program = f"""
    import os, sys, time
    sys.path.insert(0, {str(Path(process_guard.__file__).parent)!r})
    from process_guard import GuardedProcess
    with open({str(log)!r}, "wb") as output:
        process = GuardedProcess([sys.executable, "-c", sys.argv[1]], environment=os.environ, output=output, grace=0.3)
    print(process._guard.pid, flush=True)
    time.sleep(600)
    """
    sleeping = "import os, time; print(os.getpid(), flush=True); time.sleep(600)" if guard_too else SLEEPING
    command = [sys.executable, "-c", textwrap.dedent(program), sleeping]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        guard = int(parent.stdout.readline())
        pids = [guard, *pids_in(log)]
        assert all(map(runs, pids))
        parent.kill()
        if guard_too:
            os.kill(guard, signal.SIGKILL)
    wait_until(lambda: not any(map(runs, pids)))


def test_shared_memory_of_a_killed_command_is_removed(log):
    """Its resource tracker is left the time for that."""
    program = """
    import os
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory(create=True, size=4096)
    print(memory.name, flush=True)
    os.kill(os.getpid(), 9)
    """
    process = start(textwrap.dedent(program), log, grace=30.0)
    process.wait()
    name = log.read_text().split()[0]
    assert name.startswith("psm_")
    assert not Path("/dev/shm", name).exists()
