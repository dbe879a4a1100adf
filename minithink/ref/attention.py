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
    group = q.shape[1] // k.shape[0]
    if n == 1:
        # The g query heads of a group read the same keys: as g rows of one product they read them once.
        out = F.scaled_dot_product_attention(q.view(1, k.shape[0], group, -1), k[None], v[None])
        return out.reshape(q.shape)
    # torch's causal flag aligns the mask at the top left, so it is right only for a whole prompt.
    mask = None if n == s else torch.ones(n, s, dtype=torch.bool, device=q.device).tril(s - n)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None].repeat_interleave(group, 1),
        v[None].repeat_interleave(group, 1),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out[0].transpose(0, 1)
