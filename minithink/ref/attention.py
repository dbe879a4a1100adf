"""Causal attention of one sequence's newest tokens over all of its keys, with grouped query heads (GQA)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def of_any_length(device: torch.device, masked: bool) -> AbstractContextManager[None]:
    """A context in which attention without a mask is fast for texts of ever new lengths.

    On new GPUs torch prefers cuDNN, which makes a plan for each length. A plan takes longer than the attention of a
    prompt (3 ms on an H200), so the context excludes cuDNN. Later chunks of a prompt need a mask (`masked`) and keep
    cuDNN, because no other fast backend takes a mask.
    """
    if device.type == "cuda" and not masked:
        return sdpa_kernel(WITHOUT_PLANS)
    return nullcontext()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√D)·v, where query i of n sees the first S − n + i + 1 keys.

    Args:
        q: [n, Hq, D], rotated queries of the last n tokens.
        k, v: [Hkv, S, D], rotated keys, and values, of all S ≥ n tokens.

    Returns:
        [n, Hq, D].
    """
    n, hq, d = q.shape
    hkv, s, _ = k.shape
    k = k[None]  # [1, Hkv, S, D]
    v = v[None]
    if n == 1:
        # A single query sees all keys, so the query heads of a group act as several queries of their KV head.
        grouped = q.view(1, hkv, hq // hkv, d)
        out = F.scaled_dot_product_attention(grouped, k, v)
        return out.reshape(1, hq, d)
    # torch's causal flag aligns its mask at the top left, which is correct for a whole prompt only.
    whole = n == s
    mask = None
    if not whole:
        square = torch.ones(n, s, dtype=torch.bool, device=q.device)
        mask = square.tril(s - n)
    q = q.transpose(0, 1)[None]  # [1, Hq, n, D]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=whole,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
