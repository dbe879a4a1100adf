"""RMSNorm over the last axis, one read and one write. Twin: `minithink/ref/rms_norm.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.rms_norm import rms_norm
    >>> x = torch.randn(5, 64)  # [N, d], any float dtype
    >>> weight = torch.rand(64)  # [d]
    >>> out = rms_norm(x, weight, 1e-6)  # [N, d] in the dtype of x
    >>> torch.allclose(out, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6), atol=1e-5)
    True

Layout: a program holds a few whole rows in registers, so that the mean square and the product need one read. There
are outer · inner rows, and each of these two leading axes has its own stride. So the heads of q or k are normed
where the fused projection wrote them, inside [N, Hq + 2·Hkv, D].
Bound: memory, and the launch for the few rows of a decoding step. Each number is read once and written once, with
four operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, power_of_2

TILE = 1024  # numbers of a program: rows are taken together up to this many
PER_THREAD = 16  # numbers that a thread holds; a warp has 32 threads


@triton.jit
def _rms_norm(
    p_x,
    p_weight,
    p_out,
    rows,
    inner,
    width,
    stride_outer,
    stride_inner,
    stride_weight,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    i_outer = i_row // inner
    i_inner = i_row % inner
    column = tl.arange(0, BLOCK)[None, :]
    m_in = (i_row < rows) & (column < width)
    o_x = i_outer.to(tl.int64) * stride_outer + i_inner.to(tl.int64) * stride_inner
    x = tl.load(p_x + o_x + column, m_in, other=0).to(tl.float32)  # [ROWS, BLOCK]
    weight = tl.load(p_weight + i_inner * stride_weight + column, m_in, other=0).to(tl.float32)
    # x / √(mean(x²) + eps) · weight
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(p_out + i_row.to(tl.int64) * width + column, x * scale[:, None] * weight, m_in)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis; the arithmetic is float32 for every dtype.

    Args:
        x: [..., d] in any floating dtype; not copied if the last axis is dense and has at most two before it.
        weight: [d], or [H, d] for `x` [..., H, d]: one for each head.
        eps: added to the mean square.

    Returns:
        [..., d] in the dtype of `x`, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    width = x.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)
    while x.dim() < 3:
        x = x[None]
    outer, inner, _ = x.shape
    rows_of_program, block, warps = shape_of_program(width)
    _rms_norm[(triton.cdiv(outer * inner, rows_of_program),)](
        p_x=x,
        p_weight=weight.contiguous(),
        p_out=out,
        rows=outer * inner,
        inner=inner,
        width=width,
        stride_outer=x.stride(0),
        stride_inner=x.stride(1),
        stride_weight=0 if weight.dim() == 1 else width,
        eps=eps,
        ROWS=rows_of_program,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def shape_of_program(width: int) -> tuple[int, int, int]:
    """Rows of this width for a program, the power of two that holds a row, and the program's warps."""
    block = power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, min(16, max(1, rows * block // (32 * PER_THREAD)))


def variants() -> Iterator[Variant]:
    for dtype in ("fp32", "fp16", "bf16"):
        signature = dict.fromkeys(("p_x", "p_weight", "p_out"), f"*{dtype}")
        signature |= dict.fromkeys(("rows", "inner", "width", "stride_outer", "stride_inner", "stride_weight"), "i32")
        for width in (64, 128, 1536, 4096, 8192):
            rows, block, warps = shape_of_program(width)
            yield Variant(
                _rms_norm, signature | {"eps": "fp32"}, {"ROWS": rows, "BLOCK": block}, {"num_warps": warps}
            )
