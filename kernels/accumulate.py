"""Add a step's attention to the scores of the tokens. Twin: `minithink/ref/accumulate.py`.

To use it alone, copy this file, `_common.py` and `_entries.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.accumulate import accumulate
    >>> mass = torch.tensor([[[[0.5, 0.25, 0.25]]]])  # float32 [L, N, H, S], a step's attention
    >>> pos = torch.tensor([[[[0, 2, 5]]]], dtype=torch.int32)  # [L, N, H, S]
    >>> held = torch.tensor([[[3]]], dtype=torch.int32)  # [L, N, H]
    >>> position = torch.tensor([[[[0, 1, 2, 2**31 - 1]]]], dtype=torch.int32)  # [L, B, H, E]; one is empty
    >>> score = torch.tensor([[[[1.0, 2.0, 3.0, 0.0]]]])  # float32 [L, B, H, E]
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> accumulate(mass, pos, held, (position, score), at).tolist()
    [[[[1.5, 3.25, 0.25]]]]

Layout: one launch, a program per lane and block of BLOCK columns. Usually the token of column s is in entry s. If
tokens before it were evicted since, a binary search finds the entries of the block.
Bound: memory, by a count of bytes. For each token 16 bytes are read (attention, position; position and
score of its entry) and 4 written. A search reads about log2(E) more positions, from the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, unit_of, with_dense_columns
from minithink.kernels._entries import NOWHERE, find

BLOCK = 512  # columns of a program
WARPS = 4


@triton.jit
def _accumulate(
    p_mass,
    p_pos,
    p_held,
    p_known,
    p_score,
    p_at,
    p_out,
    n,
    rows,
    heads,
    entries,
    width,
    mass_layer,
    mass_row,
    mass_head,
    pos_layer,
    pos_row,
    pos_head,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_layer = i // (n * heads)
    i_n = i // heads % n
    i_head = i % heads
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_own = own < width
    m_in = m_own & (own < tl.load(p_held + i))
    total = tl.zeros([BLOCK], tl.float32)
    if tl.program_id(1) * BLOCK < tl.load(p_held + i):
        _, unit = unit_of(i, n, rows, heads, p_at)
        p_known += unit * entries
        p_score += unit * entries
        p_pos += i_layer * pos_layer + i_n * pos_row + i_head * pos_head
        pos = tl.load(p_pos + own, m_in, other=NOWHERE)
        at, known = find(p_known, pos, own, m_in & (own < entries), m_in, 0, entries)
        m_found = m_in & (at < entries) & (known == pos)
        old = tl.load(p_score + at, m_found, other=0.0)
        p_mass += i_layer * mass_layer + i_n * mass_row + i_head * mass_head
        mass = tl.load(p_mass + own, m_in, other=0.0)
        total = old + mass
    tl.store(p_out + i * width + own, tl.where(m_in, total, 0.0), m_own)


def accumulate(mass: Tensor, pos: Tensor, held: Tensor, known: tuple[Tensor, Tensor], at: Tensor) -> Tensor:
    """The scores of all tokens, as `minithink/ref/accumulate.py` describes them."""
    width = pos.shape[-1]
    rows, heads, entries = known[0].shape[1:]
    out = torch.empty(pos.shape, dtype=torch.float32, device=pos.device)
    if out.numel():
        mass = with_dense_columns(mass)
        pos = with_dense_columns(pos)
        _accumulate[(held.numel(), triton.cdiv(width, BLOCK))](
            mass,
            pos,
            held.contiguous(),
            *known,
            at,
            out,
            len(at),
            rows,
            heads,
            entries,
            width,
            *mass.stride()[:3],
            *pos.stride()[:3],
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


def variants() -> Iterator[Variant]:
    names = _accumulate.arg_names
    signature = {name: "*i32" for name in names if name.startswith("p_")}
    signature |= {"p_mass": "*fp32", "p_score": "*fp32", "p_out": "*fp32", "p_at": "*i64"}
    signature |= {name: "i32" for name in names if name[0].islower() and name not in signature}
    yield Variant(_accumulate, signature, {"BLOCK": BLOCK}, {"num_warps": WARPS})
