"""Draw a number for every cached token by a hash of its position. Twin: `minithink/ref/draw.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.draw import draw
    >>> key = torch.tensor([11, 12])  # int64 [2], a number for each of two lists of tokens
    >>> pos = torch.arange(5, dtype=torch.int32).repeat(2, 1)  # int32 [2, S], positions of their tokens
    >>> lot = draw(key, pos)  # float64 [2, S], from 0 to below 1; the same key and position draw the same lot
    >>> weight = torch.rand(2, 5)  # float32 [2, S]
    >>> torch.allclose(draw(key, pos, weight), lot.log() / weight)
    True

Layout: one launch; a program takes BLOCK columns of a lane. The hash stays in registers.
Bound: memory and latency. A token has 4 bytes of position, 4 of weight if there are weights, and 8 of score.

Rounding: lots are the twin's, bit for bit. The logarithms of weighted scores differ in their last bits, so the order
of two scores nearer than about 1e-15 of their size may differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

BLOCK = 1024  # columns of a program


@triton.jit
def _draw(p_key, p_pos, p_weight, p_score, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    i_lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = column < width
    key = tl.load(p_key + i_lane).to(tl.uint64, bitcast=True)
    pos = tl.load(p_pos + i_lane * width + column, m_in, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
    x = key + (pos + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    score = (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³
    if WEIGHTED:
        weight = tl.load(p_weight + i_lane * width + column, m_in, other=0.0)
        race = tl.log(tl.maximum(score, 1.1102230246251565e-16)) / tl.where(weight > 0, weight, 1.0).to(tl.float64)
        score = tl.where(weight > 0, race, float("-inf"))
    tl.store(p_score + i_lane * width + column, score, m_in)


def draw(key: Tensor, pos: Tensor, weight: Tensor | None = None) -> Tensor:
    """A score for every token; larger scores stay.

    Args:
        key: [...] int64, of every lane.
        pos: [..., S] int32, original positions.
        weight: [..., S] float32, at least 0; None: lots.

    Returns:
        [..., S] float64: u, from 0 to below 1, or ln(u)/w, −∞ where w is 0.
    """
    score = torch.empty(pos.shape, dtype=torch.float64, device=pos.device)
    if score.numel():
        pos = pos.to(torch.int32).contiguous()
        weights = pos if weight is None else weight.expand(pos.shape).contiguous()
        grid = pos.numel() // pos.shape[-1], triton.cdiv(pos.shape[-1], BLOCK)
        key = key.expand(pos.shape[:-1]).contiguous()
        _draw[grid](
            p_key=key,
            p_pos=pos,
            p_weight=weights,
            p_score=score,
            width=pos.shape[-1],
            WEIGHTED=weight is not None,
            BLOCK=BLOCK,
        )
    return score


def variants() -> Iterator[Variant]:
    for weighted, kind in ((False, "*i32"), (True, "*fp32")):
        signature = {"p_key": "*i64", "p_pos": "*i32", "p_weight": kind, "p_score": "*fp64", "width": "i32"}
        yield Variant(_draw, signature, {"WEIGHTED": weighted, "BLOCK": BLOCK})
