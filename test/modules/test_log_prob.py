"""Chunked log-probs and entropies against full logits, forward and gradient."""

import pytest
import torch

from torchrl_asyncgrpo.modules.log_prob import HeadTransform, log_kept_mass, token_log_prob

TRANSFORMS = {
    "plain": HeadTransform(),
    "temperature": HeadTransform(temperature=0.6),
    "scale": HeadTransform(temperature=1.3, scale=0.25),
    "softcap": HeadTransform(temperature=0.7, scale=2.0, softcap=3.0),
}


def full_log_prob(hidden, weight, bias, position, token, transform):
    raw = hidden @ weight.T + (0 if bias is None else bias)
    raw = raw * transform.scale
    if transform.softcap is not None:
        raw = transform.softcap * torch.tanh(raw / transform.softcap)
    log_p = torch.log_softmax(raw / transform.temperature, -1)
    return log_p[position, token], -(log_p.exp() * log_p).sum(-1)


def problem(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype)
    position = torch.tensor([0, 0, 1, 3, 3, 3, 6])
    token = torch.tensor([4, 10, 0, 1, 1, 2, 9])
    leaves = [hidden, weight, torch.randn(11, dtype=dtype)] if bias else [hidden, weight]
    return [leaf.requires_grad_() for leaf in leaves], position, token


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_values_and_gradients_equal_full_logits(transform, bias, chunk_size):
    leaves, position, token = problem(bias=bias)
    hidden, weight, bias_V = (*leaves, None)[:3]
    log_prob, entropy = token_log_prob(
        hidden, weight, bias_V, position, token, transform=transform, chunk_size=chunk_size
    )
    expected = full_log_prob(hidden, weight, bias_V, position, token, transform)
    torch.testing.assert_close((log_prob, entropy), expected, rtol=1e-12, atol=1e-12)

    seeds = torch.randn(len(token), dtype=torch.float64), torch.randn(len(hidden), dtype=torch.float64)
    ours = torch.autograd.grad((log_prob, entropy), leaves, seeds)
    theirs = torch.autograd.grad(expected, leaves, seeds)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_temperature_divides_logits_not_log_probs():
    """T1: logits [2, 1, 0] at temperature 0.6."""
    hidden, weight = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    log_prob, entropy = token_log_prob(
        hidden, weight, None, torch.tensor([0]), torch.tensor([1]), transform=HeadTransform(0.6), chunk_size=1
    )
    assert log_prob.item() == pytest.approx(-1.8692, abs=5e-5)
    p = torch.softmax(hidden[0] / 0.6, -1)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-12)


def test_no_tokens_give_empty_values_with_a_gradient():
    (hidden, weight), _, _ = problem(bias=False)
    none = torch.empty(0, dtype=torch.long)
    log_prob, entropy = token_log_prob(hidden[:0], weight, None, none, none, transform=HeadTransform(), chunk_size=4)
    assert log_prob.shape == (0,) and entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert hidden.grad.abs().sum() == 0


def test_never_holds_more_logits_than_a_chunk():
    """The largest tensor of forward and backward stays at chunk_size x V (and the weight's own gradient)."""
    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(3000, 4, requires_grad=True)
    position, token = torch.arange(512), torch.randint(0, 3000, (512,))
    sizes = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Record():
        log_prob, _ = token_log_prob(hidden, weight, None, position, token, transform=HeadTransform(), chunk_size=16)
        log_prob.sum().backward()
    assert max(sizes) <= 16 * 3000


