"""Parts that do not fit each other are found when the trainer is built."""

import pytest
import torch
from adapted import lora
from fakes import character_tokenizer

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    GRPOLoss,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    VLLMAdapterSyncSender,
    make_replay_buffer,
)


@pytest.mark.parametrize(("of_the_buffer", "fits"), [(1, True), (2, True), (3, False), (None, False)])
def test_rollouts_older_than_the_adapters_that_are_served_are_not_trained(of_the_buffer, fits):
    policy = lora()
    engine = TransformersEngine(policy, max_length=32)
    sender = VLLMAdapterSyncSender(policy, "http://server", max_staleness=2)
    buffer = make_replay_buffer(
        batch_size=1, max_staleness=of_the_buffer, current_version=lambda: sender.policy_version
    )
    collector = AsyncLLMCollector(
        engine, ["1+1="], lambda completions, **_: [0.0 for _ in completions], tokenizer=character_tokenizer(),
        sampling_params=SamplingParams(n=2, max_tokens=2), groups_per_step=1, replay_buffer=buffer, max_staleness=1,
    )  # fmt: skip

    def build():
        AsyncGRPOTrainer(
            collector=collector, replay_buffer=buffer, loss_module=GRPOLoss(TreeActor(policy)),
            optimizer=torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad]),
            weight_sync_sender=sender, async_collection=True, total_frames=4,
        )  # fmt: skip

    if fits:
        build()
    else:
        with pytest.raises(ValueError, match=rf"max_staleness=2, beyond.*max_staleness={of_the_buffer}, where None"):
            build()
    engine.shutdown()
