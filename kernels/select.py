"""Select the tokens of the selection windows that go, for all sequences at once. Twin: `minithink/ref/select.py`.

Layout: one program per lane. The program of a lane that is not due ends at once. Positions ascend, so the question's
tokens are the lane's first columns, and the selection window is a range of columns. In it runs the radix search of
`keep_best.py`, which loads scores by the tokens' positions. The last pass writes the tokens that go.
Bound: latency. A lane is due once in some thousand steps, and then reads 8 bytes for each of its tokens in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels.keep_best import _ordered

BLOCK = 1024  # columns at a time
WARPS = 8


@triton.jit
def _keys(p_score, p_pos, column, end, tokens):
    """The scores of some columns as unsigned integers of the same order, and which columns are in the window."""
    m = column < end
    pos = tl.load(p_pos + column, m, other=0)
    return _ordered(p_score, tl.minimum(tl.maximum(pos, 0), tokens - 1), m, 32), m


@triton.jit
def _select(
    p_score, p_pos, p_held, p_at, p_first, p_local, p_keep, p_due, p_drop, n, heads, width, tokens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    if tl.load(p_due + i) == 0:
        return
    i_n = i // heads % n
    p_score += tl.load(p_at + i_n) * tokens
    p_pos += i * width
    p_drop += i * width
    held, first = tl.load(p_held + i), tl.load(p_first + i_n)
    column = tl.arange(0, BLOCK)

    begin = tl.zeros((BLOCK,), tl.int32)  # tokens of the question
    for start in range(0, held, BLOCK):
        m_in = start + column < held
        begin += (m_in & (tl.load(p_pos + start + column, m_in, other=0) < first)).to(tl.int32)
    begin, end = tl.sum(begin), held - tl.load(p_local + i)
    inside, missing = end - begin, tl.maximum(tl.load(p_keep + i), 0)
    if missing >= inside:
        return

    # Tokens that stay lie above the range [low, high], except `missing` of them, which lie in it.
    low, high = tl.full((), 0, tl.uint32), tl.full((), 0xFFFFFFFF, tl.uint32)
    one = low + 1  # 1, typed as `low`
    digit = tl.arange(0, 256)
    shift = low + 32  # of the digit searched last
    while (shift > 0) & (inside > missing) & (missing > 0):
        shift -= 8
        count = tl.zeros((256,), tl.int32)  # tokens in the range, by digit
        for start in range(begin, end, BLOCK):
            key, m = _keys(p_score, p_pos, start + column, end, tokens)
            m_range = m & (key >= low) & (key <= high)
            count += tl.histogram(((key - low) >> shift).to(tl.int32) & 255, 256, mask=m_range)
        above = inside - tl.cumsum(count)  # tokens in the range with a larger digit
        i_digit = tl.sum((above >= missing).to(tl.int32))  # of the worst token that stays
        missing -= tl.sum(tl.where(digit == i_digit, above, 0))
        inside = tl.sum(tl.where(digit == i_digit, count, 0))
        low += i_digit.to(low.dtype) << shift
        high = low + ((one << shift) - one)

    for start in range(begin, end, BLOCK):
        key, m = _keys(p_score, p_pos, start + column, end, tokens)
        m_range = (m & (key >= low) & (key <= high)).to(tl.int32)
        above = (m & (key > high)).to(tl.int32)
        stays = above + ((m_range > 0) & (tl.cumsum(m_range) <= missing)).to(tl.int32)
        missing -= tl.sum(m_range)  # below 0 once they are found
        tl.store(p_drop + start + column, (stays == 0).to(tl.uint8), m)


def select(
    score: Tensor, pos: Tensor, held: Tensor, at: Tensor, first: Tensor, local: Tensor, keep: Tensor, due: Tensor
) -> Tensor:
    """Of the selection window of every lane that is due, keep the best tokens, as `minithink/ref/select.py` describes
    it."""
    (_, n, heads), width = held.shape, pos.shape[-1]
    drop = torch.zeros(pos.shape, dtype=torch.bool, device=pos.device)
    if drop.numel():
        lanes = (x.expand(held.shape).to(torch.int32).contiguous() for x in (local, keep))
        _select[(held.numel(),)](
            score, pos.contiguous(), held.contiguous(), at, first.to(torch.int32).contiguous(), *lanes,
            due.expand(held.shape).contiguous().view(torch.uint8), drop.view(torch.uint8),
            n, heads, width, score.shape[1], BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return drop


def variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("p_pos", "p_held", "p_first", "p_local", "p_keep"), "*i32")
    signature |= {"p_score": "*fp32", "p_at": "*i64", "p_due": "*u8", "p_drop": "*u8"}
    signature |= dict.fromkeys(("n", "heads", "width", "tokens"), "i32")
    yield Variant(_select, signature, {"BLOCK": BLOCK}, {"num_warps": WARPS})
