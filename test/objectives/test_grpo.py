"""The loss over trees against plain loops over rollouts, whatever the packing."""

import math

import pytest
import torch
from fakes import tiny_gpt2, tiny_qwen3
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModuleBase

from torchrl_asyncgrpo import FlatPacker, GRPOLoss, PolicyLoss, TreeActor, TreePacker, make_rollout
from torchrl_asyncgrpo.objectives.functional import reduce_window

NAN = math.nan


class TableActor(TensorDictModuleBase):
    """Log-prob and entropy of a node from a table by its token: a policy whose gradient is easy to follow."""

    def __init__(self, log_prob):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(log_prob, dtype=torch.float64))
        self.in_keys = [("node", "input_ids")]
        self.out_keys = [("node", "log_prob"), ("node", "entropy")]

    def forward(self, batch):
        batch["node", "log_prob"] = self.table[batch["node", "input_ids"]]
        batch["node", "entropy"] = self.table[batch["node", "input_ids"]].square()
        return batch


def row(tokens, sample, mask=None, advantage=1.0, group_id=0, **more):
    """Rollout behind a prompt token 0 that is never trained."""
    mask = [1] * len(tokens) if mask is None else mask
    return make_rollout([0, *tokens], [0, *mask], [0.0, *sample], group_id=group_id, advantage=advantage, **more)


def run(loss, batches):
    outputs = [loss(batch) for batch in batches]
    total = sum(output[key] for output in outputs for key in output.keys() if key.startswith("loss_"))
    return total, reduce_window(outputs)


def gradient(loss, batches):
    total, metrics = run(loss, batches)
    parameters = [p for p in loss.actor_network.parameters() if p.requires_grad]
    return total.item(), torch.autograd.grad(total, parameters, allow_unused=True), metrics


def test_masked_tokens_are_not_counted():
    """L3: 30 sampled tokens, 5 of a truncated completion masked out: divide by 25."""
    actor = TableActor([0.0] + [-1.0] * 5)
    rows = [row([1 + i % 5 for i in range(10)], [-1.0] * 10, group_id=i) for i in range(2)]
    rows.append(row([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], [-1.0] * 10, mask=[1] * 5 + [0] * 5))
    value, (grad,), _ = gradient(GRPOLoss(actor), TreePacker()(rows))
    assert value == pytest.approx(-1.0)
    assert grad.sum().item() == pytest.approx(-25 / 25)
    assert grad[1].item() == pytest.approx(-5 / 25)


def test_nan_of_an_untrained_token_stays_out():
    """L6."""
    value, (grad,), metrics = gradient(
        GRPOLoss(TableActor([0.0, 0.0, 0.0])), TreePacker()([row([1, 2], [0.0, NAN], mask=[1, 0])])
    )
    assert value == pytest.approx(-1.0)
    assert torch.isfinite(grad).all()
    assert all(torch.isfinite(metric).all() for metric in metrics.values())


def test_window_without_trained_tokens_is_zero_with_a_gradient_function():
    """L9."""
    actor = TreeActor(tiny_qwen3())
    (batch,) = TreePacker()([make_rollout([1, 2, 3], [0, 0, 0], [NAN] * 3, group_id=0, advantage=1.0)])
    output = GRPOLoss(actor, entropy_coeff=0.1)(batch)
    assert output["loss_objective"].item() == 0
    (output["loss_objective"] + output["loss_entropy"]).backward()
    assert all(torch.isfinite(value).all() for value in output.values())


def test_the_ratio_is_to_what_the_sampler_recorded():
    """L10."""
    _, (grad,), metrics = gradient(
        GRPOLoss(TableActor([0.0, -0.5]), clip_epsilon=(0.2, 1.0)), TreePacker()([row([1], [-1.0])])
    )
    assert metrics["ratio"].item() == pytest.approx(1.6487, abs=5e-5)
    assert grad[1].item() == pytest.approx(-1.6487, abs=5e-5)


def test_one_trained_token_works_like_any_other():
    """L12."""
    value, (grad,), _ = gradient(GRPOLoss(TableActor([0.0, -0.5])), TreePacker()([row([1], [-1.0], advantage=-2.0)]))
    assert value == pytest.approx(2 * math.exp(0.5))
    assert grad.tolist() == pytest.approx([0.0, 2 * math.exp(0.5)])


