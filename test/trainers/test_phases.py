import pytest

from torchrl_asyncgrpo.trainers.phases import PhaseTimer


def test_phases_add_up_and_start_anew(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 4.5, 10.0, 12.0, 13.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = PhaseTimer()
    with timer("train"):
        pass
    with timer("train"):
        pass
    assert timer.reset() == {"train": 2.5, "total": 10.0}
    with pytest.raises(ValueError), timer("wait"):
        raise ValueError
    assert timer.reset() == {"wait": 1.0, "total": 10.0}
