"""Find the segments of sequences in their lists of tokens. Twin: `minithink/ref/segments.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.segments import segments
    >>> pos = torch.tensor([[[[0, 2, 4, 5, 7, 8, 15]]]], dtype=torch.int32)  # [Lt, B, Ht, W], positions, ascending
    >>> count = torch.tensor([[[7]]], dtype=torch.int32)  # [Lt, B, Ht], tokens of each list
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> prompt = torch.tensor([4], dtype=torch.int32)  # [N]: segments of tau tokens begin at 4, 8 and 12
    >>> first, size = segments(pos, count, at, prompt, tau=4, total=3)  # int32 [Lt, N, Ht, total], twice
    >>> first.tolist()
    [[[[2, 5, 6]]]]
    >>> size.tolist()
    [[[[3, 1, 1]]]]

Layout: one launch, a program per unit and BLOCK segments. Lists are in the order of positions, so a binary search
finds where a segment begins, for all segments of the program at once.
Bound: latency, log2(S) loads one after the other. A search reads 4 bytes for each of these positions; 8 bytes are
written for each segment.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, unit_of

BLOCK = 128  # segments of a program


@triton.jit
def _before(p_pos, count, border):
    """How many of the first `count` positions are below each border."""
    low = tl.zeros_like(border)
    step = tl.full((), 1, tl.int32)
    while step <= count:
        step *= 2
    while step > 1:
        step = step // 2
        here = low + step  # at least so many positions are below, if the last of them is
        below = tl.load(p_pos + (here - 1), here <= count, other=0) < border
        low = tl.where((here <= count) & below, here, low)
    return low


@triton.jit(do_not_specialize=["n", "rows"])
def _segments(
    p_pos, p_count, p_at, p_prompt, p_first, p_size, n, rows, heads, width, tau, total, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    i_n = i // heads % n
    _, i_unit = unit_of(i, n, rows, heads, p_at)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    behind = tl.arange(0, 2)[:, None]  # the borders before a segment and behind it are searched together
    border = tl.load(p_prompt + i_n) + tau * (number + behind)
    count = tl.load(p_count + i_unit)
    p_pos += i_unit * width
    column = _before(p_pos, count, border)
    tl.store(p_first + i * total + number, tl.sum(tl.where(behind == 0, column, 0), 0), number < total)
    tl.store(p_size + i * total + number, tl.sum(tl.where(behind == 0, -column, column), 0), number < total)


def segments(pos: Tensor, count: Tensor, at: Tensor, prompt: Tensor, tau: int, total: int) -> tuple[Tensor, Tensor]:
    """Find the first column and the size of every segment.

    Segment g holds the tokens whose position is at least prompt + τ·g and less than prompt + τ·(g + 1).

    Args:
        pos: int32 [Lt, B, Ht, W], positions, ascending; only the first `count` of each list are read.
        count: int32 [Lt, B, Ht], tokens of each list. Both contiguous.
        at: int64 [N], the rows.
        prompt: int32 [N], tokens of their prompts.
        tau: τ, tokens of a segment.
        total: G, the number of segments to find.

    Returns:
        first: int32 [Lt, N, Ht, G], the column of each segment's first token, or where it would be.
        size: int32 [Lt, N, Ht, G], tokens of the segment that are still held.
    """
    n = len(at)
    layers, rows, heads = count.shape
    first, size = torch.empty(2, layers, n, heads, total, dtype=torch.int32, device=pos.device)
    if first.numel():
        _segments[layers * n * heads, triton.cdiv(total, BLOCK)](
            p_pos=pos,
            p_count=count,
            p_at=at.contiguous(),
            p_prompt=prompt.contiguous(),
            p_first=first,
            p_size=size,
            n=n,
            rows=rows,
            heads=heads,
            width=pos.shape[-1],
            tau=tau,
            total=total,
            BLOCK=BLOCK,
            num_warps=BLOCK // 32,
        )
    return first, size


def variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("p_pos", "p_count", "p_prompt", "p_first", "p_size"), "*i32") | {"p_at": "*i64"}
    signature |= dict.fromkeys(("n", "rows", "heads", "width", "tau", "total"), "i32")
    yield Variant(_segments, signature, {"BLOCK": BLOCK}, {"num_warps": BLOCK // 32})
