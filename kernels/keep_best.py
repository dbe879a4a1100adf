"""The best candidates of every lane, without sorting. Twin: `minithink/ref/keep_best.py`.

To use it alone, copy this file, `_common.py` and `_radix.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.keep_best import keep_best
    >>> score = torch.tensor([[0.3, 0.9, 0.1, 0.9, 0.5]])  # float32 or float64 [lanes, S], oldest first
    >>> candidate = torch.tensor([[True, False, True, True, True]])  # [lanes, S]
    >>> count = torch.tensor([2])  # [lanes]
    >>> keep_best(score, candidate, count).tolist()
    [[False, False, False, True, True]]

Layout: one program per lane, which reads its columns BLOCK at a time. The radix search of `_radix.py` finds the range
of scores that holds the worst kept candidate. The last pass writes the candidates above the range, and the missing
ones from the range, oldest first.
Bound: memory. S·(score + 2 bytes) are moved for each lane; later passes find the lane in the GPU's cache. Lanes that
keep all candidates or none never read their scores.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant
from minithink.kernels._radix import BITS, best, load_key, search

BLOCK = 1024  # columns at a time


@triton.jit
def _load(lane, start, column, end, BITS: tl.constexpr):
    """Keys and candidates of a block of columns."""
    p_score, p_candidate = lane
    m_in = start + column < end
    candidate = tl.load(p_candidate + start + column, m_in, other=0) != 0
    key = load_key(p_score + start, column, m_in, BITS)
    return key, candidate


@triton.jit
def _keep_best(p_score, p_candidate, p_count, p_kept, width, BITS: tl.constexpr, BLOCK: tl.constexpr):
    i_lane = tl.program_id(0).to(tl.int64)
    p_score += i_lane * width
    p_candidate += i_lane * width
    p_kept += i_lane * width
    missing = tl.load(p_count + i_lane)
    column = tl.arange(0, BLOCK)

    candidates = tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        candidate = tl.load(p_candidate + start + column, start + column < width, other=0)
        candidates += tl.sum(candidate.to(tl.int32))
    if (missing <= 0) | (missing >= candidates):  # none or all are kept
        for start in range(0, width, BLOCK):
            m_in = start + column < width
            candidate = tl.load(p_candidate + start + column, m_in, other=0)
            tl.store(p_kept + start + column, tl.where(missing > 0, candidate, 0), m_in)
        return

    lane = (p_score, p_candidate)
    low, high, missing = search(_load, lane, 0, width, candidates, missing, BITS, BLOCK)
    for start in range(0, width, BLOCK):
        key, candidate = _load(lane, start, column, width, BITS)
        kept, found = best(key, candidate, low, high, missing)
        missing -= found
        tl.store(p_kept + start + column, kept.to(tl.uint8), start + column < width)


def keep_best(score: Tensor, candidate: Tensor, count: Tensor) -> Tensor:
    """The `count` best candidates of every lane; of equal scores the older token is kept.

    Args:
        score: [..., S] float32 or float64, columns oldest first; anything (also NaN) where there is no candidate.
        candidate: bool [..., S].
        count: integers [...]; if a lane has fewer candidates, all are kept.

    Returns:
        bool [..., S], the candidates that are kept.
    """
    shape = candidate.shape
    if score.dtype not in BITS:
        score = score.float()
    score = score.expand(shape).contiguous()
    candidate = candidate.contiguous()
    count = count.to(torch.int32).expand(shape[:-1]).contiguous()
    kept = torch.empty_like(candidate)
    if kept.numel():
        _keep_best[(count.numel(),)](
            score,
            candidate.view(torch.uint8),
            count,
            kept.view(torch.uint8),
            width=shape[-1],
            BITS=BITS[score.dtype],
            BLOCK=BLOCK,
        )
    return kept


def variants() -> Iterator[Variant]:
    for dtype, bits in (("fp32", 32), ("fp64", 64)):
        pointers = {"p_score": f"*{dtype}", "p_candidate": "*u8", "p_count": "*i32", "p_kept": "*u8"}
        yield Variant(_keep_best, {**pointers, "width": "i32"}, {"BITS": bits, "BLOCK": BLOCK})
