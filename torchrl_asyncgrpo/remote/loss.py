"""A loss that is computed where the model is."""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_asyncgrpo.remote.actor import RemoteActor


class RemoteLoss(nn.Module):
    """The loss module of a trainer whose backend computes the loss: batches go there whole, loss shares come back.

    Old log-probs, advantages and the window's totals are sent with each batch; nothing per token comes back. What a
    loss reads beside the batch, such as the current policy version, is here: use ``RemoteActor`` with an objective of
    this process for those.

    Args:
        actor_network: the policy; its backend holds the loss.

    Raises:
        ValueError: if the backend has no loss.

    Example:
        >>> backend = RayBackend(make_actor, make_loss=partial(GRPOLoss, clip_epsilon=0.2))
        >>> loss = RemoteLoss(RemoteActor(backend))
    """

    def __init__(self, actor_network: RemoteActor) -> None:
        super().__init__()
        if not actor_network.backend.info.has_loss:
            raise ValueError(
                f"the {type(actor_network.backend).__name__} has no loss; build it with make_loss, such as "
                "make_loss=GRPOLoss, or give the RemoteActor to an objective of this process."
            )
        self.actor_network = actor_network

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Loss shares and metrics of one micro-batch, as the loss there returns them; ``loss_*`` carry the gradient."""
        return TensorDict(self.actor_network.ask(tensordict, loss=True), batch_size=[])
