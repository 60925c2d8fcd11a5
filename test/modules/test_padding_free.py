"""The plain model over one row of rollouts: as each rollout alone, and no mixing of rollouts goes unseen."""

import copy

import pytest
import torch
from fakes import VOCABULARY, kept_log_softmax, tiny_gpt2, tiny_moe, tiny_qwen3
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, MiniMaxConfig, XGLMConfig

from torchrl_asyncgrpo import FlatPacker, TreeActor, TreePacker, load_policy, make_rollout
from torchrl_asyncgrpo.data.pretrained import SMOLLM2
from torchrl_asyncgrpo.modules.padding_free import PaddingFreeActor
from torchrl_asyncgrpo.packing.padding_free import from_padding_free


def tiny_gemma2():
    torch.manual_seed(0)
    fields = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    fields |= dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=4, final_logit_softcapping=3.0)
    return AutoModelForCausalLM.from_config(Gemma2Config(**fields), attn_implementation="eager").eval()


MODELS = {"qwen3": tiny_qwen3, "gpt2": tiny_gpt2, "gemma2": tiny_gemma2}


def rollouts(kept=False):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(5):
        prompt = [[5, 6, 7], [5, 6, 8, 9]][i % 2]
        length = int(torch.randint(1, 8, (1,), generator=generator))
        tokens = [*prompt, *torch.randint(1, 4, (length,), generator=generator).tolist()]
        mask = [0] * len(prompt) + [int(k % 4 != 2) for k in range(length)]
        sets = [{t, (t + i) % 9} if on and kept else None for t, on in zip(tokens, mask, strict=True)]
        rows.append(make_rollout(tokens, mask, [-1.0] * len(mask), group_id=i % 2, rollout_id=i, sampling_mask=sets))
    return rows


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_equals_each_rollout_alone(name, temperature, kept):
    plain = MODELS[name]().double()
    actor = PaddingFreeActor(copy.deepcopy(plain), temperature=temperature, chunk_size=3)
    expected, ours = [], []
    rows = rollouts(kept)
    for batch in FlatPacker(token_budget=20)(rows):
        out = actor(batch)
        node_L, depth_L = batch["entry", "node"], batch["node", "position_ids"][batch["entry", "node"]]
        own = {}
        for e, (node, depth, r) in enumerate(
            zip(node_L.tolist(), depth_L.tolist(), batch["entry", "rollout"].tolist(), strict=True)
        ):
            log_prob, entropy = (out["node", key][node] for key in ("log_prob", "entropy"))
            log_kept = out["entry", "log_kept"][e] if kept else torch.zeros(())
            own[int(batch["rollout", "rollout_id"][r]), depth] = (log_prob, entropy, log_prob - log_kept)
        for row in (row for row in rows if int(row["rollout_id"]) in {r for r, _ in own}):
            for n, within, whole in kept_log_softmax(plain, row, temperature):
                token = int(row["token_ids"][n])
                expected.append(torch.stack([whole[token], -(whole.exp() * whole).sum(), within[token]]))
                ours.append(torch.stack(own[int(row["rollout_id"]), n]))
    assert len(ours) == sum(int(row["loss_mask"].sum()) for row in rows)
    ours, expected = torch.stack(ours), torch.stack(expected)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn_like(ours)
    for values in (ours, expected):
        (weights * values).sum().backward()
    for (parameter, theirs), own in zip(plain.named_parameters(), actor.model.parameters(), strict=True):
        scale = float(theirs.grad.abs().max()) + 1e-12
        assert float((own.grad - theirs.grad).abs().max()) <= 1e-6 * max(scale, 1.0), parameter


def test_a_row_alone_is_enough():
    actor = PaddingFreeActor(tiny_qwen3())
    (batch,) = FlatPacker(padding_free=True)(rollouts(kept=True))
    again = actor(from_padding_free(batch["flat"]))
    actor(batch)
    for key in (("node", "log_prob"), ("node", "entropy"), ("entry", "log_kept")):
        assert torch.equal(again[key], batch[key])


def test_equals_tree_attention_in_router_logits():
    (flat,), (tree,) = (packer()(rollouts()) for packer in (FlatPacker, TreePacker))
    PaddingFreeActor(tiny_moe(), router_logits=True)(flat)
    TreeActor(tiny_moe(), router_logits=True)(tree)
    ours, theirs = (b["node", "router_logits"][b["entry", "node"]] for b in (flat, tree))
    order = [(int(b["rollout", "rollout_id"][r])) for b in (flat, tree) for r in b["entry", "rollout"]]
    assert order[: len(order) // 2] == order[len(order) // 2 :]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_model_stays_as_it_is():
    model = tiny_qwen3().train()
    model.model.layers[0].eval()
    PaddingFreeActor(model)
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert not model.model.layers[0].training


def test_tree_batch_is_refused():
    (batch,) = TreePacker()(rollouts())
    with pytest.raises(ValueError, match=r"branches off node .*FlatPacker"):
        PaddingFreeActor(tiny_qwen3())(batch)


class Leaky(type(tiny_qwen3())):
    """Hands every sequence of a row the mask of one long sequence."""

    def __init__(self, config):
        super().__init__(config)
        inner = self.model.forward

        def forward(input_ids, **options):
            T = input_ids.shape[1]
            return inner(input_ids=input_ids, **options | {"attention_mask": torch.ones(1, T, dtype=torch.int64)})

        self.model.forward = forward


def test_model_that_mixes_sequences_is_refused():
    with pytest.raises(ValueError, match=r"Leaky with attn_implementation='sdpa' mixes the sequences.*TreeActor"):
        PaddingFreeActor(Leaky(tiny_qwen3().config))


SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
LINEAR = MiniMaxConfig(**SMALL, head_dim=8, num_local_experts=2, layer_types=["linear_attention", "full_attention"])
BY_PLACE_IN_THE_ROW = XGLMConfig(vocab_size=VOCABULARY, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LINEAR, "MiniMaxForCausalLM has layers of type linear_attention.*models of attention layers only"),
        (BY_PLACE_IN_THE_ROW, "XGLMForCausalLM with .* mixes the sequences"),
    ],
)
def test_models_that_mix_a_little_are_refused(config, message):
    """With weights that are not trained the difference is small, and grows with the row."""
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        PaddingFreeActor(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_mistaken_for_mixing(dtype):
    for model in (tiny_qwen3(), tiny_moe()):
        PaddingFreeActor(model.to(dtype))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rounding_of_thirty_layers_is_not_mistaken_for_mixing(attention, threads):
    model = load_policy(SMOLLM2, {"dtype": "float32", "attn_implementation": attention}, attention=None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        PaddingFreeActor(model)
    finally:
        torch.set_num_threads(before)


def test_plain_module_is_a_type_error():
    with pytest.raises(TypeError, match=r"Linear.*AutoModelForCausalLM"):
        PaddingFreeActor(nn.Linear(2, 2))
