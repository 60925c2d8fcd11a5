"""Asynchronous GRPO on prefix trees: every part of the run, built in the order of the data path.

python async_grpo.py                                     # SmolLM2-135M-Instruct learns single-digit sums on a CPU
python async_grpo.py model.name=Qwen/Qwen3-0.6B          # a hub name or a local directory
python async_grpo.py train.total_frames=640 optim.lr=1e-5
python async_grpo.py loss.name=cispo +loss.options.epsilon_high=0.4      # another objective, and an option of it
python async_grpo.py --config-name async_grpo_vllm       # the same on a vLLM server, which it starts
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Sequence
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from report import comparison_table, plot_course, recoveries_line, sampled_answers
from sums import last_number_is_sum, make_prompts
from tensordict import TensorDictBase
from torchrl.record.loggers import CSVLogger, TensorboardLogger
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    LocalWeightSyncSender,
    PolicyLoss,
    PromptSource,
    RolloutScorer,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    TreeBatch,
    TreePacker,
    VLLMEngine,
    VLLMWeightSyncSender,
    WeightSyncSender,
    make_objective,
    make_replay_buffer,
)
from torchrl_asyncgrpo.collectors.group import encode_prompt
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.advantages import make_estimator
from torchrl_asyncgrpo.data.pretrained import resolve_model
from torchrl_asyncgrpo.engines.base import Engine
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer
from torchrl_asyncgrpo.trainers.window import Packer


def make_engine(
    cfg: DictConfig, model: PreTrainedModel, path: str, longest_prompt: int, cleanup: contextlib.ExitStack
) -> tuple[Engine, WeightSyncSender]:
    """The engine that samples, and the sender that pushes the trained weights into it."""
    if cfg.engine.name == "transformers":  # in this process, between two of its decoding steps
        engine = TransformersEngine(model)
        cleanup.callback(engine.shutdown)
        return engine, LocalWeightSyncSender(model, engine)
    url = cfg.engine.url
    if url is None:
        server = VLLMServer(
            path,
            backend=cfg.engine.backend,
            dtype=cfg.engine.dtype,
            max_model_len=cfg.engine.max_model_len,
            kv_cache_gib=cfg.engine.kv_cache_gib,
            max_restarts=cfg.engine.max_restarts,
            options=list(cfg.engine.options),
            log_file=Path(cfg.output) / "vllm.log",
        )
        url = cleanup.enter_context(server).url
    engine = VLLMEngine(url, required_length=longest_prompt + cfg.sampling.max_tokens)
    cleanup.callback(engine.shutdown)
    sender = VLLMWeightSyncSender(
        model,
        url,
        backend=cfg.engine.backend,
        serving_dtype=getattr(torch, cfg.engine.dtype),
        delta=cfg.engine.delta,
        master_address=cfg.engine.master_address,
    )
    return engine, sender


def make_loss(cfg: DictConfig, model: PreTrainedModel, sender: WeightSyncSender) -> PolicyLoss:
    """The objective that the configuration names, over a tree actor."""
    options = hydra.utils.instantiate(cfg.loss.options, _convert_="all")  # corrections are objects: _target_
    if cfg.loss.name == "dr_grpo":
        options.setdefault("constant", cfg.sampling.max_tokens)
    if options.get("proximal") == "interpolated":
        options["current_version"] = lambda: sender.policy_version
    actor = TreeActor(
        model,
        temperature=cfg.sampling.temperature,
        attention=cfg.model.attention,
        router_logits=options.get("load_balance_coeff", 0) > 0,
    )
    return make_objective(cfg.loss.name, actor, **options)


def make_packer(cfg: DictConfig, loss_module: PolicyLoss, model: PreTrainedModel) -> Packer:
    """A window's rollouts to its micro-batches, after the policies that the loss compares with have scored them."""
    packer = TreePacker(token_budget=cfg.train.token_budget)
    policies = {}
    if schema.ENTRY_PROXIMAL_LOG_PROB in loss_module.in_keys:
        policies[schema.PROXIMAL_LOG_PROB] = loss_module.actor_network
    if schema.ENTRY_REF_LOG_PROB in loss_module.in_keys:
        frozen = copy.deepcopy(model).requires_grad_(False)
        policies[schema.REF_LOG_PROB] = TreeActor(
            frozen, temperature=cfg.sampling.temperature, attention=cfg.model.attention
        )
    dtype = torch.bfloat16 if cfg.train.mixed_precision else None
    scorers = [RolloutScorer(policy, packer, key=key, autocast_dtype=dtype) for key, policy in policies.items()]

    def score_and_pack(rollouts: Sequence[TensorDictBase]) -> list[TreeBatch]:
        for score in scorers:
            rollouts = score(rollouts)
        return packer(rollouts)

    return score_and_pack


