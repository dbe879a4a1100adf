"""SkipKV's score of a cached token: importance less redundancy less the penalty of its sentence."""

from __future__ import annotations

from torch import Tensor


def cumulative_score(
    importance: Tensor,
    redundancy: Tensor,
    pos: Tensor,
    at: Tensor,
    number: Tensor,
    penalty: Tensor,
    sigma: float,
) -> tuple[Tensor, Tensor]:
    """The score of eq. 6.

        Z = σ·I − (1 − σ)·R − λ_i      for the tokens of sentence i

    The paper maps ranges of sentences into the cache (Φ, eq. 8–11). Here each cached token knows its position, and
    the position its sentence.

    Args:
        importance, redundancy: float32 [L, N, H, S], anything behind the last token.
        pos: int32 [L, N, H, S], the tokens' positions; −1 behind the last token.
        at: int64 [N], the rows.
        number, penalty: int32 [B, P] and float32 [B, T], see `similarity`.
        sigma: σ, from 0 to 1.

    Returns:
        Z and λ: float32 [L, N, H, S]; where there is no token Z means nothing, and λ is 0.
    """
    layers, _, heads, columns = pos.shape
    position = pos.transpose(0, 1).flatten(1)  # [N, L·H·S]
    position = position.clamp(min=0)
    sentence = number[at].gather(1, position.long())
    lam = penalty[at].gather(1, sentence.long())
    lam = lam.unflatten(1, (layers, heads, columns))
    lam = lam.transpose(0, 1)  # [L, N, H, S]
    lam = lam.masked_fill(pos < 0, 0.0)
    z = sigma * importance - (1 - sigma) * redundancy - lam
    return z, lam
