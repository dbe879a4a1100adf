"""Rotate and store the new tokens of a decode step, before attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minithink.ref.rope import rope


class Writer(Protocol):
    """What a store's `append` returns (`minithink/kv/store.py`). The kernel uses its pages directly."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [N, n, Hkv, D], n new tokens of each row."""


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    writer: Writer,
    layer: int,
) -> Tensor:
    """Rotate one new token of each sequence, and store its keys and values in the slots that the writer has taken.

    Args:
        q: [N, Hq, D], unrotated.
        k, v: [N, Hkv, D]. The key is unrotated; it is stored rotated, and rounded to its dtype.
        cos, sin: [N, 1, D] float32, as for `rope`.
        writer: writes into the lanes of these N rows.
        layer: the layer of these keys and values.

    Returns:
        The rotated queries: [N, Hq, D] in the dtype of `q`.
    """
    rotated = rope(k, cos, sin)
    writer.write(layer, rotated[:, None], v[:, None])
    return rope(q, cos, sin)
