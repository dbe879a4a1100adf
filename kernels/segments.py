"""Where the segments of sequences lie in the lists of their tokens. Twin: `minithink/ref/segments.py`.

Layout: one launch, a program per unit and BLOCK segments. Lists are in the order of positions, so where a segment
begins is found by halving, for all segments of the program together.
Bound: 4 bytes for each of the log2(S) positions that a search looks at, 8 written a segment: the latency of as many
loads, one after the other.
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
        here = low + step  # so many at least, if the last of them is below
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
    """Segment g holds the tokens from position prompt + τ·g on, before prompt + τ·(g + 1).

    Args:
        pos: int32 [Lt, B, Ht, W], positions, ascending; only the first `count` of each list are looked at.
        count: int32 [Lt, B, Ht], tokens of each list. Both contiguous.
        at: int64 [N], of these rows.
        prompt: int32 [N], tokens of their prompts.
        tau: τ.
        total: G, segments that are asked for.

    Returns:
        first: int32 [Lt, N, Ht, G], the column of each segment's first token, or where it would stand.
        size: int32 [Lt, N, Ht, G], its tokens that are left.
    """
    n, (layers, rows, heads) = len(at), count.shape
    first, size = torch.empty(2, layers, n, heads, total, dtype=torch.int32, device=pos.device)
    if first.numel():
        _segments[layers * n * heads, triton.cdiv(total, BLOCK)](
            pos, count, at.contiguous(), prompt.contiguous(), first, size, n, rows, heads, pos.shape[-1], tau, total,
            BLOCK, num_warps=BLOCK // 32,
        )  # fmt: skip
    return first, size


def variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("p_pos", "p_count", "p_prompt", "p_first", "p_size"), "*i32") | {"p_at": "*i64"}
    signature |= dict.fromkeys(("n", "rows", "heads", "width", "tau", "total"), "i32")
    yield Variant(_segments, signature, {"BLOCK": BLOCK}, {"num_warps": BLOCK // 32})
