"""Draw a score for every cached token by a hash of its position: a lot, or with weights a race.

    u = the top 53 bits of splitmix64(key + (position + 1)·φ),  φ = 0x9E3779B97F4A7C15     (Steele et al. 2014)

No generator has a state, so u depends on nothing but the key and the token's original position. With weights the
score is ln(u)/w. The tokens with the n largest scores are a weighted sample without replacement: the law is that of
drawing one token after the other by the remaining weights (an exponential race; Efraimidis and Spirakis 2006).
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # φ as int64, in which sums and products wrap modulo 2⁶⁴
MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def draw(key: Tensor, pos: Tensor, weight: Tensor | None = None) -> Tensor:
    """A score for every token; larger scores stay.

    Args:
        key: [...] int64, of every lane.
        pos: [..., S] int32, original positions.
        weight: [..., S] float32, at least 0; None: the score is u itself.

    Returns:
        [..., S] float64: u, from 0 to below 1, or ln(u)/w, −∞ where w is 0.
    """
    counter = key[..., None] + pos.long() * GOLDEN
    bits = _right(mix(counter), 11)  # 53 of them
    u = bits.double() * 2.0**-53
    if weight is None:
        return u
    log_u = u.clamp(min=2.0**-53).log()
    return torch.where(weight > 0, log_u / weight.double(), -torch.inf)


def mix(x: Tensor) -> Tensor:
    """splitmix64: one step from state x, a bijection of int64."""
    x = x + GOLDEN
    x = x ^ _right(x, 30)
    x = x * MULTIPLIERS[0]
    x = x ^ _right(x, 27)
    x = x * MULTIPLIERS[1]
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """x shifted right as an unsigned number."""
    mask = (1 << 64 - bits) - 1
    return (x >> bits) & mask
