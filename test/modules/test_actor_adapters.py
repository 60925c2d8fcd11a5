"""The actor over models with adapters: against each rollout run alone through peft's own forward, and merged."""

import pytest
import torch
from adapted import bits_of, lora, merged, quantized, quantized_gpt2, randomize, rollouts, same_bits
from fakes import tiny_gpt2, tiny_moe, tiny_qwen3
from peft import LoraConfig, PeftMixedModel, PromptTuningConfig, get_peft_model
from peft.tuners.lora.config import VeloraConfig

from torchrl_asyncgrpo import FlatPacker, GRPOLoss, TreeActor, TreePacker
from torchrl_asyncgrpo.adapters import keep_bits, unwrapped

ADAPTERS = {
    "qwen3": lora,
    "dora": lambda: lora(use_dora=True),
    "embedding": lambda: lora(tiny_qwen3(tie_word_embeddings=False), target_modules=["embed_tokens"], use_dora=True),
    "gpt2": lambda: lora(tiny_gpt2(), fan_in_fan_out=True, bias="lora_only"),
    "experts": lambda: lora(tiny_moe(), target_modules=["v_proj"], target_parameters=["mlp.experts.down_proj"]),
    "modules_to_save": lambda: lora(modules_to_save=["norm"]),
}


def naive_sum(policy):
    """Sum over all entries of the naive log-prob, with a weight each that tells them apart; and the values."""
    values = []
    for row in rollouts():
        log_p = torch.log_softmax(policy(input_ids=row["token_ids"][None]).logits[0], -1)
        where = row["loss_mask"].nonzero().flatten()
        values.append(log_p[where - 1, row["token_ids"][where]])
    values = torch.cat(values)
    return (values * torch.linspace(0.1, 1, len(values))).sum(), values.detach()


def packed_sum(actor, packer):
    """The same, in the order of rollouts, through the actor."""
    per_rollout = {}
    for batch in packer(rollouts()):
        out = actor(batch)
        log_prob_L = out["node", "log_prob"][out["entry", "node"]]
        for i, rollout_id in enumerate(batch["rollout", "rollout_id"].tolist()):
            mine = batch["entry", "rollout"] == i
            order = batch["node", "position_ids"][batch["entry", "node"]][mine].argsort()
            per_rollout[rollout_id] = log_prob_L[mine][order]
    values = torch.cat([per_rollout[key] for key in sorted(per_rollout)])
    return (values * torch.linspace(0.1, 1, len(values))).sum(), values.detach()


@pytest.mark.parametrize("packer", [TreePacker(), TreePacker(token_budget=12), FlatPacker()])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_values_and_gradients_of_a_wrapped_model(kind, packer):
    policy = ADAPTERS[kind]().eval()
    expected, values = naive_sum(policy)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    actor = TreeActor(policy)
    assert actor.model is unwrapped(policy)
    total, own = packed_sum(actor, packer)
    torch.testing.assert_close(own, values, rtol=0, atol=2e-6)
    total.backward()
    assert {n for n, p in policy.named_parameters() if p.grad is not None} == set(gradients)
    for name, p in policy.named_parameters():
        if p.grad is not None:
            assert float((p.grad - gradients[name]).abs().max()) <= 2e-5 * max(1.0, float(p.grad.abs().max())), name


def test_only_the_adapter_gets_gradients():
    policy = lora()
    actor = TreeActor(policy)
    packed_sum(actor, TreePacker())[0].backward()
    assert all((p.grad is not None) == ("lora_" in n) for n, p in policy.named_parameters())


