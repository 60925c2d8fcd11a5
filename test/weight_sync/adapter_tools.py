"""What the tests of adapter pushes into a real server share: the model that it serves, and how that is seen."""

import torch
from fakes import tiny_qwen3
from push_tools import own_log_probs, sample

MAX_STALENESS = 1


def served_model():
    """Of a head size that vLLM's kernels take."""
    heads = dict(hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    return tiny_qwen3(max_position_embeddings=1024, **heads)


def listed(http):
    return [adapter.version for adapter in http.adapters()]


def assert_served(policy, engine, version, **options):
    """What the engine samples is sampled from the policy, under its version; the base alone is another policy."""
    completions = sample(engine, **{"n": 4, **options})
    assert {v for completion in completions for v in completion.policy_versions} == {version}
    own_L, sampled_L = own_log_probs(policy, completions)
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)
    with policy.disable_adapter():
        base_L, _ = own_log_probs(policy, completions)
    assert float((base_L - sampled_L).abs().max()) > 0.05
