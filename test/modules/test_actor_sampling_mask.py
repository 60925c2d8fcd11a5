"""The actor on kept sets, against logits of each rollout alone with -inf outside the set: values and gradients."""

import copy

import pytest
import torch
from fakes import VOCABULARY, kept_log_softmax, tiny_gpt2, tiny_qwen3
from transformers import AutoModelForCausalLM, Gemma2Config

from torchrl_asyncgrpo import FlatPacker, TreeActor, TreePacker, make_rollout


def tiny_gemma2():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, final_logit_softcapping=3.0, pad_token_id=0,
        eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


MODELS = {"qwen3": tiny_qwen3, "gpt2": tiny_gpt2, "gemma2": tiny_gemma2}


def kept_set(token, generator):
    """None, the token alone, a few tokens, or all but one."""
    kind = int(torch.randint(0, 4, (1,), generator=generator))
    if kind < 2:
        return [None, [token]][kind]
    shuffled = torch.randperm(VOCABULARY, generator=generator).tolist()
    return {token, *shuffled[: [5, VOCABULARY - 1][kind - 2]]}


def rollouts(seed=0, count=8):
    """Rows of few distinct tokens; the last two are identical but for their masks, some rows have no mask."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        prompt = [[5, 6, 7], [5, 6, 8, 9]][i % 2]
        length = int(torch.randint(1, 8, (1,), generator=generator))
        tokens = torch.randint(1, 4, (length,), generator=generator).tolist()
        if i >= count - 2:
            prompt, tokens = [5, 6, 7], [1, 2, 3, 2]
        mask = [0] * len(prompt) + [int(k % 4 != 2) for k in range(len(tokens))]
        kept = [None] * len(prompt) + [kept_set(token, generator) for token in tokens]
        rows.append(
            make_rollout(
                [*prompt, *tokens],
                mask,
                [-1.0] * len(mask),
                group_id=i % 2,
                rollout_id=i,
                sampling_mask=kept if i % 3 != 1 or i >= count - 2 else None,
            )
        )
    return rows


def alone(model, rows, temperature):
    """Log-prob within its kept set, over the whole vocabulary, and entropy of every trained token, row by row."""
    values = {}
    for row in rows:
        ids, i = row["token_ids"], int(row["rollout_id"])
        for n, within, whole in kept_log_softmax(model, row, temperature):
            values[i, n] = (within[ids[n]], whole[ids[n]], -(whole.exp() * whole).sum())
    return values


def on_tree(actor, batches):
    values = {}
    for batch in batches:
        out = actor(batch)
        depth_L = batch["node", "position_ids"][batch["entry", "node"]].tolist()
        rollout_L = batch["rollout", "rollout_id"][batch["entry", "rollout"]].tolist()
        node_L, log_kept_L = batch["entry", "node"].tolist(), out["entry", "log_kept"]
        for e, (i, n, node) in enumerate(zip(rollout_L, depth_L, node_L, strict=True)):
            log_prob = out["node", "log_prob"][node]
            values[i, n] = (log_prob - log_kept_L[e], log_prob, out["node", "entropy"][node])
    return values


@pytest.mark.parametrize(
    "packer", [TreePacker(), TreePacker(token_budget=12), FlatPacker()], ids=["tree", "split", "flat"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_equals_masked_logits_of_each_rollout_alone(name, temperature, packer):
    plain = MODELS[name]().double()
    plain.set_attn_implementation("eager")  # sdpa leaves Gemma's softcap out
    actor = TreeActor(copy.deepcopy(plain), temperature=temperature, attention="reference", chunk_size=3)
    rows = rollouts()
    expected, ours = alone(plain, rows, temperature), on_tree(actor, packer(rows))
    assert ours.keys() == expected.keys()
    keys = sorted(expected)
    for which in range(3):
        torch.testing.assert_close(
            torch.stack([ours[k][which] for k in keys]),
            torch.stack([expected[k][which] for k in keys]),
            rtol=1e-6,
            atol=1e-6,
        )
    weights = torch.randn(3, len(keys), dtype=torch.float64)
    for values in (expected, ours):
        sum(weights[which, i] * values[k][which] for i, k in enumerate(keys) for which in range(3)).backward()
    for (parameter, theirs), own in zip(plain.named_parameters(), actor.model.parameters(), strict=True):
        scale = float(theirs.grad.abs().max()) + 1e-12
        assert float((own.grad - theirs.grad).abs().max()) <= 1e-6 * max(scale, 1.0), parameter


def test_log_kept_is_exact_where_one_or_all_tokens_are_kept():
    rows = [
        make_rollout([5, 6, 1, 2], [0, 0, 1, 1], [-1.0] * 4, group_id=0, rollout_id=i, sampling_mask=mask)
        for i, mask in enumerate([[None, None, [1], [2]], None, [None, None, range(VOCABULARY), None]])
    ]
    (batch,) = TreePacker()(rows)
    out = TreeActor(tiny_qwen3())(batch)
    log_kept = out["entry", "log_kept"]
    assert out["node"].batch_size == (4,), "one node per token, whatever was kept"
    assert torch.equal(log_kept[:2], out["node", "log_prob"][2:4])
    assert log_kept[[2, 3, 5]].tolist() == [0.0, 0.0, 0.0]
    assert -1e-6 < log_kept[4].item() <= 0.0


def test_rows_without_a_mask_are_computed_as_before():
    """Bit for bit: node values of a window without masks, and of one in which another row has some."""
    rows = [make_rollout([5, 6, t, 2], [0, 0, 1, 1], [-1.0] * 4, group_id=0, rollout_id=t) for t in (1, 2, 3)]
    masked = make_rollout(
        [5, 6, 1, 2], [0, 0, 1, 1], [-1.0] * 4, group_id=0, rollout_id=9, sampling_mask=[None, None, [1, 8], [2, 4, 5]]
    )
    actor = TreeActor(tiny_qwen3())
    (plain,), (mixed,) = (TreePacker()(window) for window in (rows, [*rows, masked]))
    plain, mixed = actor(plain), actor(mixed)
    assert ("entry", "log_kept") not in plain.keys(True)
    for key in ("log_prob", "entropy"):
        assert torch.equal(plain["node", key], mixed["node", key])


def test_masked_positions_are_not_forwarded_again():
    (batch,) = TreePacker()(rollouts())
    actor, seen = TreeActor(tiny_qwen3()), []
    head = actor.hidden_states
    actor.hidden_states = lambda batch: (seen.append(batch.num_nodes), head(batch))[1]
    actor(batch)
    assert seen == [batch.num_nodes]


def test_bfloat16_autocast_keeps_log_kept_in_float32_and_consistent_with_the_log_prob():
    (batch,) = TreePacker()(rollouts())
    actor = TreeActor(tiny_qwen3(), chunk_size=2)
    exact = actor(batch.clone())["entry", "log_kept"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = actor(batch)
    log_kept_L, log_prob_L = out["entry", "log_kept"], out["node", "log_prob"][batch["entry", "node"]]
    assert log_kept_L.dtype == torch.float32
    assert (log_kept_L - exact).abs().max() < 0.05  # 8 bits of logits of about 1
    size_L = torch.bincount(batch["kept", "entry"], minlength=batch.num_entries)
    assert (size_L == 1).any()
    assert torch.equal(log_kept_L[size_L == 1], log_prob_L[size_L == 1])
    assert (log_prob_L <= log_kept_L).all()


def test_a_kept_token_outside_the_vocabulary_is_named():
    row = make_rollout([5, 1], [0, 1], [-1.0] * 2, group_id=0, sampling_mask=[None, [1, VOCABULARY]])
    with pytest.raises(ValueError, match=f"kept the token id {VOCABULARY} and the model has {VOCABULARY} logits"):
        TreeActor(tiny_qwen3())(TreePacker()([row])[0])


def test_a_micro_batch_without_a_kept_set_of_its_own_keeps_all():
    rows = [
        make_rollout([5, 1], [0, 1], [-1.0] * 2, group_id=0, rollout_id=0, sampling_mask=[None, [1, 2]]),
        make_rollout([5, 6, 1], [0, 1, 1], [-1.0] * 3, group_id=0, rollout_id=1),
    ]
    actor = TreeActor(tiny_qwen3())
    first, second = (actor(batch)["entry", "log_kept"] for batch in TreePacker(min_micro_batches=2)(rows))
    assert first.item() < 0
    assert second.tolist() == [0.0, 0.0]
    second.sum().backward()
