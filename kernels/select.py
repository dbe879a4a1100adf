"""Select the tokens of the selection windows that go, for all sequences at once. Twin: `minithink/ref/select.py`.

To use it alone, copy this file, `_common.py` and `_radix.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.select import select
    >>> score = torch.tensor([[0.0, 0.4, 0.1, 0.8, 0.2, 0.0]])  # float32 [B, T], by position
    >>> pos = torch.arange(6, dtype=torch.int32).view(1, 1, 1, 6)  # [Lt, N, Ht, S]
    >>> held = torch.full((1, 1, 1), 6, dtype=torch.int32)  # [Lt, N, Ht]
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> first = torch.tensor([1], dtype=torch.int32)  # [N]: the window begins at position 1,
    >>> local = torch.full((1, 1, 1), 1, dtype=torch.int32)  # [Lt, N, Ht]: and ends before the last token
    >>> keep = torch.full((1, 1, 1), 2, dtype=torch.int32)  # [Lt, N, Ht]
    >>> due = torch.ones(1, 1, 1, dtype=torch.bool)  # [Lt, N, Ht]
    >>> select(score, pos, held, at, first, local, keep, due).tolist()  # the tokens that go
    [[[[False, False, True, False, True, False]]]]

Layout: one program per lane. The program of a lane that is not due ends at once. Positions ascend, so the question's
tokens are the lane's first columns, and the selection window is a range of columns. In it runs the radix search of
`_radix.py`, which loads scores by the tokens' positions. The last pass writes the tokens that go.
Bound: latency. A lane is due once in some thousand steps, and then reads 8 bytes for each of its tokens in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels._radix import best, load_key, search

BLOCK = 1024  # columns at a time
WARPS = 8


@triton.jit
def _load(lane, start, column, end, BITS: tl.constexpr):
    """Keys by the tokens' positions; all columns before `end` are candidates."""
    p_score, p_pos, tokens = lane
    m_in = start + column < end
    pos = tl.load(p_pos + (start + column), m_in, other=0)
    key = load_key(p_score, tl.minimum(tl.maximum(pos, 0), tokens - 1), m_in, BITS)
    return key, m_in


@triton.jit
def _select(
    p_score,
    p_pos,
    p_held,
    p_at,
    p_first,
    p_local,
    p_keep,
    p_due,
    p_drop,
    n,
    heads,
    width,
    tokens,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    if tl.load(p_due + i) == 0:
        return
    i_n = i // heads % n
    p_score += tl.load(p_at + i_n) * tokens
    p_pos += i * width
    p_drop += i * width
    held = tl.load(p_held + i)
    first = tl.load(p_first + i_n)
    column = tl.arange(0, BLOCK)

    question = tl.zeros((BLOCK,), tl.int32)  # tokens of the question
    for start in range(0, held, BLOCK):
        m_in = start + column < held
        pos = tl.load(p_pos + start + column, m_in, other=0)
        question += (m_in & (pos < first)).to(tl.int32)
    begin = tl.sum(question)
    end = held - tl.load(p_local + i)
    missing = tl.maximum(tl.load(p_keep + i), 0)
    if missing >= end - begin:  # all tokens of the window stay
        return

    lane = (p_score, p_pos, tokens)
    low, high, missing = search(_load, lane, begin, end, end - begin, missing, 32, BLOCK)
    for start in range(begin, end, BLOCK):
        key, m_in = _load(lane, start, column, end, 32)
        stays, found = best(key, m_in, low, high, missing)
        missing -= found
        tl.store(p_drop + start + column, (~stays).to(tl.uint8), m_in)


def select(
    score: Tensor, pos: Tensor, held: Tensor, at: Tensor, first: Tensor, local: Tensor, keep: Tensor, due: Tensor
) -> Tensor:
    """Of the selection window of every lane that is due, keep the best tokens, as `minithink/ref/select.py` describes
    it."""
    _, n, heads = held.shape
    drop = torch.zeros(pos.shape, dtype=torch.bool, device=pos.device)
    if drop.numel():
        _select[(held.numel(),)](
            score,
            pos.contiguous(),
            held.contiguous(),
            at,
            first.to(torch.int32).contiguous(),
            local.expand(held.shape).to(torch.int32).contiguous(),
            keep.expand(held.shape).to(torch.int32).contiguous(),
            due.expand(held.shape).contiguous().view(torch.uint8),
            drop.view(torch.uint8),
            n,
            heads,
            width=pos.shape[-1],
            tokens=score.shape[1],
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return drop


def variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("p_pos", "p_held", "p_first", "p_local", "p_keep"), "*i32")
    signature |= {"p_score": "*fp32", "p_at": "*i64", "p_due": "*u8", "p_drop": "*u8"}
    signature |= dict.fromkeys(("n", "heads", "width", "tokens"), "i32")
    yield Variant(_select, signature, {"BLOCK": BLOCK}, {"num_warps": WARPS})
