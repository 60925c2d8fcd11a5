import pytest
import torch

from torchrl_asyncgrpo.objectives.entries import Entries


def entries(**changes):
    """Two rollouts of three and one entries, and one without any."""
    values = dict(
        log_prob_L=torch.tensor([-0.5, -1.0, -2.0, -0.1], dtype=torch.float64, requires_grad=True),
        anchor_log_prob_L=torch.tensor([-1.0, -1.0, -30.0, -0.2], dtype=torch.float64),
        sample_log_prob_L=torch.tensor([-3.0, -3.0, -3.0, -3.0], dtype=torch.float64),
        advantage_L=torch.tensor([1.0, 1.0, 1.0, -2.0], dtype=torch.float64),
        entropy_L=torch.ones(4, dtype=torch.float64),
        rollout_L=torch.tensor([0, 0, 0, 2]),
        length_S=torch.tensor([3, 0, 1]),
    )
    return Entries(**{**values, **changes})


def test_ratio_is_to_the_anchor_and_bounded():
    own = entries()
    assert own.log_ratio_L.tolist() == pytest.approx([0.5, 0.0, 28.0, 0.1])
    assert own.ratio_L.tolist() == pytest.approx(torch.tensor([0.5, 0.0, 20.0, 0.1]).double().exp().tolist())
    (grad,) = torch.autograd.grad(own.ratio_L.sum(), own.log_prob_L)
    assert grad[2] == 0
    assert grad[0].item() == pytest.approx(own.ratio_L[0].item())


def test_sums_and_means_are_by_rollout():
    own = entries()
    assert own.sum_by_rollout(own.log_ratio_L).tolist() == pytest.approx([28.5, 0.0, 0.1])
    assert own.mean_by_rollout(own.log_ratio_L).tolist() == pytest.approx([9.5, 0.0, 0.1])


def test_detached_entries_are_the_same_without_a_gradient():
    own = entries()
    assert own.log_ratio_L.requires_grad
    assert not own.detached().log_ratio_L.requires_grad
    assert torch.equal(own.detached().log_ratio_L, own.log_ratio_L)


def test_one_advantage_is_given_or_refused_by_name():
    assert torch.equal(entries().one_advantage("X"), entries().advantage_L)
    with pytest.raises(ValueError, match=r"X judges a rollout as a whole.*make_rollout one number.*GRPOLoss"):
        entries(several_advantages=True).one_advantage("X")
