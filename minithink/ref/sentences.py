"""Sentences of a token stream, one token at a time: where they end, and how many contain a keyword."""

from __future__ import annotations

import torch
from torch import Tensor

# Bits of the table, see `minithink/text/sentences.py`
STATE = 31
KEYWORD = 32
BREAK = 64


def sentences(
    token: Tensor,
    at: Tensor,
    active: Tensor,
    table: Tensor,
    state: Tensor,
) -> Tensor:
    """Read the newest token of each row.

    Args:
        token: int64 [N]; an id that is no column of the table changes nothing.
        at: int64 [N], the rows, each once.
        active: bool [N]. In other rows nothing changes.
        table: uint8 [states, V], what each token does in each state of the automaton (`minithink/text/sentences.py`).
        state: int32 [B, 3], changed in place: the automaton's state; whether the open sentence contains a keyword;
            N_o, the ended sentences with at least one keyword.

    Returns:
        bool [N]: whether the token ends a sentence.
    """
    known = active & (token >= 0) & (token < table.shape[1])
    now, keyword, others = state[at].unbind(1)  # [N] each
    column = torch.where(known, token, 0)
    does = table[now.long(), column].int()
    keyword = keyword | ((does & KEYWORD) != 0)
    ends = known & ((does & BREAK) != 0)
    others = others + (ends & (keyword != 0))
    open_keyword = torch.where(ends, 0, keyword)
    new = torch.stack((does & STATE, open_keyword, others), 1)  # [N, 3]
    new = torch.where(known[:, None], new, state[at])
    state[at] = new.int()
    return ends
