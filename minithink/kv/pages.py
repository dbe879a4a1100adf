"""How tokens lie in pages, and how they are read.

    Layout    where the codes and the parameters of a format lie in a page
    Pages     the tensors; `slots.py` makes and fills them
    Reading   the keys and values of a layer as dense tensors

Kernels read the same tensors without the dense copy: `ref/paged_attention.py` and its twin take a Reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from minithink.backend import Backend
from minithink.errors import UsageError
from minithink.kv.contract import Shape, Storage
from minithink.kv.table import BlockTable
from minithink.quant import parse_pair
from minithink.quant.format import Format
from minithink.quant.plain import DTYPES, Plain

BUFFER = 255  # the format index of tokens in the ring

Reader = Callable[[int], tuple[Tensor, Tensor]]  # layer → K, V


@dataclass(frozen=True)
class Layout:
    """How one format lies in the pages of a store."""

    k: Format
    v: Format
    dim: int
    slots: int  # of a page, a power of two
    plain: bool

    @property
    def k_codes(self) -> int:
        """Bytes of a key's codes; the value's follow."""
        return self.k.code_bytes(self.dim)

    @property
    def codes(self) -> int:
        """Bytes of a token's codes in one lane."""
        return self.k_codes + self.v.code_bytes(self.dim)

    @property
    def by_token(self) -> bool:
        """Whether keys share parameters across tokens."""
        return self.k.by == "token"

    @property
    def k_side(self) -> int:
        """Bytes of a key's own parameters; the value's follow."""
        return 0 if self.by_token else self.k.params_bytes(self.dim)

    @property
    def side(self) -> int:
        """Bytes of a token's own parameters in one lane."""
        return self.k_side + self.v.params_bytes(self.dim)

    def parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of the key and of the value, out of those of a token: [..., bytes]."""
        return codes[..., : self.k_codes], codes[..., self.k_codes : self.codes]

    def side_parts(self, side: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters of the key and of the value, out of those of a token: [..., bytes]."""
        return side[..., : self.k_side], side[..., self.k_side : self.side]

    @property
    def row(self) -> int:
        """Bytes of the parameters that a group of tokens shares in one lane."""
        return self.k.params_bytes(self.dim) if self.by_token else 0


