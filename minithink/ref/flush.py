"""Move a full buffer into pages: a decode step quantizes the waiting tokens together."""

from __future__ import annotations

from typing import Protocol


class RingFlush(Protocol):
    """Full rings of a store, made by `flush_rings` (`minithink/kv/store.py`). The kernel uses its pages directly."""

    layers: int

    def store_layer(self, layer: int) -> None:
        """Quantize the buffer's tokens of one layer, and write them into their slots."""


def flush(writer: RingFlush) -> None:
    """Quantize the keys and values that wait in the buffers of some rows, in all layers, and write them into slots.

    Args:
        writer: knows the rows, the slot of each token, and the rows of scales for groups of keys by token.
    """
    for layer in range(writer.layers):
        writer.store_layer(layer)
