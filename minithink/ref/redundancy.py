"""How much a cached key resembles the others: the redundancy of R-KV."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 256  # rows of C in memory at once


def redundancy(k: Tensor, valid: Tensor, threshold: float = 0.5) -> Tensor:
    """R-KV's redundancy (`rkv/utils.py`, `retain_direction="last"`; SkipKV eq. 5).

        C_ij = k̂_i·k̂_j, k̂ = k/(‖k‖ + 1e−8)     over all valid keys, C_ii = 0
        C_ij* = 0, j* = the largest j with C_ij > threshold: of the keys that resemble key i, the newest is spared;
                a row with no such j loses C_i0 (a side effect of the papers' code, kept)
        R_j  = softmax_j ( Σ_i C_ij / number of valid keys )

    C is [S, S] in every lane. This code computes all of it, but keeps only ROWS_AT_ONCE rows at a time. The kernel
    computes less, because only j* needs single elements: Σ_i C_ij = k̂_j·Σ_i k̂_i − k̂_j·k̂_j − Σ_{i: j*_i = j} C_ij.

    Args:
        k: [B, Hkv, S, D], rotated keys, oldest first; anything (also NaN) where not valid.
        valid: bool [B, Hkv, S], or [B, 1, S] for all heads.
        threshold: cosine above which two keys resemble each other.

    Returns:
        float32 [B, Hkv, S]: sums to 1 over the valid keys, 0 elsewhere.
    """
    s = k.shape[2]
    k = k.float()
    k = k.masked_fill(~valid.unsqueeze(-1), 0.0)
    norm = k.norm(dim=-1, keepdim=True)
    unit = k / (norm + 1e-8)  # [B, Hkv, S, D]
    keys = unit.transpose(-1, -2)
    columns = torch.arange(s, device=k.device)
    total = torch.zeros(k.shape[:3], device=k.device)  # Σ_i C_ij
    for start in range(0, s, ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        own = columns[start:end, None]  # i, [rows, 1]
        c = unit[:, :, start:end] @ keys  # [B, Hkv, rows, S]
        c = c.masked_fill(columns == own, 0.0)
        similar = (c > threshold) & valid.unsqueeze(2)
        newest = torch.where(similar, columns, 0)
        newest = newest.amax(-1, keepdim=True)  # j*, [B, Hkv, rows, 1]
        spared = c.scatter(-1, newest, 0.0)
        total += spared.sum(2)
    mean = total / valid.sum(-1, keepdim=True)
    mean = mean.masked_fill(~valid, -torch.inf)
    return mean.softmax(-1).masked_fill(~valid, 0.0)
