"""What all kernels share: whether Triton interprets them, the variants of the compile check, and small helpers.

Used by every kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton decides this when a kernel is defined. The interpreter computes with numpy, which has no bfloat16. So
# interpreted kernels convert to float32 right after each load, and keep products in float32. Kernels never join a
# scalar condition and a block of conditions by `&`: Triton 3.9's interpreter turns the result into integers, and
# refuses integers as a mask. They write `i < tl.where(condition, n, 0)` instead.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

Made = TypeVar("Made")


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
    """The row of the i-th unit (layer, row, table) of n chosen rows, and the unit's number among the units of all
    rows; int64. p_at: the chosen rows."""
    row = tl.load(p_at + i // tables % n).to(tl.int64)
    return row, (i // (n * tables) * rows + row) * tables + i % tables


_BRANCHES: dict[torch.device, list[torch.cuda.Stream]] = {}  # streams that are forked from the current one


def side_by_side(launches: Sequence[Callable[[], object]], device: torch.device, apart: bool = True) -> None:
    """Make launches that do not depend on each other. Give the longest first.

    While a CUDA graph is captured, each launch becomes a branch of the graph, so programs of one launch fill the
    parts of the GPU that another leaves idle. Otherwise, or if `apart` is False, one launch follows the other:
    without a graph, the events between branches would cost the host more time than they save.
    """
    if not apart or len(launches) < 2 or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        for launch in launches:
            launch()
        return
    main = torch.cuda.current_stream(device)
    streams = _BRANCHES.setdefault(device, [])
    streams += [torch.cuda.Stream(device) for _ in range(len(launches) - 1 - len(streams))]
    branches = streams[: len(launches) - 1]
    for stream in branches:
        stream.wait_stream(main)
    launches[0]()
    for stream, launch in zip(branches, launches[1:], strict=True):
        with torch.cuda.stream(stream):
            launch()
        main.wait_stream(stream)


def made_once(holder: Any, key: Hashable, make: Callable[[], Made]) -> Made:
    """Make what a kernel's launches have in common, once for all layers of a step.

    Args:
        holder: the step's Reading or Writer. If it has a dict `once`, the result is kept there, and later calls with
            the same key return it. Without one, each call makes the result anew.
        key: the kernel's function, and everything but the holder that the result depends on.
        make: makes the result.
    """
    kept: dict[Hashable, Made] | None = getattr(holder, "once", None)
    if kept is None:
        return make()
    if key not in kept:
        kept[key] = make()
    return kept[key]


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: Triton's ranges must have such lengths."""
    return 1 << max(0, n - 1).bit_length()


def with_dense_columns(x: Tensor) -> Tensor:
    """The tensor itself if its columns lie one behind the other, else a copy of which this is true."""
    if x.stride(-1) == 1 or x.shape[-1] < 2:
        return x
    return x.contiguous()
