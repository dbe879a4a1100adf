"""Symmetric integers under ThinKV's group scales, for its ablation of the data formats (§E.8, table 10).

The paper says only "INT4 and INT2 representations with same scaling as described in §D.3": an E4M3 scale for a group
of 16, no minimum. Chosen here:

- int4s: −7 … 7, scale amax/7. −8 is not used, so that the range is symmetric.
- int2s: −2, −1, 0, 1 in two's complement, scale amax/2. Without −2, as at 4 bits, INT2 would be ternary bit for bit,
  and half of the ablation would compare a format with itself. With −2 all four codes are used. The price is that
  positive numbers above ¾ of amax saturate at ½ of amax.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from minithink.quant.symmetric import Symmetric


@dataclass(frozen=True)
class IntSymmetric(Symmetric):
    """Whole numbers from `low` to `high`, as the low bits of their two's complement."""

    low: ClassVar[int]
    high: ClassVar[int]

    def nearest(self, y: Tensor) -> Tensor:
        # `round` takes ties to even. int8 seen as uint8 is the two's complement; the mask keeps its low bits.
        q = y.round().clamp(self.low, self.high).to(torch.int8)
        return q.view(torch.uint8) & (1 << self.bits) - 1

    def point(self, codes: Tensor) -> Tensor:
        sign = 1 << self.bits - 1
        return (codes ^ sign).float() - sign


@dataclass(frozen=True)
class Int4Symmetric(IntSymmetric):
    """−7 … 7, scale amax/7."""

    name: str = field(init=False, default="int4s")
    bits: int = field(init=False, default=4)
    reach: ClassVar[float] = 7.0
    low: ClassVar[int] = -7
    high: ClassVar[int] = 7


@dataclass(frozen=True)
class Int2Symmetric(IntSymmetric):
    """−2, −1, 0, 1, scale amax/2."""

    name: str = field(init=False, default="int2s")
    bits: int = field(init=False, default=2)
    reach: ClassVar[float] = 2.0
    low: ClassVar[int] = -2
    high: ClassVar[int] = 1
