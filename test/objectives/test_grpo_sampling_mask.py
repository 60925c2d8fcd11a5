"""The ratio of a truncated sampler: completion, rollout, tree, actor and loss together."""

import math

import pytest
import torch
from fakes import VOCABULARY, kept_log_softmax, tiny_gpt2, tiny_qwen3
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictModuleBase

from torchrl_asyncgrpo import Completion, FlatPacker, GRPOLoss, TreeActor, TreePacker, make_rollout
from torchrl_asyncgrpo.collectors.group import make_group
from torchrl_asyncgrpo.data.prompts import PromptDraw
from torchrl_asyncgrpo.objectives.functional import reduce_window


def constant_policy(probabilities):
    """A model that gives these probabilities after any prefix: its last norm puts out the same vector everywhere."""
    model = tiny_gpt2(vocab_size=len(probabilities)).double()
    with torch.no_grad():
        norm, table = model.transformer.ln_f, model.transformer.wte.weight
        norm.weight.zero_()
        norm.bias.zero_()[0] = 1.0
        table[:, 0] = torch.tensor(probabilities).log()
    return model


@pytest.mark.parametrize(("masked", "ratio"), [(True, 1.0), (False, 0.95)])
def test_top_p_of_unchanged_weights_has_ratio_one(masked, ratio):
    """T2: [.5, .3, .15, .05] at top-p 0.95, whose sampler draws the first three tokens with p / 0.95."""
    probabilities = [0.5, 0.3, 0.15, 0.05]
    tokens = [0, 1, 2]
    row = make_rollout(
        [3, *tokens],
        [0, 1, 1, 1],
        [0.0, *(math.log(probabilities[t] / 0.95) for t in tokens)],
        group_id=0,
        advantage=1.0,
        sampling_mask=[None, [0, 1, 2], [2, 1, 0], [0, 1, 2]] if masked else None,
    )
    output = GRPOLoss(TreeActor(constant_policy(probabilities)))(TreePacker()([row])[0])
    assert output["ratio"].item() == pytest.approx(ratio, abs=1e-6)
    assert output["loss_objective"].item() == pytest.approx(-ratio, abs=1e-6)
    assert (output["kl_approx"].item() < 1e-9) == masked
    entropy = -sum(p * math.log(p) for p in probabilities)
    assert output["entropy"].item() == pytest.approx(entropy, abs=1e-6), "of the whole vocabulary"


def sampled(model, prompt, length, *, temperature, top_p, top_k, generator):
    """A completion as an engine reports it: log-probs within the kept sets, and the sets."""
    ids, log_probs, masks = list(prompt), [], []
    for _ in range(length):
        logits = model(torch.tensor([ids])).logits[0, -1] / temperature
        probability, order = logits.softmax(-1).sort(descending=True)
        size = min(int((probability.cumsum(0) - probability < top_p).sum()), top_k)
        within = logits[order[:size]].log_softmax(-1)
        drawn = int(torch.multinomial(within.exp(), 1, generator=generator))
        ids.append(int(order[drawn]))
        log_probs.append(float(within[drawn]))
        masks.append(order[:size].tolist())
    return Completion(ids[len(prompt) :], log_probs, [0] * length, "stop", sampling_mask=masks)


@pytest.mark.parametrize("packer", [TreePacker(), TreePacker(token_budget=12), FlatPacker()])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 20), (1.0, 3), (1.0, 1), (0.9, VOCABULARY)])
def test_ratio_is_one_for_what_a_truncating_sampler_reports(top_p, top_k, packer):
    model, prompt = tiny_qwen3(initializer_range=0.2).double(), [5, 6, 7]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        completions = [
            sampled(model, prompt, 6, temperature=0.7, top_p=top_p, top_k=top_k, generator=generator) for _ in range(4)
        ]
    rows = make_group(
        PromptDraw(0, "p"), prompt, completions, [1.0] * 4, torch.ones(4), group_size=4, mask_truncated=False
    )
    loss = GRPOLoss(TreeActor(model, temperature=0.7))
    metrics = reduce_window([loss(batch) for batch in packer(rows)])
    assert metrics["ratio"].item() == pytest.approx(1, abs=2e-6)
    assert metrics["ratio_squared"].item() == pytest.approx(1, abs=4e-6)
    for row in rows:
        del row["kept_count"], row["kept_token_ids"]
    off = reduce_window([loss(batch) for batch in packer(rows)])
    assert off["ratio"].item() < 0.99, "without the sets the ratio is the kept mass"