@pytest.mark.parametrize("packer", [TreePacker, FlatPacker])
def test_identical_rollouts_are_two_entries(packer):
    """L14."""
    rows = [row([1, 2], [-1.0, -2.0], advantage=a, rollout_id=i) for i, a in enumerate((1.0, -0.5))]
    (batch,) = packer()(rows)
    assert batch.num_entries == 4
    value, (grad,), _ = gradient(GRPOLoss(TableActor([0.0, -0.9, -2.1])), [batch])
    separate = [gradient(GRPOLoss(TableActor([0.0, -0.9, -2.1])), packer()([r])) for r in rows]
    assert value == pytest.approx(sum(s[0] for s in separate) / 2)
    torch.testing.assert_close(grad, sum(s[1][0] for s in separate) / 2)


@pytest.mark.parametrize("untrained", [0, 6])
def test_metrics_do_not_see_untrained_tokens(untrained):
    """L4."""
    tokens, sample = [1, 2] + [3] * untrained, [-1.0, -0.7] + [-5.0] * untrained
    rows = [row(tokens, sample, mask=[1, 1] + [0] * untrained, ref_log_prob=[0, -1.1, -0.9] + [-9.0] * untrained)]
    rows += [make_rollout([0] + [3] * untrained, [0] * (1 + untrained), [NAN] * (1 + untrained), group_id=1)]
    if untrained == 0:
        rows = rows[:1]
    else:
        rows[1]["ref_log_prob"] = torch.full((1 + untrained,), NAN)
    loss = GRPOLoss(TableActor([0.0, -0.8, -0.9, -3.0]), kl_to_ref_coeff=0.1)
    _, _, metrics = gradient(loss, TreePacker()(rows))
    ratio = torch.tensor([0.2, -0.2]).double().exp()
    reference = torch.tensor([-0.3, 0.0]).double()
    assert metrics["ratio"].item() == pytest.approx(ratio.mean().item())
    assert metrics["ESS"].item() == pytest.approx((ratio.mean() ** 2 / (ratio**2).mean()).item())
    assert metrics["kl_approx"].item() == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    assert metrics["kl_to_ref"].item() == pytest.approx((reference.exp() - 1 - reference).mean().item(), abs=1e-6)
    assert metrics["entropy"].item() == pytest.approx((0.8**2 + 0.9**2) / 2)
    assert metrics["clip_fraction_high"].item() == pytest.approx(0.5)


def test_diagnostics_carry_no_gradient():
    """L11."""
    output = GRPOLoss(TableActor([0.0, -0.5]), entropy_coeff=0.01)(TreePacker()([row([1], [-1.0])])[0])
    carrying = {key for key, value in output.items() if value.requires_grad}
    assert carrying == {"loss_objective", "loss_entropy"}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulated_micro_batches_give_the_same_gradient(parts):
    """L2: nothing divides by their number a second time."""
    rows = [row([1 + i % 3, 2, i % 4], [-1.0, -0.5, -0.7], advantage=i - 2.0, group_id=i) for i in range(8)]
    loss = GRPOLoss(TableActor([-0.1, -0.8, -0.9, -1.5]))
    whole = gradient(loss, TreePacker()(rows))
    batches = TreePacker(min_micro_batches=parts)(rows)
    assert len(batches) == parts
    split = gradient(loss, batches)
    assert split[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-12, atol=1e-14)


def test_loss_equals_loops_over_rollouts():
    torch.manual_seed(0)
    table = (-torch.rand(6) * 2).tolist()
    rows = [
        row(
            torch.randint(1, 6, (n,)).tolist(),
            (-torch.rand(n) * 2).tolist(),
            mask=[int(i % 3 != 1) for i in range(n)],
            advantage=float(a),
            ref_log_prob=[0.0, *(-torch.rand(n) * 2).tolist()],
        )
        for n, a in ((5, 1.0), (2, -1.5), (7, 0.3))
    ]
    trained = [int(r["loss_mask"].sum()) for r in rows]
    weights = {
        "token-mean": [1 / sum(trained)] * 3,
        "sequence-mean": [1 / (3 * n) for n in trained],
        "constant": [1 / (3 * 16)] * 3,
    }
    for aggregation, weight in weights.items():
        expected = 0.0
        for r, w in zip(rows, weight, strict=True):
            for token, mask, old, ref in zip(
                *(r[k].tolist() for k in ("token_ids", "loss_mask", "sample_log_prob", "ref_log_prob")), strict=True
            ):
                if mask:
                    ratio, a, d = math.exp(table[token] - old), float(r["advantage"]), ref - table[token]
                    surrogate = -min(ratio * a, min(max(ratio, 0.7), 1.28) * a)
                    expected += w * (surrogate - 0.02 * table[token] ** 2 + 0.05 * (math.exp(d) - d - 1))
        loss = GRPOLoss(
            TableActor(table),
            clip_epsilon=(0.3, 0.28),
            aggregation=aggregation,
            constant=16.0 if aggregation == "constant" else None,
            entropy_coeff=0.02,
            kl_to_ref_coeff=0.05,
        )
        assert run(loss, TreePacker()(rows))[0].item() == pytest.approx(expected, rel=1e-6)


