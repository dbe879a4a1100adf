"""Sentences of a token stream, one token of each row. Twin: `minithink/ref/sentences.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.sentences import sentences
    >>> table = torch.tensor([[0, 32, 64]], dtype=torch.uint8)  # [states, V]: token 1 is a keyword, 2 ends a sentence
    >>> state = torch.zeros(2, 3, dtype=torch.int32)  # [B, 3], changed in place
    >>> token = torch.tensor([1, 2])  # [N] int64, the newest token of each row
    >>> at = torch.tensor([0, 1])  # [N] int64, the rows
    >>> active = torch.tensor([True, True])  # [N]
    >>> sentences(token, at, active, table, state).tolist()
    [False, True]
    >>> state.tolist()  # the automaton's state, a keyword in the open sentence, ended sentences with a keyword
    [[0, 1, 0], [0, 0, 0]]

Layout: programs of BLOCK rows. Each row looks into the table once and writes three numbers.
Bound: launch. A row moves 24 bytes of state, 8 of its token, 8 of its number and 1 of the table; there are few rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

BLOCK = 64  # rows of a program


@triton.jit
def _sentences(p_token, p_at, p_active, p_table, p_state, p_ends, n, width, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_in = i < n
    token = tl.load(p_token + i, m_in, other=-1)
    row = tl.load(p_at + i, m_in, other=0)
    known = m_in & (tl.load(p_active + i, m_in, other=0) != 0) & (token >= 0) & (token < width)
    p_state += row * 3
    now = tl.load(p_state, known, other=0).to(tl.int64)
    does = tl.load(p_table + now * width + token, known, other=0).to(tl.int32)
    keyword = tl.load(p_state + 1, known, other=0) | ((does >> 5) & 1)
    ends = (does >> 6) & 1
    others = tl.load(p_state + 2, known, other=0) + (ends & keyword)
    tl.store(p_state, does & 31, known)
    tl.store(p_state + 1, tl.where(ends > 0, 0, keyword), known)
    tl.store(p_state + 2, others, known)
    tl.store(p_ends + i, tl.where(known, ends, 0).to(tl.uint8), m_in)


def sentences(token: Tensor, at: Tensor, active: Tensor, table: Tensor, state: Tensor) -> Tensor:
    """Read the newest token of each row, as `minithink/ref/sentences.py` describes it: bool [N], whether it ends a
    sentence."""
    n = len(token)
    ends = torch.empty(n, dtype=torch.bool, device=token.device)
    if n:
        _sentences[(triton.cdiv(n, BLOCK),)](
            p_token=token,
            p_at=at,
            p_active=active.view(torch.uint8),
            p_table=table,
            p_state=state,
            p_ends=ends.view(torch.uint8),
            n=n,
            width=table.shape[1],
            BLOCK=BLOCK,
        )
    return ends


def variants() -> Iterator[Variant]:
    signature = {"p_token": "*i64", "p_at": "*i64", "p_active": "*u8", "p_table": "*u8", "p_state": "*i32"}
    yield Variant(_sentences, signature | {"p_ends": "*u8", "n": "i32", "width": "i32"}, {"BLOCK": BLOCK})
