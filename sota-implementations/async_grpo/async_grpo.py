"""Asynchronous GRPO on prefix trees: every part of the run, built in the order of the data path.

python async_grpo.py                                     # SmolLM2-135M-Instruct learns single-digit sums on a CPU
python async_grpo.py model.name=Qwen/Qwen3-0.6B          # a hub name or a local directory
python async_grpo.py train.total_frames=640 optim.lr=1e-5
python async_grpo.py +model.options.lora_r=16 optim.lr=2e-4              # train a LoRA adapter
python async_grpo.py loss.name=cispo +loss.options.epsilon_high=0.4      # another objective, and an option of it
python async_grpo.py --config-name async_grpo_vllm       # the same on a vLLM server, which it starts
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import hydra
import torch
from from_config import make_policy, model_settings, objective_options, server_flags
from omegaconf import DictConfig
from report import comparison_table, plot_course, recoveries_line, sampled_answers
from sums import last_number_is_sum, make_prompts
from torch import nn
from torchrl.record.loggers import CSVLogger, TensorboardLogger
from transformers import PreTrainedModel

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    LocalWeightSyncSender,
    PolicyLoss,
    PromptSource,
    ReferenceLogProbs,
    RolloutScorer,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    TreePacker,
    VLLMAdapterSyncSender,
    VLLMEngine,
    VLLMWeightSyncSender,
    WeightSyncSender,
    load_tokenizer,
    make_objective,
    make_replay_buffer,
    model_kwargs,
    reference_policy,
    run_name,
)
from torchrl_asyncgrpo.adapters import LoRATensors, unwrapped
from torchrl_asyncgrpo.collectors.group import encode_prompt
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.advantages import make_estimator
from torchrl_asyncgrpo.data.pretrained import resolve_model
from torchrl_asyncgrpo.engines.base import Engine
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer
from torchrl_asyncgrpo.trainers.window import Packer


def make_engine(
    cfg: DictConfig, policy: nn.Module, path: str, longest_prompt: int, cleanup: contextlib.ExitStack
) -> tuple[Engine, WeightSyncSender]:
    """The engine that samples, and the sender that pushes the trained weights, or the adapter alone, into it."""
    if cfg.engine.name == "transformers":  # in this process, between two of its decoding steps
        engine = TransformersEngine(policy)
        cleanup.callback(engine.shutdown)
        return engine, LocalWeightSyncSender(policy, engine)
    if cfg.engine.push not in ("weights", "adapter"):
        raise ValueError(f"engine.push={cfg.engine.push}; choose weights or adapter.")
    url, adapter = cfg.engine.url, cfg.engine.push == "adapter"
    if url is None:
        if adapter:  # of which nothing is served that LoRATensors refuses
            takes = dict(backend=None, max_loras=cfg.train.max_staleness + 2, max_lora_rank=LoRATensors(policy).rank)
        else:
            takes = dict(backend=cfg.engine.backend)
        server = VLLMServer(
            path,
            **takes,
            dtype=cfg.engine.dtype,
            max_model_len=cfg.engine.max_model_len,
            kv_cache_gib=cfg.engine.kv_cache_gib,
            max_restarts=cfg.engine.max_restarts,
            options=[*server_flags(cfg), *cfg.engine.options],
            log_file=Path(cfg.output) / "vllm.log",
        )
        url = cleanup.enter_context(server).url
    engine = VLLMEngine(url, required_length=longest_prompt + cfg.sampling.max_tokens)
    cleanup.callback(engine.shutdown)
    dtype = getattr(torch, cfg.engine.dtype)
    if adapter:
        return engine, VLLMAdapterSyncSender(
            policy, url, max_staleness=cfg.train.max_staleness, serving_dtype=dtype, directory=cfg.engine.directory
        )
    return engine, VLLMWeightSyncSender(
        policy,
        url,
        backend=cfg.engine.backend,
        serving_dtype=dtype,
        delta=cfg.engine.delta,
        master_address=cfg.engine.master_address,
    )


def make_loss(cfg: DictConfig, policy: nn.Module, sender: WeightSyncSender) -> PolicyLoss:
    """The objective that the configuration names, over a tree actor."""
    options = objective_options(cfg)
    if options.get("proximal") == "interpolated":
        options["current_version"] = lambda: sender.policy_version
    actor = TreeActor(
        policy,
        temperature=cfg.sampling.temperature,
        attention=cfg.model.attention,
        router_logits=options.get("load_balance_coeff", 0) > 0,
    )
    return make_objective(cfg.loss.name, actor, **options)


def make_packer(cfg: DictConfig, loss_module: PolicyLoss) -> Packer:
    """A window's rollouts to its micro-batches, after the policy that the loss stays close to has scored them."""
    packer = TreePacker(token_budget=cfg.train.token_budget)
    if schema.ENTRY_PROXIMAL_LOG_PROB not in loss_module.in_keys:
        return packer
    score = RolloutScorer(
        loss_module.actor_network, packer, key=schema.PROXIMAL_LOG_PROB, autocast_dtype=autocast_dtype(cfg)
    )
    return lambda rollouts: packer(score(rollouts))


