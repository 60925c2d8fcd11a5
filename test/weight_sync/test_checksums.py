import hashlib
import re

import pytest
import torch

from torchrl_asyncgrpo.weight_sync.checksums import compare_checksums

Q, K, V = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)
ATTENTION = "model.layers.0.self_attn"
WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(100, 4),
    f"{ATTENTION}.q_proj.weight": Q,
    f"{ATTENTION}.k_proj.weight": K,
    f"{ATTENTION}.v_proj.weight": V,
    f"{ATTENTION}.o_proj.weight": torch.randn(4, 8),
    "model.norm.weight": torch.randn(4),
}


def digest(tensor, dtype=torch.float32):
    return hashlib.sha256(tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def served(rank=0, shards=1, dtype=torch.float32, **changes):
    """What vLLM keeps on one rank: fused projections, rows or columns of its own, a padded vocabulary."""

    def part(tensor, dim=0):
        return tensor.chunk(shards, dim)[rank]

    tensors = {
        "model.embed_tokens.weight": part(torch.cat([WEIGHTS["model.embed_tokens.weight"], torch.zeros(28, 4)])),
        f"{ATTENTION}.qkv_proj.weight": torch.cat([part(Q), part(K), part(V)]),
        f"{ATTENTION}.o_proj.weight": part(WEIGHTS[f"{ATTENTION}.o_proj.weight"], 1),
        "model.norm.weight": WEIGHTS["model.norm.weight"],
    }
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {f"dp0:pp0:pcp0:tp{rank}:{name}": digest(tensor, dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 2])
def test_fused_padded_and_sharded_weights_are_recognised(shards, dtype):
    checksums = {}
    for rank in range(shards):
        checksums |= served(rank, shards, dtype)
    compare_checksums(WEIGHTS, checksums, dtype)


def test_heads_of_keys_that_several_ranks_share_are_recognised():
    checksums = {}
    for rank in range(4):
        own = torch.cat([Q.chunk(4)[rank], K.chunk(2)[rank // 2], V.chunk(2)[rank // 2]])
        checksums[f"dp0:pp0:pcp0:tp{rank}:{ATTENTION}.qkv_proj.weight"] = digest(own)
    compare_checksums(
        {name: WEIGHTS[f"{ATTENTION}.{name[-13:]}"] for name in WEIGHTS if "_proj" in name and "o_" not in name},
        checksums,
        torch.float32,
    )


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_one_changed_element_of_any_tensor_is_found(name):
    weights = {key: tensor.clone() for key, tensor in WEIGHTS.items()}
    weights[name].view(-1)[-1] += 1e-3
    part = "qkv_proj" if re.search("[qkv]_proj", name) else name
    with pytest.raises(ValueError, match=rf"{part}.* 0 more of 4 parameters are not what was sent"):
        compare_checksums(weights, served(), torch.float32)


@pytest.mark.parametrize("parallel", ["none", "tensor", "expert"])
def test_stacked_experts_are_recognised(parallel):
    prefix = "model.layers.0.mlp.experts"
    weights = {
        f"{prefix}.{i}.{name}_proj.weight": torch.randn(shape)
        for i in range(4)
        for name, shape in (("gate", (6, 4)), ("up", (6, 4)), ("down", (4, 6)))
    }

    def part(i, name, dim, rank):
        tensor = weights[f"{prefix}.{i}.{name}_proj.weight"]
        return tensor.chunk(2, dim)[rank] if parallel == "tensor" else tensor

    checksums = {}
    for rank in range(1 if parallel == "none" else 2):
        experts = range(2 * rank, 2 * rank + 2) if parallel == "expert" else range(4)
        w13 = torch.stack([torch.cat([part(i, "gate", 0, rank), part(i, "up", 0, rank)]) for i in experts])
        w2 = torch.stack([part(i, "down", 1, rank) for i in experts])
        checksums[f"dp0:pp0:pcp0:tp{rank}:{prefix}.w13_weight"] = digest(w13)
        checksums[f"dp0:pp0:pcp0:tp{rank}:{prefix}.routed_experts.w2_weight"] = digest(w2)
    compare_checksums(weights, checksums, torch.float32)
    weights[f"{prefix}.3.up_proj.weight"][0, 0] += 1
    with pytest.raises(ValueError, match="w13_weight and [01] more .* are not what was sent"):
        compare_checksums(weights, checksums, torch.float32)


def test_parts_in_another_order_are_not_the_same():
    wrong = served(**{f"{ATTENTION}.qkv_proj.weight": torch.cat([K, Q, V])})
    with pytest.raises(ValueError, match="not what was sent"):
        compare_checksums(WEIGHTS, wrong, torch.float32)


@pytest.mark.parametrize(
    ("weights", "checksums", "message"),
    [
        (WEIGHTS, {**served(), "dp0:pp0:pcp0:tp0:model.scale": digest(Q)}, "1 of the server's .*model.scale"),
        (WEIGHTS, served(**{"model.norm.weight": torch.zeros(0)}), r"1 of the server's .*model\.norm\.weight"),
        ({**WEIGHTS, "lm_head.weight": Q}, served(), r"1 of the tensors sent were not found .*lm_head"),
    ],
)
def test_what_cannot_be_compared_fails_a_strict_comparison(weights, checksums, message, caplog):
    with pytest.raises(ValueError, match=message):
        compare_checksums(weights, checksums, torch.float32)
    compare_checksums(weights, checksums, torch.float32, strict=False)


def test_another_format_of_checksums_is_named():
    with pytest.raises(ValueError, match="does not name its worker"):
        compare_checksums(WEIGHTS, {"model.norm.weight": "0"}, torch.float32)
