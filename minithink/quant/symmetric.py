"""What NVFP4, ternary and the symmetric integers share: a small grid of numbers under one E4M3 scale a group.

    stored scale = E4M3(amax / reach / tensor scale)      step = stored scale · tensor scale
    code = nearest point of the grid to x / step          x̂ = point · step

`reach` is the point that the group's largest magnitude lands on, up to the rounding of the scale. Zero is on every
grid and the nearest point is taken, so no element ever moves by more than its own magnitude. Scales below 2^(−10)
round to zero, and their groups to zeros; scales above 448 saturate.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from minithink.quant import e4m3
from minithink.quant.format import Grouped, divide, divide_by
from minithink.quant.pack import unpack


@dataclass(frozen=True)
class Symmetric(Grouped):
    """A format whose numbers are points of a grid; a subclass gives the points and their codes."""

    param_bytes: int = field(init=False, default=1)
    reach: ClassVar[float]

    @abstractmethod
    def nearest(self, y: Tensor) -> Tensor:
        """Numbers in units of the step, float32 of any shape, finite or ±∞ → codes of the nearest points."""

    @abstractmethod
    def point(self, codes: Tensor) -> Tensor:
        """Codes, uint8 → points, float32."""

    def encode(self, x: Tensor, tensor_scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        amax = x.abs().amax(-1, keepdim=True)  # [..., n, 1]; invalid elements are 0
        # stored scale = E4M3(amax / reach / tensor scale)
        scale = divide_by(amax, self.reach)
        stored = e4m3.encode(scale / tensor_scale if self.tensor_scaled else scale)
        return self.nearest(divide(x, self.step(stored, tensor_scale))), stored

    def read(self, packed: Tensor) -> Tensor:
        # Look up all points of a byte at once, because reading a whole cache spends most of its time here.
        points = _points_of_bytes(self, packed.device).index_select(0, packed.flatten().int())
        return points.view(*packed.shape[:-1], packed.shape[-1] * (8 // self.bits))

    def decode(self, codes: Tensor, params: Tensor, tensor_scale: Tensor) -> Tensor:
        """codes: points, as `read` gives them."""
        return codes * self.step(params, tensor_scale)

    def step(self, stored: Tensor, tensor_scale: Tensor) -> Tensor:
        """The step of every group. stored: uint8 [..., n, 1], E4M3 scales; tensor_scale: [..., 1, 1] → float32
        [..., n, 1]."""
        scale = e4m3.decode(stored)
        return scale * tensor_scale if self.tensor_scaled else scale


@cache
def _points_of_bytes(fmt: Symmetric, device: torch.device) -> Tensor:
    """The points of all codes that a byte holds: float32 [256, 8 / bits]."""
    return fmt.point(unpack(torch.arange(256, dtype=torch.uint8, device=device)[:, None], fmt.bits))
