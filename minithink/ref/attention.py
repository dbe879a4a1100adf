"""Causal attention of one sequence's newest tokens over all of its keys, with grouped query heads (GQA)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√D)·v, where query i of n sees the first S − n + i + 1 keys.

    Args:
        q: [n, Hq, D], rotated queries of the last n tokens.
        k, v: [Hkv, S, D], rotated keys, and values, of all S ≥ n tokens.

    Returns:
        [n, Hq, D].
    """
    n, s = q.shape[0], k.shape[1]
    # torch's causal flag aligns its mask at the top left, so it is right for a whole prompt only; one query sees all.
    mask = None if n in (1, s) else torch.ones(n, s, dtype=torch.bool, device=q.device).tril(s - n)
    q = q.transpose(0, 1)[None]  # [1, Hq, n, D]
    causal = mask is None and n > 1
    out = F.scaled_dot_product_attention(q, k[None], v[None], attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out[0].transpose(0, 1)
