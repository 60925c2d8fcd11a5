"""The reference against the naive log-probs of the model that it should be, row by row."""

import pytest
import torch
from adapted import WIDE, bits_of, lora, quantized, randomize, rollouts, same_bits
from fakes import kept_log_softmax, tiny_gpt2, tiny_qwen3
from peft import LoraConfig
from tensordict import lazy_stack
from transformers import Qwen3ForCausalLM

from torchrl_asyncgrpo import (
    FlatPacker,
    GRPOLoss,
    ModelConfig,
    PaddingFreeActor,
    ReferenceLogProbs,
    RemoteActor,
    RolloutScorer,
    TreeActor,
    TreePacker,
    load_policy,
    make_rollout,
    model_kwargs,
    reference_policy,
)
from torchrl_asyncgrpo.adapters import unwrapped
from torchrl_asyncgrpo.modules import checkpoint
from torchrl_asyncgrpo.modules.reference import BaseActor
from torchrl_asyncgrpo.remote.hosted_policy import HostedPolicy

KL = dict(kl_to_ref_coeff=0.1)


@torch.no_grad()
def naive(model, temperature=1.0):
    """Log-prob of every trained token of every rollout, one row at a time; in order of rollout, then of position."""
    values = []
    for row in rollouts():
        whole = {n: log_p_V for n, _, log_p_V in kept_log_softmax(model.eval(), row, temperature)}
        values.append(torch.stack([whole[n][row["token_ids"][n]] for n in whole]))
    return torch.cat(values)


def by_rollout(batches):
    """``entry.ref_log_prob`` of a window in the order of :func:`naive`."""
    rows = {}
    for batch in batches:
        depth_L = batch["node", "position_ids"][batch["entry", "node"]]
        for i, rollout_id in enumerate(batch["rollout", "rollout_id"].tolist()):
            mine = batch["entry", "rollout"] == i
            order = depth_L[mine].argsort()
            rows[rollout_id] = batch["entry", "ref_log_prob"][mine][order]
    return torch.cat([rows[key] for key in sorted(rows)])


def scored(reference, packer=None):
    batches = (packer or TreePacker())(rollouts())
    return by_rollout([ReferenceLogProbs(reference)(batch) for batch in batches])


@pytest.fixture
def directory(tmp_path):
    tiny_qwen3(**WIDE).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("packer", [TreePacker(), TreePacker(token_budget=12), FlatPacker()])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reference_log_probs_are_those_of_the_plain_model(directory, packer, temperature):
    policy = load_policy(directory)
    actor = TreeActor(policy, temperature=temperature)
    reference = reference_policy(actor, directory, **KL)
    expected = naive(Qwen3ForCausalLM.from_pretrained(directory), temperature)
    randomize(policy)
    torch.testing.assert_close(scored(reference, packer).double(), expected, rtol=0, atol=2e-6)
    assert not torch.allclose(naive(policy, temperature), expected, atol=1e-3)


def test_no_reference_without_a_penalty(monkeypatch):
    monkeypatch.setattr(checkpoint, "load_model", lambda *_, **__: pytest.fail("loaded"))
    assert reference_policy(TreeActor(tiny_qwen3()), "nobody/nothing", kl_to_ref_coeff=0.0) is None
    with pytest.raises(ValueError, match="kl_to_ref_coeff=-1"):
        reference_policy(TreeActor(tiny_qwen3()), kl_to_ref_coeff=-1)


def test_second_load_has_the_policys_arguments_and_revision(directory, monkeypatch):
    """C3."""
    seen, load = [], Qwen3ForCausalLM.from_pretrained
    monkeypatch.setattr(Qwen3ForCausalLM, "from_pretrained", lambda *a, **kw: (seen.append((a, kw)), load(*a, **kw))[1])
    kwargs = {"dtype": "float64", "revision": "main", "use_cache": False}
    given = dict(kwargs)
    actor = TreeActor(load_policy(directory, kwargs), attention="reference", chunk_size=3, temperature=0.5)
    reference = reference_policy(actor, directory, kwargs, **KL)
    assert seen[0] == seen[1]
    assert seen[0][1]["revision"] == "main"
    assert kwargs == given
    assert reference.model is not actor.model
    assert reference.model.dtype == torch.float64
    assert (reference.temperature, reference.chunk_size, reference.attention) == (0.5, 3, "reference")
    assert not any(p.requires_grad for p in reference.parameters())
    assert not reference.model.training


