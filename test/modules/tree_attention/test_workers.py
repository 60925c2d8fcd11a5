"""Threads that compute alone and meet once."""

from __future__ import annotations

import threading

import pytest
import torch

from torchrl_asyncgrpo.modules.tree_attention.workers import run_all


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


def test_an_error_of_a_task_is_raised() -> None:
    torch.set_num_threads(2)

    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_all([fail, lambda: None])
