"""The load-balancing loss against loops over rollouts, and against transformers on each rollout alone."""

import copy

import pytest
import torch
from fakes import VOCABULARY, tiny_moe
from objective_rollouts import RoutedActor, gradients, random_rollouts, run
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from torchrl_asyncgrpo import FlatPacker, GRPOLoss, TreeActor, TreePacker
from torchrl_asyncgrpo.objectives.load_balance import check_scope, load_balance_terms, path_sums

PACKERS = [TreePacker(), FlatPacker(), TreePacker(token_budget=14)]


def tiny_mixtral():
    torch.manual_seed(0)
    fields = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2)
    fields |= dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(MixtralConfig(**fields))


def spread(model):
    """Routers far from even, in float64, which transformers' grouped products of experts do not take."""
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name or "router" in name:
                parameter.normal_(std=2.0)
    return model.double()


MODELS = {
    "qwen3_moe": (lambda: spread(tiny_moe(num_experts=6)), modeling_qwen3_moe.load_balancing_loss_func, 6),
    "mixtral": (lambda: spread(tiny_mixtral()), modeling_mixtral.load_balancing_loss_func, 5),
}


def trimmed(rollouts):
    """The tokens of each rollout that trains any, up to its last trained one: what is behind it has no node."""
    rows = [(r["token_ids"], r["loss_mask"].nonzero().flatten().tolist()) for r in rollouts]
    return [ids[: trained[-1] + 1] for ids, trained in rows if trained]


def balance(rows, experts, k):
    """E Σ_e f_e P_e of the tokens of some rows, each [N, Y, E], by loops over tokens and layers."""
    slots, used, probability = 0, [0.0] * experts, [0.0] * experts
    for row in rows:
        for layers in row:
            for logits in layers:
                p, slots = logits.softmax(-1), slots + 1
                for e in sorted(range(experts), key=lambda e: -p[e].item())[:k]:
                    used[e] += 1
                for e in range(experts):
                    probability[e] = probability[e] + p[e]
    return experts * sum(u / slots * p / slots for u, p in zip(used, probability, strict=True))


def loss_of(actor, scope, k=2):
    return GRPOLoss(actor, load_balance_coeff=0.3, load_balance_scope=scope, experts_per_token=k)


