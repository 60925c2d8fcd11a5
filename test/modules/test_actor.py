"""The actor against each rollout run alone through the plain model: values, gradients, and what reaches the head."""

import copy

import pytest
import torch
from fakes import VOCABULARY, tiny_gpt2, tiny_moe, tiny_qwen3
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DogeConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
)

from torchrl_asyncgrpo import FlatPacker, PaddingFreeActor, TreeActor, TreePacker, make_rollout, unpack

SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=0,
)  # fmt: skip


def tiny(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


MODELS = {
    "qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "gemma2": lambda: tiny(Gemma2Config(**SMALL, head_dim=8, sliding_window=4, final_logit_softcapping=3.0)),
    "cohere": lambda: tiny(CohereConfig(**SMALL, logit_scale=0.2)),
    "granite": lambda: tiny(GraniteConfig(**SMALL, logits_scaling=6.0)),
}


def rollouts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(6):
        prompt = [[5, 6, 7], [5, 6, 8, 9]][i % 2]
        tokens = torch.randint(
            1, 4, (int(torch.randint(1, 8, (1,), generator=generator)),), generator=generator
        ).tolist()
        mask = [0] * len(prompt) + [int(k % 4 != 2) for k in range(len(tokens))]
        rows.append(make_rollout([*prompt, *tokens], mask, [-1.0] * len(mask), group_id=i % 2, rollout_id=i))
    return rows


def alone(model, rows, temperature):
    """Log-prob and entropy of every trained token, rollout by rollout."""
    values = {}
    for row in rows:
        ids = row["token_ids"]
        log_p = torch.log_softmax(model(ids[None]).logits[0].double() / temperature, -1)
        for i in row["loss_mask"].nonzero().flatten().tolist():
            p = log_p[i - 1]
            values[int(row["rollout_id"]), i] = (p[ids[i]], -(p.exp() * p).sum())
    return values


def on_tree(actor, batches):
    values = {}
    for batch in batches:
        out = actor(batch)
        depth = batch["node", "position_ids"]
        for node, r in zip(batch["entry", "node"].tolist(), batch["entry", "rollout"].tolist(), strict=True):
            key = int(batch["rollout", "rollout_id"][r]), int(depth[node])
            values[key] = (out["node", "log_prob"][node], out["node", "entropy"][node])
    return values


@pytest.mark.parametrize(
    "packer", [TreePacker(), TreePacker(token_budget=12), FlatPacker()], ids=["tree", "split", "flat"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_equals_each_rollout_alone(name, temperature, packer):
    plain = MODELS[name]().double()
    plain.set_attn_implementation("eager")  # sdpa leaves Gemma's softcap out
    actor = TreeActor(copy.deepcopy(plain), temperature=temperature, attention="reference", chunk_size=3)
    rows = rollouts()
    expected, ours = alone(plain, rows, temperature), on_tree(actor, packer(rows))
    assert ours.keys() == expected.keys()
    keys = sorted(expected)
    for which in (0, 1):
        torch.testing.assert_close(
            torch.stack([ours[k][which] for k in keys]),
            torch.stack([expected[k][which] for k in keys]),
            rtol=1e-6,
            atol=1e-6,
        )
    weights = torch.randn(2, len(keys), dtype=torch.float64)
    for values in (expected, ours):
        sum(weights[which, i] * values[k][which] for i, k in enumerate(keys) for which in (0, 1)).backward()
    for (parameter, theirs), own in zip(plain.named_parameters(), actor.model.parameters(), strict=True):
        scale = float(theirs.grad.abs().max()) + 1e-12
        assert float((own.grad - theirs.grad).abs().max()) <= 1e-6 * max(scale, 1.0), parameter


def test_only_parents_of_trained_nodes_reach_the_head():
    actor = TreeActor(tiny_qwen3())
    rows = [make_rollout([5, 6, 7, t, 2], [0, 0, 0, 1, 1], [-1.0] * 5, group_id=0) for t in (1, 2, 3)]
    (batch,) = TreePacker()(rows)
    seen = []
    import torchrl_asyncgrpo.modules.actor as module

    original = module.token_log_prob
    module.token_log_prob = lambda hidden, *a, **k: (seen.append(len(hidden)), original(hidden, *a, **k))[1]
    try:
        out = actor(batch)
    finally:
        module.token_log_prob = original
    assert seen == [4], "one for token 7, from which three branches start, and one for each branch"
    untrained = torch.ones(batch.num_nodes, dtype=torch.bool)
    untrained[batch["entry", "node"]] = False
    assert (out["node", "log_prob"][untrained] == 0).all()


def test_model_goes_on_generating_and_keeps_its_mode():
    model = tiny_qwen3().train()
    prompt = torch.tensor([[5, 6, 7]])
    before = model.eval().generate(prompt, do_sample=False, max_new_tokens=6)
    model.train().model.layers[0].eval()
    TreeActor(model)
    assert model.training
    assert not model.model.layers[0].training, "a frozen block stays frozen"
    assert torch.equal(model.eval().generate(prompt, do_sample=False, max_new_tokens=6), before)


def test_gradient_checkpointing_changes_nothing():
    (batch,) = TreePacker()(rollouts())
    gradients = []
    for checkpointing in (False, True):
        model = tiny_qwen3().train()
        actor = TreeActor(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        actor(batch.clone())["node", "log_prob"].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_head_that_is_more_than_linear_is_refused():
    class Shifted(type(tiny_qwen3())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.roll(1, -1)
            return output

    model = tiny_qwen3()
    model.__class__ = Shifted
    with pytest.raises(ValueError, match="Shifted.*more than"):
        TreeActor(model)


def test_wrapped_head_is_refused():
    model = tiny_qwen3(tie_word_embeddings=False)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="head of Qwen3ForCausalLM is a Sequential.*nn.Linear"):
        TreeActor(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=0.0), "temperature=0.0.*above 0"),
        (dict(chunk_size=0), "chunk_size=0"),
        (dict(attention="magic"), "'magic'.*'reference', 'segments', 'flex'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        TreeActor(tiny_qwen3(), **options)


def test_plain_module_is_a_type_error():
    with pytest.raises(TypeError, match="Linear.*AutoModelForCausalLM"):
        TreeActor(nn.Linear(2, 2))


@pytest.mark.parametrize("dense", [[], [0]], ids=["all", "some"])
def test_router_logits_are_those_of_each_rollout_alone(dense):
    """A layer without experts has none."""
    plain = tiny_moe(num_experts=6, mlp_only_layers=dense)
    actor = TreeActor(copy.deepcopy(plain), router_logits=True)
    rows = rollouts()
    (batch,) = TreePacker()(rows)
    assert ("node", "router_logits") in actor.out_keys
    out = actor(batch)
    assert out["node", "router_logits"].shape == (batch.num_nodes, 2 - len(dense), 6)
    for ours, i in zip(unpack(out, ("node", "router_logits")), batch["rollout", "rollout_id"].tolist(), strict=True):
        alone = plain(input_ids=rows[i]["token_ids"][None], output_router_logits=True).router_logits
        torch.testing.assert_close(ours, torch.stack(alone, 1)[: len(ours)], rtol=1e-4, atol=1e-5)


DYNAMIC = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4)
LONGROPE |= dict(short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 4.0, 8.0])
ROPES = {
    "dynamic": lambda: tiny(LlamaConfig(**SMALL, max_position_embeddings=16, rope_parameters=dict(DYNAMIC))),
    "longrope": lambda: tiny(
        Phi3Config(
            **SMALL,
            max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters=dict(LONGROPE),
        )
    ),
}


@pytest.mark.parametrize(("actor_class", "packer"), [(TreeActor, TreePacker()), (PaddingFreeActor, FlatPacker())])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_that_depends_on_the_longest_rollout_runs_within_its_original_length(rope, actor_class, packer):
    plain = ROPES[rope]()
    actor = actor_class(copy.deepcopy(plain))
    generator = torch.Generator().manual_seed(0)

    def rows(*lengths):
        tokens = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        return [make_rollout(t, [0] + [1] * (len(t) - 1), [-1.0] * len(t), group_id=0) for t in tokens]

    # the long one leaves nothing behind that the next batch would be computed with
    with pytest.raises(ValueError, match=rf"sequence of 17 tokens is longer than the 16 .*'{rope}'.*within 16 tokens"):
        on_tree(actor, packer(rows(17, 5)))
    within = rows(16, 5)
    expected = alone(plain, within, 1.0)
    ours = on_tree(actor, packer(within))
    assert ours.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(torch.stack(ours[key]), torch.stack(values).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DogeConfig(**SMALL), "DogeForCausalLM fails over a tree .*size.*FlatPacker and PaddingFreeActor"),
        (NemotronConfig(**SMALL), "'nemotron' does not pass keyword arguments on to its attention function"),
    ],
    ids=["mask of its own", "no keyword arguments"],
)
def test_model_that_does_not_hand_the_tree_on_is_refused_at_construction(config, message):
    model = AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(ValueError, match=message):
        TreeActor(model)
    assert all(module.training for module in model.modules())
    PaddingFreeActor(model)


def test_router_logits_are_not_written_unless_asked_for():
    actor = TreeActor(tiny_moe())
    assert ("node", "router_logits") not in actor.out_keys
    assert "router_logits" not in actor(TreePacker()(rollouts())[0])["node"].keys()


@pytest.mark.parametrize(
    "make", [tiny_qwen3, tiny_gpt2, lambda: tiny_moe(mlp_only_layers=[0, 1])], ids=["qwen3", "gpt2", "experts-nowhere"]
)
def test_router_logits_of_a_model_without_routers_are_refused_at_construction(make):
    model = make().train()
    with pytest.raises(
        ValueError, match=f"router_logits=True and {type(model).__name__}.*no router.*Qwen3-MoE, Mixtral"
    ):
        TreeActor(model, router_logits=True)
    assert all(module.training for module in model.modules())


def test_router_logits_that_do_not_stack_are_refused_at_construction():
    model = tiny_moe()
    model.model.layers[1].mlp.gate.register_forward_hook(lambda module, args, output: (output[0][:, :2], *output[1:]))
    with pytest.raises(ValueError, match=r"shapes \[\(2, 4\), \(2, 2\)\].*TreeActor.hidden_states"):
        TreeActor(model, router_logits=True)
