"""Training on a real vLLM server that is killed again and again."""

import os
import signal

import pytest
import torch
from fakes import character_tokenizer, served_qwen3

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    GRPOLoss,
    PromptSource,
    SamplingParams,
    TreeActor,
    VLLMEngine,
    VLLMWeightSyncSender,
    make_replay_buffer,
)
from torchrl_asyncgrpo.data.schema import GROUP_ID
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

STEPS, GROUPS, SAMPLES = 12, 4, 2
# At which stage of which step the server is killed: with weights just pushed, while the trainer draws, while it trains
KILLS = {("post_optim", 2), ("process_optim_batch", 5), ("pre_optim", 8)}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_three_times_costs_no_step_and_no_draw(tmp_path):
    model, tokenizer = served_qwen3(), character_tokenizer(chat=False)
    model.save_pretrained(tmp_path)
    with VLLMServer(tmp_path, max_model_len=128, max_restarts=3) as server:
        engine = VLLMEngine(server.url)
        sender = VLLMWeightSyncSender(model, server.url, verify="checksum", timeout=120)
        buffer = make_replay_buffer(batch_size=GROUPS, max_staleness=1, current_version=lambda: sender.policy_version)
        collector = AsyncLLMCollector(
            engine,
            PromptSource([f"{i}+{i}=" for i in range(STEPS * GROUPS)], shuffle=False),
            lambda completions, **_: [float(len(completion)) for completion in completions],
            tokenizer=tokenizer,
            sampling_params=SamplingParams(n=SAMPLES, max_tokens=24, ignore_eos=True),
            groups_per_step=GROUPS,
            replay_buffer=buffer,
            max_staleness=1,
        )
        trainer = AsyncGRPOTrainer(
            collector=collector,
            replay_buffer=buffer,
            loss_module=GRPOLoss(TreeActor(model)),
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            weight_sync_sender=sender,
            async_collection=True,
            total_frames=STEPS * GROUPS * SAMPLES,
            progress_bar=False,
        )
        trained, killed = [], []

        def kill_at(stage):
            if (stage, trainer.optimizer_steps()) in KILLS - set(killed):
                killed.append((stage, trainer.optimizer_steps()))
                os.kill(server.pid, signal.SIGKILL)

        def note(window):
            trained.append(sorted({int(rollout[GROUP_ID]) for rollout in window.unbind(0)}))
            kill_at("process_optim_batch")

        # behind the draw, before the packing; its result is what the next operation gets
        trainer._process_optim_batch_ops.insert(1, (lambda window: (note(window), window)[1], {}))
        trainer.register_op("pre_optim", lambda: kill_at("pre_optim"))
        trainer.register_op("post_optim", lambda: kill_at("post_optim"))
        trainer.train()
        engine.shutdown()
        sender.destroy()
        assert set(killed) == KILLS
        assert trainer.optimizer_steps() == STEPS
        assert sorted(group for window in trained for group in window) == list(range(STEPS * GROUPS))
        assert sender.counters["server_recoveries"] == 3
        assert server.restarts == 3
        assert not buffer.dropped