def test_float64_stays_float64_under_autocast():
    leaves, position, token = problem(bias=False)
    exact = full_log_prob(*leaves, None, position, token, HeadTransform())[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, _ = token_log_prob(*leaves, None, position, token, transform=HeadTransform(), chunk_size=3)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_bfloat16_autocast_accumulates_weight_gradient_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(64, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    position, token = torch.arange(64), torch.randint(0, 50, (64,))
    exact = torch.autograd.grad(full_log_prob(hidden, weight, None, position, token, HeadTransform())[0].sum(), weight)[
        0
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_prob, _ = token_log_prob(hidden, weight, None, position, token, transform=HeadTransform(), chunk_size=1)
    assert log_prob.dtype == torch.float32
    ours = torch.autograd.grad(log_prob.sum(), weight)[0]
    assert ours.dtype == torch.float32
    # 64 rank-one updates, each rounded once to 8 bits: the error does not grow with the number of chunks
    assert (ours - exact).abs().max() < 2**-8 * 64**0.5 * 4


def test_chunks_of_a_bfloat16_head_add_up_in_float32():
    """Weight and bias: the gradient is that of one chunk up to its own rounding, however many chunks there are."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((1024, 4), (8, 4), (8,)))
    position, token = torch.arange(1024), torch.randint(0, 8, (1024,))

    def gradients(chunk_size):
        leaves = [leaf.clone().requires_grad_() for leaf in (weight, bias)]
        log_prob, _ = token_log_prob(hidden, *leaves, position, token, transform=HeadTransform(), chunk_size=chunk_size)
        return torch.autograd.grad(log_prob.sum(), leaves)

    for ours, whole in zip(gradients(2), gradients(1024), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - whole).abs().max() <= 2**-7 * whole.abs().max()


def kept_problem(seed=0, num_entries=6, vocabulary=11):
    """Kept tokens of some of the entries, in no order; entry 2 keeps all tokens, entry 4 has no kept set."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_entries, vocabulary, generator=generator) < 0.4
    mask[torch.arange(num_entries), torch.randint(0, vocabulary, (num_entries,), generator=generator)] = True
    mask[2], mask[4] = True, False
    entry, token = mask.nonzero().T
    order = torch.randperm(len(entry), generator=generator)
    return mask, entry[order], token[order]


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_kept_mass_equals_masked_full_logits_in_value_and_gradient(transform, bias, chunk_size):
    leaves, _, _ = problem(bias=bias)
    hidden, weight, bias_V = (*leaves, None)[:3]
    mask, entry, token = kept_problem()
    position_L = torch.tensor([0, 0, 1, 3, 3, 6])
    position, order = position_L[entry].sort()
    log_prob, _ = token_log_prob(
        hidden, weight, bias_V, position, token[order], transform=transform, chunk_size=chunk_size
    )
    ours = log_kept_mass(log_prob, entry[order], len(mask))

    position_V, token_V = (x.flatten() for x in torch.meshgrid(torch.arange(7), torch.arange(11), indexing="ij"))
    full, _ = full_log_prob(hidden, weight, bias_V, position_V, token_V, transform)
    full = full.view(7, 11)[position_L].masked_fill(~mask, -torch.inf)
    expected = torch.stack(
        [row.logsumexp(0) if kept.any() else row.new_zeros(()) for row, kept in zip(full, mask, strict=True)]
    )
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)

    seeds = torch.randn(len(mask), dtype=torch.float64)
    for leaf, a, b in zip(
        leaves, torch.autograd.grad(ours, leaves, seeds), torch.autograd.grad(expected, leaves, seeds), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=str(leaf.shape))


def test_gradient_of_the_kept_mass_equals_finite_differences():
    _, entry, _ = kept_problem()
    log_prob = -torch.rand(len(entry), dtype=torch.float64) - 4  # small enough that no set has all the mass
    assert torch.autograd.gradcheck(lambda x: log_kept_mass(x, entry, 6), log_prob.requires_grad_())


def test_probabilities_of_the_kept_set_are_renormalised():
    """T2: [.5, .3, .15, .05] at top-p 0.95 keeps three tokens of 0.95 together."""
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    kept = torch.tensor([0, 1, 2])
    log_prob, _ = token_log_prob(
        probability.log()[None], torch.eye(4).double(), None, kept * 0, kept, transform=HeadTransform(), chunk_size=1
    )
    log_kept = log_kept_mass(log_prob, kept * 0, 1)
    assert log_kept.exp().item() == pytest.approx(0.95, abs=1e-12)
    torch.testing.assert_close((log_prob - log_kept).exp(), probability[:3] / 0.95, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log_probability", [0.0, -1e-7, -3.3, -87.0, -1e4])
def test_a_set_of_one_token_leaves_no_choice(log_probability):
    log_prob = torch.tensor([log_probability, -2.0], requires_grad=True)
    log_kept = log_kept_mass(log_prob, torch.tensor([1, 0]), 2)
    within = log_prob - log_kept[[1, 0]]
    assert within.tolist() == [0.0, 0.0]
    within.sum().backward()
    assert log_prob.grad.tolist() == [0.0, 0.0]


def test_kept_mass_is_exact_for_large_sets_and_never_above_one():
    """A running sum in float32 would be off by 1e-4 here."""
    logits = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 0.1
    for size in (len(logits), 150_000):
        log_prob = torch.log_softmax(logits, 0)[:size]
        log_kept = log_kept_mass(log_prob, torch.zeros(size, dtype=torch.long), 1)
        exact = torch.logsumexp(torch.log_softmax(logits.double(), 0)[:size], 0)
        assert log_kept.dtype == torch.float32
        assert log_kept.item() <= 0
        assert log_kept.item() == pytest.approx(exact.item(), abs=2e-6)


def test_entries_without_a_kept_set_keep_all_and_send_no_gradient():
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    log_kept = log_kept_mass(log_prob, torch.tensor([1, 1]), 3)
    assert log_kept[[0, 2]].tolist() == [0.0, 0.0]
    log_kept[[0, 2]].sum().backward()
    assert log_prob.grad.tolist() == [0.0, 0.0]
    none = log_kept_mass(log_prob[:0], torch.zeros(0, dtype=torch.long), 2)
    assert none.tolist() == [0.0, 0.0]