def autocast_dtype(cfg: DictConfig) -> torch.dtype | None:
    """What forwards without gradient run in, as the trainer's do."""
    return torch.bfloat16 if cfg.train.mixed_precision else None


@hydra.main(version_base=None, config_path=".", config_name="async_grpo")
def main(cfg: DictConfig) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # hydra shows everybody's every call
    with contextlib.ExitStack() as cleanup:
        run(cfg, cleanup)


def run(cfg: DictConfig, cleanup: contextlib.ExitStack) -> None:
    output = Path(cfg.output)
    torch.manual_seed(cfg.train.seed)

    # The policy: one model that is trained, and the task it is trained on
    path, name = resolve_model(cfg.model.name), run_name(cfg.model.name)
    device = cfg.model.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = model_settings(cfg, device)
    kwargs = model_kwargs(settings)
    tokenizer = load_tokenizer(path, kwargs)
    policy = make_policy(path, settings, device)
    model: PreTrainedModel = unwrapped(policy)  # the same weights, without the adapter's wrapper
    attention = model.config._attn_implementation
    prompts = make_prompts(cfg.task.num_prompts, cfg.train.seed, cfg.task.template)
    examples = make_prompts(8, cfg.train.seed + 1, cfg.task.template)

    # Sampling: the engine decodes with its own copy of the weights, the collector keeps it busy and scores its answers
    source = PromptSource(prompts)
    longest_prompt = max(len(encode_prompt(tokenizer, draw, max_length=2**31)) for draw in source.head(len(prompts)))
    engine, sender = make_engine(cfg, policy, path, longest_prompt, cleanup)
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
    loss_module = make_loss(cfg, policy, sender)
    reference = reference_policy(loss_module.actor_network, path, kwargs, kl_to_ref_coeff=loss_module.kl_to_ref_coeff)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)

    loggers = [CSVLogger("csv", log_dir=str(output)), TensorboardLogger(name, log_dir=str(output / "tensorboard"))]
    trainer = AsyncGRPOTrainer(
        collector=collector,
        replay_buffer=replay_buffer,
        packer=make_packer(cfg, loss_module),
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
    if reference is not None:
        trainer.register_op("process_optim_batch", ReferenceLogProbs(reference, autocast_dtype=autocast_dtype(cfg)))
    before = sampled_answers(model, tokenizer, examples, cfg.sampling.max_tokens, cfg.sampling.temperature)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(f"\nStopped after {trainer.collected_frames} rollouts; what was trained so far is saved.")
    finally:
        sender.destroy()
        cleanup.close()

    if trainer.collected_frames:
        plot_course(output / "csv", output / "reward.png", name)
    after = sampled_answers(model, tokenizer, examples, cfg.sampling.max_tokens, cfg.sampling.temperature)
    table = comparison_table(examples, before, after) + recoveries_line(sender.counters["server_recoveries"])
    (output / "answers.md").write_text(table + "\n")
    model.set_attn_implementation(attention)
    policy.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    print(f"\n{table}\n\nModel, logs, answers.md and reward.png are in {output}")


if __name__ == "__main__":
    main()
