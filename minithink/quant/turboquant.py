"""TurboQuant: a fixed random rotation, then the best scalar codebook for Gaussian numbers (Zandieh et al. 2025,
arXiv 2504.19874, algorithm 1).

A rotation R spreads every key and every value evenly over the channels: outliers disappear, and each rotated number
is nearly Gaussian, whatever the vector was. So one table of 2^b levels serves all models, layers and heads, and
nothing is calibrated. A token's vector x of D channels is stored as D codes of b bits and one number s:

    z = √D·R(x)/‖x‖             about standard normal
    code_j = number of boundaries ≤ z_j          c_j = levels[code_j]
    x̂ = s·Rᵀ(c)

With R = H·diag(σ)/√D: signs σ first, then the Sylvester Hadamard matrix H in its natural order, so that a rotation
takes D·log₂(D) additions. The scale s is what FP16 or FP32 holds, at most 65504 in FP16. How it is chosen:

    scale       s
    unbiased    ‖x‖·√D / ⟨z, c⟩           ⟨x, x̂⟩ = ‖x‖², and ⟨q, x̂⟩ is right on average over σ, for any q
    norm        ‖x‖ / ‖c‖                 ‖x̂‖ = ‖x‖
    mse         ‖x‖·⟨z, c⟩ / (√D·‖c‖²)    the least squared error under these codes
    none        ‖x‖ / √D                  the paper's letter; inner products shrink, at 1 bit to 2/π

R is orthogonal, so attention need not rotate keys and values back (`ref/rotated_attention.py`): ⟨q, x̂⟩ = s·⟨Rq, c⟩.

Sums are taken in pairs, (x₀ + x₁) + (x₂ + x₃), so that a kernel can repeat them bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.quant.format import Format, divide, saturate, view_as
from minithink.quant.int_asymmetric import PARAMS
from minithink.quant.pack import pack, unpack

SCALES = ("unbiased", "norm", "mse", "none")
# The optimal quantizer of a standard normal number (Lloyd–Max). The other half is the mirror image.
LEVELS = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
BOUNDARIES: dict[int, tuple[float, ...]] = {  # above 0, which is one, too
    1: (),
    2: (0.981599,),
    3: (0.500550, 1.049957, 1.747927),
    4: (0.258222, 0.522404, 0.799550, 1.099286, 1.437139, 1.843532, 2.400803),
}
BITS = {f"tq{bits}": bits for bits in LEVELS}  # names of the formats


@dataclass(frozen=True)
class TurboQuant(Format):
    """tq1, tq2, tq3 or tq4. A row of D channels has one parameter, s; D is a power of two."""

    bits: int = 4
    group: int = field(init=False, default=0)  # the whole row
    by: str = field(init=False, default="channel")
    scale: str = "unbiased"  # one of SCALES
    params: str = "fp16"  # the dtype of s: "fp16" or "fp32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"tq{self.bits}")
        object.__setattr__(self, "param_bytes", PARAMS[self.params].itemsize)

    def __str__(self) -> str:
        options = []
        if self.scale != "unbiased":
            options.append(f"scale={self.scale}")
        if self.params != "fp16":
            options.append(f"params={self.params}")
        return ":".join((self.name, ",".join(options))) if options else self.name

    def fit(self, dim: int) -> TurboQuant:
        if dim & (dim - 1):
            raise UsageError(
                f"{self.name} rotates a head by a Hadamard matrix, so a head must have a power of two of channels, "
                f"and this model's heads have {dim}: choose fp8, or nvfp4 or int4 in groups that divide {dim}."
            )
        return super().fit(dim)

    def quantize(self, x: Tensor, tensor_scale: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = saturate(x.float(), torch.float32)
        dim = x.shape[-1]
        # ‖x‖ may overflow. So largest = max|x| is taken out first, and only the scale gets it back.
        largest = x.abs().amax(-1, keepdim=True)
        x = divide(x, largest)
        norm = _root(_sum(x * x))
        # z = √D·R(x)/‖x‖
        z = divide(hadamard(x * signs(dim, x.device)), norm)
        # code_j = number of boundaries ≤ z_j
        codes = torch.bucketize(z, _boundaries(self.bits, x.device), right=True)
        c = _levels(self.bits, x.device)[codes]
        scale = saturate(largest * self._scale(norm, z, c), PARAMS[self.params])
        return pack(codes, self.bits), scale.view(torch.uint8)

    def _scale(self, norm: Tensor, z: Tensor, c: Tensor) -> Tensor:
        """s of vectors of this norm. norm: [..., 1]; z, c: [..., D] → [..., 1]."""
        root = math.sqrt(z.shape[-1])
        if self.scale == "none":
            return norm * (1 / root)
        if self.scale == "norm":
            return divide(norm, _root(_sum(c * c)))
        if self.scale == "mse":
            return norm * (1 / root) * divide(_sum(z * c), _sum(c * c))
        return divide(norm * root, _sum(z * c))

    def dequantize(self, codes: Tensor, params: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
        c, scale = self.rotated(codes, params)
        # x̂ = s·Rᵀ(c)
        return saturate(scale * rotate_back(c), dtype)

    def rotated(self, codes: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored, in the rotated basis: x̂ = s·Rᵀ(c).

        Args:
            codes: [..., code_bytes] uint8.
            params: [..., params_bytes] uint8.

        Returns:
            c: float32 [..., D].
            s: float32 [..., 1].
        """
        return self._read(codes), view_as(params, PARAMS[self.params]).float()

    def _read(self, packed: Tensor) -> Tensor:
        """Levels of packed codes: uint8 [..., code_bytes] → float32 [..., D]."""
        if 8 % self.bits:
            codes = unpack(packed, self.bits)
            return _levels(self.bits, packed.device).index_select(0, codes.flatten().int()).view(codes.shape)
        # Look up all levels of a byte at once, because reading a whole cache spends most of its time here.
        of_byte = _levels_of_bytes(self.bits, packed.device)
        c = of_byte.index_select(0, packed.flatten().int())
        return c.view(*packed.shape[:-1], packed.shape[-1] * (8 // self.bits))


def rotate(x: Tensor) -> Tensor:
    """R(x) = H(σ∘x)/√D. x: float32 [..., D] → [..., D]."""
    dim = x.shape[-1]
    return hadamard(x * signs(dim, x.device)) * (1 / math.sqrt(dim))


def rotate_back(y: Tensor) -> Tensor:
    """Rᵀ(y) = σ∘H(y)/√D, the inverse of `rotate`. y: float32 [..., D] → [..., D]."""
    dim = y.shape[-1]
    return hadamard(y) * (1 / math.sqrt(dim)) * signs(dim, y.device)


def hadamard(x: Tensor) -> Tensor:
    """H·x, with H_ij = (−1)^(common bits of i and j). x: [..., D], D a power of two → [..., D]."""
    dim = x.shape[-1]
    half = 1
    while half < dim:
        pairs = x.unflatten(-1, (dim // (2 * half), 2, half))  # i and i + half are a pair
        first, second = pairs.unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return x


@cache
def sign_bits(dim: int) -> tuple[int, ...]:
    """1 where σ is −1: of D numbers of splitmix64 the top bits. σ of 64 channels is the beginning of that of 128.

    σ is the same for all layers, heads, keys and values. It is never stored, so it must never change.
    """
    key = int.from_bytes(hashlib.blake2b(b"turboquant", digest_size=8).digest(), "little")
    return tuple(_splitmix64(key + (i + 1) * 0x9E3779B97F4A7C15) >> 63 for i in range(dim))


def _splitmix64(state: int) -> int:
    """The output of splitmix64 (Steele et al. 2014) in a state: 64 bits."""
    mask = (1 << 64) - 1
    z = state & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


@cache
def signs(dim: int, device: torch.device) -> Tensor:
    """σ: float32 [dim] of 1 and −1."""
    return torch.tensor([1.0 - 2 * bit for bit in sign_bits(dim)], device=device)


def _sum(x: Tensor) -> Tensor:
    """The sum over the last axis, in pairs. x: [..., D], D a power of two → [..., 1]."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x


def _root(x: Tensor) -> Tensor:
    """√x, rounded once: on CPUs torch's root of float32 may be an ulp off, and no kernel could repeat it."""
    if x.device.type == "mps":  # which has no float64
        return x.sqrt()
    return x.double().sqrt().float()


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """The level of every code: float32 [2^bits], ascending."""
    positive = LEVELS[bits]
    return torch.tensor([-level for level in reversed(positive)] + [*positive], device=device)


@cache
def _boundaries(bits: int, device: torch.device) -> Tensor:
    """Between neighbouring levels: float32 [2^bits − 1], ascending."""
    positive = BOUNDARIES[bits]
    return torch.tensor([-bound for bound in reversed(positive)] + [0.0, *positive], device=device)


@cache
def _levels_of_bytes(bits: int, device: torch.device) -> Tensor:
    """The levels of all codes that a byte holds: float32 [256, 8 / bits]."""
    codes = unpack(torch.arange(256, dtype=torch.uint8, device=device)[:, None], bits)
    return _levels(bits, device)[codes.int()]


# Choices
#
# - There is no published code. vLLM's port (`turboquant_attn.py`) stores keys so, with `norm`, and values as plain
#   asymmetric integers without a rotation; here values are stored like keys. It keeps the first and the last two
#   layers in the model's type; here a policy's storage is the same in all layers.
# - The paper rotates by a random orthogonal matrix. H·diag(σ)/√D needs D·log₂(D) additions and no memory, and its
#   errors are the same. Without σ, which vLLM leaves out, vectors that are nearly a row of H are stored badly: of
#   (1, …, 1) the squared error at 4 bits is 0.28 of the square, with σ 0.02.
# - `unbiased` is the scale of DRIVE and EDEN (Vargaftik et al. 2021 and 2022). It takes no bit, and its inner
#   products are better than those of the paper's algorithm 2, which spends one bit of each number on the signs of the
#   residual (QJL): squared error · D at 3 bits 0.027, there 0.18, with orthogonal projections 0.063. So it is
#   not here.
# - One table for standard normal numbers serves every D. The table for a rotated unit vector of 64 channels would be
#   better by 0.4 %.
# - 2.5 and 3.5 bits, by which the paper means that outlier channels have more bits, are not here: it does not say how
#   they are found. Keys and values may have different formats: quant:fmt=tq4,v_fmt=tq3.
