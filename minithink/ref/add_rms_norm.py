"""The residual connection and the norm after it."""

from __future__ import annotations

from torch import Tensor

from minithink.ref.rms_norm import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream, and norm the sum for the next block.

        summed = x + residual
        normed = rms_norm(summed)

    The sum is rounded to its dtype before the norm, so that the norm sees what the stream holds.

    Args:
        x: [..., d], the block's output.
        residual: [..., d], the stream so far.
        weight: [d].
        eps: added to the mean square.

    Returns:
        normed and summed, [..., d] each, in the dtype of `x`.
    """
    summed = x + residual
    return rms_norm(summed, weight, eps), summed
