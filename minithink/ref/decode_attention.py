"""Attention of one new token of each sequence, over lanes of different lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√D)·v over the valid tokens of every lane; every lane needs at least one.

    Args:
        q: [N, Hq, D], rotated.
        k, v: [N, Hkv, S, D], rotated keys, and values, finite everywhere.
        valid: bool [N, Hkv, S], or [N, 1, S] for all heads; None: all tokens are valid.

    Returns:
        [N, Hq, D].
    """
    n, hq, d = q.shape
    # The query heads of a group are several queries of their KV head.
    grouped = q.view(n, k.shape[1], -1, d)
    mask = None if valid is None else valid.unsqueeze(2)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(n, hq, d)


def decode_probabilities(logits: Tensor, valid: Tensor) -> Tensor:
    """softmax over the valid tokens, in float32. logits: [N, Hkv, g, S], valid: [N, Hkv or 1, S] → [N, Hkv, g, S]."""
    return logits.float().masked_fill(~valid.unsqueeze(2), -torch.inf).softmax(-1)


def group_reduce(logits: Tensor, valid: Tensor, rule: str) -> Tensor:
    """Combine the attention probabilities of the g query heads of each KV head.

    Args:
        logits: [N, Hkv, g, S], q·k/√D.
        valid: bool [N, Hkv or 1, S].
        rule: "sum", "mean" or "max" of the probabilities; "max_logit": the softmax of the heads' largest logits;
            "none": all Hq heads are returned.

    Returns:
        float32 [N, Hkv, S], with "none" [N, Hq, S]; 0 where not valid.
    """
    if rule == "max_logit":
        return decode_probabilities(logits.amax(2, keepdim=True), valid)[:, :, 0]
    p = decode_probabilities(logits, valid)
    if rule == "none":
        return p.flatten(1, 2)
    return {"sum": p.sum(2), "mean": p.mean(2), "max": p.amax(2)}[rule]
