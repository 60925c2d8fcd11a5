import subprocess
import sys

import pytest

PROGRAM = """
import torch
from torchrl_asyncgrpo.kernels.heap import release_free_pages

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

warm = torch.ones(24 * 2**20, dtype=torch.uint8)  # freed, it raises the size from which glibc maps blocks one by one
del warm
kept = [torch.ones(1456128, dtype=torch.uint8) for _ in range(200)]
del kept[1::2]
before = resident()
release_free_pages()
print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc of Linux")
def test_holes_between_tensors_are_given_back():
    released = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    assert int(released) > 90 * 1456128
