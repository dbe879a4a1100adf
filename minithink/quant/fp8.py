"""FP8: E4M3 numbers under one FP32 scale for a whole tensor (ThinKV §D.3).

Here a tensor is the keys, or the values, of one layer and sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minithink.quant import e4m3
from minithink.quant.format import Format, saturate, scale_with_headroom


@dataclass(frozen=True)
class Fp8(Format):
    """x̂ = tensor scale · E4M3. No groups."""

    name: str = field(init=False, default="fp8")
    bits: int = field(init=False, default=8)
    tensor_scaled: bool = field(init=False, default=True)

    def tensor_scale(self, amax: Tensor) -> Tensor:
        # 2·amax / 448
        return scale_with_headroom(amax, e4m3.MAX)

    def quantize(self, x: Tensor, tensor_scale: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = saturate(x.float(), torch.float32)
        return e4m3.encode(x / tensor_scale[..., None]), x.new_empty((*x.shape[:-1], 0), dtype=torch.uint8)

    def dequantize(self, codes: Tensor, params: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
        return saturate(e4m3.decode(codes) * tensor_scale[..., None], dtype)
