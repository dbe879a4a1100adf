"""R-KV's redundancy of keys whose newest similar keys are remembered from one decision to the next."""

from __future__ import annotations

import torch
from torch import Tensor

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others
NONE = -1  # in place of the position of j*: the key resembles none
ROWS_AT_ONCE = 256  # rows of C in memory at once


def running_redundancy(
    k: Tensor,
    valid: Tensor,
    pos: Tensor,
    known: tuple[Tensor, Tensor],
    at: Tensor,
    threshold: float = 0.5,
) -> Tensor:
    """The same as `redundancy`, at less expense if few tokens came or left since the last call.

    Of the S × S cosines C_ij, `redundancy` needs single elements only for j*_i, the newest key that resembles key i.
    Everything else is a sum over unit vectors, at S·D operations for a lane:

        Σ_i C_ij = k̂_j·Σ_i k̂_i − k̂_j·k̂_j − Σ_{i: j*_i = j} C_ij*

    So j* is all that is remembered: for every key a position, and no sum that rounding could spoil from call to call.
    Between two calls tokens may leave, and newer tokens may come:

        a token has come    Its row is searched: its cosines with all keys. By symmetry they also say which older keys
                            it resembles. It is newer than their j*, and replaces it.
        j*_i has left       Row i is searched again. The next newest similar key may be any older one, because a key
                            that was spared may be evicted.
        neither             j*_i is what it was, and so is the answer that there is none.

    Evicted tokens need nothing else: a token that is not held is in no sum. A row without j* loses C_i0, as in
    `redundancy`, where key 0 is the oldest one now. If m rows are searched, a call takes (m + 4)·S·D multiply-adds
    for each lane. `redundancy` takes S²·D.

    Lanes without a valid key are skipped: what is known of them stays. If a lane holds more than E tokens, nothing of
    it is remembered, and the next call searches all its rows.

    Args:
        k: [B, Hkv, S, D], rotated keys, oldest first; anything (also NaN) where not valid. Tokens that are known have
            the keys that they had in the last call.
        valid: bool [B, Hkv, S]: the first columns of each lane, as many as it holds tokens. It is not broadcast.
        pos: int32 [B, Hkv, S], positions, ascending; anything where not valid. A token that came since the last call
            has a larger position than all tokens of that call.
        known: int32 [rows, Hkv, E] each, changed in place: positions (ascending, then NOWHERE), and for each of them
            the position of its j*, or NONE. `rows` counts the rows of the state, of which the batch shows B.
        at: int64 [B], the rows, each once.
        threshold: cosine above which two keys resemble each other.

    Returns:
        float32 [B, Hkv, S]: sums to 1 over the valid keys, 0 elsewhere.
    """
    if not valid.numel():
        return torch.zeros(valid.shape, device=k.device)
    own = torch.where(valid, pos, NOWHERE)  # [B, Hkv, S], ascending
    k = k.float().masked_fill(~valid.unsqueeze(-1), 0.0)
    unit = k / (k.norm(dim=-1, keepdim=True) + 1e-8)  # [B, Hkv, S, D]
    newest, unknown = _recalled(own, valid, known, at)
    newest = _searched(unit, valid, newest, unknown, threshold)
    _remember(own, newest, known, at)

    spared_column = newest.clamp(min=0)  # a row that resembles no key spares C_i0
    partner = unit.gather(2, spared_column.unsqueeze(-1).expand(unit.shape))
    spared = (unit * partner).sum(-1)  # C_ij*
    column = torch.arange(k.shape[2], device=k.device)
    spared = spared.masked_fill(~valid | (spared_column == column), 0.0)

    everything = unit.sum(2, keepdim=True)  # Σ_i k̂_i
    total = (unit * (everything - unit)).sum(-1)
    total = total.scatter_add(-1, spared_column, -spared)
    mean = total / valid.sum(-1, keepdim=True)
    mean = mean.masked_fill(~valid, -torch.inf)
    return mean.softmax(-1).masked_fill(~valid, 0.0)


def _recalled(
    own: Tensor,
    valid: Tensor,
    known: tuple[Tensor, Tensor],
    at: Tensor,
) -> tuple[Tensor, Tensor]:
    """What is known of j*: its column now, −1 if there is none (int64), and the rows that must be searched (bool)."""
    positions = known[0][at]  # [B, Hkv, E]
    matches = known[1][at]
    entry, found = _look_up(own, positions)
    found &= valid
    match = torch.where(found, matches.gather(-1, entry), NONE)
    column, held = _look_up(match, own)
    is_new = valid & ~found
    has_left = (match != NONE) & ~held
    return torch.where(held, column, -1), is_new | has_left


def _look_up(wanted: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Where positions stand among ascending ones, int64, and whether they do, bool."""
    at = torch.searchsorted(positions.contiguous(), wanted.contiguous())
    at = at.clamp(max=positions.shape[-1] - 1)
    return at, positions.gather(-1, at) == wanted


def _searched(unit: Tensor, valid: Tensor, newest: Tensor, unknown: Tensor, threshold: float) -> Tensor:
    """The columns of all j*, −1 where there is none: int64 [B, Hkv, S]. Only rows of `unknown` are computed."""
    s = unit.shape[2]
    column = torch.arange(s, device=unit.device)
    rows = torch.where(unknown, column, s)  # s: no row
    rows = rows.sort(-1).values
    most = int(unknown.sum(-1).max())  # rows of the lane with most of them
    for start in range(0, most, ROWS_AT_ONCE):
        row = rows[..., start : min(start + ROWS_AT_ONCE, most)]
        is_row = row < s  # [B, Hkv, rows]
        row = row.clamp(max=s - 1)
        keys = unit.gather(2, row.unsqueeze(-1).expand(*row.shape, unit.shape[3]))
        c = keys @ unit.mT  # [B, Hkv, rows, S]
        c = c.masked_fill(column == row.unsqueeze(-1), 0.0)
        similar = (c > threshold) & valid.unsqueeze(2) & is_row.unsqueeze(-1)
        of_row = torch.where(similar, column, -1).amax(-1)  # [B, Hkv, rows]
        of_column = torch.where(similar, row.unsqueeze(-1), -1).amax(2)  # [B, Hkv, S]
        newest = newest.scatter_reduce(-1, row, of_row, "amax")
        newest = torch.maximum(newest, of_column)
    return newest


def _remember(own: Tensor, newest: Tensor, known: tuple[Tensor, Tensor], at: Tensor) -> None:
    """Write the positions of all keys and of their j*."""
    entries = known[0].shape[-1]
    held = (own != NOWHERE).sum(-1, keepdim=True)  # [B, Hkv, 1]
    match = torch.where(newest >= 0, own.gather(-1, newest.clamp(min=0)), NONE)
    for x, of_columns, nothing in zip(known, (own, match), (NOWHERE, NONE), strict=True):
        now = torch.full((*held.shape[:2], entries), nothing, dtype=x.dtype, device=x.device)
        width = min(entries, of_columns.shape[-1])
        now[..., :width] = of_columns[..., :width]
        now = torch.where(held <= entries, now, nothing)
        x[at] = torch.where(held > 0, now, x[at])
