"""TurboQuant inside kernels: the rotation, levels, codes and scales. Twin: `minithink/quant/turboquant.py`.

Used by `append.py`, `dequantize.py`, `paged_attention.py`, `quantize.py`, `survivors.py`, `tri_score.py`,
`_formats.py`, `_parts.py` and `_planes.py`.

The kind of such a format is "tq-" and the rule of its scale: "tq-unbiased", "tq-norm", "tq-mse", "tq-none".

A Hadamard transform of D channels is log₂(D) stages. In each, channels i and i + h become their sum and their
difference; h is 1, 2, 4, … Sums over channels are taken in pairs, too. So every number is added in the same order as
in the twin, and results are the same bit for bit. In each stage a channel gets the number of its partner, from a
register of its own thread or of another thread of the warp, and the tile keeps its shape. If the tile were split
instead, down to one column, Triton 3.6 and 3.7 would let each thread compute the codes of a whole row, and spill
registers. The signs are computed where they are needed, from a hash of the channel.

First read `rotate` and `encode_rotated`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import INTERPRETED, Variant

# Levels of a standard normal number, and the boundaries between them; the other half is the mirror image.
LEVELS = {
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
BOUNDARIES: dict[int, tuple[float, ...]] = {
    1: (),
    2: (0.981599,),
    3: (0.500550, 1.049957, 1.747927),
    4: (0.258222, 0.522404, 0.799550, 1.099286, 1.437139, 1.843532, 2.400803),
}
SCALES = ("unbiased", "norm", "mse", "none")  # the rules of a scale
TILE = 2048  # numbers that a program of `_rotate` takes
_INTERPRETED = tl.constexpr(INTERPRETED)
_INFINITY = tl.constexpr(float("inf"))
_KEY = tl.constexpr(0xF286D6B06F688F0F)  # blake2b-64("turboquant"), little endian


@triton.constexpr_function
def is_rotated(kind):
    """Whether a kind of format is one of TurboQuant's."""
    return kind.startswith("tq")


@triton.constexpr_function
def stages(dim):
    """log₂(dim)."""
    return dim.bit_length() - 1


@triton.constexpr_function
def root(dim):
    """√dim."""
    return math.sqrt(dim)


@triton.constexpr_function
def level(bits, i):
    """The i-th level above 0."""
    return LEVELS[bits][i]


@triton.constexpr_function
def boundary(bits, i):
    """The i-th of all boundaries, ascending."""
    positive = BOUNDARIES[bits]
    negative = [-bound for bound in reversed(positive)]
    return [*negative, 0.0, *positive][i]


# -- the rotation


@triton.jit
def signs(DIM: tl.constexpr):
    """σ: float32 [1, DIM] of 1 and −1, by the top bit of splitmix64."""
    channel = tl.arange(0, DIM)[None, :].to(tl.int64).to(tl.uint64, bitcast=True)
    x = (channel + 1) * 0x9E3779B97F4A7C15 + _KEY
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return 1.0 - 2.0 * (x >> 63).to(tl.int32).to(tl.float32)


@triton.jit
def _swapped(x, HALF: tl.constexpr):
    """Channels i and i + HALF swap their numbers. x: [R, D]."""
    if _INTERPRETED:  # which flips number by number
        partner = tl.arange(0, x.shape[1])[None, :] ^ HALF
        y = tl.gather(x, tl.broadcast_to(partner, x.shape), 1)
    else:
        groups: tl.constexpr = x.shape[1] // (2 * HALF)
        pairs = tl.reshape(x, (x.shape[0], groups, 2, HALF))
        y = tl.reshape(tl.flip(pairs, 2), x.shape)
    return y


@triton.jit
def hadamard(x):
    """H·x of every row. x: float32 [R, D], D a power of two."""
    channel = tl.arange(0, x.shape[1])[None, :]
    for i in tl.static_range(stages(x.shape[1])):
        is_second = (channel >> i) & 1 == 1
        other = _swapped(x, 1 << i)
        x = tl.where(is_second, other - x, x + other)
    return x


@triton.jit
def rotate(x):
    """R(x) = H(σ∘x)/√D of every row: float32 [R, D]."""
    return hadamard(x * signs(x.shape[1])) * (1 / root(x.shape[1]))


@triton.jit
def rotate_back(y):
    """Rᵀ(y) = σ∘H(y)/√D of every row: float32 [R, D]."""
    return hadamard(y) * (1 / root(y.shape[1])) * signs(y.shape[1])


