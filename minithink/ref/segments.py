"""Find the segments of sequences in their lists of tokens (ThinKV §4.1: τ generated tokens each)."""

from __future__ import annotations

import torch
from torch import Tensor


def segments(
    pos: Tensor,
    count: Tensor,
    at: Tensor,
    prompt: Tensor,
    tau: int,
    total: int,
) -> tuple[Tensor, Tensor]:
    """Find the first column and the size of every segment.

    Segment g holds the tokens whose position is at least prompt + τ·g and less than prompt + τ·(g + 1). Lists are in
    the order of positions, so the tokens of a segment stand side by side.

    Args:
        pos: int32 [Lt, B, Ht, W], positions, ascending; only the first `count` of each list are read.
        count: int32 [Lt, B, Ht], tokens of each list.
        at: int64 [N], the rows.
        prompt: int32 [N], tokens of their prompts.
        tau: τ, tokens of a segment.
        total: G, the number of segments to find.

    Returns:
        first: int32 [Lt, N, Ht, G], the column of each segment's first token, or where it would be.
        size: int32 [Lt, N, Ht, G], tokens of the segment that are still held.
    """
    column = torch.arange(pos.shape[-1], device=pos.device)
    held = column < count[:, at, :, None]  # [Lt, N, Ht, W]
    behind = torch.iinfo(torch.int32).max
    there = torch.where(held, pos[:, at], behind)
    number = torch.arange(total + 1, device=pos.device, dtype=torch.int32)
    border = prompt[:, None] + tau * number  # [N, G + 1]
    borders = border[None, :, None]
    borders = borders.expand(*there.shape[:3], -1).contiguous()
    before = torch.searchsorted(there, borders, out_int32=True)  # tokens before each border
    first = before[..., :-1].contiguous()
    size = before.diff(dim=-1)
    return first, size
