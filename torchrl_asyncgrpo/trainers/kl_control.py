"""A KL coefficient that follows the divergence it is to hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torchrl._utils import logger as torchrl_logger
from torchrl.data.llm import AdaptiveKLController
from torchrl.trainers import Trainer, TrainerHookBase

from torchrl_asyncgrpo.objectives import PolicyLoss


class AdaptiveKLControl(TrainerHookBase):
    """Raise the coefficient of the KL to the reference where it is above its target, and lower it where it is below.

    After an optimizer step with the divergence ``kl_to_ref``, in nats per trained token, the loss's coefficient becomes

        coeff · (1 + clip(kl_to_ref / target - 1, -0.2, 0.2) / horizon)

    by torchrl's ``AdaptiveKLController``; Ziegler et al., arXiv:1909.08593, section 2.2. It is set, and logged as
    ``kl_to_ref_coeff``, when the optimizer steps of an item of the collector are done: of several, each counts with the
    mean of their divergences.

        >>> loss_module = GRPOLoss(actor, kl_to_ref_coeff=0.05)
        >>> AdaptiveKLControl(loss_module, target=0.02, horizon=50).register(trainer)

    Args:
        loss_module: the trainer's; its ``kl_to_ref_coeff`` is where the coefficient starts.
        target: divergence to hold, in nats per trained token, > 0.
        horizon: optimizer steps in which the coefficient changes by a fifth at most, >= 1.

    Raises:
        TypeError: if the loss is no objective of this process.
        ValueError: if an argument is out of range, or the coefficient of the loss is 0.
    """

    def __init__(self, loss_module: PolicyLoss, *, target: float, horizon: int = 100) -> None:
        if not 0 < target < math.inf:
            raise ValueError(f"target={target}; give a divergence above 0, in nats per trained token.")
        if horizon < 1:
            raise ValueError(f"horizon={horizon}; it counts optimizer steps and must be at least 1.")
        if not isinstance(loss_module, PolicyLoss):
            raise TypeError(
                f"loss_module is a {type(loss_module).__name__}, which has no kl_to_ref_coeff to set; use an objective "
                "of this process, such as GRPOLoss."
            )
        if not loss_module.kl_to_ref_coeff > 0:
            raise ValueError(
                f"kl_to_ref_coeff={loss_module.kl_to_ref_coeff} of {type(loss_module).__name__}: a coefficient of 0 "
                "measures no divergence and stays 0 whatever it is multiplied with. Start from a small one, such as "
                "0.01."
            )
        self.loss_module = loss_module
        self.controller = AdaptiveKLController(init_kl_coef=loss_module.kl_to_ref_coeff, target=target, horizon=horizon)
        self.steps = 0

    def __call__(self, optim_steps: int, average_losses: TensorDictBase | None) -> dict[str, float]:
        """Adapt to the divergence of the optimizer steps since the last call.

        Args:
            optim_steps: optimizer steps taken so far.
            average_losses: mean of the metrics over those of the item; None where it had none.

        Returns:
            The coefficient, to be logged.

        Raises:
            KeyError: if the loss does not report ``kl_to_ref``.
        """
        taken, self.steps = optim_steps - self.steps, optim_steps
        if taken and average_losses is not None:
            if "kl_to_ref" not in average_losses.keys():
                raise KeyError(
                    f"the metrics {sorted(average_losses.keys())} have no 'kl_to_ref'; is the loss of the trainer the "
                    f"{type(self.loss_module).__name__} that AdaptiveKLControl was given?"
                )
            self._adapt(float(average_losses["kl_to_ref"]), taken)
        return {"kl_to_ref_coeff": self.loss_module.kl_to_ref_coeff}

    def _adapt(self, divergence: float, steps: int) -> None:
        if not math.isfinite(divergence):
            torchrl_logger.warning(f"kl_to_ref is {divergence}; its coefficient stays {self.controller.coef}.")
            return
        for _ in range(steps):
            # torchrl's controller reads penalties as they enter a reward, -coeff · KL, and returns a tensor
            self.controller.coef = float(self.controller.update([-self.controller.coef * divergence]))
        self.loss_module.kl_to_ref_coeff = self.controller.coef

    def register(self, trainer: Trainer, name: str = "kl_control") -> None:
        """Register behind the optimizer steps of an item, and for checkpoints.

        Raises:
            ValueError: if the trainer has another loss.
        """
        if trainer.loss_module is not self.loss_module:
            raise ValueError(
                f"the trainer's loss is another one, a {type(trainer.loss_module).__name__}, and would not see the "
                "coefficient that is set; give AdaptiveKLControl the trainer's loss_module."
            )
        self.steps = trainer._optim_count
        trainer.register_module(name, self)
        trainer.register_op("post_optim_complete_log", self)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient, and the optimizer steps it has seen."""
        return {"kl_to_ref_coeff": self.controller.coef, "steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with a saved coefficient."""
        self.controller.coef = self.loss_module.kl_to_ref_coeff = float(state_dict["kl_to_ref_coeff"])
        self.steps = int(state_dict["steps"])
