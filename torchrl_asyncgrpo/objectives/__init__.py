"""Policy-gradient objectives over tree batches: pure functions, and the LossModules that call them."""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase

from torchrl_asyncgrpo.objectives.base import PolicyLoss
from torchrl_asyncgrpo.objectives.cispo import CISPOLoss
from torchrl_asyncgrpo.objectives.dapo import DAPOLoss
from torchrl_asyncgrpo.objectives.decoupled import DecoupledPPOLoss
from torchrl_asyncgrpo.objectives.dr_grpo import DrGRPOLoss
from torchrl_asyncgrpo.objectives.dual_clip import DualClipPPOLoss
from torchrl_asyncgrpo.objectives.gmpo import GMPOLoss
from torchrl_asyncgrpo.objectives.grpo import GRPOLoss
from torchrl_asyncgrpo.objectives.gspo import GSPOLoss
from torchrl_asyncgrpo.objectives.reinforce import ReinforceLoss
from torchrl_asyncgrpo.objectives.sapo import SAPOLoss

OBJECTIVES: dict[str, type[PolicyLoss]] = {
    "grpo": GRPOLoss,
    "dr_grpo": DrGRPOLoss,
    "dapo": DAPOLoss,
    "cispo": CISPOLoss,
    "gspo": GSPOLoss,
    "sapo": SAPOLoss,
    "gmpo": GMPOLoss,
    "dual_clip_ppo": DualClipPPOLoss,
    "reinforce": ReinforceLoss,
    "decoupled_ppo": DecoupledPPOLoss,
}


def make_objective(name: str, actor_network: TensorDictModuleBase, **options: Any) -> PolicyLoss:
    """Make the objective that a configuration names.

    Args:
        name: a key of ``OBJECTIVES``.
        actor_network: as in ``PolicyLoss``.
        options: arguments of its class.

    Raises:
        ValueError: if the name is unknown or an argument is out of range.
        TypeError: if the objective does not take an argument.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is unknown; choose one of {', '.join(map(repr, OBJECTIVES))}.")
    return OBJECTIVES[name](actor_network, **options)
