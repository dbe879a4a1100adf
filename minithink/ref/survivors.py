"""Select the tokens that go when segments shrink (ThinKV §4.3): all but those that represent the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minithink.ref.kmeans import kmeans


def survivors(
    read: Any,
    first: Tensor,
    size: Tensor,
    goal: Tensor,
    longest: int,
) -> Tensor:
    """Run K-means (`ref/kmeans.py`) over the keys of every segment that holds more tokens than it may keep.

    The tokens of a segment stand side by side in their list. Lanes that share a table keep the same tokens, chosen by
    the keys of all these lanes together.

    Args:
        read: the store's Reading of R rows (`minithink/kv/reading.py`).
        first: integers [Lt, R, Ht, G], the column in which each segment begins.
        size: integers [Lt, R, Ht, G], tokens of each segment.
        goal: integers [R, G], tokens that each segment may keep.
        longest: tokens that a segment has at most.

    Returns:
        bool [Lt, R, Ht, S], the tokens that go.
    """
    shape = read.pos.shape
    layers, _, ht, width = shape
    pad = torch.nn.functional.pad
    drop = torch.zeros(shape, dtype=torch.bool, device=read.pos.device)
    for layer in range(layers):
        shrinks = size[layer] > goal[:, None]  # [R, Ht, G]
        row, head, segment = shrinks.nonzero().unbind(-1)  # [P]
        if not len(row):
            continue
        k, _ = read(layer)  # [R, Hkv, S, D]
        keys = k.unflatten(1, (ht, -1))
        keys = keys.transpose(2, 3).flatten(3)  # [R, Ht, S, Hkv / Ht · D]

        n = size[layer, row, head, segment]
        start = first[layer, row, head, segment]
        member = torch.arange(longest, device=row.device)
        valid = member < n[:, None]  # [P, T]
        column = start[:, None] + member
        column = torch.where(valid, column, width).long()  # one more column for those that are no members
        lane = (row[:, None], head[:, None], column)
        x = pad(keys, (0, 0, 0, 1))[lane]  # [P, T, F]
        kept = kmeans(x, valid, goal[row, segment])

        gone = pad(drop[layer], (0, 1))
        gone[lane] = valid & ~kept
        drop[layer] = gone[..., :-1]
    return drop
