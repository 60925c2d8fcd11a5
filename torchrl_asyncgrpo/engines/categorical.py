"""Draws tokens from logits, with the exact log-prob of what was drawn.

Shapes: B rows of logits, R draws, V vocabulary, C blocks of the vocabulary, W width of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_WIDTH = 256
#: most logits that are worked on together: bounds memory, whatever the number of rows
LOGITS_AT_ONCE = 2**22


def sample_categorical(
    logits_BV: Tensor, source_R: Tensor, temperature_R: Tensor, uniform_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token per entry of ``source_R`` by inverting the cumulative distribution.

    A draw depends on its row of logits, its temperature and its uniform alone, never on what else is in the batch. The
    search goes by blocks, then within one, in float64; a token of probability 0 is never drawn.

    Args:
        logits_BV: [B, V] float, unnormalised.
        source_R: [R] int64, row of ``logits_BV`` that each draw uses.
        temperature_R: [R] float > 0.
        uniform_R: [R] float64 in [0, 1).

    Returns:
        ``token_R`` [R] int64, and ``log_prob_R`` [R] float64, nats: log softmax(logits / temperature) of that token,
        computed in float32, or in float64 where the logits are.

    Raises:
        FloatingPointError: if a row has a NaN or +inf logit, or nothing but -inf.
    """
    rows_at_once = max(1, LOGITS_AT_ONCE // logits_BV.shape[-1])
    parts = [
        _sample_rows(logits_BV[source], temperature, uniform)
        for source, temperature, uniform in zip(
            source_R.split(rows_at_once),
            temperature_R.split(rows_at_once),
            uniform_R.split(rows_at_once),
            strict=True,
        )
    ]
    return torch.cat([token for token, _ in parts]), torch.cat([log_prob for _, log_prob in parts])


def _sample_rows(logits_RV: Tensor, temperature_R: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    precision = torch.promote_types(logits_RV.dtype, torch.float32)
    scaled_RV = logits_RV.to(precision) / temperature_R.to(precision)[:, None]
    max_R1 = scaled_RV.amax(-1, keepdim=True)
    weight_RCW = _blocks((scaled_RV - max_R1).exp_())
    block_RC = weight_RCW.sum(-1).double()
    cumulative_RC = block_RC.cumsum(-1)
    total_R1 = cumulative_RC[:, -1:]
    if not bool(torch.isfinite(total_R1).all()):
        bad = int((~torch.isfinite(total_R1)).sum())
        raise FloatingPointError(
            f"{bad} of {len(total_R1)} rows of logits have no distribution (NaN or infinite): check the weights that "
            "were loaded last."
        )
    target_R1 = uniform_R[:, None] * total_R1
    block_R1 = (cumulative_RC <= target_R1).sum(-1, keepdim=True)
    before_R1 = cumulative_RC.gather(-1, block_R1) - block_RC.gather(-1, block_R1)
    rows_R = torch.arange(len(weight_RCW), device=weight_RCW.device)
    inner_RW = weight_RCW[rows_R, block_R1[:, 0]].double().cumsum(-1)
    # Rounding may put the rest just past the block's own sum; the last token with a weight is then the right one.
    rest_R1 = torch.minimum(target_R1 - before_R1, inner_RW[:, -1:] * (1 - 2**-52))
    token_R1 = block_R1 * weight_RCW.shape[-1] + (inner_RW <= rest_R1).sum(-1, keepdim=True)
    log_prob_R1 = (scaled_RV.gather(-1, token_R1) - max_R1).double() - total_R1.log()
    return token_R1[:, 0], log_prob_R1[:, 0]


def _blocks(weight_RV: Tensor) -> Tensor:
    padding = -weight_RV.shape[-1] % BLOCK_WIDTH
    if padding:
        weight_RV = torch.nn.functional.pad(weight_RV, (0, padding))
    return weight_RV.unflatten(-1, (-1, BLOCK_WIDTH))
