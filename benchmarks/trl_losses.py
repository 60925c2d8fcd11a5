"""Losses and gradients against those of TRL's GRPOTrainer on the same tensors: python benchmarks/trl_losses.py.

Both sides read one table of log-probs, one number for each distinct prefix of the rollouts, so that the gradient with
respect to that table is comparable and counts every token that rollouts share. Theirs is ``_compute_loss`` of a
``GRPOTrainer`` of its own for every row, with the forward of its model replaced by the table; ours is a loss module
over tree batches with an actor that looks up the same table. All in float64, two micro-batches each.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from torchrl_asyncgrpo import (
    CISPOLoss,
    DAPOLoss,
    DrGRPOLoss,
    DualClipPPOLoss,
    GRPOLoss,
    GSPOLoss,
    MaskedImportanceSampling,
    OffPolicySequenceMask,
    PolicyLoss,
    SAPOLoss,
    TreePacker,
    TruncatedImportanceSampling,
    make_rollout,
)
from torchrl_asyncgrpo.data import schema

GROUPS, ROLLOUTS, MICRO_BATCHES = 2, 4, 2
COMPLETION = 7
VOCABULARY = 12
PAD = 0


@dataclass
class Row:
    """One rollout; the log-probs under the policy itself are in the table."""

    prompt: list[int]
    completion: list[int]
    trained: list[bool]  # of the completion
    sampler: np.ndarray  # log-probs of the completion: as the sampler recorded them,
    trainer: np.ndarray  # of the trainer's model when it began the window,
    reference: np.ndarray  # of the reference
    advantage: float


@dataclass
class Case:
    """One comparison.

    Attributes:
        theirs: arguments of ``GRPOConfig``.
        ours: our loss module.
        old: which log-probs TRL gets as ``old_per_token_logps``.
        importance: TRL's sampler correction, by ``vllm_importance_sampling_mode``.
        untrained: rollouts of each window without a trained token.
        scale: by what their loss is to be multiplied where the definitions differ by a factor.
    """

    name: str
    theirs: dict[str, Any]
    ours: tuple[type[PolicyLoss], dict[str, Any]]
    old: str = "sampler"
    importance: str | None = None
    untrained: int = 0
    scale: float = 1.0


def draw_rows(rng: np.random.Generator, untrained: int) -> list[Row]:
    """Groups whose rollouts share prefixes, one of them twice, with holes in the masks of the completions."""
    rows = []
    for group in range(GROUPS):
        prompt = rng.integers(1, VOCABULARY, 2 + group).tolist()
        stem = rng.integers(1, VOCABULARY, COMPLETION).tolist()
        for i in range(ROLLOUTS):
            length = int(rng.integers(2, COMPLETION + 1))
            shared = length if i == 1 else int(rng.integers(1, length))
            completion = stem[:shared] + rng.integers(1, VOCABULARY, length - shared).tolist()
            trained = [True, *(rng.random(length - 1) > 0.2).tolist()]
            log_probs = rng.normal(-2, 0.3, (3, length)).clip(max=-0.01).astype(np.float32).astype(np.float64)
            advantage = float(np.float32(rng.normal()))
            rows.append(Row(prompt, completion, trained, *log_probs, advantage))
    for row in rows[:untrained]:
        row.trained = [False] * len(row.trained)
    return rows


@dataclass
class Table:
    """Log-prob and entropy of every distinct prefix, drawn when it is first asked for."""

    rng: np.random.Generator
    place: dict[tuple[int, ...], int] = field(default_factory=dict)
    values: list[tuple[float, float]] = field(default_factory=list)
    log_prob: Tensor | None = None

    def index(self, path: tuple[int, ...]) -> int:
        if path not in self.place:
            self.place[path] = len(self.values)
            self.values.append((min(self.rng.normal(-2, 0.3), -0.01), self.rng.uniform(0.1, 2)))
        return self.place[path]

    def read(self, paths: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Log-probs, which carry the gradient to the table, and entropies."""
        at = torch.tensor([self.index(path) for path in paths])
        if self.log_prob is None:
            raise RuntimeError("the table is read before leaf() made it")
        return self.log_prob[at], torch.tensor(self.values, dtype=torch.float64)[at, 1]

    def leaf(self, rows: list[Row]) -> Tensor:
        """A fresh leaf with the log-probs of every prefix of the rows."""
        for row in rows:
            tokens = (*row.prompt, *row.completion)
            for stop in range(1, len(tokens) + 1):
                self.index(tokens[:stop])
        self.log_prob = torch.tensor(self.values, dtype=torch.float64)[:, 0].clone().requires_grad_()
        return self.log_prob