class Pages:
    """The tensors that keys and values are read from; `store.py` says what each holds."""

    shape: Shape
    storage: Storage
    dtype: torch.dtype  # of plain tokens
    backend: Backend
    layouts: list[Layout]
    table: BlockTable
    pool: Tensor
    side: Tensor
    scale_rows: Tensor
    scale_row: Tensor
    ring: Tensor
    outgoing: Tensor
    outgoing_at: Tensor
    scale: Tensor
    place: Tensor
    pos: Tensor
    count: Tensor
    thought: Tensor  # uint8 [B], the running thought type
    columns: int | None
    trash_page: int
    zero_page: int
    home: tuple[int, ...]  # formats of generated tokens
    used: set[int]  # formats that may hold tokens
    asks = True  # whether the host may read the device's memory: False where steps are captured
    # What the host knows of each row:
    most: list[int]  # tokens that a lane holds at most
    lengths: list[int]  # tokens seen, evicted ones too
    reading: set[int]  # rows whose prompt is not settled

    @property
    def seen(self) -> int:
        """Columns of the lists that are read."""
        return self.columns or max(1, *self.most)

    def positions(self) -> Tensor:
        """Original positions, oldest first, −1 after the last token: int32 [Lt, B, Ht, S]."""
        return self.pos[..., : self.seen]

    def format(self) -> Tensor:
        """Index of every token's format, BUFFER in the ring: uint8 [Lt, B, Ht, S]; undefined behind the list."""
        return self.format_of(self.place[..., : self.seen])

    def format_of(self, place: Tensor) -> Tensor:
        page = (place // self.table.most).clamp(min=0).long()
        return torch.where(place < 0, BUFFER, self.table.format[page])

    def reader(
        self, rows: Tensor | None = None, lengths: Tensor | None = None, settled: Tensor | None = None
    ) -> Reading:
        """A reader of the keys and values of some rows, layer by layer.

        Args:
            rows: int64 [N]; None: all rows.
            lengths: int64 [N], tokens that each row has seen; used only if values lag (`Storage.lag`). None: the
                host's counts.
            settled: bool [N], rows whose prompt is settled; None, with lengths: all rows.
        """
        return Reading(self, rows, lengths, settled)

    # -- slots of one format as rows of a matrix

    @cached_property
    def codes(self) -> list[Tensor]:
        """In each format, the codes of every slot of every lane: [slots, bytes]."""
        return [self._slots(self.pool, lay, lay.codes) for lay in self.layouts]

    @cached_property
    def sides(self) -> list[Tensor]:
        """In each format, the parameters of every slot."""
        return [self._slots(self.side, lay, lay.side) for lay in self.layouts]

    def _slots(self, pool: Tensor, lay: Layout, width: int) -> Tensor:
        """A view of the pool as slots of one format: [slots of all lanes, bytes], numbers if it is plain."""
        stride = pool.shape[-1] // lay.slots
        if lay.plain and pool is self.pool:
            return pool.view(self.dtype).view(-1, stride // self.dtype.itemsize)[:, : width // self.dtype.itemsize]
        return pool.view(-1, stride)[:, :width] if stride else pool.view(pool.shape[0] * pool.shape[1] * lay.slots, 0)

    def nowhere(self, f: int) -> int:
        """The trash slot of format f, numbered as `base` does; real slots have smaller numbers."""
        return self.trash_page * self.shape.sharing * self.layouts[f].slots

    def base(self, f: int, page: Tensor, slot: Tensor) -> Tensor:
        """Numbers of slots in the views above, in the first lane of their unit. page, slot: equal shapes."""
        return page * (self.shape.sharing * self.layouts[f].slots) + slot

    def index(self, f: int, layer: int, base: Tensor) -> Tensor:
        """The same in the lanes of a layer. base: [N, Ht, n] → [N, Hkv, n]."""
        return base + self.lane(layer)[:, None] * self.layouts[f].slots

    def lane(self, layer: int) -> Tensor:
        """Which of its unit's lanes each head of a layer is: [Hkv], or [1] where every lane is a unit."""
        if self.shape.scope == "head":
            return torch.zeros(1, dtype=torch.long, device=self.shape.device)
        heads = torch.arange(self.shape.kv_heads, device=self.shape.device)
        return heads + (layer * self.shape.kv_heads if self.shape.scope == "sequence" else 0)


@dataclass(frozen=True)
class _Part:
    """The tokens of one format. The tensors are int64 [Lt, N, Ht, n]."""

    format: int  # BUFFER: they lie in the ring
    base: Tensor  # the bases of their slots, or their places in the ring
    keys: Tensor | None = None  # their rows of key scales
    column: Tensor | None = None  # their columns; S: no token; None: one entry for each column


class Reading:
    """Keys and values of some rows, as they are now. Work that is equal for all layers is done once."""

    # Where a kernel may write the attention weights that it is asked for: `Observations.in_place`. None: it returns
    # them.
    into: tuple[Tensor, Tensor] | None = None

    def __init__(
        self, pages: Pages, rows: Tensor | None, lengths: Tensor | None = None, settled: Tensor | None = None
    ) -> None:
        self.pages = pages
        self.rows = rows
        self.lengths = lengths
        self.settled = settled
        self._place = pages.place[..., : pages.seen]
        self._pos = pages.positions()

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
        return None if self._valid is None else self._valid[min(layer, len(self._valid) - 1)]

    @cached_property
    def _valid(self) -> Tensor | None:
        """The same in all layers: bool [Lt, N, Ht, S]. A mask of ones changes no result, only the time. So it is left
        out on a CPU if the width is not fixed: there the check costs little."""
        valid = self.pos >= 0
        asks = self.pages.columns is None and self.pages.asks and valid.device.type == "cpu"
        if asks and bool(valid.all()):
            return None
        return valid

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """K, V [N, Hkv, S, D] in the store's dtype, 0 where there is no token."""
        if self._alone is not None:
            return self._read(self._alone, layer)
        t = min(layer, len(self.place) - 1)
        _, n, _, seen = self.place.shape
        heads = self.pages.shape.kv_heads
        dim = self.pages.shape.head_dim
        # one column more, for entries that are no token
        k = self.pages.ring.new_zeros(n, heads, seen + 1, dim)
        v = torch.zeros_like(k)
        for part in self._parts:
            assert part.column is not None
            part_k, part_v = self._read_ring(part, layer) if part.format == BUFFER else self._read(part, layer)
            into = part.column[t][..., None].expand(-1, -1, -1, dim).expand(-1, heads, -1, -1)
            k.scatter_(2, into, part_k)
            v.scatter_(2, into, part_v)
        k = k[:, :, :-1]
        v = v[:, :, :-1]
        if self.pages.storage.lag:
            v = self._lagging(layer, v)
        return k, v

    @cached_property
    def numbers(self) -> Tensor:
        """The rows: int64 [N]."""
        return torch.arange(self.pages.shape.rows, device=self.pos.device) if self.rows is None else self.rows

    @cached_property
    def by_format(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lists sorted by the formats in use, tokens in the ring last: places and columns, int32 [Lt, N, Ht, S],
        and where each format begins, int32 [Lt, N, Ht, F + 2]; see `ref/by_format.py`."""
        p = self.pages
        return p.backend.by_format(
            place=p.place,
            count=p.count,
            rows=self.numbers,
            page_format=p.table.format,
            formats=sorted(p.used),
            most=p.table.most,
            seen=p.seen,
        )

    @cached_property
    def _alone(self) -> _Part | None:
        """If all tokens have one format and there is no buffer: all columns, as one part. Else None."""
        if len(self.pages.used) > 1 or self.pages.storage.buffer:
            return None
        [f] = self.pages.used
        return self._in_pages(f, self.place, self.pos >= 0)

    @cached_property
    def _parts(self) -> list[_Part]:
        """The tokens of every format in use, then the tokens in the ring. A part is as wide as the largest number of
        its tokens in a unit; S, if steps are captured."""
        place, column, first = self.by_format
        seen = place.shape[-1]
        formats = [*sorted(self.pages.used), BUFFER]
        widths = [seen] * len(formats)
        if self.pages.asks:
            widths = first.diff(dim=-1).amax((0, 1, 2)).tolist()
        out = []
        for i, f in enumerate(formats):
            n = widths[i]
            if not n or (f == BUFFER and not self.pages.storage.buffer):
                continue
            rank = first[..., i, None] + torch.arange(n, device=place.device)
            there = rank < first[..., i + 1, None]
            rank = rank.clamp(max=seen - 1)
            own = place.gather(-1, rank)
            columns = torch.where(there, column.gather(-1, rank), seen).long()
            if f == BUFFER:
                in_ring = torch.where(there, -1 - own, 0).clamp(min=0).long()
                out.append(_Part(f, in_ring, column=columns))
            else:
                out.append(replace(self._in_pages(f, own, there), column=columns))
        return out

    def _in_pages(self, f: int, place: Tensor, there: Tensor) -> _Part:
        """Tokens of one format in pages, by their places. Where nothing is `there`, the zero page is read. place,
        there: [Lt, N, Ht, n]."""
        pages = self.pages
        most = pages.table.most
        page = torch.where(there, place // most, pages.zero_page).long()
        slot = torch.where(there, place % most, 0).long()
        keys = pages.scale_row[page, slot].long() if pages.layouts[f].by_token else None
        return _Part(f, pages.base(f, page, slot), keys)

    def _ring(self, layer: int) -> Tensor:
        """[N, Hkv, R, 2, D]."""
        return self.pages.ring[layer] if self.rows is None else self.pages.ring[layer, self.rows]

    def _lagging(self, layer: int, v: Tensor) -> Tensor:
        """Replace the values of the last `buffer` + 1 tokens by exact ones: the oldest of them from `outgoing`, if it
        was pushed out of the ring already, the others from the ring. v: [N, Hkv, S, D]."""
        pages = self.pages
        pos = self.pos[min(layer, len(self.pos) - 1)]
        lengths, settled = self._ends
        size = pages.storage.buffer
        sink = pages.storage.sink
        last_in_full = lengths[:, None, None] - 1 - size
        recent = (pos >= last_in_full) & (pos >= sink) & settled[:, None, None]
        pushed_out = pages.outgoing_at[self.numbers][:, None, None]
        in_ring = recent & (pos > pushed_out)
        is_outgoing = recent & (pos == pushed_out)
        index = ((pos - sink) % size).long()[..., None].expand(v.shape)
        of_ring = self._ring(layer)[..., 1, :].gather(2, index)
        v = torch.where(in_ring[..., None], of_ring, v)
        outgoing = pages.outgoing[layer, self.numbers][:, :, None]
        return torch.where(is_outgoing[..., None], outgoing, v)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Tokens that each row has seen, int64 [N], and whether its prompt is settled, bool [N]. A prompt that is not
        settled is not in the ring."""
        if self.lengths is not None:
            settled = self.settled
            if settled is None:
                settled = torch.ones_like(self.lengths, dtype=torch.bool)
            return self.lengths, settled
        pages = self.pages
        device = self.pos.device
        lengths = torch.tensor(pages.lengths, device=device)
        settled = torch.tensor([row not in pages.reading for row in range(pages.shape.rows)], device=device)
        if self.rows is None:
            return lengths, settled
        return lengths[self.rows], settled[self.rows]

    def _read_ring(self, part: _Part, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens in the ring: [N, Hkv, n, D]."""
        t = min(layer, len(part.base) - 1)
        heads = self.pages.shape.kv_heads
        dim = self.pages.shape.head_dim
        index = part.base[t][..., None, None].expand(-1, -1, -1, 2, dim).expand(-1, heads, -1, -1, -1)
        k, v = self._ring(layer).gather(2, index).unbind(3)
        return k, v

    def _read(self, part: _Part, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens in pages: [N, Hkv, n, D]."""
        pages = self.pages
        rows = self.rows
        f = part.format
        t = min(layer, len(part.base) - 1)
        lay = pages.layouts[f]
        dim = pages.shape.head_dim
        index = pages.index(f, layer, part.base[t])  # [N, Hkv, n]
        codes = pages.codes[f].index_select(0, index.flatten()).view(*index.shape, -1)
        if lay.plain:
            return codes[..., :dim], codes[..., dim : 2 * dim]
        side = pages.sides[f].index_select(0, index.flatten()).view(*index.shape, -1)
        k_codes, v_codes = lay.parts(codes)
        k_params, v_params = lay.side_parts(side)
        if part.keys is not None:
            row = part.keys[t] * pages.shape.sharing + pages.lane(layer)[:, None]  # [N, Hkv, n]
            k_params = pages.scale_rows.flatten(0, 1)[row][..., : lay.row]
        scale = pages.scale[f, :, layer] if rows is None else pages.scale[f, :, layer, rows]  # [2, N]
        k_scale, v_scale = scale[:, :, None, None]
        dequantize = pages.backend.dequantize
        k = dequantize(lay.k, k_codes, k_params, k_scale, pages.dtype)
        v = dequantize(lay.v, v_codes, v_params, v_scale, pages.dtype)
        return k, v


def layouts(storage: Storage, dim: int, dtype: torch.dtype) -> list[Layout]:
    """How each of the storage's formats lies in its pages."""
    size = page_bytes(storage, dim, dtype)
    out = []
    for name in storage.formats:
        k, v = (fmt.fit(dim) for fmt in _pair(name, dtype))
        per_token = k.code_bytes(dim) + v.code_bytes(dim)
        out.append(Layout(k, v, dim, 1 << ((size // per_token).bit_length() - 1), name == "plain"))
    return out


def page_bytes(storage: Storage, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a page in one lane: `block` tokens of the main format, and at least one plain token."""

    def per_token(name: str) -> int:
        return sum(fmt.code_bytes(dim) for fmt in _pair(name, dtype))

    if storage.block < 1 or storage.block & (storage.block - 1):
        raise UsageError(f"A block of {storage.block} tokens: it must be a power of two.")
    size = storage.block * per_token(storage.thoughts[storage.prompt])
    while size < per_token("plain"):
        size *= 2
    return size


def _pair(name: str, dtype: torch.dtype) -> tuple[Format, Format]:
    """The formats of keys and values."""
    if name != "plain":
        return parse_pair(name)
    plain = Plain(next(n for n, of in DTYPES.items() if of == dtype))
    return plain, plain
