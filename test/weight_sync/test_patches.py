import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_asyncgrpo.weight_sync.patches import apply_patches, changed_elements


@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 40))
def test_patches_make_the_served_weights_bit_identical_to_the_new_ones(data, dtype, size):
    special = [0.0, -0.0, float("nan"), float("inf"), 1.0, 1.0 + 2**-7, 1e-8]
    values = st.lists(st.sampled_from(special), min_size=size, max_size=size)
    new, served = torch.tensor(data.draw(values)), torch.tensor(data.draw(values)).to(dtype)
    expected = new.to(dtype)
    patch = changed_elements(new, served)
    changed = expected.view(_bits(dtype)) != served.view(_bits(dtype))
    assert patch.index.tolist() == changed.nonzero()[:, 0].tolist()
    apply_patches({"w": served}, {"w": patch})
    assert torch.equal(served.view(_bits(dtype)), expected.view(_bits(dtype)))


def _bits(dtype):
    return {4: torch.int32, 2: torch.int16}[dtype.itemsize]


def test_only_what_changes_in_the_serving_dtype_travels():
    weight = torch.full((3, 5), 0.5)
    served = weight.to(torch.bfloat16)
    weight[0, 1] += 1e-6  # below the spacing of bfloat16
    weight[2, 4] = 0.25
    patch = changed_elements(weight, served)
    assert patch.index.tolist() == [14]
    assert patch.value.tolist() == [0.25]
    assert (patch.index.dtype, patch.value.dtype, patch.nbytes) == (torch.int32, torch.bfloat16, 6)


def test_a_parameter_that_requires_grad_is_compared_and_patched():
    weight = torch.nn.Parameter(torch.zeros(4))
    served = torch.ones(4)
    patch = changed_elements(weight, served)
    assert not patch.value.requires_grad
    apply_patches({"w": served}, {"w": patch})
    assert served.tolist() == [0.0] * 4


def test_a_patch_for_an_unknown_tensor_is_an_error():
    with pytest.raises(KeyError):
        apply_patches({}, {"w": changed_elements(torch.ones(1), torch.zeros(1))})
