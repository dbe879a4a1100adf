"""LRFU, Least Recently/Frequently Used: attention counts as use (Crystal-KV §5.2, algorithm 1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 1024  # powers of λ in each of the two tables; ages from STEPS² on count as STEPS² − 1
BITS = 192  # of the integers from which the tables are rounded
SMALLEST = -(2**31) + 1  # the exponent of 0, below all others


class Scaled(NamedTuple):
    """The numbers value · 2^exponent. They may be far below the smallest float64: 0.6^1400 is 0 there."""

    value: Tensor  # float64, not negative
    exponent: Tensor  # int32

    def ordered(self) -> tuple[Tensor, Tensor]:
        """Exponents, then mantissas: numbers compare by the exponents, and those with equal ones by the mantissas."""
        mantissa, more = torch.frexp(self.value)
        exponent = torch.where(self.value > 0, self.exponent + more, SMALLEST)
        return exponent, mantissa

    def number(self) -> Tensor:
        """As float64; numbers below 2^−1000 are too small by some powers of 2, or 0."""
        return self.value * power_of_2(self.exponent)

    def log2(self) -> Tensor:
        """float64, −∞ for 0."""
        return self.value.log2() + self.exponent


class Decay:
    """The powers of λ, as factors from 1 to 2 times powers of 2.

    λ^age is the product of two entries, λ^(age mod 1024) and λ^(1024 · ⌊age / 1024⌋). Each factor is the exact power,
    rounded once to float64, and the same on all machines. So policy, twin and kernel decide alike everywhere.
    """

    def __init__(self, lam: float, device: torch.device | str = "cpu") -> None:
        self.lam = lam
        self.log2 = math.log2(lam) if lam > 0 else -math.inf
        numerator, denominator = float(lam).as_integer_ratio()  # exact: the denominator is a power of 2
        near = powers(numerator, 1 - denominator.bit_length())
        far = powers(*near.next)
        factors = near.factors + far.factors
        exponents = near.exponents + far.exponents
        self.factor = torch.tensor(factors, dtype=torch.float64, device=device)
        self.exponent = torch.tensor(exponents, dtype=torch.int32, device=device)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Factors and exponents: [2 · STEPS]."""
        return self.factor, self.exponent


class Powers(NamedTuple):
    factors: list[float]
    exponents: list[int]
    next: tuple[int, int]  # the power behind the last, an integer and an exponent of 2


def powers(base: int, exponent: int) -> Powers:
    """The first STEPS powers of base · 2^exponent, computed with integers of `BITS` bits."""
    factors = []
    exponents = []
    # The power is x · 2^e.
    x = 1
    e = 0
    for _ in range(STEPS):
        shift = max(0, x.bit_length() - 1)
        factors.append(x / (1 << shift))
        exponents.append(e + shift if x else 0)
        x = x * base
        e = e + exponent
        extra = max(0, x.bit_length() - BITS)
        x = x >> extra
        e = e + extra
    return Powers(factors, exponents, (x, e))


def lrfu(
    mass: Tensor,
    valid: Tensor,
    counted: Tensor,
    crf: Tensor,
    last: Tensor,
    t: Tensor,
    decay: Decay,
    p: float,
) -> tuple[Tensor, Tensor, Scaled]:
    """One step of CRF, the combined recency and frequency of every token.

        CRF_i(t) = Σ over the hits t_j of λ^(t − t_j)  =  λ^(t − τ_i)·CRF_i(τ_i) + [i is hit at t]

    CRF is stored for the time τ of the last hit, in float64. It is at least 1 then, so it cannot underflow. Hits more
    than `window(λ)` steps before τ are rounded away. Tokens with equal histories have equal bits, because nothing is
    computed but products and sums of stored numbers.

    Args:
        mass: [..., S], attention probability of every token; anything (also NaN) where not valid.
        valid: bool [..., S].
        counted: bool [..., S], the tokens whose hits count at this step.
        crf: float64 [..., S], CRF_i(τ_i).
        last: int32 [..., S], τ_i, not after t.
        t: int32, broadcast to [..., S]: the time.
        decay: the powers of λ in [0, 1].
        p: share of the attention that the hit set holds, in (0, 1].

    Returns:
        crf, last: after this step.
        now: the CRF decayed to t, [..., S].
    """
    hit = hit_set(mass, valid, p) & counted
    old = decayed(crf, last, t, decay)
    crf = torch.where(hit, old.number() + 1, crf)
    last = torch.where(hit, t.to(last.dtype), last)
    now = decayed(crf, last, t, decay)
    return crf, last, now


def decayed(crf: Tensor, last: Tensor, t: Tensor, decay: Decay) -> Scaled:
    """The CRF decayed to t, λ^(t − τ)·CRF(τ), with the arguments of `lrfu`."""
    age = (t - last).clamp(0, STEPS**2 - 1)
    near = age % STEPS
    far = STEPS + age // STEPS
    factor = decay.factor[near] * decay.factor[far]
    exponent = decay.exponent[near] + decay.exponent[far]
    return Scaled(crf * factor, exponent)


def power_of_2(exponent: Tensor) -> Tensor:
    """2^exponent, float64; 2^−1022 if it is less, because that is the smallest with full precision."""
    exponent = exponent.clamp(-1022, 1023)
    bits = exponent.long() + 1023
    return (bits << 52).view(torch.float64)


def window(lam: float, bits: int = 53) -> float:
    """Steps from a token's last hit back to hits of which float64 keeps nothing: 53·ln 2 / −ln λ, where λ^n is 2^−53.

    These are 53 steps at λ = 0.5, 72 at 0.6, 349 at 0.9 and 16 at 0.1. With 50 bits they are the steps within which
    every hit counts; between the two rounding decides.

    For λ in (0, ½] one hit outweighs all older ones together. So all these λ order tokens alike: by the last hit, of
    equals by the one before, and so on. In float64 they do so within the window of 50 bits. Two tokens that differ
    only in hits beyond it may tie, but never swap.
    """
    return bits / -math.log2(lam)


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
    mass = mass.masked_fill(~valid, 0.0)
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    total = ordered.double().cumsum(-1)  # up to and with each token
    before = torch.nn.functional.pad(total[..., :-1], (1, 0))
    wanted = p * total[..., -1:]
    hit = torch.zeros_like(valid)
    return hit.scatter(-1, order, before < wanted)
