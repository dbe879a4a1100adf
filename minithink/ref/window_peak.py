"""The most that a query of the window attends to each cached key: the score of MorphKV."""

from __future__ import annotations

import torch
from torch import Tensor


def window_peak(q: Tensor, k: Tensor, valid: Tensor, fuse: str = "max") -> Tensor:
    """MorphKV's score (arXiv 2503.00979; its code, `morphkv/morph_cache.py`).

        P[h, w] = softmax_j q_hw·k_j/√D           of each query head h of the group and each query w
        A[w, j] = max over h of P[h, w, j]
        s_j     = max over w of A[w, j]           or the sum over w, with fuse="sum"

    Every softmax is over the valid keys only. The caller leaves out the keys of the window itself, because each of
    its queries sees only a part of them.

    Args:
        q: [B, Hq, W, D], rotated queries of the window.
        k: [B, Hkv, S, D], rotated keys; anything (also NaN) where not valid.
        valid: bool [B, Hkv, S], or [B, 1, S] for all heads: the keys to score.
        fuse: "max" or "sum": how the scores of the queries become one.

    Returns:
        float32 [B, Hkv, S]; 0 where not valid.
    """
    d = k.shape[-1]
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, g, W, D]
    g, w = grouped.shape[2:4]
    grouped = grouped.flatten(2, 3)  # [B, Hkv, g·W, D]
    keys = k.float().transpose(-1, -2)
    logits = grouped @ keys / d**0.5
    logits = logits.masked_fill(~valid.unsqueeze(2), -torch.inf)
    p = logits.softmax(-1)  # [B, Hkv, g·W, S]
    if fuse == "max":
        score = p.amax(2)
    else:
        a = p.unflatten(2, (g, w)).amax(2)  # [B, Hkv, W, S]
        score = a.sum(2)
    return score.masked_fill(~valid, 0.0)