def plain_kwargs(**options):
    return model_kwargs(ModelConfig(dtype="float32", **options))


@pytest.mark.parametrize(
    "kwargs", [None, plain_kwargs(), plain_kwargs(device_map={"": "cpu"})], ids=["none", "no map", "map"]
)
def test_reference_is_on_the_device_of_the_policy(directory, kwargs):
    """Meta stands for cuda here."""
    actor = TreeActor(load_policy(directory, kwargs).to("meta"))
    for source in (directory, tiny_qwen3(), None):
        reference = reference_policy(actor, source, kwargs, **KL)
        assert {p.device.type for p in reference.parameters()} == {"meta"}


@pytest.mark.parametrize("attention", ["eager", None])
def test_reference_of_a_padding_free_actor_is_one(directory, attention):
    kwargs = {"attn_implementation": attention} if attention else None
    policy = load_policy(directory, kwargs, attention=None)
    actor = PaddingFreeActor(policy, temperature=0.6, chunk_size=3)
    references = [reference_policy(actor, source, kwargs, **KL) for source in (directory, policy, None)]
    references.append(reference_policy(actor, directory, **KL))
    expected = naive(Qwen3ForCausalLM.from_pretrained(directory), 0.6)
    randomize(policy)
    for reference in references:
        assert type(reference) is PaddingFreeActor
        assert (reference.attention, reference.chunk_size) == (attention or "sdpa", 3)
        own = scored(reference, FlatPacker(padding_free=True))
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=2e-6)


def test_reference_of_an_instance_is_a_frozen_copy(directory):
    policy = load_policy(Qwen3ForCausalLM.from_pretrained(directory))
    actor = TreeActor(policy)
    references = [reference_policy(actor, **KL), reference_policy(actor, policy, **KL)]
    expected = naive(Qwen3ForCausalLM.from_pretrained(directory))
    randomize(policy)
    for reference in references:
        assert not any(p.requires_grad for p in reference.parameters())
        torch.testing.assert_close(scored(reference).double(), expected, rtol=0, atol=2e-6)
    assert all(p.requires_grad for p in policy.parameters())


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["norm"]}, {"use_dora": True}])
def test_with_an_adapter_the_reference_is_the_base_of_the_same_model(options):
    expected = naive(tiny_qwen3())
    policy = lora(**options).train()
    policy.get_base_model().model.layers[1].eval()
    actor = TreeActor(policy)
    reference = reference_policy(actor, "not/loaded", **KL)
    assert isinstance(reference, BaseActor)
    modes, bits = [m.training for m in policy.modules()], bits_of(policy)
    trained = [p.requires_grad for p in policy.parameters()]
    torch.testing.assert_close(scored(reference).double(), expected, rtol=0, atol=2e-6)
    assert [m.training for m in policy.modules()] == modes
    assert [p.requires_grad for p in policy.parameters()] == trained
    assert same_bits(bits, bits_of(policy))
    assert not torch.allclose(naive(policy), expected, atol=1e-3), "the adapter is on again"


def test_reference_is_without_dropout():
    expected = naive(tiny_gpt2())
    policy = lora(tiny_gpt2(resid_pdrop=0.5), fan_in_fan_out=True, lora_dropout=0.5).train()
    reference = reference_policy(TreeActor(policy), **KL)
    torch.testing.assert_close(scored(reference).double(), expected, rtol=0, atol=2e-6)


def test_reference_on_a_quantised_base_is_that_base(tmp_path):
    expected = naive(load_policy(quantized(tmp_path, 4), attention=None).requires_grad_(False))
    policy = load_policy(quantized(tmp_path, 4), peft_config=LoraConfig(target_modules="all-linear"))
    reference = reference_policy(TreeActor(randomize(policy)), **KL)
    torch.testing.assert_close(scored(reference).double(), expected, rtol=0, atol=2e-5)


def test_base_that_is_trained_too_is_no_reference():
    actor = TreeActor(lora(tiny_gpt2(), fan_in_fan_out=True, bias="all"))
    with pytest.raises(ValueError, match=r"parameters of the base are trained.*bias='none'"):
        reference_policy(actor, **KL)
    assert reference_policy(actor, kl_to_ref_coeff=0.0) is None


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_base_that_gave_a_part_of_itself_to_the_adapter_is_no_reference(kind):
    policy = load_policy(tiny_qwen3(), peft_config=LoraConfig(target_modules="all-linear", init_lora_weights=kind))
    with pytest.raises(ValueError, match=f"init_lora_weights='{kind}'.*Build a TreeActor"):
        reference_policy(TreeActor(policy), **KL)


