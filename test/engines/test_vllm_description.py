"""What is read off a server's configuration, and the names of adapters."""

import pytest

from torchrl_asyncgrpo.engines.vllm_description import (
    AdapterSupport,
    adapter_name,
    adapter_versions,
    configured,
)

LORA = {"max_loras": 3, "max_lora_rank": 8, "lora_dtype": "torch.bfloat16", "target_modules": None}


def test_how_adapters_are_served():
    assert configured({"lora_config": LORA})["adapters"] == AdapterSupport(slots=3, max_rank=8, dtype="bfloat16")
    restricted = configured({"lora_config": LORA | {"target_modules": ["q_proj"]}})["adapters"]
    assert restricted.target_modules == ("q_proj",)


@pytest.mark.parametrize("config", [{}, {"lora_config": None}])
def test_a_server_without_adapters_or_that_does_not_tell(config):
    assert configured(config)["adapters"] is None


def test_copies_of_the_model_and_few_bits():
    config = {
        "parallel_config": {"data_parallel_size": 2, "_api_process_count": 3},
        "model_config": {"quantization": "awq"},
    }
    told = configured(config)
    assert (told["replicas"], told["api_servers"], told["quantization"]) == (2, 3, "awq")


def test_names_lead_back_to_versions_oldest_first():
    cards = [{"id": adapter_name(version), "parent": "policy"} for version in (10, 9, 100, 0)]
    others = [{"id": name, "parent": "policy"} for name in ("policy-v", "policy-v01", "policy-v1-2", "Policy-v1")]
    models = [{"id": "policy-v3", "parent": None}, {"id": "policy-v4"}]
    assert adapter_versions(cards + others + models) == [0, 9, 10, 100]
