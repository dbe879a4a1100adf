"""How much the queries to come are expected to attend to each key, by where queries lie before RoPE: TriAttention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LEAST = 1e-6  # the smallest standard deviation that scores are divided by


def tri_score(read: Any, layer: int, query: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
    """Scores of the keys of a layer, comparable between query heads, and the best of the heads that share a KV head.

        S_h(k) = ⟨ũ_h, k⟩ + Σ_f e_hf·|k_f|        k_f = k[f] + i·k[f + D/2]: a band, two channels as a complex number
        z_h    = (S_h − mean) / max(std, 1e−6)    over the candidates of the lane
        Z      = max_h z_h                        over the query heads of the KV head

    Args:
        read: called with the layer, it gives K and V of N rows, [N, Hkv, S, D], rotated, 0 where there is no token.
            The paged manager gives a Reading (`minithink/kv/reading.py`), the plain one dense keys.
        layer: the layer.
        query: float32 [N, Hq, D], ũ: what stands for the queries to come, as rotated for each row's next position.
        weight: float32 [Hq, D/2], e: how much the length of a band counts.
        candidates: bool [N, Ht, S], the tokens that are compared; Ht is Hkv, or 1 for all heads.

    Returns:
        float32 [N, Hkv, S], 0 where there is no candidate.
    """
    k, _ = read(layer)
    k = k.float()
    n, kv_heads, _, dim = k.shape
    query = query.view(n, kv_heads, -1, dim)  # [N, Hkv, g, D]
    weight = weight.view(kv_heads, -1, dim // 2)  # [Hkv, g, D/2]
    real, imaginary = k.chunk(2, dim=-1)
    length = torch.hypot(real, imaginary)  # [N, Hkv, S, D/2]
    score = query @ k.transpose(-1, -2) + weight @ length.transpose(-1, -2)  # [N, Hkv, g, S]

    valid = candidates[:, :, None]  # [N, Ht, 1, S]
    count = valid.sum(-1, keepdim=True).clamp(min=1)
    mean = score.masked_fill(~valid, 0.0).sum(-1, keepdim=True) / count
    deviation = (score - mean).masked_fill(~valid, 0.0)
    variance = deviation.square().sum(-1, keepdim=True) / count
    z = deviation / variance.sqrt().clamp(min=LEAST)
    return z.amax(2)