@pytest.mark.parametrize("packer", PACKERS, ids=["tree", "flat", "split"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_rollout_scope_is_the_mean_over_rollouts_of_loops_over_each(seed, k, packer):
    rollouts = random_rollouts(seed)
    actor = RoutedActor(rollouts)
    losses, metrics = run(loss_of(actor, "rollout", k), packer(rollouts))
    rows = trimmed(rollouts)
    expected = sum(balance([actor.routed(ids)], 4, k) for ids in rows) / len(rows)
    assert metrics["load_balance"] == pytest.approx(expected.item(), rel=1e-12)
    assert losses["loss_load_balance"].item() == pytest.approx(0.3 * expected.item(), rel=1e-12)
    ours, theirs = (gradients(value, [actor.router]) for value in (losses["loss_load_balance"], 0.3 * expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert float(ours[0].abs().max()) > 1e-4


@pytest.mark.parametrize("packer", PACKERS, ids=["tree", "flat", "split"])
def test_micro_batch_scope_is_over_all_rows_of_a_micro_batch(packer):
    rollouts = random_rollouts(1)
    actor, expected = RoutedActor(rollouts), 0.0
    batches = packer(rollouts)
    by_id = {int(r["rollout_id"]): r for r in rollouts}
    for batch in batches:
        rows = trimmed([by_id[i] for i in batch["rollout", "rollout_id"].tolist()])
        share = len(rows) / int(batch["window", "num_rollouts"])
        expected = expected + share * balance([actor.routed(ids) for ids in rows], 4, 2)
    losses, metrics = run(loss_of(actor, "micro-batch"), batches)
    assert metrics["load_balance"] == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = (gradients(value, [actor.router]) for value in (losses["loss_load_balance"], 0.3 * expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def routed_alone(model, ids):
    return model(input_ids=ids[None], output_router_logits=True, use_cache=False).router_logits


def close(losses, actor_model, expected, plain):
    """Value, and gradient of every parameter; transformers forms its sums, and the models their routing, in float32."""
    assert losses["loss_load_balance"].item() == pytest.approx(0.3 * expected.item(), rel=1e-6)
    ours = gradients(losses["loss_load_balance"], list(actor_model.parameters()))
    theirs = gradients(0.3 * expected, list(plain.parameters()))
    largest = max(float(g.abs().max()) for g in theirs)
    assert largest > 1e-3
    for own, other in zip(ours, theirs, strict=True):
        assert float((own - other).abs().max()) <= 2e-6 * largest


@pytest.mark.parametrize("packer", PACKERS, ids=["tree", "flat", "split"])
@pytest.mark.parametrize("name", MODELS)
def test_rollout_scope_equals_transformers_on_each_rollout_alone(name, packer):
    make, load_balancing_loss, experts = MODELS[name]
    plain = make()
    actor = TreeActor(copy.deepcopy(plain), router_logits=True)
    rollouts = random_rollouts(3)
    rows = trimmed(rollouts)
    expected = sum(load_balancing_loss(routed_alone(plain, ids), experts, 2) for ids in rows) / len(rows)
    losses, _ = run(loss_of(actor, "rollout"), packer(rollouts))
    close(losses, actor.model, expected, plain)


@pytest.mark.parametrize("packer", [TreePacker(), FlatPacker()], ids=["tree", "flat"])
@pytest.mark.parametrize("name", MODELS)
def test_micro_batch_scope_equals_transformers_on_its_padded_rows(name, packer):
    make, load_balancing_loss, experts = MODELS[name]
    plain = make()
    actor = TreeActor(copy.deepcopy(plain), router_logits=True)
    rollouts = random_rollouts(3)
    rows = trimmed(rollouts)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    output = plain(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    expected = load_balancing_loss(output.router_logits, experts, 2, mask)
    assert output.aux_loss.item() == pytest.approx(expected.item(), rel=1e-6), "what the model itself would add"
    losses, _ = run(loss_of(actor, "micro-batch"), packer(rollouts))
    close(losses, actor.model, expected, plain)


def test_gradient_checkpointing_changes_nothing():
    (batch,) = TreePacker()(random_rollouts(3))
    values = []
    for checkpointing in (False, True):
        model = spread(tiny_moe()).train()
        actor = TreeActor(model, router_logits=True)
        if checkpointing:
            model.gradient_checkpointing_enable()
        losses, _ = run(loss_of(actor, "rollout"), [batch])
        values.append((losses["loss_load_balance"].detach(), gradients(sum(losses.values()), list(model.parameters()))))
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=1e-12)


def test_the_coefficient_leaves_the_other_terms_alone():
    rollouts = random_rollouts(1)
    actor = RoutedActor(rollouts)
    with_term, without = (run(loss, TreePacker()(rollouts)) for loss in (loss_of(actor, "rollout"), GRPOLoss(actor)))
    assert torch.equal(with_term[0]["loss_objective"], without[0]["loss_objective"])
    assert with_term[0].keys() - without[0].keys() == {"loss_load_balance"}
    assert with_term[1].keys() - without[1].keys() == {"load_balance"}


@pytest.mark.parametrize(("chosen", "k", "expected"), [([0, 1, 2, 3], 1, 1.0), ([2, 2, 2, 2], 1, 4.0)])
def test_even_routing_is_one_and_a_single_expert_is_their_number(chosen, k, expected):
    """Four tokens, four experts, and a router that is sure."""
    logits = torch.full((4, 1, 4), -50.0, dtype=torch.float64)
    logits[torch.arange(4), 0, chosen] = 50.0
    value = load_balance_terms(logits, torch.tensor([4, 4, 4, 4]), torch.tensor([3]), k)
    assert value.tolist() == pytest.approx([expected], rel=1e-12)


def test_half_precision_routers_are_summed_in_float64():
    logits = torch.randn(4000, 1, 4)
    end, leaf = torch.full((4000,), 4000), torch.tensor([3999])
    halves = load_balance_terms(logits.bfloat16(), end, leaf, 2)
    assert halves.dtype == torch.float64
    whole = load_balance_terms(logits.bfloat16().double(), end, leaf, 2)
    torch.testing.assert_close(halves, whole, rtol=1e-6, atol=0)


def test_path_sums_are_from_the_root_to_each_node():
    """0-1-2 and 1-3, then a second tree 4-5."""
    value, end = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [2.0], [20.0]]), torch.tensor([4, 4, 3, 4, 6, 6])
    assert path_sums(value, end).flatten().tolist() == [1, 11, 111, 1011, 2, 22]


def test_bad_arguments():
    with pytest.raises(ValueError, match="experts_per_token=5 and the routers have 4"):
        load_balance_terms(torch.zeros(2, 1, 4), torch.tensor([2, 2]), torch.tensor([1]), 5)
    with pytest.raises(ValueError, match="load_balance_scope='batch'.*'rollout', 'micro-batch'"):
        check_scope("batch")
