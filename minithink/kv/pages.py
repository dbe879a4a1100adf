"""How tokens lie in pages, and how they are read.

    Layout    where the codes and the parameters of a format lie in a page
    Pages     the tensors; `slots.py` makes and fills them
    Reading   the keys and values of a layer as dense tensors

Kernels read the same tensors without the dense copy: `ref/paged_attention.py` and its twin take a Reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        return None if asks and bool(valid.all()) else valid

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """K, V [N, Hkv, S, D] in the store's dtype, 0 where there is no token."""
        t = min(layer, len(self.place) - 1)
        if self._alone is not None:
            f, base, keys = self._alone
            return self._read(f, layer, base[t], None if keys is None else keys[t])
        shape = self.pages.shape
        n = self.place.shape[1]
        seen = self.place.shape[-1]
        heads = shape.kv_heads
        dim = shape.head_dim
        # one column more, for entries that are no token
        k, v = (self.pages.ring.new_zeros(n, heads, seen + 1, dim) for _ in range(2))
        for f, column, lies, keys in self._parts:
            if f == BUFFER:
                index = lies[t][..., None, None].expand(n, lies.shape[2], -1, 2, dim).expand(-1, heads, -1, -1, -1)
                part = self._ring(layer).gather(2, index).unbind(3)
            else:
                part = self._read(f, layer, lies[t], None if keys is None else keys[t])
            into = column[t][..., None].expand(n, column.shape[2], -1, dim).expand(-1, heads, -1, -1)
            k.scatter_(2, into, part[0])
            v.scatter_(2, into, part[1])
        k = k[:, :, :-1]
        v = v[:, :, :-1]
        return k, self._lagging(layer, v) if self.pages.storage.lag else v

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
            p.place, p.count, self.numbers, p.table.format, sorted(p.used), p.table.most, p.seen
        )

    @cached_property
    def _alone(self) -> tuple[int, Tensor, Tensor | None] | None:
        """If all tokens have one format and there is no buffer: the format, and for every column the base of its slot
        and its row of key scales, int64 [Lt, N, Ht, S]. Columns without a token read the zero page. Else None."""
        pages = self.pages
        most = self.pages.table.most
        if len(pages.used) > 1 or pages.storage.buffer:
            return None
        [f] = pages.used
        page = torch.where(self.pos >= 0, self.place // most, pages.zero_page).long()
        slot = torch.where(self.pos >= 0, self.place % most, 0).long()
        keys = pages.scale_row[page, slot].long() if pages.layouts[f].by_token else None
        return f, pages.base(f, page, slot), keys

    @cached_property
    def _parts(self) -> list[tuple[int, Tensor, Tensor, Tensor | None]]:
        """The tokens of every format in use, then the tokens in the ring (BUFFER). Each entry has the format, then
        int64 [Lt, N, Ht, n]: the tokens' columns (S: no token), the bases of their slots (or their places in the
        ring), their rows of key scales. n is the largest number in a unit; S, if steps are captured."""
        pages = self.pages
        place, column, first = self.by_format
        most = pages.table.most
        seen = place.shape[-1]
        kinds = [*sorted(pages.used), BUFFER]
        wide = first.diff(dim=-1).amax((0, 1, 2)).tolist() if pages.asks else [seen] * len(kinds)
        out: list[tuple[int, Tensor, Tensor, Tensor | None]] = []
        for i, (f, n) in enumerate(zip(kinds, wide, strict=True)):
            if not n or (f == BUFFER and not pages.storage.buffer):
                continue
            rank = first[..., i, None] + torch.arange(n, device=place.device)
            there = rank < first[..., i + 1, None]
            rank = rank.clamp(max=seen - 1)
            lies = place.gather(-1, rank)
            columns = torch.where(there, column.gather(-1, rank), seen).long()
            if f == BUFFER:
                out.append((f, columns, torch.where(there, -1 - lies, 0).clamp(min=0).long(), None))
                continue
            page = torch.where(there, lies // most, pages.zero_page).long()
            slot = torch.where(there, lies % most, 0).long()
            keys = pages.scale_row[page, slot].long() if pages.layouts[f].by_token else None
            out.append((f, columns, pages.base(f, page, slot), keys))
        return out

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
        recent = (pos >= lengths[:, None, None] - 1 - size) & (pos >= sink) & settled[:, None, None]
        pushed_out = pages.outgoing_at[self.numbers][:, None, None]
        in_ring = (recent & (pos > pushed_out))[..., None]
        index = ((pos - sink) % size).long()[..., None].expand(v.shape)
        v = torch.where(in_ring, self._ring(layer)[..., 1, :].gather(2, index), v)
        outgoing = pages.outgoing[layer, self.numbers][:, :, None]
        return torch.where((recent & (pos == pushed_out))[..., None], outgoing, v)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Tokens that each row has seen, int64 [N], and whether its prompt is settled, bool [N]. A prompt that is not
        settled is not in the ring."""
        if self.lengths is not None:
            all_are = torch.ones_like(self.lengths, dtype=torch.bool)
            return self.lengths, all_are if self.settled is None else self.settled
        pages = self.pages
        device = self.pos.device
        lengths = torch.tensor(pages.lengths, device=device)
        settled = torch.tensor([row not in pages.reading for row in range(pages.shape.rows)], device=device)
        return (lengths, settled) if self.rows is None else (lengths[self.rows], settled[self.rows])

    def _read(self, f: int, layer: int, base: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """K and V of one format. base, keys: [N, Ht, S]."""
        pages = self.pages
        rows = self.rows
        lay = pages.layouts[f]
        dim = pages.shape.head_dim
        index = pages.index(f, layer, base)  # [N, Hkv, S]
        codes = pages.codes[f].index_select(0, index.flatten()).view(*index.shape, -1)
        if lay.plain:
            return codes[..., :dim], codes[..., dim : 2 * dim]
        side = pages.sides[f].index_select(0, index.flatten()).view(*index.shape, -1)
        if keys is None:
            k_params = side[..., : lay.k_side]
        else:
            row = keys * pages.shape.sharing + pages.lane(layer)[:, None]  # [N, Hkv, S]
            k_params = pages.scale_rows.flatten(0, 1)[row][..., : lay.row]
        scale = pages.scale[f, :, layer] if rows is None else pages.scale[f, :, layer, rows]  # [2, N]
        k_scale, v_scale = scale[:, :, None, None]
        dequantize = pages.backend.dequantize
        k = dequantize(lay.k, codes[..., : lay.k_codes], k_params, k_scale, pages.dtype)
        v_codes = codes[..., lay.k_codes : lay.codes]
        v_params = side[..., lay.k_side : lay.side]
        return k, dequantize(lay.v, v_codes, v_params, v_scale, pages.dtype)


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
