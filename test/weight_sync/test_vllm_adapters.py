"""Merged pushes to vLLM: what travels and in which dtype, one tensor at a time; and into a real server."""

import hashlib
import sys
import types
import weakref

import pytest
import torch
from adapted import bits_of, lora, merged, quantized, randomize, same_bits
from fakes import served_qwen3, tiny_moe, tiny_qwen3
from peft import IA3Config, LoraConfig, get_peft_model
from push_tools import own_log_probs, sample
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from torchrl_asyncgrpo import TreeActor, VLLMEngine, VLLMWeightSyncSender, load_policy
from torchrl_asyncgrpo.adapters import keep_bits
from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model
from torchrl_asyncgrpo.engines.vllm_description import ServerDescription

URL = "http://server"


class Server:
    """Answers a sender, and holds what a transfer brings."""

    def __init__(self, dtype="float32"):
        self.held, self.version, self.dtype = {}, 0, dtype

    def describe(self):
        return ServerDescription(
            model="policy", root="/elsewhere", max_model_len=128, has_weight_routes=True, has_generate_route=True,
            dtype=self.dtype, transfer_backend="shm", world_size=1,
        )  # fmt: skip

    def checksums(self, **_):
        return {
            f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
            for name, tensor in self.held.items()
        }

    def weight_version(self, **_):
        return self.version

    def pause(self, *_, **__):
        pass

    def resume(self, **_):
        pass

    def post(self, *_, **__):
        pass

    def close(self):
        pass


class Source:
    """Of a push; sees that no more than one tensor that was made for it is alive."""

    def __init__(self, metadata):
        self.metadata, self.weights, self.nbytes = list(metadata), (), 0

    def read(self, own):
        previous = None
        for (name, dtype, shape), (given, tensor) in zip(self.metadata, self.weights, strict=True):
            assert (given, tuple(tensor.shape)) == (name, shape)
            assert previous is None or previous() is None, "the tensor before is alive"
            previous = None if tensor.data_ptr() in own else weakref.ref(tensor)
            yield name, tensor.detach().to(dtype).clone()
            del tensor


@pytest.fixture
def pushed(monkeypatch):
    """Push a policy, and return the sender and the server, whose tensors are those that it got."""

    def push(policy, server=None, failing_at=None, **options):
        server = server or Server()
        own = {p.data_ptr() for p in policy.parameters()}

        class Transfer:
            sent_bytes = 0

            def __init__(self, source):
                self.source = source

            def stage(self, waiting):
                for i, (name, tensor) in enumerate(self.source.read(own)):
                    if i == failing_at:
                        raise RuntimeError("out of memory")
                    server.held[name] = tensor

            def send_weights(self):
                server.version += 1

            def shutdown(self):
                pass

        fake = types.ModuleType("vllm_transfer")
        fake.PushSource = Source
        fake.PushClient = lambda http, timeout: types.SimpleNamespace(version=None)
        fake.open_transfer = lambda client, source, **_: Transfer(source)
        import torchrl_asyncgrpo.weight_sync as package

        monkeypatch.setitem(sys.modules, "torchrl_asyncgrpo.weight_sync.vllm_transfer", fake)
        monkeypatch.setattr(package, "vllm_transfer", fake, raising=False)
        sender = VLLMWeightSyncSender(policy, URL, **{"verify": "checksum", **options})
        sender._http = server
        sender.update_weights()
        return sender, server

    return push


def test_server_gets_base_plus_delta_tensor_by_tensor(pushed):
    policy = lora()
    before = bits_of(policy)
    sender, server = pushed(policy)
    expected = merged(policy)
    assert server.held.keys() == dict(expected.named_parameters()).keys()
    for name, tensor in expected.named_parameters():
        torch.testing.assert_close(server.held[name], tensor.detach(), rtol=0, atol=1e-6, msg=name)
    for version in range(2, 101):
        assert sender.update_weights() == version
    assert same_bits(before, bits_of(policy))


