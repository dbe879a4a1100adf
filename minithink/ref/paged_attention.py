"""Attention of one new token of each sequence over keys and values in pages, in any formats."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minithink.ref.decode_attention import decode_attention, group_reduce


class Reading(Protocol):
    """A store's keys and values, to be read (`minithink/kv/reading.py`).

    The kernel uses its pages directly: the protocols in `kernels/_layout.py` say which attributes it reads.
    """

    def valid(self, layer: int) -> Tensor | None:
        """The columns that hold a token: bool [N, Hkv or 1, S]; None: all columns."""

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """K, V: [N, Hkv, S, D], finite everywhere."""


def paged_attention(
    q: Tensor,
    read: Reading,
    layer: int,
    group: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q·kᵀ/√D)·v over the tokens that the lanes of a layer hold, and the attention that each token got.

    Args:
        q: [N, Hq, D], rotated.
        read: gives the keys and values of these N rows.
        layer: the layer.
        group: how to combine the attention of a KV head's query heads: sum, mean, max, max_logit or none (see
            `decode_attention.group_reduce`); None: no mass is wanted.

    Returns:
        out: [N, Hq, D]; 0 for a lane without tokens.
        mass: float32 [N, Hkv, S] ([N, Hq, S] with "none"), 0 where there is no token; None if `group` is None.
    """
    k, v = read(layer)
    valid = read.valid(layer)
    n, hq, d = q.shape
    hkv, s = k.shape[1:3]
    out = decode_attention(q, k, v, valid)
    if valid is not None:  # the softmax of a lane without tokens is NaN: its output becomes 0
        some = valid.any(-1)
        some = some[..., None, None]  # [N, Ht, 1, 1]
        out = out.view(n, some.shape[1], -1, d)
        out = out.masked_fill(~some, 0)
        out = out.view(n, hq, d)
    if group is None:
        return out, None
    grouped = q.view(n, hkv, -1, d)
    keys = k.transpose(-1, -2)
    logits = grouped @ keys / d**0.5  # [N, Hkv, g, S]
    if valid is None:
        valid = torch.ones(n, 1, s, dtype=torch.bool, device=k.device)
    mass = group_reduce(logits, valid, group)
    of_tables = mass.view(n, valid.shape[1], -1, s)
    of_tables = of_tables.masked_fill(~valid[:, :, None], 0)
    return out, of_tables.view(mass.shape)
