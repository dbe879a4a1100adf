"""Rotary position embedding, one read and one write. Twin: `minithink/ref/rope.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.rope import rope
    >>> x = torch.randn(3, 4, 64)  # [N, H, D], any float dtype: 4 heads of tokens at the positions 0, 1 and 2
    >>> angle = torch.outer(torch.arange(3.0), 10000.0 ** -torch.arange(0, 1, 1 / 32))  # [N, D/2]
    >>> cos = torch.cat((angle.cos(), angle.cos()), dim=1)[:, None]  # [N, 1, D] float32
    >>> sin = torch.cat((-angle.sin(), angle.sin()), dim=1)[:, None]  # the first half with a minus
    >>> out = rope(x, cos, sin)  # [N, H, D] in the dtype of x
    >>> torch.allclose(out, x * cos + x.roll(32, dims=-1) * sin, atol=1e-5)
    True

Layout: a program takes one token and a few of its heads, and holds both halves of each head, so that every number is
read once. Cosines and sines are read once for all heads of the program. Heads and tokens have strides, so q and k are
read directly from the fused projection's output, [N, Hq + 2·Hkv, D].
Bound: memory, and the launch for the few tokens of a decoding step. Each number is read once and written once, with
two multiplications and an addition.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

TILE = 512  # pairs of a program: heads are taken together up to this many


@triton.jit
def _rope(
    p_x,
    p_cos,
    p_sin,
    p_out,
    heads,
    half,
    stride_token,
    stride_head,
    stride_cos,
    stride_sin,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    m_column = column < half
    m_in = (i_head < heads) & m_column
    p_cos += i_token * stride_cos + column
    p_sin += i_token * stride_sin + column
    cos_a = tl.load(p_cos, m_column, other=0)
    cos_b = tl.load(p_cos + half, m_column, other=0)  # [1, BLOCK]
    sin_a = tl.load(p_sin, m_column, other=0)
    sin_b = tl.load(p_sin + half, m_column, other=0)
    p_x += i_token * stride_token + i_head * stride_head + column
    a = tl.load(p_x, m_in, other=0).to(tl.float32)  # [HEADS, BLOCK]
    b = tl.load(p_x + half, m_in, other=0).to(tl.float32)
    # (a, b)·(cos, cos) + (b, a)·(−sin, sin)
    p_out += (i_token * heads + i_head) * 2 * half + column
    tl.store(p_out, a * cos_a + b * sin_a, m_in)
    tl.store(p_out + half, b * cos_b + a * sin_b, m_in)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (a, b) = (x_i, x_{i + D/2}) of every head by the angle of that token's position.

    Args:
        x: [N, H, D], queries or keys of N tokens; not copied if the last axis is dense.
        cos, sin: [N, 1, D] float32, of each token's angles; `cos` holds (cos, cos), `sin` (−sin, sin).

    Returns:
        [N, H, D] in the dtype of `x`, contiguous; the arithmetic is float32.
    """
    n, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    heads_of_program, block = shape_of_program(heads, width // 2)
    _rope[n, triton.cdiv(heads, heads_of_program)](
        p_x=x,
        p_cos=cos,
        p_sin=sin,
        p_out=out,
        heads=heads,
        half=width // 2,
        stride_token=x.stride(0),
        stride_head=x.stride(1),
        stride_cos=cos.stride(0),
        stride_sin=sin.stride(0),
        HEADS=heads_of_program,
        BLOCK=block,
        num_warps=2,
    )
    return out


def shape_of_program(heads: int, half: int) -> tuple[int, int]:
    """Heads of a program, and the power of two that holds half a head."""
    block = power_of_2(half)
    return min(power_of_2(heads), max(1, TILE // block)), block


def variants() -> Iterator[Variant]:
    integers = ("heads", "half", "stride_token", "stride_head", "stride_cos", "stride_sin")
    for dtype in ("fp32", "fp16", "bf16"):
        signature = {"p_x": f"*{dtype}", "p_cos": "*fp32", "p_sin": "*fp32", "p_out": f"*{dtype}"}
        signature |= dict.fromkeys(integers, "i32")
        for heads, half in ((32, 64), (2, 64), (32, 32)):
            heads_of_program, block = shape_of_program(heads, half)
            yield Variant(_rope, signature, {"HEADS": heads_of_program, "BLOCK": block}, {"num_warps": 2})
