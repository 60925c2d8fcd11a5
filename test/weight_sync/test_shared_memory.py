import subprocess
import sys

import pytest
import torch

from torchrl_asyncgrpo.weight_sync.shared_memory import ALIGNMENT, SharedFile, SharedTensors, TensorSpec, layout

SPECS = [TensorSpec("a", "float32", (3, 5)), TensorSpec("b", "bfloat16", (7,)), TensorSpec("c", "int64", ())]


def test_tensors_are_aligned_apart_and_in_order():
    offsets, nbytes = layout(SPECS)
    assert offsets == [0, 64, 128]
    assert nbytes == 192
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


def test_what_one_process_writes_another_reads_and_the_other_way_round():
    file = SharedFile(layout(SPECS)[1])
    tensors = SharedTensors(file.path, SPECS)
    tensors["a"].copy_(torch.arange(15.0).view(3, 5))
    tensors["c"].fill_(2**40)
    program = f"""
from torchrl_asyncgrpo.weight_sync.shared_memory import SharedTensors, TensorSpec
tensors = SharedTensors({file.path!r}, [TensorSpec(*spec) for spec in {[tuple(s) for s in SPECS]!r}])
assert tensors["a"].flatten().tolist() == list(range(15)), tensors["a"]
assert int(tensors["c"]) == 2**40
tensors["b"].fill_(0.5)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert tensors["b"].tolist() == [0.5] * 7
    file.close()


def test_mappings_outlive_the_file_and_nothing_remains_of_it():
    file = SharedFile(layout(SPECS)[1])
    tensors = SharedTensors(file.path, SPECS)
    file.close()
    tensors["a"].fill_(1.0)
    assert float(tensors["a"].sum()) == 15.0
    with pytest.raises(RuntimeError):
        SharedTensors(file.path, SPECS)


def test_memory_that_is_not_there_is_refused_when_it_is_reserved():
    with pytest.raises(MemoryError, match=r"shared memory"):
        SharedFile(2**62)


def test_no_tensor_at_all_is_a_mapping_too():
    file = SharedFile(layout([])[1])
    assert len(SharedTensors(file.path, [])) == 0
