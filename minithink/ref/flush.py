"""A full buffer into pages: what a decode step does with tokens that are quantized together."""

from __future__ import annotations

from typing import Protocol


class BufferWriter(Protocol):
    """What a store's `flush_rings` gives (`minithink/kv/store.py`). The kernel looks through it, at the pages."""

    layers: int

    def store_layer(self, layer: int) -> None:
        """Quantize the buffer's tokens of one layer, and write them into their slots."""


def flush(writer: BufferWriter) -> None:
    """Quantize the keys and values that wait in the buffers of some rows, in all layers, and write them into slots.

    Args:
        writer: knows the rows, where each of their tokens goes, and which rows of scales the groups of keys by token
            have.
    """
    for layer in range(writer.layers):
        writer.store_layer(layer)
