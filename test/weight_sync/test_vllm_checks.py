"""Which server cannot serve an adapter, said with the flag to add; and whether its base is that of the adapter."""

import dataclasses
import hashlib
import re

import pytest
import torch
from adapted import lora
from fakes import tiny_qwen3

from torchrl_asyncgrpo.adapters import LoRATensors, ServedWeights
from torchrl_asyncgrpo.engines.vllm_description import AdapterSupport, ServerDescription
from torchrl_asyncgrpo.weight_sync.vllm_checks import check_adapter_server, check_base, check_server

SUPPORT = AdapterSupport(slots=3, max_rank=8, dtype="float32")
SERVER = ServerDescription(
    model="policy", root="/elsewhere", max_model_len=128, has_weight_routes=True, has_generate_route=True,
    has_adapter_routes=True, dtype="float32", world_size=2, replicas=1, api_servers=1, adapters=SUPPORT,
)  # fmt: skip
LAYERS = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
WANTED = dict(url="http://s", serving_dtype=torch.float32, slots=3, rank=8, layers=LAYERS, held_version=0)


@pytest.fixture(scope="module")
def policy():
    return lora()


def changed(**changes):
    return dataclasses.replace(SERVER, **changes)


def test_a_server_with_just_enough_of_all_is_taken(policy):
    assert check_adapter_server(SERVER, policy, **WANTED) is SUPPORT
    for modules in (("q_proj", "k_proj"), ("o_proj", "qkv_proj"), tuple(LAYERS)):
        restricted = dataclasses.replace(SUPPORT, target_modules=modules)
        assert check_adapter_server(changed(adapters=restricted), policy, **WANTED) is restricted
    check_adapter_server(changed(device="cpu"), policy, **WANTED)
    half = changed(device="cuda", dtype="bfloat16")
    check_adapter_server(half, policy, **{**WANTED, "serving_dtype": torch.bfloat16})


SMALL = dataclasses.replace(SUPPORT, slots=2, max_rank=4)


