"""PagedStore: keys and values in pages, packed in their formats. New tokens take the slots of evicted tokens.

    pool        [pages, lanes of a unit, bytes of a page]: codes; a slot holds its token's key codes, then the value's
    side        beside it: the parameters (scales, minima) of groups of channels, for every slot
    scale_rows  the parameters of groups of tokens (keys by token): a row for each group that holds a token
    ring        the full-precision buffer: tokens that wait to be quantized together
    outgoing    where values lag behind keys, the value that left the ring last
    place, pos  for every unit the list of its tokens, oldest first: where each lies, and its original position
    count       the tokens in each list

A *unit* is the lanes that share a table, and so have the same tokens in the same slots (`table.py`). *Keys by token*
share a scale across tokens, one for each channel; papers call this per-channel quantization.

The life of a token:

    append    a prompt's token takes a slot of a plain page; then the Writer writes its key and value, layer by layer
    take      a generated token takes a slot, or a place in the ring; then the Writer writes it, too
    settle    the prompt was read: the tokens that the policy kept move from plain pages into pages of their format
    flush     the ring is full: its tokens are quantized into pages of the running thought type
    reader    reads every layer's keys and values, oldest token first
    evict     the token leaves its list and its slot is free; an empty page returns to the pool

So a prompt's tokens are appended, and for generated tokens slots are taken. (The `append` of passes and kernels is
another: it writes the key and value of a token whose slot was taken.)

All pages have one size in bytes and serve any format (`pages.py` reads them). A page holds tokens of one unit, one
format and one thought type (`table.py`). A held token moves only if a policy asks for another format
(`requantize.py`), or if gather compaction is measured (`compaction.py`).

A decode step takes slots, and flushes rings, in three parts:

    require, require_flush   the host checks that there is room; while steps are captured it must not read the
                             device's memory, and reads `overflow` after the step instead
    take, flush_rings        work on tensors alone, so a CUDA graph can capture them
    appended, flushed        the host counts what was taken

The pool has two extra pages: masked-out writes go to the trash page, masked-out reads come from the zero page.

The store is one object in three classes: `Pages` reads, `Slots` makes the tensors and gives slots, and `PagedStore`
appends, takes, flushes and begins segments. It holds `moves` (`requantize.py`), which moves tokens between formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.batch import Batch
from minithink.kv.ledger import Ledger
from minithink.kv.requantize import Moves
from minithink.kv.slots import SAME as SAME
from minithink.kv.slots import Slots
from minithink.kv.table import Entry
from minithink.ref.flush import flush as by_layer


class PagedStore(Slots):
    """Keys and values of the tokens of B rows. `kv/contract.py` explains rows and lanes, `kv/table.py` units."""

    @cached_property
    def moves(self) -> Moves:
        """Moves tokens to other formats: `measure`, `settle` and `requantize`."""
        return Moves(self)

    # -- appending

    def append(self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int]) -> Writer:
        """Take slots in plain pages for tokens of prompts: counts[i] for row rows[i], which has seen lengths[i]
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
        most = self.require_columns(rows, counts)
        at = torch.tensor(rows, device=device)
        column = torch.arange(n, device=device)
        more = torch.tensor(counts, device=device)
        before = torch.tensor(lengths, device=device)
        valid = (column < more[:, None])[None, :, None].expand(lt, len(rows), ht, n)
        purpose = f"appending {sum(counts):,} tokens to {len(rows)} sequences"
        self.require_pages(at, n, lambda: valid.sum(-1), purpose, 0)
        if self.columns is None:
            self._widen(max(most))
        bases = self.allocate_many(at, valid, 0, self.thought)  # format 0 is plain
        held = self.count[:, at]  # [Lt, N, Ht]
        # The new tokens' columns, behind the tokens held; masked-out tokens go to the extra last column.
        end = torch.where(valid, held[..., None] + column, self.place.shape[-1] - 1)
        position = (before[:, None] + column)[None, :, None].expand(valid.shape)
        for lists, new in ((self.place, self.places(bases)), (self.pos, torch.where(valid, position, -1))):
            own = lists[:, at]
            lists[:, at] = own.scatter_(-1, end, new.to(torch.int32))
        self.pos[..., -1] = -1
        self.count[:, at] = held + more[None, :, None].to(torch.int32)
        self.most = most
        for row, length, count in zip(rows, lengths, counts, strict=True):
            self.lengths[row] = length + count
        self.reading.update(rows)
        return _PageWriter(self, at, bases)

    def require(self, rows: Sequence[int]) -> None:
        """Check that there is room for one generated token of each row: in the lists and, if the host may read the
        device's memory, in pages.

        Raises:
            Exhausted: the pool has no pages left; the store is as it was.
            UsageError: a lane would hold more tokens than the fixed width; the store is as it was.
        """
        most = self.most
        if self.columns is None or max(most) >= self.columns:  # the host's counts include evicted tokens
            most = self.require_columns(rows, [1] * len(rows))
        else:
            most = list(most)
            for row in rows:
                most[row] += 1
        if self.asks and not self.storage.buffer:
            at = torch.tensor(rows, device=self.shape.device)
            lt, _, ht = self.shape.tables
            purpose = f"appending {len(rows):,} tokens to {len(rows)} sequences"
            self.require_pages(
                at, 1, lambda: torch.ones(lt, len(rows), ht, dtype=torch.long, device=at.device), purpose
            )
        if self.columns is None:
            self._widen(max(most))
        self.most = most

    def require_columns(self, rows: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Check that lists of a fixed width have room for new tokens: counts[i] of row rows[i].

        Returns:
            for every row the tokens that a lane holds at most, with the new tokens.

        Raises:
            UsageError: a lane would hold more tokens than the fixed width.
        """
        more = [0] * self.shape.rows
        for row, count in zip(rows, counts, strict=True):
            more[row] += count
        most = [held + new for held, new in zip(self.most, more, strict=True)]
        if self.columns is not None and max(most) > self.columns:  # the host does not count evictions
            most = [held + new for held, new in zip(self.count.amax((0, 2)).tolist(), more, strict=True)]
            if max(most) > self.columns:
                raise UsageError(
                    f"A lane may hold {max(most):,} tokens and the width was fixed to {self.columns:,}: use a "
                    "smaller budget or --max-new-tokens."
                )
        return most

    def take(self, batch: Batch) -> Writer:
        """Take slots, or places in the ring, for one generated token of every active row, without the host. If the
        pool is too small, `overflow` becomes true.

        `enlist` puts the tokens at the end of their lists, with places in the ring. If there is a ring, they stay
        there until it is flushed. Without a ring `allocate` gives them slots at once, and writes their places.
        """
        at = batch.row
        self.backend.enlist(self.place, self.pos, self.count, at, batch.active, batch.length - 1, batch.waiting)
        if self.storage.lag:
            self._push_out(batch)
        if self.storage.buffer:
            return _RingWriter(self, at, batch.waiting)
        return _PageWriter(self, at, self.allocate(at, batch.active, 1))

    def _push_out(self, batch: Batch) -> None:
        """Keep the values that the new tokens will push out of the ring. A row's value is kept once, because padding
        rows write into the place of their own next token, too."""
        at = batch.row
        position = batch.length - 1 - self.storage.buffer
        new = (self.outgoing_at[at] != position)[:, None, None]
        values = self.ring[:, at, :, batch.waiting, 1].transpose(0, 1)  # [L, N, Hkv, D]
        self.outgoing[:, at] = torch.where(new, values, self.outgoing[:, at])
        self.outgoing_at[at] = position

    def appended(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Update the host's counts after `take`. lengths: tokens that each row has seen now."""
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length
        self.used.update(self.appends)
        if self.storage.buffer:
            for row in rows:
                self.waiting[row] += 1
        elif not self.asks:
            self.table.drawn()

    @property
    def appends(self) -> tuple[int, ...]:
        """Formats that `take` may write."""
        return () if self.storage.buffer else self.home

    # -- full buffers

    def require_flush(self, rows: Sequence[int]) -> None:
        """Check that there are pages and rows of key scales for the full rings of some rows.

        Raises:
            Exhausted: there are too few; the store is as it was.
        """
        at = torch.tensor(rows, device=self.shape.device)
        size = self.storage.buffer
        place = self.place[:, at, :, : self.seen]  # [Lt, N, Ht, S]
        waits = (place < 0) & (self.positions()[:, at] >= 0)
        purpose = f"quantizing the buffers of {len(rows)} sequences"
        if any(self.layouts[f].by_token for f in self.home):
            valid = torch.zeros(*place.shape[:-1], size + 1, dtype=torch.bool, device=at.device)
            valid = valid.scatter_(-1, torch.where(waits, -1 - place, size).long(), True)[..., :size]
            self.require_rows(at, valid, purpose, None, self.thought)
        self.require_pages(at, size, lambda: waits.sum(-1), purpose)

    def flush_rings(self, batch: Batch) -> None:
        """Quantize the full ring of every active row, without the host."""
        at = batch.row
        bases = self.allocate(batch.row, batch.active, self.storage.buffer)
        groups = dict[int, Tensor]()
        for f, base in bases.items():
            if self.layouts[f].by_token:
                uses = self._group_sizes(f, base < self.nowhere(f))
                self.overflow |= (uses > 0).sum() > self.free_rows.top
                groups[f] = self.draw_rows(f, uses, base, uses.numel())
                self.free_rows.top.clamp_(min=0)
        # The kernel does not support integers that are shrunk.
        flush = by_layer if self.storage.shrink else self.backend.flush
        flush(_BufferWriter(self, at, bases, groups))

    def flushed(self, rows: Sequence[int]) -> None:
        """Update the host's counts after `flush_rings`."""
        self.used.update(self.home)
        if not self.asks:
            self.table.drawn()
            self.free_rows.at_least = 0  # some were drawn; `require` reads the true number
        for row in rows:
            self.waiting[row] = 0

    # -- segments

    def open_segment(self, at: Tensor, opened: Tensor, thought: Tensor) -> None:
        """Note the thought type of new segments. `begin_segments` makes it the running type; full buffers are flushed
        before that, because they belong to the segment before. at: int64 [N], rows, each once; opened: bool [N];
        thought: uint8 [N]."""
        self.next_thought[at] = torch.where(opened, thought, self.next_thought[at])

    def begin_segments(self, at: Tensor, active: Tensor) -> None:
        """Begin the segments that `open_segment` noted. at: int64 [N], rows, each once; active: bool [N]."""
        begun = torch.where(active, self.next_thought[at], SAME)
        self.thought[at] = torch.where(begun != SAME, begun, self.thought[at])
        self.next_thought[at] = torch.where(active, SAME, self.next_thought[at])
        self.begun[at] = begun

    def begin(self, row: int, position: int, thought: int) -> None:
        """Note on the host that a segment of this type begins at this position."""
        self.starts[row].append(position)
        self.kinds[row].append(thought)

    def clear(self, row: int) -> None:
        """Forget a row."""
        at = self.one_row(row)
        if self.compaction:
            self.compaction.finish()
        self.evict(torch.ones_like(self.positions()[:, :1], dtype=torch.bool), at)
        if self.compaction:
            self.compaction.finish()
        self.thought[row] = self.storage.prompt
        self.next_thought[row] = SAME
        self.scale[..., row] = 1
        self.waiting[row] = 0
        self.starts[row] = []
        self.kinds[row] = []
        self.outgoing_at[row] = -1
        self.reading.discard(row)
        self.most[row] = self.lengths[row] = 0

    # -- tables, tensors, bytes

    def entries(self, layer: int, row: int, head: int) -> list[Entry]:
        """The block table of one unit."""
        n = int(self.count[layer, row, head])
        place = self.place[layer, row, head, :n].tolist()
        pos = self.pos[layer, row, head, :n].tolist()
        at = {divmod(p, self.table.most): q for p, q in zip(place, pos, strict=True) if p >= 0}
        return self.table.entries((layer, row, head), at, self.starts[row] or [0])

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the store occupies."""
        own = (self.pool, self.side, self.scale_rows, self.row_uses, self.scale_row, self.scale)
        rings = (self.ring, self.outgoing, self.outgoing_at)
        lists = (self.place, self.pos, self.count, self.thought_format, self.slots, self.overflow)
        thoughts = (self.thought, self.next_thought, self.begun)
        moves = self.compaction.tensors if self.compaction else ()
        free = (self.free_rows.stack, self.free_rows.top)
        return *own, *rings, *lists, *thoughts, *moves, *free, *self.table.tensors

    def account(self, rows: Sequence[int] | None = None) -> Ledger:
        """Bytes that the tokens of some rows hold (None: of all). The reserve is the free slots of their pages."""
        rows = [row for row in (range(len(self.most)) if rows is None else rows) if self.most[row]]
        if not rows:
            return Ledger()
        at = torch.tensor(rows, device=self.shape.device)
        payload, scales, tables, buffers = self.bytes_of(at).sum(1).tolist()
        return Ledger(payload=payload, scales=scales, tables=tables, buffers=buffers, reserve=self.free_in_pages(at))

    def free_in_pages(self, rows: Tensor) -> int:
        """Bytes of the free slots in the pages of some rows: of the whole pages, less what their tokens take.
        rows: int64 [N]."""
        page = self.table.page[:, rows]
        number = page[page != self.table.pages.count].long()
        of_token = torch.tensor([lay.codes + lay.side for lay in self.layouts], device=number.device)
        taken = self.table.taken[number] * of_token[self.table.format[number].long()]
        free = number.numel() * (self.page_bytes + self.side_bytes) - int(taken.sum())
        return free * self.shape.sharing

    def paged(self, row: int) -> int:
        """Tokens of a row that lie in pages, in all lanes together."""
        there = (self.positions()[:, row] >= 0) & (self.place[:, row, :, : self.seen] >= 0)
        return int(there.sum()) * self.shape.sharing

    def bytes_of(self, rows: Tensor | None = None) -> Tensor:
        """Bytes that the tokens of each row hold. It works without the host, so a CUDA graph can capture it.

        Args:
            rows: int64 [N]; None: all of them.

        Returns:
            int64 [4, N]: payload, scales, tables and buffers, as the ledger has them.
        """
        pages = self.table.page
        count = self.count
        if rows is not None:
            pages = pages[:, rows]
            count = count[:, rows]
        tokens = count.sum((0, 2))
        payload, scales = self._payload_and_scales(rows, tokens)
        scaled = sum(lay.k.tensor_scaled + lay.v.tensor_scaled for lay in self.layouts)
        scales = scales + scaled * self.scale[0, 0, :, 0].nbytes
        # Of a page: which slots are live and their rows of scales; its number, taken, filled, thought and format.
        of_slots = self.table.most * (1 + 4 * bool(self.scale_row.numel()))
        opened = (pages != self.table.pages.count).sum((0, 2, 3))
        tables = tokens * 8 + opened * (of_slots + 4 + 8) + self.count[:, 0].nbytes
        buffers = self.ring[:, 0].nbytes + self.outgoing[:, 0].nbytes
        return torch.stack((payload, scales, tables, torch.full_like(payload, buffers)))

    def _payload_and_scales(self, rows: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of codes and of parameters, int64 [N] each; rows: as of `bytes_of`; tokens: of each row, [N]."""
        lanes = self.shape.sharing
        if len(self.layouts) == 1 and not self.storage.buffer:  # all tokens have the same size
            [lay] = self.layouts
            return tokens * lanes * lay.codes, tokens * lanes * lay.side
        pos = self.positions()
        place = self.place[..., : self.seen]
        if rows is not None:
            pos = pos[:, rows]
            place = place[:, rows]
        paged = (pos >= 0) & (place >= 0)
        most = self.table.most
        page = torch.where(paged, place // most, self.table.pages.count).long()  # in the ring: trash page, no format
        slot = torch.where(paged, place % most, 0).long()
        formats = self.table.format[page]
        payload = torch.zeros_like(tokens)
        scales = torch.zeros_like(tokens)
        for f, lay in enumerate(self.layouts):
            mine = formats == f
            of_format = mine.sum((0, 2, 3)) * lanes
            payload = payload + of_format * lay.codes
            scales = scales + of_format * lay.side
            if lay.by_token:  # n living tokens share a row of scales: each has one nth of it
                row = torch.where(mine, self.scale_row[page, slot], self.free_rows.count).long()
                uses = self.row_uses[row]
                share = torch.where(mine, 1 / uses.double(), 0).sum((0, 2, 3))
                scales = scales + share.round().long() * lanes * lay.row
        return payload, scales


class Writer:
    """Writes the keys and values of appended tokens. Kernels do not call it: they read its fields and write the slots
    themselves."""

    store: Slots
    at: Tensor  # rows, int64 [N]
    index: Tensor | None = None  # their tokens' places in the ring, int64 [N]; None: the tokens go into pages
    # For each format the slots in the first lane of each unit, int64 [Lt, N, Ht, n]; the trash slot means that the
    # token has another format.
    bases: dict[int, Tensor]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [N, n, Hkv, D], padded to the longest, in the order of `append`'s rows."""
        raise NotImplementedError


class _PageWriter(Writer):
    def __init__(self, store: Slots, at: Tensor, bases: dict[int, Tensor]) -> None:
        self.store = store
        self.at = at
        self.bases = bases

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)  # [N, Hkv, n, D]
        for f, base in self.bases.items():
            index = self.store.index(f, layer, base[min(layer, base.shape[0] - 1)])
            self.store.write(f, layer, self.at, index, k, v)


class _RingWriter(Writer):
    def __init__(self, store: Slots, at: Tensor, index: Tensor) -> None:
        self.store = store
        self.at = at
        self.index = index
        self.bases = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        # A padding row writes, too: into the place that its own next token will take.
        self.store.ring[layer, self.at, :, self.index] = torch.stack((k[:, 0], v[:, 0]), dim=2)


class _BufferWriter:
    """Quantizes full rings. The kernel `flush` reads its fields, as kernels do with a Writer."""

    def __init__(self, store: Slots, at: Tensor, bases: dict[int, Tensor], groups: dict[int, Tensor]) -> None:
        self.store = store
        self.at = at
        self.bases = bases
        self.layers = store.shape.layers
        self.groups = groups  # of formats with keys by token, their rows of scales: int32 [Lt, N, Ht, groups]

    def store_layer(self, layer: int) -> None:
        store = self.store
        k, v = store.ring[layer, self.at].unbind(3)  # [N, Hkv, R, D] each
        through = store.home[0] if store.storage.shrink else None
        for f, bases in self.bases.items():
            t = min(layer, len(bases) - 1)
            group = self.groups[f][t] if f in self.groups else None
            store.write_tokens(f, layer, self.at, bases[t], k, v, group, through)