class TableActor(TensorDictModuleBase):
    """Writes the log-probs of the table in the place of a model's."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.in_keys = [schema.NODE_INPUT_IDS, schema.NODE_PARENT]
        self.out_keys = [schema.NODE_LOG_PROB, schema.NODE_ENTROPY]
        self.table = table

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(
            batch[schema.NODE_INPUT_IDS].tolist(), batch[schema.NODE_PARENT].tolist(), strict=True
        ):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        batch[schema.NODE_LOG_PROB], batch[schema.NODE_ENTROPY] = self.table.read(paths)
        return batch


def ours(case: Case, rows: list[Row], table: Table) -> tuple[float, Tensor]:
    """Loss of the window and its gradient."""
    log_prob = table.leaf(rows)
    kind, options = case.ours
    loss_module = kind(TableActor(table), **options)
    rollouts = []
    for i, row in enumerate(rows):
        ahead = [0.0] * len(row.prompt)
        rollout = make_rollout(
            row.prompt + row.completion,
            [False] * len(row.prompt) + row.trained,
            ahead + row.sampler.tolist(),
            group_id=i // ROLLOUTS,
            advantage=row.advantage,
            ref_log_prob=ahead + row.reference.tolist(),
        )
        rollout[schema.PROXIMAL_LOG_PROB] = torch.tensor(ahead + row.trainer.tolist(), dtype=torch.float32)
        rollouts.append(rollout)
    batches = TreePacker(min_micro_batches=MICRO_BATCHES)(rollouts)
    assert len(batches) == MICRO_BATCHES
    total = sum(value for batch in batches for key, value in loss_module(batch).items() if key.startswith("loss_"))
    total.backward()
    return total.item(), log_prob.grad


def theirs(case: Case, rows: list[Row], table: Table) -> tuple[float, Tensor]:
    """The same, summed over TRL's micro-batches."""
    log_prob = table.leaf(rows)
    per_batch = len(rows) // MICRO_BATCHES
    width = {"prompt": max(len(row.prompt) for row in rows), "completion": COMPLETION}

    def padded(values: list[Any], dtype: torch.dtype, *, left: bool = False) -> Tensor:
        tensor = torch.full((len(values), width["prompt" if left else "completion"]), PAD, dtype=dtype)
        for line, value in zip(tensor, values, strict=True):
            line[len(line) - len(value) if left else 0 :][: len(value)] = torch.as_tensor(value, dtype=dtype)
        return tensor

    def forward(_model: Any, input_ids: Tensor, mask: Tensor, kept: int, **_: Any) -> tuple[Tensor, Tensor, None]:
        values = torch.zeros(2, *input_ids.shape, dtype=torch.float64)
        columns = [values[0], values[1]]
        for b, (line, real) in enumerate(zip(input_ids, mask.bool(), strict=True)):
            tokens = tuple(line[real].tolist())
            read = table.read([tokens[: n + 1] for n in range(len(tokens))])
            at = (torch.full_like(real.nonzero()[:, 0], b), real.nonzero()[:, 0])
            columns = [column.index_put(at, value) for column, value in zip(columns, read, strict=True)]
        return columns[0][:, -kept:], columns[1][:, -kept:], None

    total = 0.0
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(directory, case)
        trainer._get_per_token_logps_and_entropies = forward
        trainer.current_gradient_accumulation_steps = MICRO_BATCHES
        trained = sum(sum(row.trained) for row in rows)
        for start in range(0, len(rows), per_batch):
            batch = rows[start : start + per_batch]
            inputs = {
                "prompt_ids": padded([row.prompt for row in batch], torch.int64, left=True),
                "prompt_mask": padded([[1] * len(row.prompt) for row in batch], torch.int64, left=True),
                "completion_ids": padded([row.completion for row in batch], torch.int64),
                "completion_mask": padded([[1] * len(row.completion) for row in batch], torch.int64),
                "tool_mask": padded([row.trained for row in batch], torch.int64),
                "advantages": torch.tensor([row.advantage for row in batch], dtype=torch.float64),
                "old_per_token_logps": padded([getattr(row, case.old) for row in batch], torch.float64),
                "ref_per_token_logps": padded([row.reference for row in batch], torch.float64),
                "num_items_in_batch": torch.tensor(float(trained)),
            }
            if case.importance is not None:
                inputs["importance_sampling_ratio"] = importance_ratio(
                    trainer, inputs, padded([row.sampler for row in batch], torch.float64), case.importance
                )
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            total += loss.item()
    return case.scale * total, case.scale * log_prob.grad


def importance_ratio(trainer: Any, inputs: dict[str, Tensor], sampler: Tensor, mode: str) -> Tensor:
    """What ``_generate_and_score_completions`` computes beside sampling, in its four modes."""
    difference = (inputs["old_per_token_logps"] - sampler) * inputs["completion_mask"] * inputs["tool_mask"]
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    highest = trainer.vllm_importance_sampling_clip_max
    return ratio.clamp(max=highest) if mode.endswith("truncate") else ratio.masked_fill(ratio > highest, 0.0)


