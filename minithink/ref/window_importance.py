"""How much the newest queries attend to each cached key: the importance of SnapKV and R-KV."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def window_importance(q: Tensor, k: Tensor, valid: Tensor, kernel_size: int = 7, pooling: str = "max") -> Tensor:
    """R-KV's importance, smoothed over neighbouring keys (`rkv/compression/r1_kv.py`; SkipKV eq. 4).

        A[w, j] = max over the group of q_w·k_j/√D        (the maximum of the logits, no causal mask)
        I[j]    = mean over w of softmax_j A[w, j]
        Ĩ       = pool(I)

    The softmax is over the valid keys only: the caller leaves out the window, whose keys these queries see partly.

    Args:
        q: [B, Hq, W, D], rotated queries of the window.
        k: [B, Hkv, S, D], rotated keys, oldest first; anything (also NaN) where not valid.
        valid: bool [B, Hkv, S], or [B, 1, S] for all heads: the keys to score. Neighbours are the valid keys before
            and after, so they must stand together, as columns from 0 to some number do.
        kernel_size, pooling: see `pool`.

    Returns:
        float32 [B, Hkv, S]; 0 where not valid.
    """
    b, _, w, d = q.shape
    grouped = q.float().view(b, k.shape[1], -1, w, d)
    logits = (grouped.flatten(2, 3) @ k.float().transpose(-1, -2)).unflatten(2, (-1, w)).amax(2) / d**0.5
    p = logits.masked_fill(~valid.unsqueeze(2), -torch.inf).softmax(-1)  # [B, Hkv, W, S]
    return pool(p.mean(2), valid, kernel_size, pooling)


def pool(score: Tensor, valid: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """Every valid key's score and those of its (kernel_size − 1)/2 neighbours on each side as one.

    Args:
        score: [..., S]; anything (also NaN) where not valid.
        valid: bool, of the same shape or broadcast.
        kernel_size: odd; 1 changes nothing.
        pooling: "max", or "avg": the sum divided by kernel_size, also at the ends, where there are fewer keys
            (torch's count_include_pad, as in the papers' code: the first and the last key lose).

    Returns:
        the shape of `score`; 0 where not valid.
    """
    if kernel_size < 1 or kernel_size % 2 == 0 or pooling not in ("max", "avg"):
        raise ValueError(f"kernel_size {kernel_size} must be odd, and pooling {pooling!r} max or avg")
    side, flat = kernel_size // 2, (-1, 1, score.shape[-1])
    if pooling == "max":
        outside = score.masked_fill(~valid, -torch.inf)
        pooled = F.max_pool1d(outside.reshape(flat), kernel_size, stride=1, padding=side)
    else:
        outside = score.masked_fill(~valid, 0.0)
        pooled = F.avg_pool1d(outside.reshape(flat), kernel_size, stride=1, padding=side)
    return pooled.view_as(score).masked_fill(~valid, 0.0)
