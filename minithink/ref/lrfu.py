"""LRFU, Least Recently/Frequently Used: attention counts as use (Crystal-KV §5.2, algorithm 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def lrfu(
    mass: Tensor, valid: Tensor, counted: Tensor, crf: Tensor, last: Tensor, t: Tensor, lam: float, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of CRF, the combined recency and frequency of every token.

        CRF_i(t) = Σ over the hits t_j of λ^(t − t_j)  =  λ^(t − τ_i)·CRF_i(τ_i) + [i is hit at t]

    CRF is stored for the time τ of the last hit. It is at least 1 then, so it cannot underflow. Decayed values are
    compared as logarithms, in double precision: at λ = 0.6, λ^(t − τ) itself would be 0 in float32 after some 200
    steps.

    Args:
        mass: [..., S], attention probability of every token; anything (also NaN) where not valid.
        valid: bool [..., S].
        counted: bool [..., S], the tokens whose hits count at this step.
        crf: float32 [..., S], CRF_i(τ_i).
        last: int32 [..., S], τ_i, not after t.
        t: int32, broadcast to [..., S]: the time.
        lam: λ in [0, 1].
        p: share of the attention that the hit set holds, in (0, 1].

    Returns:
        crf, last: after this step.
        score: float64 [..., S], log2 of the decayed CRF, −∞ where CRF is 0. Rounded to multiples of 2^−30, so that
            tokens with equal histories tie, whichever way the device rounds.
    """
    hit = hit_set(mass, valid, p) & counted
    age = (t - last).clamp(min=0)
    crf = torch.where(hit, (crf * lam ** age.double() + 1).float(), crf)
    last = torch.where(hit, t.to(last.dtype), last)
    return crf, last, log_crf(crf, last, t, lam)


def log_crf(crf: Tensor, last: Tensor, t: Tensor, lam: float) -> Tensor:
    """log2 of the CRF decayed to t, as `lrfu` returns it: float64 [..., S]."""
    age = (t - last).clamp(min=0).double()
    log_lam = math.log2(lam) if lam > 0 else -math.inf
    score = crf.double().log2() + torch.where(age > 0, age * log_lam, 0.0)
    return (score * 2**30).round() / 2**30


def hit_set(mass: Tensor, valid: Tensor, p: float) -> Tensor:
    """The smallest set of tokens that together got the share p of the attention: the most attended ones.

    Of equally attended tokens the older comes first. The token with which the sum reaches p is in the set; a token
    without attention never is, so the set is empty if all mass is 0. Mass need not sum to 1.

    Args:
        mass: [..., S]; anything (also NaN) where not valid.
        valid: bool [..., S].
        p: in (0, 1].

    Returns:
        bool [..., S].
    """
    ordered, order = mass.masked_fill(~valid, 0.0).sort(dim=-1, descending=True, stable=True)
    total = ordered.double().cumsum(-1)
    before = torch.nn.functional.pad(total[..., :-1], (1, 0))
    return torch.zeros_like(valid).scatter(-1, order, before < p * total[..., -1:])
