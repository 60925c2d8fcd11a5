import pytest
import torch

from torchrl_asyncgrpo.data.group_sampler import WaitingGroup, WholeGroupSampler


def make(max_staleness=0, version=1):
    sampler = WholeGroupSampler(max_staleness, lambda: version)
    sampler.groups.extend(WaitingGroup(i, [2 * i, 2 * i + 1], oldest_version=i % 2) for i in range(4))
    return sampler


def test_draws_are_whole_groups_in_order_and_end_with_them():
    sampler = make()
    index, info = sampler.sample(None, 3)
    assert index.tolist() == [0, 1, 2, 3, 4, 5]
    assert info["group_id"].tolist() == [0, 1, 2]
    assert [sampler.can_sample(None, n) for n in (1, 2)] == [True, False]
    assert sampler.sample(None, 3)[0].dtype == torch.long
    assert not sampler.groups


@pytest.mark.parametrize(("max_staleness", "gone"), [(0, [0, 2]), (1, []), (None, [])])
def test_stale_groups_are_taken_out_wherever_they_stand(max_staleness, gone):
    sampler = make(max_staleness)
    assert [group.group_id for group in sampler.drop_stale()] == gone
    assert [group.group_id for group in sampler.groups] == [i for i in range(4) if i not in gone]


def test_state_is_plain_and_comes_back():
    sampler, other = make(), WholeGroupSampler(0, int)
    other.load_state_dict(sampler.state_dict())
    assert other.groups == sampler.groups
    assert sampler.state_dict()["groups"][1] == [1, 1, 2, 3]


def test_negative_staleness_is_refused():
    with pytest.raises(ValueError, match="max_staleness=-1"):
        make(-1)