@triton.jit
def _sum(x):
    """The sum of every row, in pairs. x: [R, D] → [R, 1]."""
    for i in tl.static_range(stages(x.shape[1])):
        x += _swapped(x, 1 << i)
    return tl.max(x, 1, keep_dims=True)  # all channels hold the sum


# -- codes


@triton.jit
def decode_level(code, BITS: tl.constexpr):
    """int32 codes → float32 levels."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    above = code >= HALF
    i_level = tl.where(above, code - HALF, HALF - 1 - code)
    size = tl.full(code.shape, level(BITS, 0), tl.float32)
    for i in tl.static_range(1, HALF):
        size = tl.where(i_level >= i, level(BITS, i), size)
    return tl.where(above, size, -size)


@triton.jit
def encode_rotated(x, KIND: tl.constexpr, BITS: tl.constexpr):
    """Quantize rows.

    Args:
        x: float32 [R, D], finite.

    Returns:
        code: int32 [R, D].
        scale: float32 [R, 1], which may be infinite.
    """
    DIM: tl.constexpr = x.shape[1]
    largest = tl.max(tl.abs(x), 1, keep_dims=True)
    x = tl.div_rn(x, tl.where(largest > 0, largest, _INFINITY))
    norm = tl.sqrt_rn(_sum(x * x))
    # z = √D·R(x)/‖x‖
    z = tl.div_rn(hadamard(x * signs(DIM)), tl.where(norm > 0, norm, _INFINITY))
    code = tl.zeros(z.shape, tl.int32)
    for i in tl.static_range((1 << BITS) - 1):
        code += (z >= boundary(BITS, i)).to(tl.int32)
    c = decode_level(code, BITS)
    if KIND == "tq-none":
        scale = norm * (1 / root(DIM))
    elif KIND == "tq-norm":
        scale = tl.div_rn(norm, tl.sqrt_rn(_sum(c * c)))
    elif KIND == "tq-mse":
        scale = norm * (1 / root(DIM)) * tl.div_rn(_sum(z * c), _sum(c * c))
    else:
        product = _sum(z * c)
        scale = tl.div_rn(norm * root(DIM), tl.where(product > 0, product, _INFINITY))
    return code, largest * scale


# -- rows in memory


@triton.jit(do_not_specialize=["rows", "inner"])
def _rotate(p_x, p_out, rows, inner, x_outer, x_inner, DIM: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate rows, or rotate them back. Row i lies at (i // inner) · x_outer + i % inner · x_inner, and its result in
    the same place of the output."""
    i_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    m_row = i_row < rows
    o = i_row // inner * x_outer + i_row % inner * x_inner + tl.arange(0, DIM)[None, :]
    x = tl.load(p_x + o, m_row, other=0.0).to(tl.float32)
    if BACK:
        y = rotate_back(x)
    else:
        y = rotate(x)
    tl.store(p_out + o, y, m_row)


def rotate_rows(x: Tensor, back: bool = False, out: Tensor | None = None) -> Tensor:
    """Rotate every row, or rotate it back.

    Args:
        x: [A, B, D], the last axis dense; float32, float16 or bfloat16.
        out: where the result is written: float32 or the dtype of `x`, with its strides; it may be `x` itself. None: a
            new float32 tensor; then `x` must be contiguous.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    outer, inner, dim = x.shape
    rows = outer * inner
    block = max(1, TILE // dim)
    if rows:
        _rotate[triton.cdiv(rows, block),](
            p_x=x,
            p_out=out,
            rows=rows,
            inner=inner,
            x_outer=x.stride(0),
            x_inner=x.stride(1),
            DIM=dim,
            BACK=back,
            BLOCK=block,
        )
    return out


def variants() -> Iterator[Variant]:
    """Queries of bfloat16 models, and parts of outputs."""
    numbers = dict.fromkeys(("rows", "inner", "x_outer", "x_inner"), "i32")
    for dim in (64, 128, 256):
        sizes = {"DIM": dim, "BLOCK": TILE // dim}
        yield Variant(_rotate, numbers | {"p_x": "*bf16", "p_out": "*fp32"}, sizes | {"BACK": False})
        yield Variant(_rotate, numbers | {"p_x": "*fp32", "p_out": "*fp32"}, sizes | {"BACK": True})
