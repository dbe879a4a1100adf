"""Select tokens among lanes that share a number of places: heads of a layer with one budget (Ada-KV)."""

from __future__ import annotations

from torch import Tensor

from minithink.ref.keep_best import keep_best


def keep_shared(score: Tensor, candidate: Tensor, count: Tensor, floor: Tensor) -> Tensor:
    """The best candidates of H lanes together, and of each lane at least its `floor` best.

    A lane keeps its `floor` best candidates. The remaining places, up to `count`, go to the best other candidates of
    any lane. Of equal scores the older token is kept, and among different lanes that of the first lane.

    Args:
        score: float32 or float64 [..., H, S], columns oldest first; anything (also NaN) where there is no candidate.
        candidate: bool [..., H, S].
        count: int32 [...], of all H lanes together; if there are fewer candidates, all are kept.
        floor: int32 [..., H], tokens that each lane keeps, even if their sum is more than `count`.

    Returns:
        bool [..., H, S], the candidates that are kept.
    """
    certain = keep_best(score, candidate, floor)
    missing = count - certain.sum((-2, -1), dtype=count.dtype)
    uncertain = candidate & ~certain
    others = keep_best(score.flatten(-2), uncertain.flatten(-2), missing)  # [..., H·S]
    return certain | others.view_as(certain)
