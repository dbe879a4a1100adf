"""What policies remember of a lane's tokens: lists of entries, in which tokens are found by position.

Used by `accumulate.py`, `carry.py`, `repack.py`, `retain.py`, `running_redundancy.py` and `stamp.py`.

The first tensor of a list holds positions, ascending; others hold what is remembered of these tokens. Empty entries
come last. Usually the token of column s is in entry s. If tokens before it were evicted since the list was written,
its entry is a later one, and a binary search finds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**31 - 1)  # the position in an empty entry: behind all others


@triton.jit
def search(p_known, pos, first, entries):
    """The first entry, from `first` on, whose position is at least `pos`; `entries` if there is none.

    pos: int32, a block of positions. One binary search for each of them, all in the same log2(entries) steps.
    """
    at = tl.zeros_like(pos) + first
    end = tl.zeros_like(pos) + entries
    left = entries - first
    while left > 0:
        middle = (at + end) // 2
        known = tl.load(p_known + middle, at < end, other=NOWHERE)
        m_less = (known < pos) & (at < end)
        at = tl.where(m_less, middle + 1, at)
        end = tl.where(m_less, end, middle)
        left //= 2
    return at


@triton.jit
def find(p_known, pos, own, m_own, m_in, first, entries):
    """Find the entries of the tokens in the columns `own` → the entries, and the positions that stand in them.

    A token is new if its position does not stand in its entry. No entry before `first` is searched.
    m_own: columns whose entry of the same number may be read. m_in: columns that hold a token.
    """
    at = own
    known = tl.load(p_known + own, m_own, other=NOWHERE)
    if tl.max(((known != pos) & m_in).to(tl.int32)) > 0:
        at = search(p_known, pos, first, entries)
        known = tl.load(p_known + at, at < entries, other=NOWHERE)
    return at, known
