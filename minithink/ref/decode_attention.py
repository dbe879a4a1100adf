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
    hkv = k.shape[1]
    # The query heads of a group are several queries of their KV head.
    grouped = q.view(n, hkv, -1, d)
    mask = None
    if valid is not None:
        mask = valid.unsqueeze(2)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return out.reshape(n, hq, d)


def decode_probabilities(logits: Tensor, valid: Tensor) -> Tensor:
    """softmax over the valid tokens, in float32. logits: [N, Hkv, g, S], valid: [N, Hkv or 1, S] → [N, Hkv, g, S]."""
    outside = ~valid.unsqueeze(2)
    logits = logits.float()
    logits = logits.masked_fill(outside, -torch.inf)
    return logits.softmax(-1)


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
        largest = logits.amax(2, keepdim=True)  # [N, Hkv, 1, S]
        return decode_probabilities(largest, valid)[:, :, 0]
    p = decode_probabilities(logits, valid)
    if rule == "none":
        return p.flatten(1, 2)
    if rule == "sum":
        return p.sum(2)
    if rule == "mean":
        return p.mean(2)
    if rule == "max":
        return p.amax(2)
    raise KeyError(rule)


def causal_weights(q: Tensor, k: Tensor, first: int, group: str) -> Tensor:
    """Attention weights of n queries of a prompt, each over the keys up to its own position.

    Args:
        q: [n, Hq, D], rotated; the first stands at position `first`.
        k: [Hkv, S, D].
        group: as in `group_reduce`.

    Returns:
        float32 [n, Hkv, S], with "none" [n, Hq, S].
    """
    n, _, d = q.shape
    hkv, s, _ = k.shape
    # one product for each KV head: otherwise torch copies the keys for every query
    grouped = q.unflatten(1, (hkv, -1))
    grouped = grouped.transpose(0, 1)  # [Hkv, n, g, D]
    logits = grouped.flatten(1, 2) @ k.mT  # [Hkv, n·g, S]
    logits = logits.unflatten(1, (n, -1))
    logits = logits.transpose(0, 1)  # [n, Hkv, g, S]
    own = first + torch.arange(n, device=q.device)
    column = torch.arange(s, device=q.device)
    valid = column <= own[:, None]  # [n, S]
    return group_reduce(logits / d**0.5, valid[:, None], group)


def query_rows(
    q: Tensor,
    k: Tensor,
    pos: Tensor,
    length: Tensor,
    group: str,
) -> Tensor:
    """Attention weights of the last n queries of some sequences over the tokens that they hold now.

    Args:
        q: [R, Hq, n, D], rotated, the newest last.
        k: [R, Hkv, S, D], rotated.
        pos: int32 [R, Ht, S], positions of the tokens; −1: no token.
        length: int64 [R], tokens that each sequence has had.
        group: as in `group_reduce`.

    Returns:
        float32 [R, Hkv, n, S], with "none" [R, Hq, n, S]; 0 for queries that are not there.
    """
    q = q.float()
    k = k.float()
    hkv = k.shape[1]
    n, d = q.shape[2:]
    keys = k.transpose(-1, -2)  # [R, Hkv, D, S]
    out = []
    for i in range(n):
        own = length - n + i  # [R], the query's position
        valid = (pos >= 0) & (pos <= own[:, None, None])
        grouped = q[:, :, i].unflatten(1, (hkv, -1))  # [R, Hkv, g, D]
        logits = grouped @ keys / d**0.5
        weights = group_reduce(logits, valid, group)
        out.append(weights.nan_to_num(0.0))  # no valid token: no such query
    return torch.stack(out, dim=2)
