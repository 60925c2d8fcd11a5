"""A command in a process tree that ends as a whole: with the command, when told to, and with the process that began it.

    this process ──▶ guard ──▶ command ──▶ its children ──▶ ...

The guard is a small process of its own. Orphans below it become its children, and it exits only when it has none left,
so its exit says that nothing runs any more. It needs nothing but the standard library: it runs this very file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

_POLL_S, _KILL_TIMEOUT_S = 0.2, 60.0
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class GuardedProcess:
    """Run a command so that none of its processes outlives it, this process, or :meth:`stop`. Linux only.

    It gets a session of its own: Ctrl-C reaches this process, which then stops it in order.

    Args:
        command: program and arguments.
        environment: all of its environment variables.
        output: file that takes its standard output and error.
        grace: seconds that the command is given to end by itself when it is stopped, and then what it leaves behind.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes], grace: float = 5.0
    ) -> None:
        self._grace = grace
        self._guard = subprocess.Popen(
            # Isolated from start-up files and paths of the user: the guard is this file and the standard library.
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(grace), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        with self._guard.stdout as pipe:
            self._pid = int(pipe.readline() or 0)

    @property
    def pid(self) -> int | None:
        """Process id of the command; None once it has ended."""
        return self._pid if self.running and os.path.exists(f"/proc/{self._pid}") else None

    @property
    def running(self) -> bool:
        """True while any process is left."""
        return self._guard.poll() is None

    @property
    def exit_reason(self) -> str:
        """How the command ended: ``"SIGKILL"``, ``"exit code 1"``. Only when it is not running."""
        code = self._guard.returncode
        number = -code if code < 0 else code - 128
        if number in set(signal.Signals):
            return signal.Signals(number).name
        return f"exit code {code}"

    def wait(self) -> None:
        """Return when no process is left."""
        self._guard.wait()
        self._sweep()

    def stop(self) -> None:
        """End every process and return when none is left; again and again is fine.

        The command is asked to end (SIGTERM), and killed where it does not within the grace; so is what it leaves.

        Raises:
            RuntimeError: if a process outlives SIGKILL by a minute: it waits in the kernel, for a device perhaps.
        """
        self._guard.terminate()
        try:
            self._guard.wait(3 * self._grace + _KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            left = sorted(_session(self._guard.pid) - {self._guard.pid})
            raise RuntimeError(
                f"The processes {left} are left {_KILL_TIMEOUT_S:.0f} s after they were killed. They wait in the "
                "kernel, for a device perhaps: look at dmesg."
            ) from error
        self._sweep()

    def _sweep(self) -> None:
        # Where the guard itself was killed, what it guarded still has its session, whose number is not given away.
        if self._guard.returncode < 0:
            _end_all(lambda: _session(self._guard.pid), self._grace)


def _processes() -> dict[int, tuple[str, int, int]]:
    """State, parent and session of every process; ``"Z"`` is the state of one that has ended."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:  # it may end meanwhile
                state, parent, _, session = file.read().rpartition(")")[2].split()[:4]
                found[int(name)] = state, int(parent), int(session)
    return found


def _session(leader: int) -> set[int]:
    return {pid for pid, (state, _, session) in _processes().items() if session == leader and state != "Z"}


def _descendants(ancestor: int) -> set[int]:
    processes = _processes()
    found: set[int] = set()
    grown = {ancestor}
    while grown:
        grown = {pid for pid, (_, parent, _) in processes.items() if parent in grown}
        found |= grown
    return found


def _ignores_sigterm(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        ignored = re.search(r"^SigIgn:\s*(\w+)", file.read(), re.MULTILINE)
        return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _end_all(remaining: Callable[[], set[int]], grace: float) -> None:
    """End processes until none remains, gently at first.

    Python's resource trackers ignore SIGTERM and remove the shared memory of the others once these are gone: they are
    the last to be killed.
    """
    started = time.monotonic()
    told: set[int] = set()
    while pids := remaining():
        seconds = time.monotonic() - started
        for pid in pids:
            if seconds > 2 * grace or (seconds > grace and not _ignores_sigterm(pid)):
                number = signal.SIGKILL
            elif pid not in told:
                number = signal.SIGTERM
            else:
                continue
            told.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.05)


def guard(parent: int, grace: float, command: Sequence[str]) -> int:
    """Run a command for a parent, and return once none of its processes is left.

    Args:
        parent: process id of the process that started this one.
        grace: seconds, as for :class:`GuardedProcess`.
        command: program and arguments; its process id goes to standard output, its output to standard error.

    Returns:
        The exit status of the command, or 128 plus the number of the signal that ended it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    awaited = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the exit status of the command with it

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)  # for a guard that is killed

    # The object is kept: forgotten, it would reap the command itself.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=before_exec)
    child = process.pid
    os.write(1, f"{child}\n".encode())
    os.close(1)
    status: int | None = None

    def reap() -> None:
        nonlocal status
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    status = os.waitstatus_to_exitcode(ended[1])

    def remaining() -> set[int]:
        reap()
        return _descendants(os.getpid())

    deadline: float | None = None
    while status is None:
        received = signal.sigtimedwait(awaited, _POLL_S)
        told = received is not None and received.si_signo != signal.SIGCHLD
        if deadline is None and (told or os.getppid() != parent):
            os.kill(child, signal.SIGTERM)
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        reap()
    process.returncode = status
    _end_all(remaining, grace)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
