"""Add a step's attention to the scores of the tokens. Twin: `minithink/ref/accumulate.py`.

Layout: one launch, a program per lane and block of BLOCK columns. Usually the token of column s is in entry s. If
tokens before it were evicted since, a binary search finds the entries of the block.
Bound: memory, by a count of bytes (not measured). For each token 16 bytes are read (attention, position; position and
score of its entry) and 4 written. A search reads about log2(E) more positions, from the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, unit_of

BLOCK = 512  # columns of a program
WARPS = 4
NOWHERE = 2**31 - 1  # the position in an empty entry


@triton.jit
def _accumulate(
    p_mass, p_pos, p_held, p_known, p_score, p_at, p_out, n, rows, heads, entries, width, mass_layer, mass_row,
    mass_head, pos_layer, pos_row, pos_head, NOWHERE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    i_layer, i_n, i_head = i // (n * heads), i // heads % n, i % heads
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_own = own < width
    m_in = m_own & (own < tl.load(p_held + i))
    total = tl.zeros([BLOCK], tl.float32)
    if tl.program_id(1) * BLOCK < tl.load(p_held + i):
        _, unit = unit_of(i, n, rows, heads, p_at)
        p_known += unit * entries
        p_score += unit * entries
        pos = tl.load(p_pos + i_layer * pos_layer + i_n * pos_row + i_head * pos_head + own, m_in, other=NOWHERE)
        known, at = tl.load(p_known + own, m_in & (own < entries), other=NOWHERE), own
        if tl.max(((known != pos) & m_in).to(tl.int32)) > 0:
            at, end, left = tl.zeros_like(own), tl.zeros_like(own) + entries, entries
            while left > 0:
                middle = (at + end) // 2
                m_less = (tl.load(p_known + middle, at < end, other=NOWHERE) < pos) & (at < end)
                at, end = tl.where(m_less, middle + 1, at), tl.where(m_less, end, middle)
                left //= 2
            known = tl.load(p_known + at, at < entries, other=NOWHERE)
        old = tl.load(p_score + at, m_in & (at < entries) & (known == pos), other=0.0)
        mass = tl.load(p_mass + i_layer * mass_layer + i_n * mass_row + i_head * mass_head + own, m_in, other=0.0)
        total = old + mass
    tl.store(p_out + i * width + own, tl.where(m_in, total, 0.0), m_own)


def accumulate(mass: Tensor, pos: Tensor, held: Tensor, known: tuple[Tensor, Tensor], at: Tensor) -> Tensor:
    """The scores of all tokens, as `minithink/ref/accumulate.py` describes them."""
    width, entries = pos.shape[-1], known[0].shape[-1]
    out = torch.empty(pos.shape, dtype=torch.float32, device=pos.device)
    if out.numel():
        mass, pos = (x if x.stride(-1) == 1 or width < 2 else x.contiguous() for x in (mass, pos))
        _accumulate[(held.numel(), triton.cdiv(width, BLOCK))](
            mass, pos, held.contiguous(), *known, at, out, len(at), known[0].shape[1], held.shape[2], entries, width,
            *mass.stride()[:3], *pos.stride()[:3], NOWHERE=NOWHERE, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def variants() -> Iterator[Variant]:
    names = _accumulate.arg_names
    signature = {name: "*i32" for name in names if name.startswith("p_")}
    signature |= {"p_mass": "*fp32", "p_score": "*fp32", "p_out": "*fp32", "p_at": "*i64"}
    signature |= {name: "i32" for name in names if name[0].islower() and name not in signature}
    yield Variant(_accumulate, signature, {"NOWHERE": NOWHERE, "BLOCK": BLOCK}, {"num_warps": WARPS})
