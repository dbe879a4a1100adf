"""Ternary (ThinKV §D.3): {−1, 0, +1} in 2 bits, one E4M3 scale a group of 16, no FP32 scale.

The scale is the group's amax, as in the paper. The paper does not give the thresholds. Chosen here: ± half the scale,
where the nearest point changes. `ternary_best.py` stores the scale of least squared error, and
docs/appendix/thinkv.md has the errors of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from minithink.quant.symmetric import Symmetric


@dataclass(frozen=True)
class Ternary(Symmetric):
    """Codes are a sign and a magnitude: 0 is 00, +1 is 01, −1 is 11. 10 (−0) is never written and reads as 0."""

    name: str = field(init=False, default="ternary")
    bits: int = field(init=False, default=2)
    reach: ClassVar[float] = 1.0

    def nearest(self, y: Tensor) -> Tensor:
        # Exactly half the scale rounds to 0.
        one = y.abs() > 0.5
        return one.to(torch.uint8) | (one & (y < 0)).to(torch.uint8) << 1

    def point(self, codes: Tensor) -> Tensor:
        return (codes & 1).float() * (1 - (codes & 2).float())
