"""Find the segments of sequences in their lists of tokens (ThinKV §4.1: τ generated tokens each)."""

from __future__ import annotations

import torch
from torch import Tensor


def segments(pos: Tensor, count: Tensor, at: Tensor, prompt: Tensor, tau: int, total: int) -> tuple[Tensor, Tensor]:
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
    held = torch.arange(pos.shape[-1], device=pos.device) < count[:, at, :, None]
    there = torch.where(held, pos[:, at], torch.iinfo(torch.int32).max)
    border = prompt[:, None] + tau * torch.arange(total + 1, device=pos.device, dtype=torch.int32)  # [N, G + 1]
    borders = border[None, :, None].expand(*there.shape[:3], -1).contiguous()
    column = torch.searchsorted(there, borders, out_int32=True)  # tokens before each border
    return column[..., :-1].contiguous(), column.diff(dim=-1)
