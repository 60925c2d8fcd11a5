"""Pushes into a real vLLM server: what arrives, and what running requests see of it."""

import pytest
import torch
from push_tools import PROMPT, in_background, own_log_probs, perturb, sample, sampled_tokens, wait_for_tokens
from transformers import AutoModelForCausalLM

from torchrl_asyncgrpo import VLLMWeightSyncSender, make_rollout
from torchrl_asyncgrpo.data.pretrained import SMOLLM2, resolve_model
from torchrl_asyncgrpo.data.schema import oldest_version


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(resolve_model(SMOLLM2), dtype=torch.float32)


@pytest.fixture(scope="module")
def original(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def policy(model, original):
    """The model with its original weights, which a test may change."""
    model.load_state_dict(original)
    return model


@pytest.fixture
def server(smollm2_server):
    return smollm2_server


def test_the_importance_ratio_of_pushed_weights_is_one(policy, sender, engine):
    perturb(policy)
    assert sender.update_weights() == 1
    completions = sample(engine, n=16, max_tokens=40)
    own_L, sampled_L = own_log_probs(policy, completions)
    assert len(own_L) >= 500
    assert {version for c in completions for version in c.policy_versions} == {1}
    torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=2e-3)
    assert float((own_L - sampled_L).abs().mean()) < 2e-4


def test_old_weights_would_not_pass_for_the_pushed_ones(policy, original, sender, engine):
    perturb(policy)
    sender.update_weights()
    completions = sample(engine, n=4)
    policy.load_state_dict(original)
    own_L, sampled_L = own_log_probs(policy, completions)
    assert float((own_L - sampled_L).abs().max()) > 0.1


def test_a_push_in_the_middle_of_a_request_gives_two_spans_and_the_staleness_of_the_oldest(
    policy, sender, engine, server
):
    sender.update_weights()
    perturb(policy)
    before = sampled_tokens(server)
    with in_background(lambda: sample(engine, max_tokens=200)) as request:
        wait_for_tokens(server, before + 5)
        sender.pause()  # before the push is made ready, which takes some machines longer than the other 195 tokens
        sender.send_weights(sender.named_weights())
        sender.resume(2)
    (completion,) = request.result
    versions = completion.policy_versions
    assert len(versions) == 200
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    rollout = make_rollout(
        PROMPT + completion.token_ids,
        [0] * len(PROMPT) + [1] * 200,
        [0.0] * len(PROMPT) + completion.log_probs,
        group_id=0,
        policy_version=[2] * len(PROMPT) + versions,
    )
    assert sender.policy_version - oldest_version(rollout) == 1


def test_only_changed_elements_travel_and_the_server_holds_exactly_what_a_full_push_gives(
    policy, original, server, http
):
    def checksums_after(delta):
        policy.load_state_dict(original)
        sender = VLLMWeightSyncSender(policy, server.url, delta=delta, verify="checksum", timeout=60)
        sender.update_weights()
        assert sender.sent_bytes == full
        perturb(policy, seed=1, share=0.01)
        sender.update_weights()
        sent = [sender.sent_bytes]
        sender.update_weights()
        sent.append(sender.sent_bytes)
        perturb(policy, seed=2)
        sender.update_weights()
        sent.append(sender.sent_bytes)
        perturb(policy, seed=3, share=0.01)
        sender.update_weights()
        sender.destroy()
        return sent, http.checksums()

    full = sum(parameter.nbytes for parameter in policy.parameters())
    sent, by_delta = checksums_after(delta=True)
    assert 0 < sent[0] < 0.021 * full
    assert sent[1] == 0
    assert sent[2] == full  # a patch of everything would be larger
    _, by_full = checksums_after(delta=False)
    assert by_delta == by_full
