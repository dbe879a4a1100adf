"""What all kernels share: whether they are interpreted, and what a compile check needs to know of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

# Triton decides this when a kernel is defined. The interpreter computes with numpy, which knows no bfloat16: kernels
# convert to float32 right after each load, and keep products in float32, where this is true.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class Variant:
    """One way a kernel is compiled, for `python -m minithink.bench compile`, which needs no GPU."""

    kernel: Any  # a triton.jit function
    signature: dict[str, str]  # argument → type: "*bf16", "*fp32", "*u8", "i32", "fp32"
    constexprs: dict[str, Any] = field(default_factory=dict)  # argument → value
    options: dict[str, int] = field(default_factory=dict)  # num_warps, num_stages, launch_pdl
    arch: int = 80  # the lowest compute capability, times 10


@triton.jit
def unit_of(i, n, rows, tables, p_at):
    """Of the i-th unit (a layer, a row, a table) of the n chosen rows: which row it is, and its number among those of
    all rows; int64. p_at: the chosen rows."""
    row = tl.load(p_at + i // tables % n).to(tl.int64)
    return row, (i // (n * tables) * rows + row) * tables + i % tables


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: Triton's ranges must have such lengths."""
    return 1 << max(0, n - 1).bit_length()
