"""What DynTS's predictor costs and what its evictions save, in floating-point operations (theorem 5.1, appendix A).

    M, B, K   tokens of the question; the budget; tokens that a trigger evicts
    i         generated tokens, from 1 on
    d, L      numbers of a hidden state; layers

Eq. 13 gives the length after step i. The attention of that step still reads the tokens that its trigger evicts, so
eq. 9 counts the saving of each trigger one step early.
"""

from __future__ import annotations

from minithink.errors import UsageError


def predictor_flops(d: int) -> int:
    """6d² + d, of one token (eq. 12)."""
    return 6 * d * d + d


def token_flops(layers: int, width: int) -> int:
    """4·L·d, of attention to one cached token (eq. 14). width: d or, where they differ, heads · head_dim."""
    return 4 * layers * width


def triggers(i: int, m: int, b: int, k: int) -> int:
    """n_i, triggers up to step i (eq. 13)."""
    return max(0, (m + i - b) // k + 1)


def length(i: int, m: int, b: int, k: int) -> int:
    """S_i, cached tokens after step i (eq. 13)."""
    return m + i - triggers(i, m, b, k) * k


def gain(i: int, m: int, b: int, k: int, d: int, layers: int, width: int | None = None) -> int:
    """Operations that step i saves beside a full cache; negative: it costs more (eq. 9 and 18)."""
    saved = triggers(i, m, b, k) * k * token_flops(layers, width or d)
    return saved - predictor_flops(d)


def break_even(d: int, layers: int, n: int = 1, width: int | None = None) -> float:
    """The K above which the n-th trigger pays: (6d² + d) / (n·4·L·d) (eq. 10). width: as in `token_flops`.

    Raises:
        UsageError: a number is below 1.
    """
    if min(d, layers, n, width or d) < 1:
        raise UsageError(f"break_even: d is {d}, layers {layers} and n {n}; all must be at least 1.")
    return predictor_flops(d) / (n * token_flops(layers, width or d))


def repaid(m: int, b: int, k: int, d: int, layers: int, width: int | None = None) -> int:
    """The first step at which all gains up to it are above 0."""
    total = 0
    i = 0
    while total <= 0:
        i += 1
        total += gain(i, m, b, k, d, layers, width)
    return i
