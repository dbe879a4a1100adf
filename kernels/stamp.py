"""Stamps of the tokens that are hit, and the longest times between hits. Twin: `minithink/ref/stamp.py`.

To use it alone, copy this file, `_common.py` and `_entries.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.stamp import stamp
    >>> hit = torch.tensor([[[[True, False, True]]]])  # [Lt, N, Ht, S]
    >>> pos = torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32)  # [Lt, N, Ht, S]
    >>> held = torch.tensor([[[3]]], dtype=torch.int32)  # [Lt, N, Ht]
    >>> position = torch.full((1, 1, 1, 3), 2**31 - 1, dtype=torch.int32)  # [Lt, B, Ht, E]: no entries yet
    >>> stamps = torch.zeros(1, 1, 1, 3, dtype=torch.int32)  # [Lt, B, Ht, E], changed in place
    >>> at = torch.tensor([0])  # [N] int64, the rows
    >>> prompt = torch.tensor([2], dtype=torch.int32)  # [N], tokens of the prompt
    >>> t = torch.tensor([1], dtype=torch.int32)  # [N], generated tokens
    >>> active = torch.tensor([True])  # [N]
    >>> stamp(hit, pos, held, (position, stamps), at, prompt, t, active)
    >>> stamps.tolist()
    [[[[1, 0, 1]]]]

Layout: one launch, a program per lane, which goes over the lane's entries BLOCK at a time. Usually the token of
column s is in entry s. If tokens before it were evicted since, a binary search finds the entries of the block. They
are in or behind the block, so no entry is read that an earlier block has written.
Bound: memory, by a count of bytes. For each token 13 bytes are read and 8 written (flag and position;
position and TS of its entry), with MRI 17 and 12. A search reads about log2(E) more positions, from the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant, unit_of, with_dense_columns
from minithink.kernels._entries import NOWHERE, find

BLOCK = 512  # entries at a time
WARPS = 4


@triton.jit
def _stamp(
    p_hit,
    p_pos,
    p_held,
    p_known,
    p_last,
    p_gap,
    p_at,
    p_prompt,
    p_t,
    p_active,
    n,
    rows,
    heads,
    entries,
    width,
    pos_layer,
    pos_row,
    pos_head,
    GAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    i_layer = i // (n * heads)
    i_n = i // heads % n
    i_head = i % heads
    if tl.load(p_active + i_n) != 0:
        _, unit = unit_of(i, n, rows, heads, p_at)
        p_hit += i * width
        p_pos += i_layer * pos_layer + i_n * pos_row + i_head * pos_head
        p_known += unit * entries
        p_last += unit * entries
        p_gap += unit * entries
        held = tl.load(p_held + i)
        prompt = tl.load(p_prompt + i_n)
        t = tl.load(p_t + i_n)
        for start in range(0, entries, BLOCK):
            own = start + tl.arange(0, BLOCK)
            m_entry = own < entries
            m_in = m_entry & (own < held)
            pos = tl.load(p_pos + own, m_in, other=NOWHERE)
            at, known = find(p_known, pos, own, m_entry, m_in, start, entries)
            m_found = m_in & (known == pos)
            hit = tl.load(p_hit + own, m_in, other=0) != 0
            last = tl.load(p_last + at, m_found, other=0)
            last = tl.where(m_found, last, tl.maximum(pos - prompt, 0))  # of a new token, the step before it came
            gap = tl.zeros_like(last)
            if GAPS:
                # MRI_i ← max(MRI_i, t − TS_i)
                gap = tl.load(p_gap + at, m_found, other=0)
                gap = tl.where(hit, tl.maximum(gap, t - last), gap)
            # TS_i ← t
            last = tl.where(hit, t, last)
            tl.debug_barrier()  # all threads have read, and write now
            tl.store(p_known + own, pos, m_entry)
            tl.store(p_last + own, tl.where(m_in, last, 0), m_entry)
            if GAPS:
                tl.store(p_gap + own, gap, m_entry)
            tl.debug_barrier()


def stamp(
    hit: Tensor,
    pos: Tensor,
    held: Tensor,
    known: tuple[Tensor, ...],
    at: Tensor,
    prompt: Tensor,
    t: Tensor,
    active: Tensor,
) -> None:
    """Stamp the tokens that are hit at time t, as `minithink/ref/stamp.py` describes it."""
    rows, heads, entries = known[0].shape[1:]
    width = pos.shape[-1]
    if held.numel() and entries:
        pos = with_dense_columns(pos)
        _stamp[(held.numel(),)](
            hit.contiguous().view(torch.uint8),
            pos,
            held.contiguous(),
            *known[:2],
            known[-1],
            at,
            prompt,
            t,
            active.view(torch.uint8),
            len(at),
            rows,
            heads,
            entries,
            width,
            *pos.stride()[:3],
            GAPS=len(known) == 3,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def variants() -> Iterator[Variant]:
    names = _stamp.arg_names
    signature = {name: "*i32" for name in names if name.startswith("p_")}
    signature |= {"p_hit": "*u8", "p_active": "*u8", "p_at": "*i64"}
    signature |= {name: "i32" for name in names if name[0].islower() and name not in signature}
    for gaps in (False, True):
        yield Variant(_stamp, signature, {"GAPS": gaps, "BLOCK": BLOCK}, {"num_warps": WARPS})