def test_policy_term_is_the_whole_of_another_loss():
    class Reinforce(PolicyLoss):
        def policy_term(self, entries):
            return -entries.log_prob_L * entries.advantage_L

    loss = Reinforce(TableActor([0.0, -0.5, -2.0]))
    value, (grad,), _ = gradient(loss, TreePacker()([row([1, 2], [-1.0, -1.0], advantage=3.0)]))
    assert value == pytest.approx(3 * 2.5 / 2)
    assert grad.tolist() == pytest.approx([0.0, -1.5, -1.5])


def test_set_keys_is_honoured():
    (batch,) = TreePacker()([row([1], [-1.0])])
    batch["rollout", "my_advantage"] = torch.tensor([5.0])
    loss = GRPOLoss(TableActor([0.0, -1.0]))
    loss.set_keys(advantage=("rollout", "my_advantage"))
    assert loss(batch)["loss_objective"].item() == pytest.approx(-5.0)
    assert ("rollout", "my_advantage") in loss.in_keys
    with pytest.raises(ValueError, match="not an accepted"):
        loss.set_keys(advantages="x")


def random_rows(seed, count, ref=False):
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, n=1):
        return torch.randint(low, high, (n,), generator=generator).tolist()

    rows = []
    for i in range(count):
        n = integers(1, 7)[0]
        mask = integers(0, 2, n)
        sample = (-torch.rand(n, generator=generator) * 3 - 1).tolist()
        rows.append(
            row(integers(1, 4, n), sample, mask, advantage=integers(-2, 3)[0] + 0.5, group_id=i // 3, rollout_id=i)
        )
    return rows


def whole_model_gradient(actor, rows, packer):
    loss = GRPOLoss(actor, clip_epsilon=(0.2, 0.28), entropy_coeff=0.03, aggregation="sequence-mean")
    return gradient(loss, packer(rows))


@pytest.mark.parametrize(("make", "tolerance"), [(tiny_qwen3, 1e-6), (tiny_gpt2, 1e-9)], ids=["qwen3", "gpt2"])
@settings(max_examples=15)
@given(data=st.data())
def test_gradient_of_a_window_is_the_same_for_every_packing(make, tolerance, data):
    rows = random_rows(data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 8)))
    model = make().double()
    actor = TreeActor(model)
    value, grads, metrics = whole_model_gradient(actor, rows, FlatPacker())
    order = data.draw(st.permutations(rows))
    packer = data.draw(st.sampled_from([TreePacker, FlatPacker]))(
        token_budget=data.draw(st.one_of(st.none(), st.integers(8, 30))),
        min_micro_batches=data.draw(st.integers(1, 4)),
    )
    packed_value, packed_grads, packed_metrics = whole_model_gradient(actor, order, packer)
    assert packed_value == pytest.approx(value, abs=tolerance)
    scale = max((float(g.abs().max()) for g in grads if g is not None), default=1.0) or 1.0
    for ours, theirs in zip(packed_grads, grads, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert float((ours - theirs).abs().max()) <= tolerance * max(scale, 1.0)
    for key in metrics.keys():
        assert packed_metrics[key].item() == pytest.approx(metrics[key].item(), abs=tolerance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(clip_epsilon=1.0), r"clip_epsilon=1.0.*\[0, 1\)"),
        (dict(clip_epsilon=(0.2, -0.1)), "clip_epsilon"),
        (dict(clip_epsilon=[0.2, 0.2, 0.2]), "clip_epsilon=.*pair"),
        (dict(entropy_coeff=-1.0), "entropy_coeff=-1.0"),
        (dict(kl_to_ref_coeff=NAN), "kl_to_ref_coeff"),
        (dict(aggregation="sum"), "'sum'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOLoss(TableActor([0.0]), **options)


def test_missing_reference_is_named():
    with pytest.raises(KeyError, match="ref_log_prob.*make_rollout"):
        GRPOLoss(TableActor([0.0, -1.0]), kl_to_ref_coeff=0.1)(TreePacker()([row([1], [-1.0])])[0])