def test_policy_elsewhere_has_its_reference_elsewhere():
    actor = RemoteActor(HostedPolicy(lambda: TreeActor(tiny_qwen3())))
    with pytest.raises(TypeError, match="RemoteActor of a StandIn.*for transformers models of this process"):
        reference_policy(actor, **KL)
    assert reference_policy(actor, kl_to_ref_coeff=0.0) is None


def test_an_adapter_that_fails_in_the_reference_is_on_afterwards():
    policy = lora()
    actor = TreeActor(policy)
    reference = reference_policy(actor, **KL)
    before = naive(policy)
    with pytest.raises(KeyError):
        reference(TreePacker()(rollouts())[0].exclude("entry"))
    assert torch.equal(naive(policy), before)


def test_nothing_but_the_reference_is_written_on_the_batch():
    actor = TreeActor(lora())
    (batch,) = TreePacker()(rollouts())
    before = batch.clone()
    out = ReferenceLogProbs(reference_policy(actor, **KL))(batch)
    assert out is batch
    keys = set(batch.keys(True, True))
    assert keys - set(before.keys(True, True)) == {("entry", "ref_log_prob")}
    assert all(torch.equal(batch[key], before[key]) for key in before.keys(True, True))
    assert batch["entry", "ref_log_prob"].dtype == torch.float32
    assert not batch["entry", "ref_log_prob"].requires_grad


def test_reference_is_of_the_whole_vocabulary_where_the_sampler_kept_a_part():
    class Watched(TreeActor):
        def forward(self, batch):
            assert "kept" not in batch.keys(), "nothing to compute of it"
            return super().forward(batch)

    actor = Watched(tiny_qwen3())
    row = make_rollout([5, 6, 7], [0, 0, 1], [0.0, 0.0, -0.1], group_id=0, sampling_mask=[None, None, [7, 9]])
    plain = make_rollout([5, 6, 7], [0, 0, 1], [0.0, 0.0, -0.1], group_id=0)
    batches = [TreePacker()([r])[0] for r in (row, plain)]
    values = [ReferenceLogProbs(actor)(batch)["entry", "ref_log_prob"] for batch in batches]
    assert "kept" in batches[0].keys()
    assert torch.equal(values[0], values[1])


def test_stage_of_the_trainer_gets_a_stack_of_micro_batches():
    actor = TreeActor(lora())
    reference = ReferenceLogProbs(reference_policy(actor, **KL))
    micro_batches = TreePacker(token_budget=8)(rollouts())
    assert len(micro_batches) > 1
    stack = reference(lazy_stack(micro_batches))
    torch.testing.assert_close(by_rollout(stack.unbind(0)).double(), naive(tiny_qwen3()), rtol=0, atol=2e-6)


def test_scorer_of_rollouts_and_of_batches_agree():
    policy = lora()
    reference = reference_policy(TreeActor(policy), **KL)
    rows = RolloutScorer(reference, TreePacker(), key="ref_log_prob")(rollouts())
    of_rollouts = torch.cat([row["ref_log_prob"][row["loss_mask"]] for row in rows])
    torch.testing.assert_close(of_rollouts, scored(reference), rtol=0, atol=1e-6)


def test_penalty_of_a_new_adapter_is_zero_and_grows():
    policy = load_policy(tiny_qwen3(), peft_config=LoraConfig(target_modules="all-linear"))
    actor = TreeActor(policy)
    loss_module = GRPOLoss(actor, **KL)
    reference = ReferenceLogProbs(reference_policy(actor, **KL))
    (batch,) = TreePacker()(rollouts())
    assert float(loss_module(reference(batch))["kl_to_ref"]) == pytest.approx(0, abs=1e-6)
    randomize(policy)
    out = loss_module(reference(batch))
    assert float(out["kl_to_ref"]) > 1e-3
    out["loss_kl_to_ref"].backward()
    assert all(p.grad is None for n, p in unwrapped(policy).named_parameters() if "lora_" not in n)
