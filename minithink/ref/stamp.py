"""When each token was last attended to, and the longest time between two such steps (RaaS, LazyEviction)."""

from __future__ import annotations

import torch
from torch import Tensor

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others


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
    """Stamp the tokens that are hit at time t.

        MRI_i ← max(MRI_i, t − TS_i),   TS_i ← t      for every token i that is hit

    `known` lists the tokens that each lane held after earlier steps, oldest first. It is changed in place. Afterwards
    entry s belongs to the token of column s. Tokens are found by their position, because other policies may have
    evicted some of them. Tokens that are not found are new, and newer than all found tokens. A new token has MRI 0,
    and its TS is the step before it came: 0 for the prompt and the first generated token, 1 for the next.

    Args:
        hit: bool [Lt, N, Ht, S]; anything behind the last token.
        pos: int32 [Lt, N, Ht, S], the tokens' positions, ascending; anything behind the last token.
        held: int32 [Lt, N, Ht], tokens of each lane; at most E, where the row is active.
        known: int32 [Lt, B, Ht, E]: positions and TS, or positions, TS and MRI.
        at: int64 [N], the rows, each once.
        prompt: int32 [N], tokens of the prompt.
        t: int32 [N], generated tokens, the newest included.
        active: bool [N]. In other rows nothing changes.
    """
    entries = known[0].shape[-1]
    hit = hit[..., :entries]
    pos = pos[..., :entries]
    columns = pos.shape[-1]
    listed = torch.arange(columns, device=pos.device) < held[..., None]
    there, *old = [x[:, at] for x in known]  # [Lt, N, Ht, E] each
    entry = torch.searchsorted(there, pos.contiguous())  # [Lt, N, Ht, S]
    entry = entry.clamp(max=entries - 1)
    found = listed & (there.gather(-1, entry) == pos)
    t = t[:, None, None]
    prompt = prompt[:, None, None]

    born = (pos - prompt).clamp(min=0)
    last = old[0].gather(-1, entry)
    last = torch.where(found, last, born)
    stamped = torch.where(hit, t, last)
    new = [
        torch.where(listed, pos, NOWHERE),
        torch.where(listed, stamped, 0),
    ]
    if len(old) == 2:
        gap = old[1].gather(-1, entry)
        gap = torch.where(found, gap, 0)
        longest = torch.maximum(gap, t - last)
        longest = torch.where(hit, longest, gap)
        new.append(torch.where(listed, longest, 0))

    rows = active[:, None, None]
    for x, of_columns, nothing in zip(known, new, (NOWHERE, 0, 0), strict=False):
        wide = torch.full_like(there, nothing)
        wide[..., :columns] = of_columns
        x[:, at] = torch.where(rows, wide, x[:, at])