def test_merged_model_has_the_same_log_probs():
    policy = lora()
    own = packed_sum(TreeActor(policy), TreePacker())[1]
    torch.testing.assert_close(own, packed_sum(TreeActor(merged(policy)), TreePacker())[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("bits", "tolerance"), [(4, 2e-5), (8, 0.02)])
def test_quantised_base_against_its_own_forward(tmp_path, bits, tolerance):
    """In 8 bits the columns of outliers, and with them the rounding, depend on what else is in the batch."""
    model = quantized(tmp_path, bits)
    keep_bits(model)
    policy = lora(model)
    _, values = naive_sum(policy)
    torch.testing.assert_close(packed_sum(TreeActor(policy), TreePacker())[1], values, rtol=0, atol=tolerance)


def test_actor_of_a_quantised_base_does_not_repack_it(tmp_path):
    policy = lora(quantized(tmp_path, 4).eval())
    layer = unwrapped(policy).model.layers[0].self_attn.q_proj.base_layer
    before, scales = layer.weight.clone(), layer.weight.quant_state.absmax.clone()
    actor = TreeActor(policy.eval())
    with torch.no_grad():
        packed_sum(actor, TreePacker())
    assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight.quant_state.absmax, scales)
    assert layer.weight.quant_state.dtype == torch.float32


@pytest.mark.parametrize("bits", [4, 8])
def test_state_of_a_quantised_policy_comes_back_on_a_base_that_is_loaded_anew(tmp_path, bits):
    """What a checkpoint of the trainer holds; bitsandbytes itself cannot load its own state into quantised layers."""
    policy = lora(quantized(tmp_path, bits))
    unwrapped(policy).model.norm.weight.data.mul_(2)  # in full precision, and saved
    loss_module = GRPOLoss(TreeActor(policy))
    state = {key: value.clone() for key, value in loss_module.state_dict().items()}
    assert not any("base_layer" in key for key in state)
    assert sum("lora_" in key for key in state) == 2 * 7 * 2
    other = lora(quantized(tmp_path, bits), std=0.3)
    fresh = GRPOLoss(TreeActor(other))
    before = bits_of(quantized(tmp_path, bits))
    assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"
    assert same_bits(bits_of(policy), bits_of(other))
    for name, tensor in bits_of(other).items():
        if "base_layer" in name:
            assert torch.equal(tensor, before[name.removeprefix("base_model.model.").replace(".base_layer", "")])
    del state["actor_network.model.model.norm.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*norm.weight"):
        fresh.load_state_dict(state)


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_trained_biases_of_quantised_layers_come_back(tmp_path, bits, adapted):
    def policy():
        model = quantized_gpt2(tmp_path, bits)
        return lora(model, bias="all", std=0) if adapted else model

    old, new = policy(), policy()
    loss_module, fresh = GRPOLoss(TreeActor(randomize(old))), GRPOLoss(TreeActor(new))
    state = {key: value.clone() for key, value in loss_module.state_dict().items()}
    assert not any(key.endswith(("c_attn.weight", "base_layer.weight", "SCB", "absmax")) for key in state)
    assert str(fresh.load_state_dict(state)) == "<All keys matched successfully>"
    assert same_bits(bits_of(old), bits_of(new))
    del state[next(key for key in state if key.endswith("bias") and "c_attn" in key)]
    with pytest.raises(RuntimeError, match="Missing key.*c_attn.*bias"):
        fresh.load_state_dict(state)


def test_adapters_that_cannot_be_trained_are_refused():
    untied = tiny_qwen3(tie_word_embeddings=False)
    head = get_peft_model(untied, LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="on the output head of Qwen3ForCausalLM"):
        TreeActor(head)
    prompts = get_peft_model(tiny_qwen3(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="peft_config is a PromptTuningConfig"):
        TreeActor(prompts)
    velora = LoraConfig(target_modules=["q_proj"], velora_config=VeloraConfig(num_groups=8))
    with pytest.raises(ValueError, match="of the kind VeloraLinear"):
        TreeActor(get_peft_model(tiny_qwen3(), velora))
    policy = lora()
    policy.merge_adapter()
    with pytest.raises(ValueError, match="is merged into its base"):
        TreeActor(policy)
    with pytest.raises(TypeError, match="model is a PeftMixedModel.*PeftModel"):
        TreeActor(PeftMixedModel(tiny_qwen3(), LoraConfig(target_modules=["q_proj"])))


def test_wrapped_model_goes_on_generating():
    policy = randomize(lora()).eval()
    prompt = torch.tensor([[5, 6, 7]])
    before = policy.generate(input_ids=prompt, do_sample=False, max_new_tokens=6)
    TreeActor(policy)
    assert torch.equal(policy.generate(input_ids=prompt, do_sample=False, max_new_tokens=6), before)
