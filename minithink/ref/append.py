"""What a decode step does with its new tokens before it attends: rotate, and store."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minithink.ref.rope import rope


class Writer(Protocol):
    """What a store's `append` gives (`minithink/kv/store.py`). The kernel looks through it, at the pages."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [N, n, Hkv, D], n new tokens of each row."""


def append(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, writer: Writer, layer: int) -> Tensor:
    """Rotate one new token a sequence, and store its keys and values where the writer has taken room for them.

    Args:
        q: [N, Hq, D], unrotated.
        k, v: [N, Hkv, D], the key unrotated; it is stored as rotated and rounded to its dtype.
        cos, sin: [N, 1, D] float32, as for `rope`.
        writer: writes into the lanes of these N rows.
        layer: whose keys and values these are.

    Returns:
        The rotated queries: [N, Hq, D] in the dtype of `q`.
    """
    writer.write(layer, rope(k, cos, sin)[:, None], v[:, None])
    return rope(q, cos, sin)