def make_trainer(directory: str, case: Case) -> Any:
    """A ``GRPOTrainer`` on the smallest model there is."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, bos_token_id=None, eos_token_id=PAD, pad_token_id=PAD,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # with beta, TRL loads a reference from there
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
        args=GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=GROUPS * ROLLOUTS // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            num_generations=ROLLOUTS,
            max_completion_length=COMPLETION,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            **case.theirs,
        ),
    )
    trainer.use_vllm = case.importance is not None  # set here, since with the argument it would look for a server
    trainer.model.train()
    return trainer


TOKEN_MEAN, SEQUENCE_MEAN = {"aggregation": "token-mean"}, {"aggregation": "sequence-mean"}
KL = {"kl_to_ref_coeff": 0.1}
CASES = [
    Case("GRPO, sequence-mean / TRL grpo", {"loss_type": "grpo"}, (GRPOLoss, SEQUENCE_MEAN)),
    Case("GRPO, token-mean / TRL dapo", {"loss_type": "dapo"}, (GRPOLoss, TOKEN_MEAN)),
    Case("Dr. GRPO / TRL dr_grpo", {"loss_type": "dr_grpo"}, (DrGRPOLoss, {"constant": COMPLETION})),
    Case("DAPO / TRL dapo, epsilon_high=0.28", {"loss_type": "dapo", "epsilon_high": 0.28}, (DAPOLoss, {})),
    Case("CISPO(0.28) / TRL cispo, epsilon_high=1.28", {"loss_type": "cispo", "epsilon_high": 1.28}, (CISPOLoss, {})),
    Case(  # a temperature that float32 holds exactly, in which TRL's torch.where makes it
        "SAPO / TRL sapo",
        {"loss_type": "sapo", "sapo_temperature_neg": 1.0625},
        (SAPOLoss, {"temperature_negative": 1.0625}),
    ),
    Case(
        "GSPO / TRL grpo, sequence ratios",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1},
        (GSPOLoss, {"clip_epsilon": 0.1}),
    ),
    Case(
        "dual-clip PPO(1.5) / TRL dapo, delta=1.5",
        {"loss_type": "dapo", "delta": 1.5},
        (DualClipPPOLoss, {"dual_clip": 1.5}),
    ),
    Case(
        "KL k3 / TRL beta, use_bias_correction_kl=False",
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
        (GRPOLoss, {**KL, "kl_estimator": "k3"}),
    ),
    Case(
        "KL unbiased / TRL beta, use_bias_correction_kl=True",
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
        (GRPOLoss, {**KL, "kl_estimator": "unbiased"}),
    ),
    Case(
        "OffPolicySequenceMask(0.05) / TRL off_policy_mask_threshold",
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
        (GRPOLoss, {"correction": OffPolicySequenceMask(0.05)}),
    ),
    Case(
        "TruncatedImportanceSampling(1.2) / TRL token_truncate",
        {"loss_type": "dapo", "vllm_importance_sampling_clip_max": 1.2},
        (GRPOLoss, {"anchor": "proximal", "correction": TruncatedImportanceSampling(1.2)}),
        old="trainer",
        importance="token_truncate",
    ),
    Case(
        "MaskedImportanceSampling(0, 1.2, sequence) / TRL sequence_mask",
        {"loss_type": "dapo", "vllm_importance_sampling_clip_max": 1.2},
        (GRPOLoss, {"anchor": "proximal", "correction": MaskedImportanceSampling(0, 1.2, level="sequence")}),
        old="trainer",
        importance="sequence_mask",
    ),
    Case(
        "one rollout of 8 untrained, sequence-mean / TRL grpo × 8/7",
        {"loss_type": "grpo"},
        (GRPOLoss, SEQUENCE_MEAN),
        untrained=1,
        scale=8 / 7,
    ),
]


def difference(case: Case, seed: int = 0) -> float:
    """Relative difference of the loss or of the gradient, whichever is larger."""
    rng = np.random.default_rng(seed)
    rows = draw_rows(rng, case.untrained)
    table = Table(rng)
    (loss, gradient), (their_loss, their_gradient) = ours(case, rows, table), theirs(case, rows, table)
    of_gradient = (gradient - their_gradient).abs().max() / their_gradient.abs().max()
    return max(abs(loss - their_loss) / abs(their_loss), of_gradient.item())


def run() -> list[dict[str, Any]]:
    """Rows of the benchmark table; see ``run.py``."""
    if find_spec("trl") is None:
        print("trl is not installed, so there is no peer to compare with: pip install -e '.[bench]'")
        return []
    disable_progress_bar()
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for case in CASES:
            figures = {"ours": difference(case), "peer": None, "unit": "", "ratio": None, "bar": "ours < 1e-12"}
            rows.append({"name": f"difference of loss and gradient, {case.name}", **figures})
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
