"""How much the newest queries attend to each cached key: the importance of SnapKV and R-KV."""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.ref.pool import pool


def window_importance(
    q: Tensor,
    k: Tensor,
    valid: Tensor,
    kernel_size: int = 7,
    pooling: str = "max",
) -> Tensor:
    """R-KV's importance, smoothed over neighbouring keys (`rkv/compression/r1_kv.py`; SkipKV eq. 4).

        A[w, j] = max over the group of q_w·k_j/√D        (the maximum of the logits, no causal mask)
        I[j]    = mean over w of softmax_j A[w, j]
        Ĩ       = pool(I)

    The softmax is over the valid keys only. The caller leaves out the keys of the window itself, because each of its
    queries sees only a part of them.

    Args:
        q: [B, Hq, W, D], rotated queries of the window.
        k: [B, Hkv, S, D], rotated keys, oldest first; anything (also NaN) where not valid.
        valid: bool [B, Hkv, S], or [B, 1, S] for all heads: the keys to score. They must be neighbouring columns,
            because pooling takes the columns before and after a key.
        kernel_size, pooling: see `pool`.

    Returns:
        float32 [B, Hkv, S]; 0 where not valid.
    """
    b, _, w, d = q.shape
    hkv = k.shape[1]
    grouped = q.float().view(b, hkv, -1, w, d)
    grouped = grouped.flatten(2, 3)  # [B, Hkv, g·W, D]
    keys = k.float().transpose(-1, -2)
    logits = grouped @ keys  # [B, Hkv, g·W, S]
    logits = logits.unflatten(2, (-1, w))
    a = logits.amax(2) / d**0.5  # [B, Hkv, W, S]
    a = a.masked_fill(~valid.unsqueeze(2), -torch.inf)
    p = a.softmax(-1)
    return pool(p.mean(2), valid, kernel_size, pooling)
