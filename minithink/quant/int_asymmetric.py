"""Asymmetric integers of 2, 4, 8 and 16 bits (KIVI, `new_pack.py`; PM-KVQ, `quantizer.py`).

Each group has a scale and a minimum:

    scale = (max − min) / (2^b − 1)     code = clamp(round((x − min) / scale), 0, 2^b − 1)     x̂ = code·scale + min

Ties round to the even code. The parameters are FP16 (for KIVI) or FP32 (for PM-KVQ). Codes of 16 bits always have
FP32 parameters: FP16 would be too coarse. Both authors' codes keep parameters in the type of the data: FP16 in KIVI's
models, bfloat16 in PM-KVQ's. KIVI's code computes codes in this type, too; PM-KVQ's widens the data to FP32 only for
codes of 16 bits. Here everything is computed in FP32. Chosen where the papers are silent or their code fails:

- The scale is taken from the minimum as stored, so that rounding the minimum does not cut off the top.
- In a constant group, or if the scale underflows, all codes are 0 and x̂ = min. There KIVI's code divides 0 by 0.
  PM-KVQ's code bounds the scale to [1e−5, 1e5]. This code does not: at 16 bits the bound would coarsen groups with a
  range below 0.66.
- Inputs saturate at the largest number that a minimum can be, 65504, with FP16 parameters. (A minimum and a scale of
  65504 each would make 1,048,064 of a large number at 4 bits, and 16,769,024 at 8 bits.) With FP32 parameters they
  saturate at 2^126, where max − min is still finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.quant.format import Format, Grouped, divide, divide_by, saturate, view_as
from minithink.quant.pack import pack, unpack

PARAMS = {"fp16": torch.float16, "fp32": torch.float32}
WIDEST = {"fp16": 65504.0, "fp32": 2.0**126}  # magnitudes above this one saturate, by the type of the parameters


@dataclass(frozen=True)
class IntAsymmetric(Grouped):
    """int2, int4, int8 or int16. A group's parameters are its scale, then its minimum."""

    bits: int
    params: str = "fp16"  # the dtype of scales and minima: "fp16" or "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name", f"int{self.bits}")
        object.__setattr__(self, "param_bytes", 2 * PARAMS[self.params].itemsize)
        if self.bits == 16 and self.params != "fp32":
            raise UsageError(f"int16 stores its parameters as fp32, not as {self.params}: leave params out.")

    def __str__(self) -> str:
        return super().__str__() + (",params=fp32" if self.params == "fp32" and self.bits < 16 else "")

    @property
    def top(self) -> int:
        """The largest code, 2^b − 1."""
        return (1 << self.bits) - 1

    def encode(self, x: Tensor, tensor_scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        widest = WIDEST[self.params]
        x = x.clamp(-widest, widest)
        lowest = x.where(valid, math.inf).amin(-1, keepdim=True)  # [..., n, 1]
        highest = x.where(valid, -math.inf).amax(-1, keepdim=True)
        lowest = lowest.where(lowest < math.inf, 0.0) + 0.0  # 0 for a group without valid elements; −0 becomes 0
        dtype = PARAMS[self.params]
        stored_min = saturate(lowest, dtype)
        # scale = (max − min) / (2^b − 1)
        stored_scale = saturate(divide_by((highest - stored_min.float()).clamp(min=0), self.top) + 0.0, dtype)
        # code = clamp(round((x − min) / scale), 0, 2^b − 1)
        y = divide(x - stored_min.float(), stored_scale.float())
        codes = y.round().clamp(0, self.top).to(torch.int32)
        return codes, torch.cat((stored_scale, stored_min), dim=-1).view(torch.uint8)

    def decode(self, codes: Tensor, params: Tensor, tensor_scale: Tensor) -> Tensor:
        scale, minimum = view_as(params, PARAMS[self.params]).float().split(1, dim=-1)  # [..., n, 1] each
        # x̂ = code·scale + min
        return codes.float() * scale + minimum


def shrink(source: Format, target: Format, codes: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """Requantize to half, a quarter or an eighth of the bits, from the codes alone (PM-KVQ's packed backend).

    One halving, from 2c bits to c, repeated until the target's bits are reached:

        q' = ⌊(q + 2^(c−1)) / (2^c + 1)⌋      scale' = scale·(2^c + 1)      min' = min

    Because 2^2c − 1 = (2^c − 1)·(2^c + 1), the grid of 2^c points spans the same range; q' is its point nearest to q.
    A scale that exceeds 65504 in FP16 saturates.

    Args:
        source, target: asymmetric integers, equal in `group`, `by` and `params`.
        codes: [..., source.code_bytes] uint8.
        params: [..., source.params_bytes] uint8; by token one row for every token, or each shared row once.

    Returns:
        codes: [..., target.code_bytes] uint8.
        params: like `params`.

    Raises:
        UsageError: the formats differ in more than the bits, or the target has more.
    """
    if not (
        isinstance(source, IntAsymmetric)
        and isinstance(target, IntAsymmetric)
        and target.bits <= source.bits
        and replace(source, bits=target.bits) == target
    ):
        raise UsageError(f"{source} cannot be shrunk to {target}: only integers can, to fewer bits and nothing else.")
    q = unpack(codes, source.bits).int()
    groups = params.unflatten(-1, (params.shape[-1] // source.param_bytes, source.param_bytes))
    scale, minimum = view_as(groups, PARAMS[source.params]).split(1, dim=-1)
    bits = source.bits
    while bits > target.bits:
        bits //= 2  # c
        # q' = ⌊(q + 2^(c−1)) / (2^c + 1)⌋
        q = torch.div(q + (1 << bits - 1), (1 << bits) + 1, rounding_mode="floor")
        # scale' = scale·(2^c + 1)
        scale = saturate(scale.float() * ((1 << bits) + 1), scale.dtype)
    return pack(q, target.bits), torch.cat((scale, minimum), dim=-1).view(torch.uint8).flatten(-2)