@pytest.mark.parametrize(
    ("server", "wanted", "reasons"),
    [
        (changed(adapters=None), {}, ["takes no adapters: .* --enable-lora --max-loras 3 --max-lora-rank 8"]),
        (
            changed(adapters=SMALL),
            {},
            ["2 adapters at once and max_staleness=1 needs 3: .*--max-loras 3", "rank 4 and"],
        ),
        (
            changed(adapters=dataclasses.replace(SUPPORT, target_modules=("o_proj",))),
            {},
            ["on o_proj alone and this one is on q_proj too: .*without --lora-target-modules"],
        ),
        (
            changed(adapters=dataclasses.replace(SUPPORT, target_modules=(LAYERS[0], "gate_up_proj"))),
            {"layers": [*LAYERS, "model.layers.0.mlp.up_proj"]},
            ["gate_up_proj alone and this one is on q_proj too"],
        ),
        (changed(device="cuda"), {}, ["serves float32 on a GPU, where vLLM dies.*--dtype bfloat16"]),
        (changed(has_adapter_routes=False), {}, ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"]),
        (changed(has_weight_routes=False, adapters=None), {}, ["VLLM_SERVER_DEV_MODE=1"]),
        (
            changed(replicas=2, api_servers=2),
            {},
            ["2 API servers, each with a list of adapters.*--api-server-count 1", "2 data-parallel replicas.*-size 1"],
        ),
        (changed(api_servers=4), {}, ["4 API servers.*--api-server-count 1"]),
        (changed(replicas=4), {}, ["4 data-parallel replicas, into which pushes of adapters are not tested"]),
        (changed(quantization="awq"), {}, [r"few bits \(awq\)"]),
        (SERVER, {"held_version": 7}, ["whole weights of version 7 were pushed: restart it"]),
        (changed(dtype="bfloat16"), {}, ["serves bfloat16 and the sender sends float32: .*--dtype float32"]),
        (
            changed(adapters=SMALL, has_adapter_routes=False, replicas=2),
            {},
            ["--max-loras 3", "--max-lora-rank 8", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "2 data-parallel"],
        ),
    ],
)
def test_all_that_a_server_lacks_is_named_at_once_with_the_merged_push_as_the_other_way(
    server, wanted, reasons, policy
):
    with pytest.raises(ValueError, match=r"http://s cannot serve this adapter.*merged, with VLLMWeightSync") as error:
        check_adapter_server(server, policy, **{**WANTED, **wanted})
    for reason in reasons:
        assert error.match(reason)


def test_a_server_of_another_model_is_named(policy, tmp_path):
    tiny_qwen3(hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"serves another model.*hidden_size 64 \(here 32\)"):
        check_adapter_server(changed(root=str(tmp_path)), policy, **WANTED)


def test_a_server_of_adapters_takes_no_merged_weights(policy):
    with pytest.raises(ValueError, match="started with --enable-lora.*VLLMAdapterSyncSender"):
        check_server(
            changed(transfer_backend="shm"), policy, url="http://s", backend="shm", serving_dtype=torch.float32
        )


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


@pytest.fixture
def checksums(policy):
    """As a server on a CPU has them: linear layers are fused and cannot be read."""
    found = {}
    for name, tensor in ServedWeights(policy, merge=False).items():
        packed = "proj" in name
        key = name.replace("embed_tokens.", "embed_tokens.base_layer.").replace("proj.", "proj.base_layer.")
        key = re.sub("[qkv]_proj", "qkv_proj", re.sub("(gate|up)_proj", "gate_up_proj", key))
        found[f"dp0:pp0:pcp0:tp0:{key}"] = digest(tensor[:0] if packed else tensor)
    return found


def check(policy, checksums, layers=None):
    layers = LoRATensors(policy).layers if layers is None else layers
    check_base(ServedWeights(policy, merge=False), checksums, torch.float32, layers=layers, url="http://s")


def test_the_base_is_what_is_below_the_adapter(policy, checksums, caplog):
    check(policy, checksums)
    check(policy, {key: digest(torch.empty(0)) for key in checksums})
    assert not caplog.records, "what cannot be read on any CPU is not worth a word"


@pytest.mark.parametrize("name", ["model.embed_tokens.base_layer.weight", "model.norm.weight"])
def test_another_base_is_named(name, policy, checksums):
    checksums[f"dp0:pp0:pcp0:tp0:{name}"] = digest(torch.ones(3))
    with pytest.raises(
        ValueError, match="serves another base than that of the adapter.*Start it with --model DIRECT"
    ) as error:
        check(policy, checksums)
    assert error.match("are not those below the adapter.*lays its weights out anew, pass verify='none'")
    assert "Push again" not in str(error.value)


def test_linear_layers_are_compared_where_they_can_be_read(policy, checksums):
    base = ServedWeights(policy, merge=False)
    key, name = (f"model.layers.0.mlp.down_proj.{part}weight" for part in ("base_layer.", ""))
    checksums[f"dp0:pp0:pcp0:tp0:{key}"] = digest(base[name])
    check(policy, checksums)
    checksums[f"dp0:pp0:pcp0:tp0:{key}"] = digest(ServedWeights(policy)[name])
    with pytest.raises(ValueError, match="down_proj"):
        check(policy, checksums)


def test_a_layer_that_the_server_would_leave_out_is_named(policy, checksums):
    """A checkpoint of text and images has the language model under another name; vLLM serves the bare base then."""
    inside = {key.replace(":model.", ":language_model.model."): digest for key, digest in checksums.items()}
    with pytest.raises(ValueError, match=r"adapter is on model\.layers\.0\.self_attn\.q_proj, and the vLLM server at"):
        check(policy, inside)
    last = [key for key in checksums if "layers.1.mlp.down_proj" not in key]
    with pytest.raises(ValueError, match=r"on model\.layers\.1\.mlp\.down_proj, .*--model DIRECTORY.*verify='none'"):
        check(policy, {key: checksums[key] for key in last})
    check(policy, {key: checksums[key] for key in last}, layers=["model.layers.0.mlp.up_proj"])
