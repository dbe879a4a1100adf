"""Reading: the keys and values of some rows, layer by layer, as dense tensors.

Kernels read the same memory without the dense copy: `ref/paged_attention.py` and its twin take a Reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minithink.kv.contract import BUFFER
from minithink.kv.store import PagedStore

Reader = Callable[[int], tuple[Tensor, Tensor]]  # layer → K, V


@dataclass(frozen=True)
class _Part:
    """The tokens of one format. The tensors are int64 [Lt, N, Ht, n]."""

    format: int  # BUFFER: they lie in the ring
    base: Tensor  # the bases of their slots, or their places in the ring
    groups: Tensor | None = None  # of keys by token
    column: Tensor | None = None  # their columns; S: no token; None: one entry for each column


class Reading:
    """Keys and values of some rows, as they are now. Work that is equal for all layers is done once."""

    # Where a kernel may write the attention weights that it is asked for: `Observations.in_place`. None: it returns
    # them.
    into: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        store: PagedStore,
        rows: Tensor | None = None,
        lengths: Tensor | None = None,
        settled: Tensor | None = None,
    ) -> None:
        """
        Args:
            rows: int64 [N]; None: all rows.
            lengths: int64 [N], tokens that each row has had; used only if values lag (`Storage.lag`). None: the
                host's counts.
            settled: bool [N], rows whose prompt is settled; None, with lengths: all rows.
        """
        self.store = store
        self.rows = rows
        self.lengths = lengths
        self.settled = settled
        self.once: dict[Any, Any] = {}  # what a kernel has worked out for all layers
        self._place = store.lists.places()
        self._pos = store.lists.positions()

    @cached_property
    def place(self) -> Tensor:
        """int32 [Lt, N, Ht, S]."""
        return self._place if self.rows is None else self._place[:, self.rows]

    @cached_property
    def pos(self) -> Tensor:
        """int32 [Lt, N, Ht, S], −1 after the last token."""
        return self._pos if self.rows is None else self._pos[:, self.rows]

    def valid(self, layer: int) -> Tensor | None:
        """Columns that hold a token: bool [N, Ht, S]; None: all columns do."""
        valid = self._valid
        if valid is None:
            return None
        return valid[min(layer, len(valid) - 1)]

    @cached_property
    def _valid(self) -> Tensor | None:
        """The same in all layers: bool [Lt, N, Ht, S]. A mask of ones changes no result, only the time. So it is left
        out on a CPU if the width is not fixed: there the check costs little."""
        valid = self.pos >= 0
        store = self.store
        asks = store.asks and store.lists.columns is None and valid.device.type == "cpu"
        return None if asks and bool(valid.all()) else valid

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """K, V [N, Hkv, S, D] in the store's dtype, 0 where there is no token."""
        if self._alone is not None:
            return self._read(self._alone, layer)
        t = min(layer, len(self.place) - 1)
        _, n, _, width = self.place.shape
        heads = self.store.shape.kv_heads
        dim = self.store.shape.head_dim
        # one column more, for entries that are no token
        k = self.store.ring.new_zeros(n, heads, width + 1, dim)
        v = torch.zeros_like(k)
        for part in self._parts:
            assert part.column is not None
            read = self._read_ring if part.format == BUFFER else self._read
            part_k, part_v = read(part, layer)
            column = part.column[t]  # [N, Ht, n]
            into = column.expand(-1, heads, -1)[..., None].expand(-1, -1, -1, dim)
            k.scatter_(2, into, part_k)
            v.scatter_(2, into, part_v)
        k = k[:, :, :-1]
        v = v[:, :, :-1]
        if self.store.storage.lag:
            v = self._lagging(layer, v)
        return k, v

    @cached_property
    def numbers(self) -> Tensor:
        """The rows: int64 [N]."""
        if self.rows is not None:
            return self.rows
        return torch.arange(self.store.shape.rows, device=self.pos.device)

    @cached_property
    def by_format(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lists sorted by the formats in use, tokens in the ring last: places and columns, int32 [Lt, N, Ht, S],
        and where each format begins, int32 [Lt, N, Ht, F + 2]; see `ref/by_format.py`."""
        lists = self.store.lists
        table = self.store.slots.table
        return self.store.pages.backend.by_format(
            place=lists.place,
            count=lists.count,
            rows=self.numbers,
            page_format=table.format,
            formats=sorted(self.store.slots.used),
            stride=table.stride,
            seen=lists.columns_read,
        )

    @cached_property
    def _alone(self) -> _Part | None:
        """If all tokens have one format and there is no buffer: all columns, as one part. Else None."""
        used = self.store.slots.used
        if len(used) > 1 or self.store.storage.buffer:
            return None
        [f] = used
        return self._in_pages(f, self.place, self.pos >= 0)

    @cached_property
    def _parts(self) -> list[_Part]:
        """The tokens of every format in use, then the tokens in the ring. A part is as wide as the largest number of
        its tokens in a unit; S, if steps are captured."""
        _, _, first = self.by_format
        formats = sorted(self.store.slots.used)
        if self.store.storage.buffer:
            formats.append(BUFFER)
        widths = [self.place.shape[-1]] * len(formats)
        if self.store.asks:
            widths = first.diff(dim=-1).amax((0, 1, 2)).tolist()
        parts = []
        for i, f in enumerate(formats):
            if widths[i]:
                parts.append(self._part(i, f, widths[i]))
        return parts

    def _part(self, i: int, f: int, n: int) -> _Part:
        """The tokens of format f, the i-th that is in use, at most n of a unit."""
        place, column, first = self.by_format
        width = place.shape[-1]
        rank = first[..., i, None] + torch.arange(n, device=place.device)
        there = rank < first[..., i + 1, None]
        last = first[..., -1:] - 1
        rank = torch.minimum(rank, last).clamp(min=0)  # what is behind the last token was never written
        own = place.gather(-1, rank)
        columns = torch.where(there, column.gather(-1, rank), width).long()
        if f == BUFFER:
            in_ring = torch.where(there, -1 - own, 0).clamp(min=0).long()
            return _Part(f, in_ring, column=columns)
        return replace(self._in_pages(f, own, there), column=columns)

    def _in_pages(self, f: int, place: Tensor, there: Tensor) -> _Part:
        """Tokens of one format in pages, by their places. Where nothing is `there`, the zero page is read. place,
        there: [Lt, N, Ht, n]."""
        pages = self.store.pages
        slots = self.store.slots
        stride = slots.table.stride
        page = torch.where(there, place // stride, pages.zero_page).long()
        slot = torch.where(there, place % stride, 0).long()
        groups = slots.group_of[page, slot].long() if pages.layouts[f].by_token else None
        return _Part(f, pages.base(f, page, slot), groups)

    def _ring(self, layer: int) -> Tensor:
        """[N, Hkv, buffer, 2, D]: a layer of the ring."""
        ring = self.store.ring[layer]
        return ring if self.rows is None else ring[self.rows]

    def _lagging(self, layer: int, v: Tensor) -> Tensor:
        """Replace the values of the last `buffer` + 1 tokens by exact ones: the oldest of them from `outgoing`, if it
        was pushed out of the ring already, the others from the ring. v: [N, Hkv, S, D]."""
        store = self.store
        pos = self.pos[min(layer, len(self.pos) - 1)]
        lengths, settled = self._ends
        size = store.storage.buffer
        sink = store.storage.sink
        last_in_full = lengths[:, None, None] - 1 - size
        recent = (pos >= last_in_full) & (pos >= sink) & settled[:, None, None]
        pushed_out = store.outgoing_at[self.numbers][:, None, None]
        in_ring = recent & (pos > pushed_out)
        is_outgoing = recent & (pos == pushed_out)
        index = ((pos - sink) % size).long()
        index = index[..., None].expand(v.shape)
        of_ring = self._ring(layer)[..., 1, :].gather(2, index)
        v = torch.where(in_ring[..., None], of_ring, v)
        outgoing = store.outgoing[layer, self.numbers][:, :, None]
        return torch.where(is_outgoing[..., None], outgoing, v)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Tokens that each row has had, int64 [N], and whether its prompt is settled, bool [N]. A prompt that is not
        settled is not in the ring."""
        if self.lengths is not None:
            settled = self.settled
            if settled is None:
                settled = torch.ones_like(self.lengths, dtype=torch.bool)
            return self.lengths, settled
        store = self.store
        device = self.pos.device
        lengths = torch.tensor(store.lengths, device=device)
        settled = torch.tensor([row not in store.unsettled for row in range(store.shape.rows)], device=device)
        if self.rows is None:
            return lengths, settled
        return lengths[self.rows], settled[self.rows]

    def _read_ring(self, part: _Part, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens in the ring: [N, Hkv, n, D]."""
        t = min(layer, len(part.base) - 1)
        heads = self.store.shape.kv_heads
        dim = self.store.shape.head_dim
        index = part.base[t][..., None, None].expand(-1, -1, -1, 2, dim)
        index = index.expand(-1, heads, -1, -1, -1)
        k, v = self._ring(layer).gather(2, index).unbind(3)
        return k, v

    def _read(self, part: _Part, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens in pages: [N, Hkv, n, D]."""
        pages = self.store.pages
        f = part.format
        t = min(layer, len(part.base) - 1)
        lay = pages.layouts[f]
        index = pages.index(f, layer, part.base[t])  # [N, Hkv, n]
        codes = _entries_of(pages.codes[f], index)
        if lay.plain:
            dim = pages.shape.head_dim
            return codes[..., :dim], codes[..., dim : 2 * dim]
        side = _entries_of(pages.sides[f], index)
        k_codes, v_codes = lay.parts(codes)
        k_params, v_params = lay.side_parts(side)
        if part.groups is not None:
            number = pages.group_index(layer, part.groups[t])  # [N, Hkv, n]
            k_params = pages.group_params.flatten(0, 1)[number][..., : lay.shared]
        scale = pages.scale[f, :, layer]  # [2, B]
        if self.rows is not None:
            scale = scale[:, self.rows]
        k_scale, v_scale = scale[:, :, None, None]
        dequantize = self.store.pages.backend.dequantize
        k = dequantize(lay.k, k_codes, k_params, k_scale, self.store.dtype)
        v = dequantize(lay.v, v_codes, v_params, v_scale, self.store.dtype)
        return k, v


def _entries_of(matrix: Tensor, index: Tensor) -> Tensor:
    """What slots of these numbers have: [slots, bytes], index [...] → [..., bytes]."""
    return matrix.index_select(0, index.flatten()).view(*index.shape, -1)
