import logging
import os
from pathlib import Path

import pytest

from torchrl_asyncgrpo.remote import on_ray as module

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def on_ray():
    """Ray on this machine, whose workers import the package and the stand-ins of the tests from here."""
    import ray

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "test"), *filter(None, [before])])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 * 2**20,
    )
    yield ray
    ray.shutdown()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


class Pool:
    """Worker processes that backend after backend is built in: a process takes seconds to start, a policy none."""

    def __init__(self, ray):
        self.ray = ray
        self.start = module._start_workers
        self.workers = []
        self.bereaved = False

    def __call__(self, count, options):
        self.ray.experimental.collective.destroy_all_collective_groups()
        alive = [worker for worker in self.workers if self.is_alive(worker)]
        self.bereaved |= len(alive) < len(self.workers)
        if self.bereaved and count > 1:  # torch.distributed of a process survives no member of its first group
            alive, self.bereaved = [], False
        self.workers = alive + self.start(max(0, count - len(alive)), options)
        return self.workers[:count]

    def is_alive(self, worker):
        try:
            self.ray.get(worker.__ray_ready__.remote())
        except self.ray.exceptions.RayActorError:
            return False
        return True


@pytest.fixture(scope="module")
def workers(on_ray):
    """Lets every ``RayBackend`` of a module take its workers from one pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_start_workers", Pool(on_ray))
        yield
