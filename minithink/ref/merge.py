"""Merge parts of an attention by their log-sum-exp: the identity behind flash-decoding (ThinKV §C.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def partial_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over a part of the tokens, and the weight of this part as a log-sum-exp.

        lse = log Σ_j exp(q·k_j/√D)

    Args:
        q: [N, Hq, D].
        k, v: [N, Hkv, S, D], of this part.
        valid: bool [N, Hkv, S].

    Returns:
        out: float32 [N, Hq, D], 0 where no token is valid.
        lse: float32 [N, Hq], −∞ there.
    """
    n, hq, d = q.shape
    hkv = k.shape[1]
    grouped = q.view(n, hkv, -1, d).float()  # [N, Hkv, g, D]
    keys = k.float().transpose(-1, -2)
    logits = grouped @ keys / d**0.5  # [N, Hkv, g, S]
    logits = logits.masked_fill(~valid[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)  # [N, Hkv, g]
    smallest = torch.finfo(torch.float32).min
    finite = lse.clamp(min=smallest)  # −∞ less −∞ would be NaN
    p = (logits - finite[..., None]).exp()
    out = p @ v.float()
    return out.view(n, hq, d), lse.view(n, hq)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the tokens into attention over all of them.

        out = Σ_i exp(lse_i − lse)·out_i,   lse = log Σ_i exp(lse_i)

    Args:
        parts: (out [N, Hq, D], lse [N, Hq]) each, float32; for each head at least one part must hold a token.

    Returns:
        out [N, Hq, D] and lse [N, Hq] of all parts' tokens together.
    """
    outs = torch.stack([out for out, _ in parts])  # [parts, N, Hq, D]
    lses = torch.stack([lse for _, lse in parts])  # [parts, N, Hq]
    lse = lses.logsumexp(0)
    # softmax makes weights that sum to 1 even if lse is so large that exp(lse_i − lse) shows its rounding.
    weights = lses.softmax(0)[..., None]
    out = (weights * outs).sum(0)
    return out, lse
