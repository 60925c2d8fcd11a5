"""GRPO with the model elsewhere: policy and engine in processes of Ray, and a trainer that holds no weights.

python remote_grpo.py                              # the job of ../async_grpo: SmolLM2-135M-Instruct learns sums
python remote_grpo.py remote.workers=2             # data parallel over micro-batches
python remote_grpo.py remote.contract=flat train.token_budget=1024     # the model's own attention over rows of rollouts
python remote_grpo.py remote.loss=here             # the loss in this process, on log-probs that come from the workers
python remote_grpo.py engine.name=vllm engine.url=http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchrl.record.loggers import CSVLogger, TensorboardLogger
from transformers import PreTrainedTokenizerBase

from torchrl_asyncgrpo import (
    AsyncGRPOTrainer,
    AsyncLLMCollector,
    FlatPacker,
    LocalWeightSyncSender,
    PaddingFreeActor,
    PolicyLoss,
    PromptSource,
    RayBackend,
    RayEngine,
    ReferenceLogProbs,
    RemoteActor,
    RemoteLoss,
    RemoteOptimizer,
    RemoteWeightSyncSender,
    RolloutScorer,
    SamplingParams,
    TransformersEngine,
    TreeActor,
    TreePacker,
    VLLMEngine,
    VLLMWeightSyncSender,
    WeightSyncSender,
    load_tokenizer,
    make_objective,
    make_replay_buffer,
    model_kwargs,
    run_name,
)
from torchrl_asyncgrpo.adapters import has_quantized_layers, unwrapped
from torchrl_asyncgrpo.collectors.group import encode_prompt
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.advantages import make_estimator
from torchrl_asyncgrpo.data.pretrained import resolve_model
from torchrl_asyncgrpo.engines.base import Engine
from torchrl_asyncgrpo.modules.checkpoint import load_model
from torchrl_asyncgrpo.trainers.window import Packer

SPINE = Path(__file__).parent.parent / "async_grpo"
sys.path.insert(0, str(SPINE))
import from_config  # noqa: E402
from from_config import make_policy, model_settings, objective_options  # noqa: E402
from report import comparison_table, plot_course  # noqa: E402
from sums import last_number_is_sum, make_prompts  # noqa: E402

ray.cloudpickle.register_pickle_by_value(from_config)  # the processes of Ray do not look for it beside this script
ConfigStore.instance().store("async_grpo", OmegaConf.load(SPINE / "async_grpo.yaml"))


# --- what runs in the processes of Ray -----------------------------------------------------------
def load(cfg: DictConfig, path: str, device: str | None = None) -> nn.Module:
    """The policy that the configuration describes."""
    device = device or cfg.model.device or ("cuda" if torch.cuda.is_available() else "cpu")
    own = cfg.remote.contract == "flat" and cfg.model.attention != "auto"
    changes = {"attn_implementation": cfg.model.attention} if own else {}
    return make_policy(path, model_settings(cfg, device), device, **changes)


def make_actor(cfg: DictConfig, path: str) -> TreeActor:
    """The policy of a worker, for the batches of its contract."""
    torch.manual_seed(cfg.train.seed)  # a worker is a process of its own, and adapters begin at random
    options = dict(
        temperature=cfg.sampling.temperature, router_logits=cfg.loss.options.get("load_balance_coeff", 0) > 0
    )
    if cfg.remote.contract == "flat":
        return PaddingFreeActor(load(cfg, path), **options)
    return TreeActor(load(cfg, path), attention=cfg.model.attention, **options)


def make_loss(cfg: DictConfig, actor: TreeActor, sender: WeightSyncSender | None = None) -> PolicyLoss:
    """The objective that the configuration names, in a worker or, with the sender, here."""
    options = objective_options(cfg)
    if options.get("proximal") == "interpolated":
        if sender is None:
            raise ValueError("loss.options.proximal=interpolated reads the policy version here; set remote.loss=here.")
        options["current_version"] = lambda: sender.policy_version
    return make_objective(cfg.loss.name, actor, **options)


def make_engine(cfg: DictConfig, path: str) -> TransformersEngine:
    """The engine, with weights of its own: those of the base in full precision, until the first push."""
    kwargs = model_kwargs(model_settings(cfg, "cuda" if torch.cuda.is_available() else "cpu"))
    kwargs.pop("quantization_config", None)
    return TransformersEngine(load_model(path, kwargs, attention=None))


# --- what runs here ------------------------------------------------------------------------------
def start_engine(
    cfg: DictConfig, path: str, longest_prompt: int, cleanup: contextlib.ExitStack
) -> tuple[Engine, Callable[[Any], WeightSyncSender]]:
    """The engine that samples, and what makes the sender that pushes a worker's weights into it."""
    if cfg.engine.name == "transformers":
        engine = RayEngine(partial(make_engine, cfg, path), actor_options=OmegaConf.to_container(cfg.engine.options))
        cleanup.callback(engine.shutdown)
        return engine, partial(LocalWeightSyncSender, engine=engine)
    engine = VLLMEngine(cfg.engine.url, required_length=longest_prompt + cfg.sampling.max_tokens)
    cleanup.callback(engine.shutdown)
    return engine, partial(
        VLLMWeightSyncSender,
        url=cfg.engine.url,
        backend=cfg.engine.backend,
        serving_dtype=getattr(torch, cfg.engine.dtype),
    )


def make_packer(cfg: DictConfig, loss: PolicyLoss) -> Packer:
    """A window's rollouts to its micro-batches, after the policy that the loss stays close to has scored them."""
    packing = {"token_budget": cfg.train.token_budget, "min_micro_batches": cfg.remote.workers}
    packer = FlatPacker(padding_free=True, **packing) if cfg.remote.contract == "flat" else TreePacker(**packing)
    if schema.ENTRY_PROXIMAL_LOG_PROB not in loss.in_keys:
        return packer
    score = RolloutScorer(loss.actor_network, packer, key=schema.PROXIMAL_LOG_PROB)
    return lambda rollouts: packer(score(rollouts))


