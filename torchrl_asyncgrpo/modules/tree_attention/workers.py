"""Threads for work that falls into independent parts: each computes its part alone, and they meet once, at the end.

PyTorch's own threads meet after every operation. Where the cores are shared, by an inference thread or by another
process, each of those meetings can wait for a time slice of the scheduler.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


def run_all(tasks: list[Callable[[], Result]]) -> list[Result]:
    """Run tasks on as many threads as PyTorch would use, each single-threaded and without recording gradients.

    Args:
        tasks: independent of each other.

    Returns:
        Their results, in their order; the first error of a task is raised.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    return list(_pool(os.getpid(), threads).map(_without_gradients, tasks))


def _without_gradients(task: Callable[[], Result]) -> Result:
    with torch.no_grad():
        return task()


def _single_threaded() -> None:
    # A thread takes over the number of the process when it first asks for it; only then it can have its own.
    torch.get_num_threads()
    torch.set_num_threads(1)


@cache
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """One pool per process and size: threads do not survive a fork."""
    pool = ThreadPoolExecutor(threads, "tree_attention", initializer=_single_threaded)
    started = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(started.wait)
    started.wait()
    # What a thread sets for itself is also what threads that start later begin with.
    torch.set_num_threads(threads)
    return pool
