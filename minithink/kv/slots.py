"""Slots: the store's tensors, and how tokens get slots and give them back.

    require_pages   the host checks that there is room; if not, nothing changes
    allocate        tokens get slots, without the host (`ref/allocate.py`)
    write           keys and values are written into slots, in the slots' format
    evict           tokens leave their lists, their slots are free (`ref/evict.py`)

`requantize.py` moves tokens to other formats with these, `store.py` appends and flushes.

A slot has three numbers, each for its purpose:

    place   page · `table.most` + slot, as the lists have it, whatever the format; `table.most` is the number of slots
            in a page of the smallest format. In the ring: −1 − index.
    base    the slot's number among all slots of one format, in the first lane of its unit (`Pages.base`); the trash
            slot (`nowhere`) stands for no slot
    index   the same in one lane of the unit (`Pages.index`): keys and values are read and written there
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.errors import UsageError
from minithink.kv.compaction import Compaction
from minithink.kv.contract import Shape, Storage
from minithink.kv.pages import Pages, layouts, page_bytes
from minithink.kv.table import BlockTable, FreeList
from minithink.quant.format import Format
from minithink.ref.allocate import allocate
from minithink.ref.evict import release_rows

SAME = 255  # no new thought type


class Slots(Pages):
    """The tensors of B rows, and their free slots. `kv/contract.py` explains rows and lanes, `kv/table.py` units."""

    def __init__(
        self,
        shape: Shape,
        storage: Storage,
        *,
        pages: int,
        scale_rows: int | None = None,
        dtype: torch.dtype = torch.float32,
        columns: int | None = None,
        width: int = 16,
        table_width: int = 4,
        backend: Backend = REFERENCE,
    ) -> None:
        """
        Args:
            pages: number of pages; `sizes.needs` tells how many a sequence may need.
            scale_rows: groups of keys by token that may be held at once; None: a quarter of the tokens that fit.
            dtype: of plain tokens and of the ring.
            columns: width of everything that is read, in tokens; None: as wide as the longest lane. With a fixed
                width no shape depends on what the sequences hold.
            width: tokens that lists have room for at first; they grow, unless `columns` are fixed.
            table_width: pages that a unit's table has room for at first; tables grow, unless `columns` are fixed.
            backend: the operations.
        """
        self.shape = shape
        self.storage = storage
        self.dtype = dtype
        self.backend = backend
        self.layouts = layouts(storage, shape.head_dim, dtype)
        if storage.shrink and any(lay.by_token for lay in self.layouts):
            raise UsageError(f"Keys by token share their scales and cannot be shrunk: {storage.formats}.")
        if not storage.buffer and (storage.shrink or any(lay.by_token for lay in self.layouts)):
            raise UsageError(
                f"Keys by token, and integers that are shrunk, are quantized together: {storage.formats} need a "
                "buffer, and have none."
            )
        if storage.compaction != "none" and (storage.buffer or storage.formats != ("plain",)):
            raise UsageError(
                f"Compaction {storage.compaction!r} moves tokens in the model's own number type only, and they are "
                f"stored in {storage.formats}: leave one of the two out."
            )
        self.thought_format = torch.tensor([storage.formats.index(t) for t in storage.thoughts], device=shape.device)
        self.page_bytes = page_bytes(storage, shape.head_dim, dtype)
        per_page = [lay.slots for lay in self.layouts]
        lanes = shape.sharing
        if (pages + 1) * max(per_page) > 2**31:
            raise UsageError(
                f"A pool of {pages:,} pages of up to {max(per_page)} slots has more slots than 32 bits can number: "
                "use a smaller --batch-size, budget or --max-new-tokens."
            )
        self.table = BlockTable(shape, pages, per_page, shape.device, table_width)
        self.trash_page = pages
        self.zero_page = pages + 1  # for masked-out writes, for masked-out reads
        self.pool = torch.zeros(pages + 2, lanes, self.page_bytes, dtype=torch.uint8, device=shape.device)
        widest = max(lay.slots * lay.side for lay in self.layouts)
        self.side_bytes = -(-widest // max(per_page)) * max(per_page)
        self.side = torch.zeros(pages + 2, lanes, self.side_bytes, dtype=torch.uint8, device=shape.device)

        row = max(lay.row for lay in self.layouts)
        count = 0
        if row:
            main = max(lay.slots for lay in self.layouts if lay.by_token)
            count = -(-pages * main // 4) if scale_rows is None else scale_rows
        self.free_rows = FreeList(count, "rows of key scales", shape.device)
        self.scale_rows = torch.zeros(count + 2, lanes, row, dtype=torch.uint8, device=shape.device)
        self.row_uses = torch.zeros(count + 1, dtype=torch.int32, device=shape.device)  # tokens held
        self.scale_row = torch.full(
            (pages + 2 if row else 0, self.table.most), count + 1, dtype=torch.int32, device=shape.device
        )

        lt, b, ht = shape.tables
        ring = (shape.layers, b, shape.kv_heads, storage.buffer, 2, shape.head_dim)
        self.ring = torch.zeros(ring, dtype=dtype, device=shape.device)
        # If values lag: the value that left the ring of each row last, and its position.
        lagging = shape.head_dim if storage.lag else 0
        self.outgoing = torch.zeros(shape.layers, b, shape.kv_heads, lagging, dtype=dtype, device=shape.device)
        self.outgoing_at = torch.full((b,), -1, dtype=torch.int64, device=shape.device)
        # FP32 scales of K and of V, in each format
        self.scale = torch.ones(len(self.layouts), 2, shape.layers, b, dtype=torch.float32, device=shape.device)
        self.thought = torch.full((b,), storage.prompt, dtype=torch.uint8, device=shape.device)
        # Types of segments that begin with the next tokens, and that began with the last ones; SAME: no segment
        self.next_thought = torch.full((b,), SAME, dtype=torch.uint8, device=shape.device)
        self.begun = torch.full((b,), SAME, dtype=torch.uint8, device=shape.device)
        # Lists of tokens. The extra last column takes masked-out writes. place: page · `table.most` + slot, or
        # −1 − index for tokens in the ring.
        width = columns or width
        self.place = torch.zeros(lt, b, ht, width + 1, dtype=torch.int32, device=shape.device)
        self.pos = torch.full((lt, b, ht, width + 1), -1, dtype=torch.int32, device=shape.device)
        self.count = torch.zeros(lt, b, ht, dtype=torch.int32, device=shape.device)
        self.compaction = Compaction(self) if storage.compaction != "none" else None
        self.columns = columns
        self.home = tuple(dict.fromkeys(storage.formats.index(t) for t in storage.thoughts))  # of generated tokens
        self.slots = torch.tensor(per_page, dtype=torch.int32, device=shape.device)
        self.overflow = torch.zeros((), dtype=torch.bool, device=shape.device)  # the pool was too small
        # What the host knows of each row:
        self.most = [0] * b  # tokens that a lane holds at most (`table.most` is about slots of pages)
        self.lengths = [0] * b  # tokens seen, evicted ones too
        self.waiting = [0] * b  # tokens in the ring, those evicted there counted too
        self.reading = set[int]()  # rows whose prompt is not settled
        self.starts: list[list[int]] = [[] for _ in range(b)]  # positions at which segments begin, for reading
        self.kinds: list[list[int]] = [[] for _ in range(b)]  # and their thought types
        self.used = {0}  # formats that may hold tokens
        self.stays_plain = storage.sink > 0 or "plain" in (*storage.thoughts, *storage.also)

    # -- room: the host checks it before anything changes

    def require_pages(
        self,
        at: Tensor,
        most: int,
        count: Callable[[], Tensor],
        purpose: str,
        f: int | None = None,
        thought: Tensor | None = None,
    ) -> None:
        """Check that the pool has pages for new tokens of some rows, and widen the tables if they lack columns.

        Args:
            at: int64 [N], the rows, each once.
            most: tokens that a unit gets at most.
            count: returns how many tokens every unit gets, int64 [Lt, N, Ht]; called only if the host's counts do not
                suffice.
            purpose: of the tokens, in words, for the message.
            f: the format of all tokens; None: the format of their row's thought type.
            thought: uint8 [B], the type of each row's tokens; None: the running one.

        Raises:
            Exhausted: there are too few pages; the store is as it was.
        """
        of_rows = self.thought if thought is None else thought
        fewest_slots = min(self.layouts[g].slots for g in (self.home if f is None else (f,)))
        pages = -(-most // fewest_slots)

        def missing() -> Tensor:
            kind = of_rows[at]
            own = self._formats(f)[kind.long()]
            return self.table.missing(own, self.slots[own], kind, count(), at)

        self.table.require(at, pages, missing, purpose)

    def _widen(self, width: int) -> None:
        """Widen every list to at least `width` tokens."""
        have = self.place.shape[-1] - 1
        if width > have:
            more = max(width, 2 * have) - have
            self.place = torch.nn.functional.pad(self.place, (0, more))
            self.pos = torch.nn.functional.pad(self.pos, (0, more), value=-1)
            if self.compaction:
                self.compaction.widen(more)

    # -- slots

    def _formats(self, f: int | None) -> Tensor:
        """The format of each thought type, int64 [types]. f: this format for all types."""
        return self.thought_format if f is None else torch.full_like(self.thought_format, f)

    def allocate(self, at: Tensor, active: Tensor, size: int) -> dict[int, Tensor]:
        """Give slots to the tokens of some rows' lists that lie in no page yet, without the host.

        Args:
            at: int64 [N], rows, each once.
            active: bool [N], rows with such tokens; inactive rows stay as they are.
            size: their places are −1 − index, with an index below `size`.

        Returns:
            For each format by index the bases of the tokens' slots (`Pages.base`), int64 [Lt, N, Ht, size]; the
            trash slot (`nowhere`) for tokens of other formats.
        """
        t = self.table
        base = self.backend.allocate(
            live=t.live,
            taken=t.taken,
            filled=t.filled,
            page_thought=t.thought,
            page_format=t.format,
            page=t.page,
            stack=t.pages.stack,
            top=t.pages.top,
            place=self.place,
            count=self.count,
            at=at,
            active=active,
            thought=self.thought,
            formats=self.thought_format,
            slots=self.slots,
            overflow=self.overflow,
            size=size,
            lanes=self.shape.sharing,
        )
        return self._by_type(base, at, None, self.thought)

    def allocate_many(self, at: Tensor, valid: Tensor, f: int | None, thought: Tensor) -> dict[int, Tensor]:
        """Give slots to tokens that are in no list yet (of prompts) or that move. There may be thousands, and the
        kernel is made for the few tokens of a decode step. So the PyTorch twin runs on every device.

        Args:
            at: int64 [N], rows, each once.
            valid: bool [Lt, N, Ht, n], the tokens.
            f, thought: as of `require_pages`.

        Returns:
            As of `allocate`, int64 [Lt, N, Ht, n].
        """
        t = self.table
        n = valid.shape[-1]
        index = (-1 - torch.arange(n, dtype=torch.int32, device=at.device)).expand(valid.shape)
        place = index.new_zeros(*valid.shape[:3], n + 1)
        place.scatter_(-1, torch.where(valid, valid.cumsum(-1) - 1, n), index)
        count = valid.sum(-1, dtype=torch.int32)
        page = t.page[:, at]
        rows = torch.arange(len(at), device=at.device)  # of these copies
        self.used.update(self.home if f is None else (f,))
        base = allocate(
            live=t.live,
            taken=t.taken,
            filled=t.filled,
            page_thought=t.thought,
            page_format=t.format,
            page=page,
            stack=t.pages.stack,
            top=t.pages.top,
            place=place,
            count=count,
            at=rows,
            active=torch.ones_like(at, dtype=torch.bool),
            thought=thought[at],
            formats=self._formats(f),
            slots=self.slots,
            overflow=self.overflow,
            size=n,
            lanes=self.shape.sharing,
        )
        t.page[:, at] = page
        return self._by_type(base, at, f, thought)

    def _by_type(self, base: Tensor, at: Tensor, f: int | None, thought: Tensor) -> dict[int, Tensor]:
        """Split bases by format, if rows may have several formats."""
        if f is not None or len(self.home) == 1:
            return {self.home[0] if f is None else f: base}
        chosen = self.thought_format[thought[at].long()][:, None, None]
        return {g: torch.where(chosen == g, base, self.nowhere(g)) for g in self.home}

    def places(self, bases: dict[int, Tensor]) -> Tensor:
        """Places (page · most + slot) of the tokens that have slots: int64 [Lt, N, Ht, n]; other entries are
        undefined."""
        out = torch.zeros_like(next(iter(bases.values())))
        for f, base in bases.items():
            size = self.shape.sharing * self.layouts[f].slots
            out = torch.where(base < self.nowhere(f), base // size * self.table.most + base % size, out)
        return out

    # -- rows of key scales

    def require_rows(
        self, at: Tensor, valid: Tensor, purpose: str, f: int | None, thought: Tensor
    ) -> dict[int, Tensor]:
        """Check that there are rows of scales for groups of keys by token, one for each group with a token.

        Args:
            valid: bool [Lt, N, Ht, n], the tokens.
            at, purpose, f, thought: as of `require_pages`.

        Returns:
            For each format that needs rows the sizes of the groups, as of `_group_sizes`.

        Raises:
            Exhausted: there are too few rows; the store is as it was.
        """
        own = self._formats(f)[thought[at].long()][:, None, None]  # [N, 1, 1]
        uses = dict[int, Tensor]()
        for g in self.home if f is None else (f,):
            if self.layouts[g].by_token:
                uses[g] = self._group_sizes(g, valid & (own == g))
        if uses:
            most = sum(x.numel() for x in uses.values())
            wanted = torch.stack([(x > 0).sum() for x in uses.values()]).sum()
            self.free_rows.require(most, lambda: wanted, purpose)
        return uses

    def _group_sizes(self, f: int, valid: Tensor) -> Tensor:
        """Valid tokens of each group of keys by token. valid: bool [Lt, N, Ht, n] → int32 [Lt, N, Ht, groups]."""
        size = self.layouts[f].k.group
        padded = torch.nn.functional.pad(valid, (0, -valid.shape[-1] % size))
        return padded.unflatten(-1, (-1, size)).sum(-1, dtype=torch.int32)

    def draw_rows(self, f: int, uses: Tensor, base: Tensor, most: int) -> Tensor:
        """Give a row of scales to every group with a token, and note which tokens read it.

        Args:
            uses: as of `_group_sizes`.
            base: of the tokens' slots, [Lt, N, Ht, n].
            most: rows that are given at most.

        Returns:
            int32 [Lt, N, Ht, groups].
        """
        row = self.free_rows.draw(uses > 0, most)
        size = self.shape.sharing * self.layouts[f].slots
        self.row_uses[row.long()] = uses
        of_tokens = row.repeat_interleave(self.layouts[f].k.group, -1)[..., : base.shape[-1]]
        self.scale_row[base // size, base % size] = of_tokens
        return row

    # -- writing

    def write(
        self, f: int, layer: int, rows: Tensor, index: Tensor, k: Tensor, v: Tensor, params: Tensor | None = None
    ) -> None:
        """Write tokens of one layer and format into slots.

        Args:
            index: [N, Hkv, n], the slots.
            k, v: numbers, [N, Hkv, n, D]; with `params` k has codes instead.
            params: of keys by token the content of their rows of scales, [N, Hkv, groups, bytes].
        """
        lay = self.layouts[f]
        dim = self.shape.head_dim
        if lay.plain:
            both = torch.cat((k, v), dim=-1).to(self.dtype)
            self.codes[f].index_copy_(0, index.flatten(), both.reshape(-1, 2 * dim))
            return
        k_scale, v_scale = self.scale[f, :, layer, rows][:, :, None, None]
        if params is None:
            k, k_params = self.backend.quantize(lay.k, k, k_scale)
            self.sides[f][index, : lay.k_side] = k_params
        v, v_params = self.backend.quantize(lay.v, v, v_scale)
        self.codes[f][index, : lay.codes] = torch.cat((k, v), dim=-1)
        self.sides[f][index, lay.k_side : lay.side] = v_params

    def write_tokens(
        self,
        f: int,
        layer: int,
        rows: Tensor,
        base: Tensor,
        k: Tensor,
        v: Tensor,
        group: Tensor | None,
        through: int | None = None,
    ) -> None:
        """Quantize tokens of one layer into their slots.

        Args:
            base: int64 [N, Ht, n]; tokens without a slot have the trash slot (`nowhere`).
            k, v: [N, Hkv, n, D].
            group: of keys by token the rows of scales, int32 [N, Ht, groups].
            through: quantize to this integer format first, then shrink the integers (PM-KVQ: chained); None: quantize
                directly.
        """
        if through not in (None, f):
            self._write_shrunk(through, f, layer, base, k, v)
            return
        params = None
        if group is not None:
            valid = base < self.nowhere(f)
            scale = self.scale[f, 0, layer, rows]
            k, params = self._quantize_groups(self.layouts[f].k, k, valid, scale)
            number = group.long() * self.shape.sharing + self.lane(layer)[:, None]  # [N, Hkv, groups]
            self.scale_rows.view(-1, self.scale_rows.shape[-1])[number, : self.layouts[f].row] = params
        self.write(f, layer, rows, self.index(f, layer, base), k, v, params)

    def _quantize_groups(self, fmt: Format, k: Tensor, valid: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize keys by token. k: [N, Hkv, n, D], valid: [N, Ht, n] → codes [N, Hkv, n, …], params [N, Hkv,
        groups, …]."""
        n = k.shape[2]
        more = -k.shape[2] % fmt.group
        k = torch.nn.functional.pad(k, (0, 0, 0, more)).unflatten(2, (-1, fmt.group))
        valid = torch.nn.functional.pad(valid, (0, more)).unflatten(2, (-1, fmt.group)).expand(*k.shape[:-1])
        codes, params = self.backend.quantize(fmt, k, scale[:, None, None], valid)
        return codes.flatten(2, 3)[:, :, :n], params

    def _write_shrunk(self, f: int, to: int, layer: int, base: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize in format f, shrink the integers to format `to`, write these (PM-KVQ: chained)."""
        first = self.layouts[f]
        last = self.layouts[to]
        one = torch.ones((), device=k.device)
        index = self.index(to, layer, base)
        ops = self.backend
        k_codes, k_params = ops.shrink(first.k, last.k, *ops.quantize(first.k, k, one))
        v_codes, v_params = ops.shrink(first.v, last.v, *ops.quantize(first.v, v, one))
        self.codes[to][index, : last.codes] = torch.cat((k_codes, v_codes), dim=-1)
        self.sides[to][index, : last.side] = torch.cat((k_params, v_params), dim=-1)

    # -- free slots

    def evict(self, drop: Tensor, at: Tensor | None = None) -> None:
        """Evict tokens. Their slots are free at once; no token moves, unless compaction is measured.

        Args:
            drop: bool [Lt, N, Ht, S], the tokens.
            at: int64 [N], their rows, each once; None: all B rows.
        """
        if at is not None and self.compaction:
            drop = torch.zeros_like(self.positions(), dtype=torch.bool).index_copy_(1, at, drop)
            at = None
        t = self.table
        rows = self.free_rows
        tables = t.page
        top = t.pages.top
        if self.compaction:
            drop = self.compaction.plan(drop)
            if self.compaction.late:  # empty pages stay with their lanes until the tokens have moved
                tables = t.page[..., :0]
                top = top.clone()
        if at is None:
            at = torch.arange(self.shape.rows, device=drop.device)
        self.backend.evict(
            drop=drop,
            at=at,
            place=self.place,
            pos=self.pos,
            count=self.count,
            live=t.live,
            taken=t.taken,
            page_format=t.format,
            page=tables,
            stack=t.pages.stack,
            top=top,
            scale_row=self.scale_row,
            row_uses=self.row_uses,
            row_stack=rows.stack,
            row_top=rows.top,
            most=t.most,
        )
        if self.columns is None:
            self.refresh()

    def refresh(self) -> None:
        """Read from the device how many tokens the lanes hold; the host does not count evictions."""
        self.most = self.count.amax((0, 2)).tolist()

    def release(self, place: Tensor, which: Tensor, at: Tensor) -> None:
        """Free slots, and the rows of scales whose last token they held. at: int64 [N], the rows of the tokens."""
        page = torch.where(which, place // self.table.most, self.table.pages.count).long()
        slot = torch.where(which, place % self.table.most, 0).long()
        if self.scale_row.numel():
            rows = self.free_rows
            release_rows(page, slot, which, self.scale_row, self.row_uses, rows.stack, rows.top)
        self.table.release(page, slot, which, at)

    def one_row(self, row: int) -> Tensor:
        """One row as int64 [1], filled on the device: a copy from the host's memory would wait."""
        return torch.full((1,), row, device=self.shape.device)
