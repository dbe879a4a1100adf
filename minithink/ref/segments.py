"""Where the segments of sequences lie in the lists of their tokens (ThinKV §4.1: τ generated tokens each)."""

from __future__ import annotations

import torch
from torch import Tensor


def segments(pos: Tensor, count: Tensor, at: Tensor, prompt: Tensor, tau: int, total: int) -> tuple[Tensor, Tensor]:
    """Segment g holds the tokens from position prompt + τ·g on, before prompt + τ·(g + 1).

    They stand side by side, behind the prompt's, since lists are in the order of positions.

    Args:
        pos: int32 [Lt, B, Ht, W], positions, ascending; only the first `count` of each list are looked at.
        count: int32 [Lt, B, Ht], tokens of each list.
        at: int64 [N], of these rows.
        prompt: int32 [N], tokens of their prompts.
        tau: τ.
        total: G, segments that are asked for.

    Returns:
        first: int32 [Lt, N, Ht, G], the column of each segment's first token, or where it would stand.
        size: int32 [Lt, N, Ht, G], its tokens that are left.
    """
    held = torch.arange(pos.shape[-1], device=pos.device) < count[:, at, :, None]
    there = torch.where(held, pos[:, at], torch.iinfo(torch.int32).max)
    border = prompt[:, None] + tau * torch.arange(total + 1, device=pos.device, dtype=torch.int32)  # [N, G + 1]
    borders = border[None, :, None].expand(*there.shape[:3], -1).contiguous()
    column = torch.searchsorted(there, borders, out_int32=True)  # tokens before each border
    return column[..., :-1].contiguous(), column.diff(dim=-1)