def answers(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[dict], params: SamplingParams
) -> list[str]:
    """One answer of the engine to each prompt, sampled with the same seed at every call."""

    async def ask() -> list[Any]:
        draws = PromptSource(prompts).head(len(prompts))
        requests = (encode_prompt(tokenizer, draw, engine.max_length) for draw in draws)
        return await asyncio.gather(*(engine.generate(ids, params) for ids in requests))

    return [tokenizer.decode(completions[0].token_ids, skip_special_tokens=True) for completions in asyncio.run(ask())]


@hydra.main(version_base=None, config_path=".", config_name="remote_grpo")
def main(cfg: DictConfig) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # hydra shows everybody's every call
    check(cfg)
    with contextlib.ExitStack() as cleanup:
        run(cfg, cleanup)


def check(cfg: DictConfig) -> None:
    """Raise ``ValueError`` for what would be found out late, or not at all."""
    for name, allowed in (
        ("engine.name", ("transformers", "vllm")),
        ("remote.contract", ("tree", "flat")),
        ("remote.loss", ("there", "here")),
    ):
        value = OmegaConf.select(cfg, name)
        if value not in allowed:
            raise ValueError(f"{name}={value}; choose {' or '.join(allowed)}.")
    model_settings(cfg, "cpu")
    if cfg.engine.name == "vllm" and cfg.engine.url is None:
        raise ValueError("engine.name=vllm with engine.url=null; give the URL of a vLLM server that runs.")


def run(cfg: DictConfig, cleanup: contextlib.ExitStack) -> None:
    output = Path(cfg.output)
    torch.manual_seed(cfg.train.seed)
    path, name = resolve_model(cfg.model.name), run_name(cfg.model.name)
    tokenizer = load_tokenizer(path, model_kwargs(model_settings(cfg, "cpu")))
    prompts = make_prompts(cfg.task.num_prompts, cfg.train.seed, cfg.task.template)
    examples = make_prompts(8, cfg.train.seed + 1, cfg.task.template)
    sampling = partial(SamplingParams, max_tokens=cfg.sampling.max_tokens, temperature=cfg.sampling.temperature)
    source = PromptSource(prompts)
    longest_prompt = max(len(encode_prompt(tokenizer, draw, max_length=2**31)) for draw in source.head(len(prompts)))

    # Elsewhere: the engine with its weights; the policy with its weights, optimizer and loss
    ray.init(cfg.remote.address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    cleanup.callback(ray.shutdown)
    engine, make_sender = start_engine(cfg, path, longest_prompt, cleanup)
    start_backend = partial(
        RayBackend,
        partial(make_actor, cfg, path),
        autocast_dtype=torch.bfloat16 if cfg.train.mixed_precision else None,
        actor_options=OmegaConf.to_container(cfg.remote.options),
    )
    backend: RayBackend = start_backend(
        make_optimizer=torch.optim.AdamW,
        make_loss=partial(make_loss, cfg) if cfg.remote.loss == "there" else None,
        make_sender=make_sender,
        workers=cfg.remote.workers,
    )
    cleanup.callback(backend.shutdown)

    # Here: stand-ins for policy, optimizer and sender
    actor = RemoteActor(backend)
    optimizer = RemoteOptimizer(backend, lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)
    sender = RemoteWeightSyncSender(actor)
    loss_here = make_loss(cfg, actor, sender)

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
        sampling_params=sampling(n=cfg.sampling.group_size),
        groups_per_step=cfg.train.groups_per_step,
        replay_buffer=replay_buffer,
        advantage=make_estimator(cfg.advantage.name, group_size=cfg.sampling.group_size, **cfg.advantage.options),
        advantage_per_reward=cfg.advantage.name == "gdpo",
        max_staleness=cfg.train.max_staleness,
        seed=cfg.train.seed,
    )
    trainer = AsyncGRPOTrainer(
        collector=collector,
        replay_buffer=replay_buffer,
        packer=make_packer(cfg, loss_here),
        loss_module=RemoteLoss(actor) if cfg.remote.loss == "there" else loss_here,
        optimizer=optimizer,
        weight_sync_sender=sender,
        weight_update_frequency=cfg.train.weight_update_frequency,
        async_collection=cfg.train.async_collection,
        total_frames=cfg.train.total_frames,
        clip_norm=cfg.optim.clip_norm,
        logger=[CSVLogger("csv", log_dir=str(output)), TensorboardLogger(name, log_dir=str(output / "tensorboard"))],
        log_interval=0,
    )
    if loss_here.kl_to_ref_coeff > 0:  # one more process, with the reference
        trainer.register_op("process_optim_batch", ReferenceLogProbs(RemoteActor(start_backend())))
    before = answers(engine, tokenizer, examples, sampling(seed=0))
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(f"\nStopped after {trainer.collected_frames} rollouts; what was trained so far is saved.")
    if trainer.collected_frames:
        plot_course(output / "csv", output / "reward.png", name)
    table = comparison_table(examples, before, answers(engine, tokenizer, examples, sampling(seed=0)))
    (output / "answers.md").write_text(table + "\n")
    policy = load(cfg, path, device="cpu")  # weights come here once, to be saved
    # layers in 4 or 8 bits are not in the state, and are as they were loaded
    unwrapped(policy).load_state_dict(backend.save("model"), strict=not has_quantized_layers(policy))
    policy.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    print(f"\n{table}\n\nModel, logs, answers.md and reward.png are in {output}")


if __name__ == "__main__":
    main()
