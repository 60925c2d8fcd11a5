"""The auxiliary load-balancing loss of a mixture of experts, exact when rollouts share tokens.

Shapes: T nodes, S rollouts, Y layers with a router, E experts.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

LoadBalanceScope = Literal["rollout", "micro-batch"]


def load_balance_terms(
    router_logits_TYE: Tensor,
    subtree_end_T: Tensor,
    leaf_S: Tensor,
    experts_per_token: int,
    *,
    scope: LoadBalanceScope = "rollout",
) -> Tensor:
    """Load-balancing loss E · Σ_e f_e · P_e: how unevenly tokens are spread over experts, k where they are even.

    Layers are pooled before the product, so that imbalances of two layers can cancel.

    f_e is the share of token slots that went to expert e and P_e its mean probability, both over all tokens and layers:
    Switch Transformers, arXiv:2101.03961, eq. 4-6, with top-k as in transformers' ``load_balancing_loss_func``. A token
    counts once for every rollout that contains it, so that the value is that of the rollouts one by one, each up to its
    last trained token: what is behind that has no node.

    Args:
        router_logits_TYE: [T, Y, E] of every node and layer; carries the gradient.
        subtree_end_T: [T] int64, end of each node's subtree; nodes are in depth-first pre-order.
        leaf_S: [S] int64, the node that each rollout ends at.
        experts_per_token: k, experts that a token is sent to.
        scope: ``"rollout"``: f and P are over the tokens of one rollout, the scope of DeepSeek-V3, arXiv:2412.19437,
            section 2.1.2; does not depend on how a window is packed. ``"micro-batch"``: over the tokens of all
            rollouts, which equals transformers' loss on their rows; a product of means, and so different for every
            split of a window.

    Returns:
        [S] float64, the term of every rollout; with ``"micro-batch"`` the same one.

    Raises:
        ValueError: if there are fewer experts than a token is sent to.
    """
    experts = router_logits_TYE.shape[-1]
    if experts_per_token > experts:
        raise ValueError(f"experts_per_token={experts_per_token} and the routers have {experts} experts.")
    chosen_TYk = router_logits_TYE.topk(experts_per_token, dim=-1).indices
    used_TE = torch.zeros_like(router_logits_TYE, dtype=torch.float32).scatter_(-1, chosen_TYk, 1.0).mean(1)
    prob_TE = router_logits_TYE.softmax(-1, dtype=torch.promote_types(router_logits_TYE.dtype, torch.float32)).mean(1)
    used_SE, prob_SE = (path_sums(value.double(), subtree_end_T)[leaf_S] for value in (used_TE, prob_TE))
    length_S = path_sums(torch.ones_like(used_TE[:, :1]), subtree_end_T)[leaf_S]
    if scope == "micro-batch":
        used_SE, prob_SE, length_S = (
            value.sum(0, keepdim=True).expand(value.shape) for value in (used_SE, prob_SE, length_S)
        )
    return experts * (used_SE / length_S * (prob_SE / length_S)).sum(-1)


def path_sums(value_TE: Tensor, subtree_end_T: Tensor) -> Tensor:
    """[T, E] sums over the path from the root to each node: a node adds to the interval of its subtree.

    Args:
        value_TE: [T, E], one row per node in depth-first pre-order.
        subtree_end_T: [T] int64, end of each node's subtree.
    """
    zero = value_TE.new_zeros(1, value_TE.shape[1])
    steps_TE = torch.cat([value_TE, zero]).index_add(0, subtree_end_T, -value_TE)
    return steps_TE.cumsum(0)[:-1]


def check_scope(scope: str) -> None:
    """Raise ``ValueError`` unless the scope is known."""
    if scope not in get_args(LoadBalanceScope):
        known = ", ".join(map(repr, get_args(LoadBalanceScope)))
        raise ValueError(f"load_balance_scope={scope!r} is unknown; choose one of {known}.")
