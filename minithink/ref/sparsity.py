"""Attention sparsity, by which ThinKV tells types of thoughts apart: the share of tokens with almost no attention.

It is counted in one row of attention for each layer, the mean of the rows of its KV heads (ThinKV §C.2).
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def mean_row(p: Tensor) -> Tensor:
    """The mean of the rows of a layer's KV heads, which all hold the same tokens (ThinKV §C.2, last sentence).

    The heads are added one after the other, so the sum does not depend on the batch or on the width.

    Args:
        p: float32 [..., Hkv, S], attention weights.

    Returns:
        float32 [..., 1, S].
    """
    heads = p.split(1, dim=-2)
    return reduce(torch.add, heads) / len(heads)


def mean_row_by_position(p: Tensor, pos: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The same where KV heads hold different tokens: the columns of the mean row are positions.

    A head gives a token that it does not hold the weight 0, and a token counts if any head holds it. A head holds a
    position at most once, and heads are added one after the other, so the order of the sum is fixed.

    Args:
        p: float32 [..., Hkv, S], attention weights; anything where there is no token.
        pos: integers [..., Hkv, S], positions of the tokens, below `tokens`; −1: no token. Its leading dimensions
            may be 1 where those of `p` are not.
        tokens: columns of the mean row.

    Returns:
        The mean row, float32 [..., 1, tokens], and the positions of its tokens, int64 [..., 1, tokens]; −1: no head
        holds one.
    """
    column = torch.where(pos >= 0, pos, tokens).long()  # one more column for those that are no tokens
    total = p.new_zeros(*p.shape[:-2], tokens + 1)
    held = torch.zeros(*pos.shape[:-2], tokens + 1, dtype=torch.bool, device=pos.device)
    for weights, at in zip(p.unbind(-2), column.unbind(-2), strict=True):
        total.scatter_add_(-1, at.expand_as(weights), weights)
        held.scatter_(-1, at, True)
    row = total[..., None, :tokens] / p.shape[-2]
    position = torch.arange(tokens, device=pos.device)
    return row, torch.where(held[..., None, :tokens], position, -1)


def sparsity(p: Tensor, valid: Tensor, share: float = 0.01) -> Tensor:
    """The share of cached tokens whose weight is below 1 % of the row's largest (ThinKV §3.1, §C.2).

        |{t: p_t < share · max p}| / |{t}|

    ThinKV gives one row, the mean over KV heads. If several rows are given, each is counted, and their shares are
    averaged.

    Args:
        p: float32 [..., Hkv, S], attention weights, one for the query heads of a KV head together (eq. 2 to 4: the
            softmax of the group's largest logits), or [..., 1, S], their mean; anything where not valid.
        valid: bool [..., Hkv, S], or [..., 1, S] for all heads.
        share: of the row's largest weight; 0.01 is the paper's 1 %.

    Returns:
        float32 [...], 0 where no token is valid.
    """
    inside = p.masked_fill(~valid, 0.0)
    largest = inside.amax(-1, keepdim=True)
    below = (p < share * largest) & valid
    held = valid.sum(-1)
    shares = below.sum(-1) / held.clamp(min=1)  # [..., Hkv]
    heads = shares.shape[-1]
    total = shares.double().sum(-1)  # the sum is exact, whatever its order
    return (total / heads).float()
