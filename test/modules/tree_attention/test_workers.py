"""Threads that compute alone and meet once."""

from __future__ import annotations

import threading

import pytest
import torch

from torchrl_asyncgrpo.modules.tree_attention.workers import pool, run_all


def test_results_come_in_order_from_single_threaded_workers_without_gradients() -> None:
    torch.set_num_threads(3)
    results = run_all([lambda i=i: (i, torch.get_num_threads(), torch.is_grad_enabled()) for i in range(20)])
    assert results == [(i, 1, False) for i in range(20)]
    assert torch.get_num_threads() == 3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [3]


def test_callers_at_the_same_time_share_one_pool() -> None:
    barrier, pools = threading.Barrier(4), []

    def ask() -> None:
        barrier.wait()
        pools.append(pool(5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, pools))) == 1


def test_workers_write_what_the_caller_made_under_inference_mode() -> None:
    torch.set_num_threads(2)
    with torch.inference_mode():
        total = torch.zeros(4)
        run_all([lambda i=i: total[i].add_(i) for i in range(4)])
    assert total.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_error_of_a_task_is_raised() -> None:
    torch.set_num_threads(2)

    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_all([fail, lambda: None])
