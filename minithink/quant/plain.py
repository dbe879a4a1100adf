"""fp32, fp16 and bf16: numbers stored as they are, without groups or scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.quant.format import Format, saturate, view_as

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Plain(Format):
    """fp32, fp16 or bf16. A tensor of that dtype is stored and read back bit for bit, also ±∞ and NaN."""

    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", 8 * self.dtype.itemsize)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored numbers."""
        return DTYPES[self.name]

    def quantize(self, x: Tensor, tensor_scale: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stored = x if x.dtype == self.dtype else saturate(x, self.dtype)
        return stored.contiguous().view(torch.uint8), x.new_empty((*x.shape[:-1], 0), dtype=torch.uint8)

    def dequantize(self, codes: Tensor, params: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
        stored = view_as(codes, self.dtype)
        return stored if dtype == self.dtype else saturate(stored, dtype)
