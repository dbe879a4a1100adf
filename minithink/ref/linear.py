"""The matrix product of every projection."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

CPUINFO = Path("/proc/cpuinfo")
# MKL, which torch's CPU builds use, spreads a product with few rows over all threads on Intel's processors only.
SPREADS = CPUINFO.exists() and "GenuineIntel" in CPUINFO.read_text()
FEW_ROWS = 32  # up to here a product on a CPU is bound by reading the weights


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · W + b.

    A product with few rows does little more than read W. If the CPU's library would read W with one core only, each
    thread gets a block of W's columns.

    Args:
        x: [N, in].
        weight: [in, out]; any strides, so a transposed [out, in] is fine.
        bias: what to add: a bias [out], the residual stream [N, out], whose memory the result may take, or None.

    Returns:
        [N, out].
    """
    few = x.shape[0] <= FEW_ROWS
    if x.is_cpu and not SPREADS and few:
        parts = torch.get_num_threads()  # only here, because torch.compile cannot trace this call
        if parts > 1 and weight.shape[1] % parts == 0:
            out = _in_blocks(x, weight, parts)
            return out if bias is None else out + bias
    if bias is None:
        return x @ weight
    return torch.addmm(bias, x, weight)


def _in_blocks(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """x · W as `parts` products side by side, each with a block of W's columns."""
    n = x.shape[0]
    inner, outer = weight.shape
    blocks = weight.view(inner, parts, -1)
    blocks = blocks.transpose(0, 1)  # [parts, in, out / parts]
    each = x.expand(parts, n, -1)
    out = torch.bmm(each, blocks)  # [parts, N, out / parts]
    if n == 1:
        return out.view(1, -1)
    return out.transpose(0, 1).reshape(n, outer)
