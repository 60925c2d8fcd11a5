"""What is read off a server's configuration, and the names of adapters."""

import pytest

from torchrl_asyncgrpo.engines.vllm_description import (
    AdapterSupport,
    PolicyAdapter,
    configured,
    listed_adapters,
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


def test_names_lead_back_to_versions_and_publications_oldest_first():
    adapters = [PolicyAdapter(*pair) for pair in ((10, 7), (9, 100), (9, 20), (100, 1), (0, 0))]
    cards = [{"id": adapter.name, "parent": "policy"} for adapter in adapters]
    names = ("policy-v", "policy-v1", "policy-v01-1", "policy-v1-02", "policy-v1-2-3", "Policy-v1-2")
    others = [{"id": name, "parent": "policy"} for name in names]
    models = [{"id": "policy-v3-1", "parent": None}, {"id": "policy-v4-1"}]
    assert (
        listed_adapters(cards + others + models) == sorted(adapters) == [(0, 0), (9, 20), (9, 100), (10, 7), (100, 1)]
    )
