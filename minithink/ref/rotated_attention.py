"""Attention over keys and values that TurboQuant has stored, without rotating them back.

R is orthogonal, so a key need not be rotated back to be multiplied with a query; the query is rotated instead, once
for all keys. And because R is linear, the weighted sum of the values is rotated back once, not every value:

    ⟨q, k̂⟩ = s_k·⟨R(q), c_k⟩          Σ_j p_j·v̂_j = Rᵀ(Σ_j p_j·s_v·c_v)

This is how the kernel of `paged_attention` reads these formats. `ref/paged_attention.py` rotates every key and value
back, as it decodes those of all formats, and differs by the rounding of sums alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.quant.turboquant import rotate, rotate_back

Stored = tuple[Tensor, Tensor]  # c [N, Hkv, S, D] and s [N, Hkv, S, 1], float32: `TurboQuant.rotated` gives them


def rotated_attention(q: Tensor, keys: Stored, values: Stored, valid: Tensor) -> Tensor:
    """softmax(q·k̂ᵀ/√D)·v̂ of one new token of each sequence over the valid tokens of every lane.

    Args:
        q: [N, Hq, D], rotated by RoPE, as keys are.
        keys, values: what is stored, in the rotated basis.
        valid: bool [N, Hkv or 1, S]; every lane needs a valid token.

    Returns:
        float32 [N, Hq, D].
    """
    k, k_scale = keys
    v, v_scale = values
    n, hq, d = q.shape
    hkv = k.shape[1]
    grouped = rotate(q.float()).view(n, hkv, -1, d)  # [N, Hkv, g, D]
    logits = grouped @ k.mT * k_scale.mT / d**0.5  # [N, Hkv, g, S]
    logits = logits.masked_fill(~valid.unsqueeze(2), -torch.inf)
    weights = logits.softmax(-1) * v_scale.mT
    out = rotate_back(weights @ v)
    return out.view(n, hq, d)
