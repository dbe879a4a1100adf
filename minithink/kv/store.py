"""PagedStore: keys and values in pages, packed in their formats. New tokens take the slots of evicted tokens.

A store has four parts, each an object of its own:

    lists        which tokens every unit holds, oldest first, and where each lies       (`lists.py`)
    slots        which slots are free; they are given to tokens and taken back          (`slots.py`)
    pages        the memory: codes of keys and values, and their parameters             (`pages.py`)
    compaction   moves tokens together after an eviction, if that is measured           (`compaction.py`)

and itself the full-precision buffers and the thought types of its rows:

    ring         tokens that wait to be quantized together (`Storage.buffer`)
    outgoing     where values are quantized later than keys (`Storage.lag`), the value that left the ring last

A *unit* is the lanes that share a table, and so have the same tokens in the same slots (`table.py`): with scope
"head" one lane, with "layer" the heads of a layer. *Keys by token* share a scale across tokens, one for each channel;
papers call this per-channel quantization.

The life of a token:

    append    a prompt's token takes a slot of a plain page; then a Writer writes its key and value, layer by layer
    take      a generated token takes a slot, or a place in the ring; then a Writer writes it, too
    settle    the prompt was read: the tokens that the policy kept move from plain pages into pages of their format
    flush     the ring is full: its tokens are quantized into pages of the running thought type
    read      a Reading has every layer's keys and values, oldest token first (`reading.py`)
    evict     the token leaves its list and its slot is free; an empty page returns to the pool

So a prompt's tokens are appended, and for generated tokens slots are taken. (The `append` of passes and kernels is
another: it writes the key and value of a token whose slot was taken.)

A page holds tokens of one unit, one format and one thought type. A held token moves only if it settles or is flushed,
if a policy asks for another format (`requantize.py` has this and `settle`), or if compaction is measured.

A decode step takes slots, and flushes rings, in three parts:

    require, require_flush   the host checks that there is room; while steps are captured it must not read the
                             device's memory, and reads `slots.overflow` after the step instead
    take, flush_rings        work on tensors alone, so a CUDA graph can capture them
    appended, flushed        the host counts what was taken

Captured graphs know the addresses of tensors. So with fixed widths (`columns`) no tensor is replaced by another.

Letters in the shapes of tensors, here and in `manager.py`:

    B        rows of the manager
    N        rows of a step: those of its batch, or the few that a policy acts on, which calls them B
    T        new tokens of a forward pass, of all rows; a decode step has one of each row, so T is N
    n        tokens of one row, as many as the row with the most of them has
    S        columns of the lists that are read
    L        layers
    Hq, Hkv  query heads and KV heads; g query heads share a KV head
    D, d     numbers of a head, and of the residual stream
    Lt, Ht   L and Hkv where every lane keeps its own tokens; 1 where layers or heads keep the same (`Policy.scope`)

In code, f is a format, the index into `Storage.formats` (0 is plain), and t the index of a layer on the axis Lt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.kv import checks
from minithink.kv.batch import Batch
from minithink.kv.compaction import Compaction
from minithink.kv.contract import Shape, Storage
from minithink.kv.ledger import Ledger
from minithink.kv.lists import Lists
from minithink.kv.pages import Pages
from minithink.kv.slots import Slots
from minithink.kv.table import Entry
from minithink.ref.flush import flush as by_layer

SAME = 255  # no new thought type


class PagedStore:
    """Keys and values of the tokens of B rows. `kv/contract.py` explains rows and lanes."""

    def __init__(
        self,
        shape: Shape,
        storage: Storage,
        *,
        pages: int,
        groups: int | None = None,
        dtype: torch.dtype = torch.float32,
        columns: int | None = None,
        width: int = 16,
        table_width: int = 4,
        backend: Backend = REFERENCE,
    ) -> None:
        """
        Args:
            pages: number of pages; `sizes.needs` tells how many a sequence may need.
            groups: groups of keys by token that may be held at once; None: a quarter of the tokens that fit.
            dtype: of plain tokens and of the ring.
            columns: width of everything that is read, in tokens; None: as wide as the longest lane. With a fixed
                width no shape depends on what the sequences hold.
            width: tokens that lists have room for at first; they grow, unless `columns` are fixed.
            table_width: pages that a unit's table has room for at first; tables grow, unless `columns` are fixed.
            backend: the operations.

        Raises:
            UsageError: the storage asks for what its formats, or so many pages, cannot do.
        """
        device = shape.device
        self.shape = shape
        self.storage = storage
        self.dtype = dtype
        self.pages = Pages(
            shape,
            storage,
            pages=pages,
            groups=groups,
            dtype=dtype,
            backend=backend,
        )
        checks.storable(storage, by_token=any(lay.by_token for lay in self.pages.layouts))
        self.slots = Slots(self.pages, storage, table_width)
        self.lists = Lists(shape, columns, width)
        self.compaction: Compaction | None = None
        if storage.compaction != "none":
            checks.compactible(storage)
            self.compaction = Compaction(self.lists, self.slots, late=storage.compaction == "overlapped")

        _, rows, _ = shape.tables
        ring = (shape.layers, rows, shape.kv_heads, storage.buffer, 2, shape.head_dim)
        self.ring = torch.zeros(ring, dtype=dtype, device=device)  # [L, B, Hkv, buffer, 2, D]: keys, then values
        # If values lag: the value that left the ring of each row last [L, B, Hkv, D], and its position [B].
        outgoing = (shape.layers, rows, shape.kv_heads, shape.head_dim if storage.lag else 0)
        self.outgoing = torch.zeros(outgoing, dtype=dtype, device=device)
        self.outgoing_at = torch.full((rows,), -1, dtype=torch.int64, device=device)
        # The running thought type of each row, uint8 [B]. Then the types of segments that begin with the next tokens,
        # and of those that began with the last ones; SAME: no segment.
        self.thought = torch.full((rows,), storage.prompt, dtype=torch.uint8, device=device)
        self.next_thought = torch.full((rows,), SAME, dtype=torch.uint8, device=device)
        self.begun = torch.full((rows,), SAME, dtype=torch.uint8, device=device)

        self.asks = True  # whether the host may read the device's memory: False where steps are captured
        # What the host knows of each row:
        self.lengths = [0] * rows  # tokens so far, evicted ones too
        self.waiting = [0] * rows  # tokens in the ring, those evicted there counted too
        self.unsettled = set[int]()  # rows whose prompt is not settled
        self.starts: list[list[int]] = [[] for _ in range(rows)]  # where segments begin, for `entries`
        self.kinds: list[list[int]] = [[] for _ in range(rows)]  # and their thought types

    # -- tokens of prompts

    def append(self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int]) -> Writer:
        """Take slots in plain pages for tokens of prompts: counts[i] for row rows[i], which has had lengths[i]
        tokens before. `settle` moves them to their own format.

        Returns:
            the Writer of these tokens' keys and values, layer by layer.

        Raises:
            Exhausted: the pool has no pages left; the store is as it was.
            UsageError: a lane would hold more tokens than the fixed width; the store is as it was.
        """
        n = max(counts)
        device = self.shape.device
        lt, _, ht = self.shape.tables
        if self.compaction:
            self.compaction.finish()
        longest = self.lists.require(rows, counts)
        at = torch.tensor(rows, device=device)
        more = torch.tensor(counts, device=device)
        first = torch.tensor(lengths, device=device)
        valid = torch.arange(n, device=device) < more[:, None]  # [N, n]
        valid = valid[None, :, None].expand(lt, len(rows), ht, n)
        plain = 0  # the first format
        purpose = f"appending {sum(counts):,} tokens to {len(rows)} sequences"
        self.slots.require_pages(
            at,
            most=n,
            count=lambda: valid.sum(-1),
            purpose=purpose,
            f=plain,
            thought=self.thought,
        )
        self._widen(longest)
        bases = self.slots.allocate_many(at, valid, plain, self.thought)
        self.lists.append(at, valid, self.slots.places_of(bases), first)
        for row, length, count in zip(rows, lengths, counts, strict=True):
            self.lengths[row] = length + count
        self.unsettled.update(rows)
        return _PageWriter(self, at, bases)

    # -- generated tokens

    def require(self, rows: Sequence[int]) -> None:
        """Check that there is room for one generated token of each row: in the lists and, if the host may read the
        device's memory, in pages.

        Raises:
            Exhausted: the pool has no pages left; the store is as it was.
            UsageError: a lane would hold more tokens than the fixed width; the store is as it was.
        """
        longest = self.lists.require_one(rows)
        if self.asks and not self.storage.buffer:
            at = torch.tensor(rows, device=self.shape.device)
            lt, _, ht = self.shape.tables
            purpose = f"appending {len(rows):,} tokens to {len(rows)} sequences"

            def one_each() -> Tensor:
                return torch.ones(lt, len(rows), ht, dtype=torch.long, device=at.device)

            self.slots.require_pages(
                at,
                most=1,
                count=one_each,
                purpose=purpose,
                f=None,
                thought=self.thought,
            )
        self._widen(longest)

    def take(self, batch: Batch) -> Writer:
        """Take slots, or places in the ring, for one generated token of every active row, without the host. If the
        pool is too small, `slots.overflow` becomes true.

        `enlist` puts the tokens at the end of their lists, with places in the ring. If there is a ring, they stay
        there until it is flushed. Without a ring `allocate` gives them slots at once, and writes their places.
        """
        at = batch.row
        lists = self.lists
        active = batch.active
        self.pages.backend.enlist(
            lists.place,
            lists.pos,
            lists.count,
            at,
            active,
            batch.length - 1,
            batch.waiting,
        )
        if self.storage.lag:
            self._push_out(batch)
        if self.storage.buffer:
            return _RingWriter(self, at, batch.waiting)
        bases = self.slots.allocate(
            lists,
            at,
            active,
            thought=self.thought,
            size=1,
        )
        return _PageWriter(self, at, bases)

    def _push_out(self, batch: Batch) -> None:
        """Keep the values that the new tokens will push out of the ring. A row's value is kept once, because padding
        rows write into the place of their own next token, too."""
        at = batch.row
        position = batch.length - 1 - self.storage.buffer
        new = self.outgoing_at[at] != position
        values = self.ring[:, at, :, batch.waiting, 1].transpose(0, 1)  # [L, N, Hkv, D]
        before = self.outgoing[:, at]
        self.outgoing[:, at] = torch.where(new[:, None, None], values, before)
        self.outgoing_at[at] = position

    def appended(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Update the host's counts after `take`. lengths: tokens that each row has had now."""
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length
        self.slots.used.update(self.appends)
        if self.storage.buffer:
            for row in rows:
                self.waiting[row] += 1
        elif not self.asks:
            self.slots.table.drawn(self.units * len(rows))

    @property
    def appends(self) -> tuple[int, ...]:
        """Formats in which `take` may store tokens; none, if tokens wait in the ring."""
        return () if self.storage.buffer else self.slots.home

    # -- room for more tokens

    @property
    def units(self) -> int:
        """Units of a row."""
        layers, _, heads = self.shape.tables
        return layers * heads

    def has_room(self, rows: Sequence[int], prompts: Sequence[int] = ()) -> bool:
        """Whether the pool surely has pages for the next step, whatever the policy does in it. The device's count of
        free pages is read only if the host's does not suffice.

        Args:
            rows: that bring one generated token each.
            prompts: tokens of prompts that are read before this step; their sequences take part in it.
        """
        opened = self._opened_by_rows(rows) + self._opened_by_prompts(prompts)
        return self.slots.table.free_pages.has(self.units * opened)

    def _opened_by_rows(self, rows: Sequence[int]) -> int:
        """Pages that one unit of each row, together, opens at most in a step."""
        size = self.storage.buffer
        opened = len(rows)
        if size:
            full = [row for row in rows if self.waiting[row] + 1 >= size]
            opened = len(full) * self._pages_of(size)
        if self.storage.moves:
            opened += sum(self._opened_by_moves(self.lists.longest[row] + 1) for row in rows)
        return opened

    def _opened_by_prompts(self, prompts: Sequence[int]) -> int:
        """The same for prompts that are read and settled, and for the step after them."""
        opened = 0
        plain = self.pages.layouts[0]
        stays = self.slots.home == (0,) and not self.storage.buffer  # no token of a prompt moves when it settles
        for tokens in prompts:
            if stays:
                opened += self._pages_of(tokens + 1)
            else:
                opened += -(-tokens // plain.slots)
                opened += self._pages_of(tokens)
                opened += max(1, self._pages_of(self.storage.buffer))
            if self.storage.moves:
                opened += 2 * self._opened_by_moves(tokens + 1)  # behind the prompt, and behind the step
        return opened

    def _opened_by_moves(self, held: int) -> int:
        """Pages that a unit opens at most if all its tokens move to other formats. Those of one format and thought
        type get pages of their own."""
        layouts = self.pages.layouts
        fewest = min(lay.slots for lay in layouts)
        return -(-held // fewest) + len(layouts) * len(self.storage.thoughts)

    def _pages_of(self, tokens: int) -> int:
        """Pages for so many generated tokens of a unit, whatever their thought type."""
        fewest = min(self.pages.layouts[f].slots for f in self.slots.home)
        return -(-tokens // fewest)

    def make_room(self, rows: int, count: int) -> None:
        """Make the pool larger, if a step might find it too small, whatever the policy does. Captured graphs know the
        addresses of its tensors, so this is for steps that are not captured.

        Args:
            rows: that take part in the step.
            count: tokens that each may append.
        """
        lt, _, ht = self.shape.tables
        units = lt * rows * ht
        layouts = self.pages.layouts
        # New tokens, and a full ring. If there are several formats, all tokens of a lane may move to another one.
        moving = count + self.storage.buffer
        if len(layouts) > 1:
            moving += max(self.lists.longest)
        fewest = min(lay.slots for lay in layouts)
        pages = units * len(layouts) * (-(-moving // fewest) + 1)
        groups = 0
        sizes = [lay.k.group for lay in layouts if lay.by_token]
        if sizes:
            groups = units * len(sizes) * (-(-moving // min(sizes)) + 1)
        free_pages = self.slots.table.free_pages
        free_groups = self.slots.free_groups
        if free_pages.has(pages) and free_groups.has(groups):
            return
        more_pages = max(pages, free_pages.count // 2)
        more_groups = max(groups, free_groups.count // 2) if sizes else 0
        self.slots.grow(more_pages, more_groups)

    def _widen(self, longest: list[int]) -> None:
        """Make the lists wide enough for so many tokens of each row."""
        self.lists.longest = longest
        if self.lists.columns is None:
            self.lists.widen(max(longest))
            if self.compaction:
                self.compaction.widen()

    # -- full buffers

    def require_flush(self, rows: Sequence[int]) -> None:
        """Check that there are pages and groups for the tokens in the full rings of some rows.

        Raises:
            Exhausted: there are too few; the store is as it was.
        """
        at = torch.tensor(rows, device=self.shape.device)
        size = self.storage.buffer
        place = self.lists.places()[:, at]  # [Lt, N, Ht, S]
        pos = self.lists.positions()[:, at]
        waits = (place < 0) & (pos >= 0)
        purpose = f"quantizing the buffers of {len(rows)} sequences"
        if any(self.pages.layouts[f].by_token for f in self.slots.home):
            # A token in the ring has the place −1 − its number there (`slots.py`).
            number = torch.where(waits, -1 - place, size).long()
            valid = torch.zeros(*place.shape[:-1], size + 1, dtype=torch.bool, device=at.device)
            valid = valid.scatter_(-1, number, True)[..., :size]
            self.slots.require_groups(
                at,
                valid,
                purpose=purpose,
                f=None,
                thought=self.thought,
            )
        self.slots.require_pages(
            at,
            most=size,
            count=lambda: waits.sum(-1),
            purpose=purpose,
            f=None,
            thought=self.thought,
        )

    def flush_rings(self, batch: Batch) -> None:
        """Quantize the full ring of every active row, without the host."""
        at = batch.row
        bases = self.slots.allocate(
            self.lists,
            at,
            batch.active,
            thought=self.thought,
            size=self.storage.buffer,
        )
        groups = self.slots.draw_groups_unchecked(bases)
        # The kernel does not support integers that are shrunk.
        flush = by_layer if self.storage.shrink else self.pages.backend.flush
        flush(_RingFlush(self, at, bases, groups))

    def flushed(self, rows: Sequence[int]) -> None:
        """Update the host's counts after `flush_rings`."""
        slots = self.slots
        slots.used.update(slots.home)
        if not self.asks:
            slots.table.drawn(self.units * len(rows) * self._pages_of(self.storage.buffer))
            slots.free_groups.at_least = 0  # some were drawn; `require` reads the true number
        for row in rows:
            self.waiting[row] = 0

    # -- eviction

    def evict(self, drop: Tensor, at: Tensor | None = None) -> None:
        """Evict tokens. Their slots are free at once; no token moves, unless compaction is measured.

        Args:
            drop: bool [Lt, N, Ht, S], the tokens.
            at: int64 [N], their rows, each once; None: all B rows.
        """
        if self.compaction:
            if at is not None:
                everywhere = torch.zeros_like(self.lists.positions(), dtype=torch.bool)
                drop = everywhere.index_copy_(1, at, drop)
                at = None
            drop = self.compaction.plan(drop)
        if at is None:
            at = torch.arange(self.shape.rows, device=drop.device)
        # With late compaction empty pages stay with their lanes until the tokens have moved.
        late = self.compaction is not None and self.compaction.late
        self.slots.evict(self.lists, drop, at, keep_pages=late)
        if self.lists.columns is None:
            self.lists.refresh()

    # -- segments

    def open_segment(self, at: Tensor, opened: Tensor, thought: Tensor) -> None:
        """Note the thought type of new segments. `begin_segments` makes it the running type; full buffers are flushed
        before that, because they belong to the segment before. at: int64 [N], rows, each once; opened: bool [N];
        thought: uint8 [N]."""
        self.next_thought[at] = torch.where(opened, thought, self.next_thought[at])

    def begin_segments(self, at: Tensor, active: Tensor) -> None:
        """Begin the segments that `open_segment` noted. at: int64 [N], rows, each once; active: bool [N]."""
        noted = self.next_thought[at]
        running = self.thought[at]
        begun = torch.where(active, noted, SAME)
        self.thought[at] = torch.where(begun != SAME, begun, running)
        self.next_thought[at] = torch.where(active, SAME, noted)
        self.begun[at] = begun

    def note_segment(self, row: int, position: int, thought: int) -> None:
        """Note on the host that a segment of this type begins at this position."""
        self.starts[row].append(position)
        self.kinds[row].append(thought)

    def clear(self, row: int) -> None:
        """Forget a row."""
        if self.compaction:
            self.compaction.finish()
        everything = torch.ones_like(self.lists.positions()[:, :1], dtype=torch.bool)
        self.evict(everything, self.one_row(row))
        if self.compaction:
            self.compaction.finish()
        self.thought[row] = self.storage.prompt
        self.next_thought[row] = SAME
        self.pages.scale[..., row] = 1
        self.waiting[row] = 0
        self.starts[row] = []
        self.kinds[row] = []
        self.outgoing_at[row] = -1
        self.unsettled.discard(row)
        self.lists.longest[row] = 0
        self.lengths[row] = 0

    def one_row(self, row: int) -> Tensor:
        """One row as int64 [1], filled on the device: a copy from the host's memory would wait."""
        return torch.full((1,), row, device=self.shape.device)

    def format(self) -> Tensor:
        """Index of every token's format, BUFFER in the ring: uint8 [Lt, B, Ht, S]; undefined behind the list."""
        return self.slots.format_of(self.lists.places())

    # -- tables, tensors, bytes

    def entries(self, layer: int, row: int, head: int) -> list[Entry]:
        """The block table of one unit, for people to read. layer, head: on the axes Lt and Ht."""
        lists = self.lists
        n = int(lists.count[layer, row, head])
        place = lists.place[layer, row, head, :n].tolist()
        pos = lists.pos[layer, row, head, :n].tolist()
        table = self.slots.table
        tokens = {}  # (page, slot) → original position
        for p, position in zip(place, pos, strict=True):
            if p >= 0:
                tokens[divmod(p, table.stride)] = position
        return table.entries((layer, row, head), tokens, self.starts[row] or [0])

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the store occupies."""
        parts = (*self.pages.tensors, *self.slots.tensors, *self.lists.tensors)
        rings = (self.ring, self.outgoing, self.outgoing_at)
        thoughts = (self.thought, self.next_thought, self.begun)
        moves = self.compaction.tensors if self.compaction else ()
        return *parts, *rings, *thoughts, *moves

    def account(self, rows: Sequence[int] | None = None) -> Ledger:
        """Bytes that the tokens of some rows hold (None: of all). The reserve is the free slots of their pages."""
        if rows is None:
            rows = range(self.shape.rows)
        rows = [row for row in rows if self.lists.longest[row]]
        if not rows:
            return Ledger()
        at = torch.tensor(rows, device=self.shape.device)
        payload, scales, tables, buffers = self.bytes_of(at).sum(1).tolist()
        return Ledger(
            payload=payload,
            scales=scales,
            tables=tables,
            buffers=buffers,
            reserve=self.free_in_pages(at),
        )

    def free_in_pages(self, rows: Tensor) -> int:
        """Bytes of the free slots in the pages of some rows: of the whole pages, less what their tokens take.
        rows: int64 [N]."""
        table = self.slots.table
        page = table.page[:, rows]
        page = page[page != table.free_pages.count].long()
        of_token = torch.tensor([lay.codes + lay.side for lay in self.pages.layouts], device=page.device)
        of_token = of_token[table.format[page].long()]
        taken = table.taken[page] * of_token
        whole = page.numel() * (self.pages.page_bytes + self.pages.side_bytes)
        return (whole - int(taken.sum())) * self.shape.sharing

    def paged(self, row: int) -> int:
        """Tokens of a row that lie in pages, in all lanes together."""
        pos = self.lists.positions()[:, row]
        place = self.lists.places()[:, row]
        there = (pos >= 0) & (place >= 0)
        return int(there.sum()) * self.shape.sharing

    def bytes_of(self, rows: Tensor | None = None) -> Tensor:
        """Bytes that the tokens of each row hold. It works without the host, so a CUDA graph can capture it.

        Args:
            rows: int64 [N]; None: all of them.

        Returns:
            int64 [4, N]: payload, scales, tables and buffers, as the ledger has them.
        """
        table = self.slots.table
        page = table.page
        count = self.lists.count
        if rows is not None:
            page = page[:, rows]
            count = count[:, rows]
        tokens = count.sum((0, 2))
        payload, scales = self._payload_and_scales(rows, tokens)
        scaled = sum(lay.k.tensor_scaled + lay.v.tensor_scaled for lay in self.pages.layouts)
        scales = scales + scaled * self.pages.scale[0, 0, :, 0].nbytes
        # Of a page: which slots are live and their groups; its number, taken, filled, thought and format.
        grouped = self.slots.group_of.numel() > 0
        of_page = table.stride * (1 + 4 * grouped) + 4 + 8
        opened = (page != table.free_pages.count).sum((0, 2, 3))
        tables = tokens * 8 + opened * of_page + self.lists.count[:, 0].nbytes
        buffers = self.ring[:, 0].nbytes + self.outgoing[:, 0].nbytes
        return torch.stack((payload, scales, tables, torch.full_like(payload, buffers)))

    def _payload_and_scales(self, rows: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of codes and of parameters, int64 [N] each; rows: as of `bytes_of`; tokens: of each row, [N]."""
        lanes = self.shape.sharing
        slots = self.slots
        table = slots.table
        if len(self.pages.layouts) == 1 and not self.storage.buffer:  # all tokens have the same size
            [lay] = self.pages.layouts
            return tokens * lanes * lay.codes, tokens * lanes * lay.side
        pos = self.lists.positions()
        place = self.lists.places()
        if rows is not None:
            pos = pos[:, rows]
            place = place[:, rows]
        paged = (pos >= 0) & (place >= 0)
        page = torch.where(paged, place // table.stride, self.pages.trash_page).long()  # that page has no format
        slot = torch.where(paged, place % table.stride, 0).long()
        formats = table.format[page]
        payload = torch.zeros_like(tokens)
        scales = torch.zeros_like(tokens)
        for f, lay in enumerate(self.pages.layouts):
            mine = formats == f
            of_format = mine.sum((0, 2, 3)) * lanes
            payload = payload + of_format * lay.codes
            scales = scales + of_format * lay.side
            if lay.by_token:  # n living tokens share the parameters of a group: each has one nth of them
                group = torch.where(mine, slots.group_of[page, slot], slots.free_groups.count).long()
                uses = slots.group_uses[group].double()
                share = torch.where(mine, 1 / uses, 0).sum((0, 2, 3))
                scales = scales + share.round().long() * lanes * lay.shared
        return payload, scales


class Writer:
    """Writes the keys and values of new tokens, layer by layer, where `append` or `take` has found room for them.

    There are two, because a new token lies in a page or in the ring:

        _PageWriter   tokens of prompts; generated tokens, if the policy's storage has no buffer
        _RingWriter   generated tokens, if it has one (`Storage.buffer`): they wait there to be quantized together

    Kernels do not call a writer. They read its fields and write the slots themselves.
    """

    store: PagedStore
    at: Tensor  # rows, int64 [N]
    index: Tensor | None = None  # their tokens' places in the ring, int64 [N]; None: the tokens go into pages
    # For each format the slots in the first lane of each unit, int64 [Lt, N, Ht, n]; the trash slot means that the
    # token has another format.
    bases: dict[int, Tensor]
    once: dict[Any, Any]  # what a kernel has worked out for all layers

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [N, n, Hkv, D], padded to the longest, in the order of `append`'s rows."""
        raise NotImplementedError


class _PageWriter(Writer):
    """Writes new tokens into pages. Their slots are plain, or of the format of their row's thought type."""

    def __init__(self, store: PagedStore, at: Tensor, bases: dict[int, Tensor]) -> None:
        self.store = store
        self.at = at
        self.bases = bases
        self.once = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)  # [N, Hkv, n, D]
        for f, base in self.bases.items():
            t = min(layer, len(base) - 1)
            pages = self.store.pages
            index = pages.index(f, layer, base[t])
            pages.write(f, layer, self.at, index, k, v)


class _RingWriter(Writer):
    """Writes one generated token of each row into the ring, in full precision."""

    def __init__(self, store: PagedStore, at: Tensor, index: Tensor) -> None:
        self.store = store
        self.at = at
        self.index = index
        self.bases = {}
        self.once = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        # A padding row writes, too: into the place that its own next token will take.
        kv = torch.stack((k[:, 0], v[:, 0]), dim=2)  # [N, Hkv, 2, D]
        self.store.ring[layer, self.at, :, self.index] = kv


class _RingFlush:
    """Moves the tokens of full rings into pages, in the format of their row's thought type.

    This is no Writer, because the tokens are not new: their keys and values lie in the ring. `ref/flush.py` calls
    `store_layer` for each layer; its kernel reads the fields instead.
    """

    def __init__(self, store: PagedStore, at: Tensor, bases: dict[int, Tensor], groups: dict[int, Tensor]) -> None:
        self.store = store
        self.at = at
        self.bases = bases
        self.layers = store.shape.layers
        self.groups = groups  # of formats with keys by token, the groups: int32 [Lt, N, Ht, groups]

    def store_layer(self, layer: int) -> None:
        store = self.store
        k, v = store.ring[layer, self.at].unbind(3)  # [N, Hkv, buffer, D] each
        through = store.slots.home[0] if store.storage.shrink else None
        for f, bases in self.bases.items():
            t = min(layer, len(bases) - 1)
            group = self.groups[f][t] if f in self.groups else None
            store.pages.write_tokens(
                f,
                layer,
                self.at,
                base=bases[t],
                k=k,
                v=v,
                group=group,
                through=through,
            )
