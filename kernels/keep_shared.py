"""The best candidates of lanes that share a number of places. Twin: `minithink/ref/keep_shared.py`.

To use it alone, copy this file, `_common.py` and `_radix.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.keep_shared import keep_shared
    >>> score = torch.tensor([[[0.9, 0.8, 0.7], [0.1, 0.2, 0.3]]])  # float32 or float64 [N, H, S], oldest first
    >>> candidate = torch.ones(1, 2, 3, dtype=torch.bool)  # [N, H, S]
    >>> count = torch.tensor([3], dtype=torch.int32)  # [N]: three tokens stay of the two heads together,
    >>> floor = torch.tensor([[1, 1]], dtype=torch.int32)  # [N, H]: and at least one of each
    >>> keep_shared(score, candidate, count, floor).tolist()
    [[[True, True, False], [False, False, True]]]

Layout: two launches, both with the radix search of `_radix.py`. The lanes of a group lie one behind the other. So a
lane is a range of columns, and the group is a longer range.

    _certain   a program per lane keeps the candidates that the lane keeps for certain
    _others    a program per group fills the places that are left, among the candidates that are not kept yet

Bound: latency. Each search reads the scores of its range once for each digit and once at the end; after the first
time they are in the GPU's cache. A row is due once in some hundred steps.
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
WARPS = 8


@triton.jit
def _load(lane, start, column, end, BITS: tl.constexpr):
    """Keys and candidates, while none of them is kept yet."""
    p_score, p_candidate, _ = lane
    m_in = start + column < end
    candidate = tl.load(p_candidate + (start + column), m_in, other=0) != 0
    key = load_key(p_score + start, column, m_in, BITS)
    return key, candidate


@triton.jit
def _load_open(lane, start, column, end, BITS: tl.constexpr):
    """Keys, and the candidates that are not kept yet."""
    p_kept = lane[2]
    key, candidate = _load(lane, start, column, end, BITS)
    kept = tl.load(p_kept + (start + column), start + column < end, other=1)
    return key, candidate & (kept == 0)


@triton.jit
def _keep(load: tl.constexpr, lane, begin, end, count, BITS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """Keep the `count` best candidates of a range of columns → how many are kept.

    FIRST: all columns are written; else only those that are kept now.
    """
    p_kept = lane[2]
    column = tl.arange(0, BLOCK)
    candidates = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        _, candidate = load(lane, start, column, end, BITS)
        candidates += tl.sum(candidate.to(tl.int32))
    count = tl.minimum(tl.maximum(count, 0), candidates)

    low, high, missing = search(load, lane, begin, end, candidates, count, BITS, BLOCK)
    if FIRST or count > 0:
        for start in range(begin, end, BLOCK):
            m_in = start + column < end
            key, candidate = load(lane, start, column, end, BITS)
            kept, found = best(key, candidate, low, high, missing)
            missing -= found
            tl.store(p_kept + start + column, kept.to(tl.uint8), m_in if FIRST else kept)
    return count


@triton.jit
def _certain(
    p_score,
    p_candidate,
    p_floor,
    p_kept,
    p_number,
    heads,
    width,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The `floor` best of each lane, and how many they are."""
    i_lane = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    o_lane = i_lane * width
    lane = (p_score + o_lane, p_candidate + o_lane, p_kept + o_lane)
    floor = tl.load(p_floor + i_lane)
    tl.store(p_number + i_lane, _keep(_load, lane, 0, width, floor, BITS, BLOCK, FIRST=True))


@triton.jit
def _others(
    p_score,
    p_candidate,
    p_count,
    p_kept,
    p_number,
    heads,
    width,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of the other candidates of all lanes, for the places that are left."""
    i = tl.program_id(0).to(tl.int64)
    o_group = i * heads * width
    lane = (p_score + o_group, p_candidate + o_group, p_kept + o_group)
    missing = tl.load(p_count + i)
    for i_head in range(heads):
        missing -= tl.load(p_number + i * heads + i_head)
    _keep(_load_open, lane, 0, heads * width, missing, BITS, BLOCK, FIRST=False)


def keep_shared(score: Tensor, candidate: Tensor, count: Tensor, floor: Tensor) -> Tensor:
    """The best candidates of H lanes together, and of each lane at least its `floor` best, as
    `minithink/ref/keep_shared.py` describes it."""
    shape = candidate.shape
    if score.dtype not in BITS:
        score = score.float()
    score = score.expand(shape).contiguous()
    candidate = candidate.contiguous()
    count = count.to(torch.int32).expand(shape[:-2]).contiguous()
    floor = floor.to(torch.int32).expand(shape[:-1]).contiguous()
    kept = torch.empty_like(candidate)
    if kept.numel():
        heads, width = shape[-2:]
        groups = count.numel()
        shared = {
            "p_score": score,
            "p_candidate": candidate.view(torch.uint8),
            "p_kept": kept.view(torch.uint8),
            "p_number": torch.empty_like(floor),
            "heads": heads,
            "width": width,
            "BITS": BITS[score.dtype],
            "BLOCK": BLOCK,
            "num_warps": WARPS,
        }
        _certain[groups, heads](p_floor=floor, **shared)
        _others[(groups,)](p_count=count, **shared)
    return kept


def variants() -> Iterator[Variant]:
    for dtype, bits in (("fp32", 32), ("fp64", 64)):
        signature = {"p_score": f"*{dtype}", "p_candidate": "*u8", "p_kept": "*u8", "p_number": "*i32"}
        signature |= dict.fromkeys(("heads", "width"), "i32")
        constants = {"BITS": bits, "BLOCK": BLOCK}
        yield Variant(_certain, {**signature, "p_floor": "*i32"}, constants, {"num_warps": WARPS})
        yield Variant(_others, {**signature, "p_count": "*i32"}, constants, {"num_warps": WARPS})
