"""Attention sparsity, by which ThinKV tells types of thoughts apart: the share of tokens with almost no attention."""

from __future__ import annotations

from torch import Tensor


def sparsity(p: Tensor, valid: Tensor, share: float = 0.01) -> Tensor:
    """The share of cached tokens whose weight is below 1 % of the row's largest (ThinKV §3.1, §C.2).

        |{t: p_t < share · max p}| / |{t}|        mean over KV heads

    Args:
        p: float32 [..., Hkv, S], attention weights, one for the query heads of a KV head together (eq. 2 to 4: the
            softmax of the group's largest logits); anything where not valid.
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