def rows_with_masks(seed, count):
    """Rows over three tokens, most of them with masks over eight, several on one path."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, n=1):
        return torch.randint(low, high, (n,), generator=generator).tolist()

    rows = []
    for i in range(count):
        tokens = integers(1, 4, integers(1, 7)[0])
        kept = [sorted({t, *integers(0, 8, integers(0, 6)[0])}) if integers(0, 4)[0] else None for t in tokens]
        mask = integers(0, 2, len(tokens))
        sample = [0.0, *(-torch.rand(len(tokens), generator=generator)).tolist()]
        reference = [0.0, *(-torch.rand(len(tokens), generator=generator) * 4).tolist()]
        rows.append(
            make_rollout(
                [0, *tokens],
                [0, *mask],
                sample,
                group_id=i // 3,
                rollout_id=i,
                advantage=integers(-2, 3)[0] + 0.5,
                ref_log_prob=reference,
                sampling_mask=[None, *kept] if integers(0, 4)[0] else None,
            )
        )
    return rows


def loops(model, rows, temperature):
    """Objective, entropy bonus and KL of a window by loops over rollouts and tokens."""
    total, count = 0.0, sum(int(row["loss_mask"].sum()) for row in rows)
    for row in rows:
        ids, advantage = row["token_ids"], row["advantage"].double()
        for n, within, whole in kept_log_softmax(model, row, temperature):
            ratio = (within[ids[n]] - row["sample_log_prob"][n]).exp()
            difference = row["ref_log_prob"][n] - whole[ids[n]]
            term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            term = term + 0.03 * (whole.exp() * whole).sum() + 0.05 * (difference.exp() - difference - 1)
            total = total + term / count
    return total


def whole_gradient(loss, batches):
    outputs = [loss(batch) for batch in batches]
    total = sum(output[key] for output in outputs for key in output.keys() if key.startswith("loss_"))
    parameters = list(loss.actor_network.parameters())
    return total.item(), torch.autograd.grad(total, parameters, allow_unused=True), reduce_window(outputs)


@pytest.mark.parametrize(("make", "tolerance"), [(tiny_qwen3, 1e-6), (tiny_gpt2, 1e-7)], ids=["qwen3", "gpt2"])
@settings(max_examples=20)
@given(data=st.data())
def test_loss_and_gradient_equal_loops_for_every_packing(make, tolerance, data):
    rows = rows_with_masks(data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 8)))
    if not any(bool(row["loss_mask"].any()) for row in rows):
        rows += rows_with_masks(1, 3)
    model = make().double()
    expected = loops(model, rows, 0.8)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    packer = data.draw(st.sampled_from([TreePacker, FlatPacker]))(
        token_budget=data.draw(st.one_of(st.none(), st.integers(8, 30))),
        min_micro_batches=data.draw(st.integers(1, 4)),
    )
    loss = GRPOLoss(
        TreeActor(model, temperature=0.8), clip_epsilon=(0.2, 0.28), entropy_coeff=0.03, kl_to_ref_coeff=0.05
    )
    value, grads, _ = whole_gradient(loss, packer(data.draw(st.permutations(rows))))
    assert value == pytest.approx(expected.item(), abs=tolerance)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        if theirs is not None:
            scale = max(float(theirs.abs().max()), 1.0)
            assert float((ours - theirs).abs().max()) <= tolerance * scale


class IgnorantActor(TensorDictModuleBase):
    """An actor that knows nothing of kept sets."""

    in_keys, out_keys = [("node", "input_ids")], [("node", "log_prob"), ("node", "entropy")]

    def forward(self, batch):
        batch["node", "log_prob"] = batch["node", "entropy"] = -torch.ones(len(batch["node", "input_ids"]))
        return batch


def one_row(**more):
    return TreePacker()([make_rollout([5, 1], [0, 1], [-1.0] * 2, group_id=0, advantage=1.0, **more)])[0]


def test_an_actor_that_ignores_kept_sets_is_refused():
    loss = GRPOLoss(IgnorantActor())
    with pytest.raises(KeyError, match="top-p.*log_kept.*IgnorantActor.*Use TreeActor"):
        loss(one_row(sampling_mask=[None, [1, 2]]))
    assert loss(one_row())["ratio"].item() == 1
    assert loss(one_row(sampling_mask=[[1], None]))["ratio"].item() == 1, "nothing was cut where it is trained"


def test_the_key_of_the_kept_mass_can_be_changed():
    loss = GRPOLoss(IgnorantActor())
    loss.set_keys(log_kept=("entry", "my_mass"))
    batch = one_row(sampling_mask=[None, [1, 2]])
    batch["entry", "my_mass"] = torch.tensor([-0.25])
    assert loss(batch)["ratio"].item() == pytest.approx(math.exp(0.25))
    del batch["entry", "my_mass"]
    loss.set_keys(kept_entry=("kept", "my_entry"))
    assert loss(batch)["ratio"].item() == 1, "no such key, nothing was cut"
    batch["kept", "my_entry"] = batch["kept", "entry"]
    with pytest.raises(KeyError, match="my_entry.*my_mass"):
        loss(batch)


def test_policy_term_gets_the_log_prob_within_the_kept_set():
    seen = []

    class Recorded(GRPOLoss):
        def policy_term(self, entries):
            seen.append(entries.log_prob_L.tolist())
            return super().policy_term(entries)

    batch = one_row(sampling_mask=[None, [1]])
    Recorded(TreeActor(tiny_qwen3()))(batch)
    assert seen == [[0.0]]
    assert "log_kept" not in batch["entry"].keys(), "the caller's batch is left alone"
