"""Windows of rollouts, and steps on them as a trainer takes them: what remote and local training are compared on."""

from functools import partial
from types import SimpleNamespace

import torch
from fakes import tiny_qwen3
from tensordict import lazy_stack
from transformers import AutoModelForCausalLM, MambaConfig

from torchrl_asyncgrpo import FlatPacker, GRPOLoss, TransformersEngine, TreeActor, TreePacker, make_rollout
from torchrl_asyncgrpo.modules.padding_free import PaddingFreeActor
from torchrl_asyncgrpo.trainers.stepper import WindowOptimizationStepper


def window(seed=0, *, kept=False, several=False):
    """Seven rollouts of two prompts."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(7):
        prompt = [[5, 6, 7], [5, 6, 8, 9]][i % 2]
        length = int(torch.randint(1, 8, (1,), generator=generator))
        tokens = [*prompt, *torch.randint(1, 4, (length,), generator=generator).tolist()]
        mask = [0] * len(prompt) + [int(k % 4 != 2) for k in range(length)]
        log_prob = (-4 - torch.rand(len(tokens), generator=generator)).tolist()
        advantage = torch.randn(len(tokens) if several else (), generator=generator)
        sets = [{t, (t + i) % 9, 3} if on and kept else None for t, on in zip(tokens, mask, strict=True)]
        rows.append(
            make_rollout(
                tokens, mask, log_prob, group_id=i % 2, rollout_id=i, advantage=advantage, sampling_mask=sets,
                ref_log_prob=(-4 - torch.rand(len(tokens), generator=generator)).tolist(),
            )
        )  # fmt: skip
    return rows


def train(loss, optimizer, packer, *, steps=5, clip_norm=0.5, at_gradient=lambda: None):
    """Step on as many windows, the learning rate falling from one to the next; loss and metrics of each."""
    stepper = WindowOptimizationStepper(optimizer, clip_norm=clip_norm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    trainer = SimpleNamespace(compute_loss=loss, pre_optim=at_gradient)
    course = []
    for step in range(steps):
        course.append(stepper.step(trainer, lazy_stack(packer(window(step)))))
        schedule.step()
    assert stepper.optimizer_step_count == steps
    return course


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(ours, theirs, tolerance=1e-6):
    assert ours.keys() == theirs.keys()
    for name in theirs.keys():
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


# What the processes on Ray import from here
def tree_actor(seed=0):
    return TreeActor(tiny_qwen3(seed))


def flat_actor(seed=0):
    return PaddingFreeActor(tiny_qwen3(seed))


def recurrent_actor():
    config = MambaConfig(vocab_size=16, hidden_size=16, state_size=4, num_hidden_layers=2)
    return TreeActor(AutoModelForCausalLM.from_config(config))


class CountingEngine(TransformersEngine):
    """Counts the requests of each cohort."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cohorts = []

    def _submit(self, loop):
        self.cohorts.append(len(self._forming[loop]))
        super()._submit(loop)


def make_engine():
    return CountingEngine(tiny_qwen3(), max_length=32)


ACTORS = {"tree": tree_actor, "flat": flat_actor}
PACKERS = {
    "tree": TreePacker(min_micro_batches=3),
    "flat": FlatPacker(min_micro_batches=3, padding_free=True),
}
grpo = partial(GRPOLoss, entropy_coeff=0.01, kl_to_ref_coeff=0.1)
# for the rollouts of an engine, which bring no log-probs of a reference
entropic_grpo = partial(GRPOLoss, entropy_coeff=0.01)
adamw = partial(torch.optim.AdamW, weight_decay=0.1)
