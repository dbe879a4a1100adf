"""SwiGLU's elementwise half: silu(gate) · up in one pass. Twin: `minithink/ref/swiglu.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.swiglu import swiglu
    >>> gate_up = torch.randn(5, 2 * 64)  # [N, 2·F], any float dtype
    >>> out = swiglu(gate_up)  # [N, F] in the same dtype
    >>> gate, up = gate_up.chunk(2, dim=1)
    >>> torch.allclose(out, torch.nn.functional.silu(gate) * up, atol=1e-5)
    True

Bound: memory. Two numbers are read and one is written for each output, with a handful of operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

BLOCK = 1024  # outputs of a program


@triton.jit
def _swiglu(p_in, p_out, width, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = column < width
    gate = tl.load(p_in + i_row * 2 * width + column, m_in).to(tl.float32)
    up = tl.load(p_in + i_row * 2 * width + width + column, m_in).to(tl.float32)
    # silu(x) = x / (1 + exp(−x))
    tl.store(p_out + i_row * width + column, gate / (1 + tl.exp(-gate)) * up, m_in)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, where the last axis of `gate_up` holds the gate and then the up projection.

    Args:
        gate_up: [..., 2F], contiguous.

    Returns:
        [..., F].
    """
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if rows := out.numel() // max(1, width):
        _swiglu[rows, triton.cdiv(width, BLOCK)](gate_up.contiguous(), out, width, BLOCK)
    return out


def variants() -> Iterator[Variant]:
    for dtype in ("fp32", "fp16", "bf16"):
        yield Variant(_swiglu, {"p_in": f"*{dtype}", "p_out": f"*{dtype}", "width": "i32"}, {"BLOCK": BLOCK})
