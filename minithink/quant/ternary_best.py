"""Ternary numbers with the scale of least squared error, in place of the group's largest magnitude (`ternary.py`).

Bytes and their meaning are those of `ternary`; only the scale that is written differs. docs/appendix/thinkv.md has
the errors of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minithink.quant import e4m3
from minithink.quant.format import divide
from minithink.quant.ternary import Ternary

# E4M3 numbers that are tried below the usual scale. If the k largest of m magnitudes become one, the best scale is
# their mean. So where another k than 1 is better, its mean is at least amax/√m. Groups have at most 128 elements, and
# 28 numbers reach from amax to amax/√128; the others are there because the usual scale is rounded.
TRIED = 30
LARGEST = 2.0**24  # magnitude that counts when the scale is chosen


@dataclass(frozen=True)
class TernaryBest(Ternary):
    """Ternary whose scale gives its group the least Σ(x̂ − x)². Of equal errors the largest scale is taken.

    Magnitudes above 2^24 count as 2^24 when the scale is chosen. Scales saturate at 448 anyway.
    """

    name: str = field(init=False, default="ternary_best")

    def encode(self, x: Tensor, tensor_scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        _, usual = super().encode(x, tensor_scale, valid)
        magnitude = x.abs().clamp(max=LARGEST)
        # In float64 all sums are exact, because what is added lies between half a scale and 2^25. So the kernel
        # takes the same scale, although it adds in another order. MPS has no float64.
        magnitude = magnitude if x.device.type == "mps" else magnitude.double()
        best = usual
        most = _saved(magnitude, usual)
        for below in range(1, TRIED + 1):
            tried = (usual.int() - below).clamp(min=0).to(torch.uint8)
            saved = _saved(magnitude, tried)
            better = saved > most
            best = torch.where(better, tried, best)
            most = torch.where(better, saved, most)
        return self.nearest(divide(x, self.step(best, tensor_scale))), best


def _saved(magnitude: Tensor, stored: Tensor) -> Tensor:
    """By how much a scale makes the squared error of every group smaller than Σx², that of zeros.

        Σx² − Σ(|x| − s)² = s · Σ(2|x| − s), all three over |x| > s/2, which become one

    Args:
        magnitude: |x|, [..., n, m].
        stored: uint8 [..., n, 1], E4M3 scales s.

    Returns:
        [..., n, 1], of the type of the magnitudes.
    """
    scale = e4m3.decode(stored).to(magnitude.dtype)
    terms = torch.where(magnitude > scale / 2, 2 * magnitude - scale, 0)
    return scale * terms.sum(-1, keepdim=True)