@hydra.main(version_base=None, config_path=".", config_name="async_grpo")
def main(cfg: DictConfig) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # hydra shows everybody's every call
    with contextlib.ExitStack() as cleanup:
        run(cfg, cleanup)


def run(cfg: DictConfig, cleanup: contextlib.ExitStack) -> None:
    output = Path(cfg.output)
    torch.manual_seed(cfg.train.seed)

    # The policy: one model that is trained, and the task it is trained on
    path = resolve_model(cfg.model.name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    device = cfg.model.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=cfg.model.dtype).to(device)
    attention = model.config._attn_implementation
    prompts = make_prompts(cfg.task.num_prompts, cfg.train.seed, cfg.task.template)
    examples = make_prompts(8, cfg.train.seed + 1, cfg.task.template)

    # Sampling: the engine decodes with its own copy of the weights, the collector keeps it busy and scores its answers
    source = PromptSource(prompts)
    longest_prompt = max(len(encode_prompt(tokenizer, draw, max_length=2**31)) for draw in source.head(len(prompts)))
    engine, sender = make_engine(cfg, model, path, longest_prompt, cleanup)
    replay_buffer = make_replay_buffer(
        batch_size=cfg.train.groups_per_step,
        max_staleness=cfg.train.max_staleness,
        current_version=lambda: sender.policy_version,
    )
    collector = AsyncLLMCollector(
        engine,
        source,
        last_number_is_sum,
        tokenizer=tokenizer,
        sampling_params=SamplingParams(
            n=cfg.sampling.group_size, max_tokens=cfg.sampling.max_tokens, temperature=cfg.sampling.temperature
        ),
        groups_per_step=cfg.train.groups_per_step,
        replay_buffer=replay_buffer,
        advantage=make_estimator(cfg.advantage.name, group_size=cfg.sampling.group_size, **cfg.advantage.options),
        advantage_per_reward=cfg.advantage.name == "gdpo",
        max_staleness=cfg.train.max_staleness,
        seed=cfg.train.seed,
    )

    # Training: a window of groups becomes prefix trees, the actor forwards every shared token once
    loss_module = make_loss(cfg, model, sender)
    packer = make_packer(cfg, loss_module, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)

    loggers = [CSVLogger("csv", log_dir=str(output)), TensorboardLogger("tensorboard", log_dir=str(output))]
    trainer = AsyncGRPOTrainer(
        collector=collector,
        replay_buffer=replay_buffer,
        packer=packer,
        loss_module=loss_module,
        optimizer=optimizer,
        weight_sync_sender=sender,
        weight_update_frequency=cfg.train.weight_update_frequency,
        async_collection=cfg.train.async_collection,
        total_frames=cfg.train.total_frames,
        device=device,
        clip_norm=cfg.optim.clip_norm,
        mixed_precision=cfg.train.mixed_precision,
        logger=loggers,
        log_interval=0,
    )
    before = sampled_answers(model, tokenizer, examples, cfg.sampling.max_tokens, cfg.sampling.temperature)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(f"\nStopped after {trainer.collected_frames} rollouts; what was trained so far is saved.")
    finally:
        sender.destroy()
        cleanup.close()

    if trainer.collected_frames:
        plot_course(output / "csv", output / "reward.png")
    after = sampled_answers(model, tokenizer, examples, cfg.sampling.max_tokens, cfg.sampling.temperature)
    table = comparison_table(examples, before, after) + recoveries_line(sender.counters["server_recoveries"])
    (output / "answers.md").write_text(table + "\n")
    model.set_attn_implementation(attention)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    print(f"\n{table}\n\nModel, logs, answers.md and reward.png are in {output}")


if __name__ == "__main__":
    main()