def test_trained_weights_are_the_same_after_a_push_that_raised(pushed):
    policy = lora()
    before = bits_of(policy)
    with pytest.raises(RuntimeError, match="out of memory"):
        pushed(policy, failing_at=3)
    assert same_bits(before, bits_of(policy))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_base_travels_dequantised(bits, tmp_path, pushed):
    model = quantized(tmp_path, bits)
    keep_bits(model)
    policy = lora(model)
    before = bits_of(policy)
    sender, server = pushed(policy)
    assert sender.serving_dtype == torch.float32
    saved = load_file(tmp_path / "model.safetensors")
    assert {n: t.shape for n, t in server.held.items()} == {n: t.shape for n, t in saved.items()}
    assert same_bits(before, bits_of(policy))
    plain = tiny_qwen3(hidden_size=64, intermediate_size=64, head_dim=16)
    plain.load_state_dict(server.held, strict=False)
    x = torch.arange(1, 9)[None]
    with torch.no_grad():
        difference = plain.eval()(x).logits - policy.eval()(input_ids=x).logits
    assert float(difference.abs().max()) < (2e-6 if bits == 4 else 0.02)


def test_adapters_in_float32_do_not_decide_the_serving_dtype():
    assert VLLMWeightSyncSender(lora(tiny_qwen3().bfloat16()), URL).serving_dtype == torch.bfloat16
    policy = tiny_qwen3()
    policy.model.norm.double()
    with pytest.raises(ValueError, match=r"parameters of torch.float32, torch.float64; pass serving_dtype"):
        VLLMWeightSyncSender(lora(policy), URL)


def test_server_is_compared_with_the_model_inside(tmp_path):
    served_qwen3().save_pretrained(tmp_path)
    server = Server()
    described = server.describe()
    server.describe = lambda: ServerDescription(**{**vars(described), "root": str(tmp_path)})
    sender = VLLMWeightSyncSender(lora(), URL)
    sender._http = server
    with pytest.raises(ValueError, match="serves another model.*hidden_size 128"):
        sender.init_weight_transfer()


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("build", [tiny_qwen3, tiny_moe])
def test_names_and_shapes_are_those_of_the_base_checkpoint(build, loaded, adapter, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    policy = lora(model, target_modules=["q_proj"]) if adapter else model
    sent = VLLMWeightSyncSender(policy, URL).weights()
    assert {n: t.shape for n, t in sent.items()} == {n: t.shape for n, t in saved.items()}
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name]) is not (adapter and "q_proj" in name), name


def test_experts_of_an_adapter_are_merged_before_they_are_stored_one_by_one(tmp_path):
    model = tiny_moe()
    model.save_pretrained(tmp_path)
    policy = lora(model, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    sent = VLLMWeightSyncSender(policy, URL).weights()
    again = tmp_path / "merged"
    merged(policy).save_pretrained(again)
    for name, tensor in load_file(again / "model.safetensors").items():
        torch.testing.assert_close(sent[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_adapter_that_cannot_be_merged_is_refused_at_construction():
    policy = get_peft_model(tiny_qwen3(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="ia3.*LoRA, rsLoRA and DoRA"):
        VLLMWeightSyncSender(policy, URL)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
def test_log_probs_of_a_real_server_are_the_trainers(bits, smollm2_server):
    quantization = None if bits is None else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    kwargs = {"dtype": torch.float32, "quantization_config": quantization}
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    policy = randomize(load_policy(resolve_model(SMOLLM2), kwargs, peft_config=adapter), std=0.02)
    before = bits_of(policy)
    sender = VLLMWeightSyncSender(policy, smollm2_server.url, verify="checksum", timeout=60)
    engine = VLLMEngine(smollm2_server.url)
    assert sender.update_weights() == 1
    completions = sample(engine, n=8, max_tokens=40)
    own_L, sampled_L = own_log_probs(policy, completions)
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)
    assert same_bits(before, bits_of(policy))
    with policy.disable_adapter():
        base_L, _ = own_log_probs(policy, completions)
    assert float((base_L - sampled_L).abs().max()) > 0.1, "the base alone is another policy"
    assert TreeActor(policy).model is policy.get_base_model()
    engine.shutdown()
    sender.destroy()
