"""The residual connection and the norm after it, in one pass. Twin: `minithink/ref/add_rms_norm.py`.

Layout: a program holds a few whole rows in registers, as in `rms_norm`. The rows of the inputs may be further apart
than they are wide.
Bound: memory. Two numbers are read and two are written, with five operations. Two separate kernels would move five
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels.rms_norm import shape_of_program


@triton.jit
def _add_rms_norm(
    p_x, p_residual, p_weight, p_normed, p_summed, rows, width, stride_x, stride_residual, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    m_in = (i_row < rows) & (column < width)
    x = tl.load(p_x + i_row * stride_x + column, m_in, other=0).to(tl.float32)  # [ROWS, BLOCK]
    residual = tl.load(p_residual + i_row * stride_residual + column, m_in, other=0).to(tl.float32)
    weight = tl.load(p_weight + column, column < width, other=0).to(tl.float32)
    # summed = x + residual, rounded to its dtype: the norm sees what is stored
    summed = (x + residual).to(p_summed.dtype.element_ty)
    tl.store(p_summed + i_row * width + column, summed, m_in)
    summed = summed.to(tl.float32)
    # normed = summed / √(mean(summed²) + eps) · weight
    scale = tl.rsqrt(tl.sum(summed * summed, axis=1) / width + eps)
    tl.store(p_normed + i_row * width + column, summed * scale[:, None] * weight, m_in)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream, and norm the sum for the next block.

    Args:
        x: [..., d], the block's output; not copied if its leading axes collapse into one.
        residual: [..., d], the stream so far; likewise.
        weight: [d].
        eps: added to the mean square.

    Returns:
        normed and summed, [..., d] each, in the dtype of `x`, contiguous.
    """
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = torch.empty_like(normed)
    if normed.numel() == 0:
        return normed, summed
    width = x.shape[-1]
    x, residual = _rows(x), _rows(residual)
    rows_of_program, block, warps = shape_of_program(width)
    _add_rms_norm[(triton.cdiv(x.shape[0], rows_of_program),)](
        x, residual, weight.contiguous(), normed, summed, x.shape[0], width, x.stride(0), residual.stride(0), eps,
        rows_of_program, block, num_warps=warps,
    )  # fmt: skip
    return normed, summed


def _rows(x: Tensor) -> Tensor:
    """[..., d] → [rows, d] with a dense last axis."""
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1])


def variants() -> Iterator[Variant]:
    for dtype in ("fp32", "fp16", "bf16"):
        signature = dict.fromkeys(("p_x", "p_residual", "p_weight", "p_normed", "p_summed"), f"*{dtype}")
        signature |= dict.fromkeys(("rows", "width", "stride_x", "stride_residual"), "i32")
        for width in (64, 1536, 4096, 8192):
            rows, block, warps = shape_of_program(width)
            yield Variant(
                _add_rms_norm, signature | {"eps": "fp32"}, {"ROWS": rows, "BLOCK": block}, {"num_warps": warps}
            )
