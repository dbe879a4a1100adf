"""PagedStore: keys and values in pages, packed in their formats, with slots that are used again in place.

    pool        [pages, lanes of a unit, bytes of a page]: codes; a slot holds its token's key codes, then the value's
    side        beside it: the parameters (scales, minima) of groups of channels, for every slot
    scale_rows  the parameters of groups of tokens (keys by token): a row a group, until its last token is gone
    ring        the full-precision buffer: tokens that wait to be quantized together
    place, pos  for every unit the list of its tokens, oldest first: where each lies, and its original position

The life of a token:

    append    takes a slot, or a place in the ring; the Writer then brings its key and value, layer by layer
    settle    a prompt is read: what the policy left of it moves from plain pages to where it will stay
    flush     the ring is full: its tokens are quantized into pages of the running thought type
    reader    gives every layer's keys and values, oldest token first
    evict     the token leaves its list, its slot is free; the page too when it was the last one
              (what stays moves together then, where that is measured: `compaction.py`)

All pages have one size in bytes and serve any format (`pages.py` says how they are read); a page holds tokens of one
unit, one format and one thought type (`table.py`). A token never moves while it lives, unless another format is asked
for.

Masked-out writes go to a page behind the last one, masked-out reads come from a second one that is all zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.errors import UsageError
from minithink.kv.compaction import Compaction
from minithink.kv.contract import Shape, Storage
from minithink.kv.ledger import Ledger
from minithink.kv.pages import Pages, Reader, layouts, page_bytes
from minithink.kv.table import BlockTable, Entry, Exhausted, FreeList
from minithink.quant import shrink
from minithink.quant.format import Format
from minithink.ref.evict import release_rows

SAME = 255  # no new thought type


class PagedStore(Pages):
    """Tokens of B rows. Rows, lanes and units as in `kv/contract.py`."""

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
        poison: bool = False,
    ) -> None:
        """
        Args:
            pages: of a unit each; the manager's `needs` tells how many a sequence may need.
            scale_rows: groups of keys by token that may live at once; None: a quarter of the tokens that fit.
            dtype: of plain tokens and of the ring.
            columns: fix the width of everything that is read to so many tokens; None: as wide as the longest lane.
                With a fixed width no shape depends on what the sequences hold.
            width: tokens that lists have room for at first; they grow, unless `columns` are fixed.
            table_width: pages that a unit has room for at first; tables grow too, but not in `append_next`.
            backend: the functions that do it.
            poison: fill whatever is freed with NaN, for tests.
        """
        self.shape, self.storage, self.dtype, self.poison = shape, storage, dtype, poison
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
        per_page, lanes = [lay.slots for lay in self.layouts], shape.sharing
        if (pages + 1) * max(per_page) > 2**31:
            raise UsageError(
                f"A pool of {pages:,} pages of up to {max(per_page)} slots has more slots than 32 bits can number: "
                "use a smaller --batch-size, budget or --max-new-tokens."
            )
        self.table = BlockTable(shape, pages, per_page, shape.device, table_width)
        self.trash_page, self.zero_page = pages, pages + 1  # where masked-out writes go, and such reads come from
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
        self.row_uses = torch.zeros(count + 1, dtype=torch.int32, device=shape.device)  # living tokens
        self.row_of = torch.full(
            (pages + 2 if row else 0, self.table.most), count + 1, dtype=torch.int32, device=shape.device
        )

        lt, b, ht = shape.tables
        ring = (shape.layers, b, shape.kv_heads, storage.buffer, 2, shape.head_dim)
        self.ring = torch.zeros(ring, dtype=dtype, device=shape.device)
        # FP32 scales of K and of V, in each format
        self.scale = torch.ones(len(self.layouts), 2, shape.layers, b, dtype=torch.float32, device=shape.device)
        self.thought = torch.full((b,), storage.prompt, dtype=torch.uint8, device=shape.device)
        # Of `open_next`: types that begin with the next tokens, and those that began with the last ones; SAME: none
        self.next_thought, self.begun = (torch.full_like(self.thought, SAME) for _ in range(2))
        # Lists of tokens, one column more than there are: masked-out writes go there. place: page · slots + slot, or
        # −1 − index for tokens in the ring.
        width = columns or width
        self.place = torch.zeros(lt, b, ht, width + 1, dtype=torch.int32, device=shape.device)
        self.pos = torch.full((lt, b, ht, width + 1), -1, dtype=torch.int32, device=shape.device)
        self.count = torch.zeros(lt, b, ht, dtype=torch.int32, device=shape.device)
        self.compaction = Compaction(self) if storage.compaction != "none" else None
        self.columns = columns
        self.home = tuple(dict.fromkeys(storage.formats.index(t) for t in storage.thoughts))  # of generated tokens
        self.slots = torch.tensor(per_page, dtype=torch.int32, device=shape.device)
        self.overflow = torch.zeros((), dtype=torch.bool, device=shape.device)  # of `append_next`
        # What the host knows of each row:
        self.most = [0] * b  # tokens that a lane holds at most
        self.lengths = [0] * b  # tokens seen, evicted ones too
        self.waiting = [0] * b  # tokens in the ring, those evicted there counted too
        self.reading = set[int]()  # rows whose prompt is not settled
        self.starts: list[list[int]] = [[] for _ in range(b)]  # positions at which segments begin, for reading
        self.kinds: list[list[int]] = [[] for _ in range(b)]  # and their thought types
        self.used = {0}  # formats that may hold tokens
        self.stays_plain = storage.sink > 0 or "plain" in (*storage.thoughts, *storage.also)

    # -- appending

    def append(self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int], prompt: bool) -> Writer:
        """Take slots for new tokens: counts[i] for row rows[i], which has seen lengths[i] tokens before.

        Args:
            prompt: the tokens belong to prompts and stay plain for now; otherwise one token a row, which goes to the
                ring or to the format of its row's thought type.

        Returns:
            what writes the keys and values of these tokens, layer by layer.

        Raises:
            Exhausted: the pool has no pages left; the store is as it was.
            UsageError: a lane would hold more tokens than the fixed width; the store is as it was.
        """
        n, device = max(counts), self.shape.device
        if prompt and self.compaction:
            self.compaction.finish()
        most = self.require_columns(rows, counts)
        width = max(most) if self.columns is None else None
        at = torch.tensor(rows, device=device)
        column = torch.arange(n, device=device)
        # of every unit of these rows: [Lt, N, Ht, n]
        lt, _, ht = self.shape.tables
        fits = column < torch.tensor(counts, device=device)[:, None]
        position = torch.tensor(lengths, device=device)[:, None] + column
        valid, positions = (x[None, :, None].expand(lt, len(rows), ht, n) for x in (fits, position.to(torch.int32)))
        if self.storage.buffer and not prompt:
            waiting = torch.tensor([self.waiting[row] for row in rows], device=device)
            writer = self._append_to_ring(at, valid, positions, waiting, width)
        else:
            writer = self._append_to_pages(
                at, valid, positions, width, prompt, f"appending {sum(counts):,} tokens to {len(rows)} sequences"
            )
        self.most = most
        self._count(rows, counts, lengths, prompt)
        if prompt:
            self.reading.update(rows)
        return writer

    def append_next(self, at: Tensor, active: Tensor, lengths: Tensor, waiting: Tensor) -> Writer:
        """One generated token for some rows, from tensors alone, as a CUDA graph captures it: the host does nothing
        here, and tells afterwards what it knows (`appended`). Widths are fixed, and there is room
        (`require_columns`); too small a pool sets `overflow`.

        Args:
            at: int64 [N], rows, each once.
            active: bool [N], those that bring a token.
            lengths: int64 [N], tokens that each row has seen.
            waiting: int64 [N], tokens in each row's ring.
        """
        self.backend.enlist(self.place, self.pos, self.count, at, active, lengths, waiting)
        if self.storage.buffer:
            return _RingWriter(self, at, waiting)
        return _PageWriter(self, at, self._allocate(at, active, 1))

    def appended(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """What the host must know after `append_next`."""
        for row, length in zip(rows, lengths, strict=True):
            self.most[row] += 1
            self.lengths[row] = length + 1
        self.used.update(self.appends)
        if not self.storage.buffer:
            self.table.drawn()
            return
        for row in rows:
            self.waiting[row] += 1

    @property
    def appends(self) -> tuple[int, ...]:
        """Formats that `append_next` may write."""
        return () if self.storage.buffer else self.home

    def refresh(self) -> None:
        """Ask the device how many tokens the lanes hold, after evictions."""
        self.most = self.count.amax((0, 2)).tolist()

    def _count(self, rows: Sequence[int], counts: Sequence[int], lengths: Sequence[int], prompt: bool) -> None:
        for row, length, count in zip(rows, lengths, counts, strict=True):
            self.lengths[row] = length + count
            if self.storage.buffer and not prompt:
                self.waiting[row] += count

    def _append_to_ring(
        self, at: Tensor, valid: Tensor, positions: Tensor, waiting: Tensor, width: int | None
    ) -> Writer:
        self._list(at, valid, (-1 - waiting)[None, :, None, None].expand(valid.shape), positions, width)
        return _RingWriter(self, at, waiting)

    def _append_to_pages(
        self, at: Tensor, valid: Tensor, positions: Tensor, width: int | None, prompt: bool, purpose: str
    ) -> Writer:
        thought = self._thoughts(at)
        formats = (0,) if prompt else self.home
        chosen = torch.zeros_like(thought) if prompt else self.thought_format[thought.long()]
        valids = {f: valid & (chosen == f)[..., None] for f in formats} if len(formats) > 1 else {formats[0]: valid}
        places = self._take(at, valids, thought, purpose)
        place = sum(torch.where(valids[f], self._join(*places[f]), 0) for f in formats)
        assert isinstance(place, Tensor)
        self._list(at, valid, place, positions, width)
        return _PageWriter(self, at, {f: self._base(f, page, slot) for f, (page, slot) in places.items()})

    def _allocate(self, at: Tensor, active: Tensor, size: int) -> dict[int, Tensor]:
        """Slots for the tokens that lie in no page yet, without asking anything of the device: for each format the
        numbers of the slots in the first lane of their units, int64 [Lt, N, Ht, size], as in `Writer.bases`."""
        t = self.table
        base = self.backend.allocate(
            t.live, t.taken, t.filled, t.thought, t.format, t.page, t.pages.stack, t.pages.top, self.place,
            self.count, at, active, self.thought, self.thought_format, self.slots, self.overflow, size,
            self.shape.sharing,
        )  # fmt: skip
        if len(self.home) == 1:
            return {self.home[0]: base}
        chosen = self.thought_format[self.thought[at].long()][:, None, None]
        return {f: torch.where(chosen == f, base, self.nowhere(f)) for f in self.home}

    def _take(
        self, at: Tensor, valids: dict[int, Tensor], thought: Tensor, purpose: str
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Slots for the valid tokens of each format in some rows, or none: → page, slot [Lt, N, Ht, n]."""
        missing = {f: self.table.missing(f, thought, valid.sum(-1), at) for f, valid in valids.items()}
        most = {f: -(-valid.shape[-1] // self.layouts[f].slots) for f, valid in valids.items()}
        units = thought.numel()
        wanted = torch.stack([pages.sum() for pages in missing.values()]).sum()
        self.table.pages.require(sum(most.values()) * units, wanted, purpose)
        out = {}
        full = self.shape.device.type != "cpu" or bool(wanted)  # asking costs less than opening nothing, on a CPU
        for f, valid in valids.items():
            if full:
                self.table.open(f, thought, missing[f], most[f], at)
            out[f] = self.table.take(f, thought, valid, at)
            self.used.add(f)
        return out

    def require_columns(self, rows: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Make sure that lists of a fixed width have room for new tokens: counts[i] of row rows[i]. `append` asks by
        itself; the host asks before `append_next`, which would write behind the end.

        Returns:
            tokens that the lanes of every row hold at most, with the new ones.

        Raises:
            UsageError: a lane would hold more tokens than the fixed width.
        """
        more = [0] * self.shape.rows
        for row, count in zip(rows, counts, strict=True):
            more[row] += count
        most = [held + new for held, new in zip(self.most, more, strict=True)]
        if self.columns is not None and max(most) > self.columns:  # evictions are not counted: ask the device
            most = [held + new for held, new in zip(self.count.amax((0, 2)).tolist(), more, strict=True)]
            if max(most) > self.columns:
                raise UsageError(
                    f"A lane may hold {max(most):,} tokens and the width was fixed to {self.columns:,}: use a "
                    "smaller budget or --max-new-tokens."
                )
        return most

    def _list(self, at: Tensor, valid: Tensor, place: Tensor, positions: Tensor, width: int | None) -> None:
        """Put new tokens at the ends of their lists. width: what these need; None: it is fixed."""
        if width is not None:
            self._widen(width)
        held = self.count[:, at]
        column = torch.where(valid, held[..., None] + valid.cumsum(-1) - 1, self.place.shape[-1] - 1)
        lt, _, ht = self.shape.tables
        layer, head = (torch.arange(n, device=at.device) for n in (lt, ht))
        end = layer[:, None, None, None], at[:, None, None], head[:, None], column
        self.place[end] = place.to(torch.int32)
        self.pos[end] = torch.where(valid, positions, -1)
        self.count[:, at] = held + valid.sum(-1, dtype=torch.int32)

    def _widen(self, width: int) -> None:
        """Room for so many tokens in every list."""
        have = self.place.shape[-1] - 1
        if width > have:
            more = max(width, 2 * have) - have
            self.place = torch.nn.functional.pad(self.place, (0, more))
            self.pos = torch.nn.functional.pad(self.pos, (0, more), value=-1)
            if self.compaction:
                self.compaction.widen(more)

    # -- writing

    def _write(
        self, f: int, layer: int, rows: Tensor, index: Tensor, k: Tensor, v: Tensor, params: Tensor | None = None
    ) -> None:
        """Write tokens of one layer and format into slots. index: [N, Hkv, n], k, v: values [N, Hkv, n, D]; with
        `params` (keys by token) k holds codes already, and params [N, Hkv, groups, bytes] has their rows' content."""
        lay, dim = self.layouts[f], self.shape.head_dim
        if lay.plain:
            both = torch.cat((k, v), dim=-1).to(self.dtype)
            self._codes[f].index_copy_(0, index.flatten(), both.reshape(-1, 2 * dim))
            return
        k_scale, v_scale = self.scale[f, :, layer, rows][:, :, None, None]
        if params is None:
            k, k_params = self.backend.quantize(lay.k, k, k_scale)
            self._sides[f][index, : lay.k_side] = k_params
        v, v_params = self.backend.quantize(lay.v, v, v_scale)
        self._codes[f][index, : lay.codes] = torch.cat((k, v), dim=-1)
        self._sides[f][index, lay.k_side : lay.side] = v_params

    def _store(
        self, rows: Tensor, valid: Tensor, values: Reader, formats: Sequence[int],
        chosen: Tensor, thought: Tensor, purpose: str,
    ) -> Tensor:  # fmt: skip
        """Quantize tokens into pages.

        Args:
            rows: int64 [N], whose tokens these are.
            valid: bool [Lt, N, Ht, n].
            values: layer → K, V [N, Hkv, n, D], finite where valid.
            formats: that may occur.
            chosen: format index [Lt, N, Ht] of each unit's tokens.
            thought: uint8 [Lt, N, Ht].

        Returns:
            place, int64 [Lt, N, Ht, n], of the valid tokens.
        """
        valids = {f: valid & (chosen == f)[..., None] for f in formats}
        groups: dict[int, Tensor] = {}
        for f in formats:  # rows of key scales: one for every group with a valid token
            if self.layouts[f].by_token:
                groups[f] = self._group_sizes(f, valids[f])
        if groups:
            wanted = torch.stack([(g > 0).sum() for g in groups.values()]).sum()
            self.free_rows.require(sum(g.numel() for g in groups.values()), wanted, purpose)
        places = self._take(rows, valids, thought, purpose)
        place = torch.zeros_like(valid, dtype=torch.long)
        for f in formats:
            page, slot = places[f]
            place = torch.where(valids[f], self._join(page, slot), place)
            row = None
            if f in groups:
                row = self._draw_rows(f, groups[f], page, slot, groups[f].numel())
            for layer in range(self.shape.layers):
                t = min(layer, valid.shape[0] - 1)
                k, v = values(layer)
                if self.storage.shrink and f != formats[0]:
                    self._write_shrunk(formats[0], f, layer, rows, page[t], slot[t], k, v)
                else:
                    base = self._base(f, page[t], slot[t])
                    self._write_tokens(f, layer, rows, base, k, v, valids[f][t], None if row is None else row[t])
        return place

    def _group_sizes(self, f: int, valid: Tensor) -> Tensor:
        """Valid tokens of each group of keys by token. valid: bool [Lt, N, Ht, n] → int32 [Lt, N, Ht, groups]."""
        size = self.layouts[f].k.group
        padded = torch.nn.functional.pad(valid, (0, -valid.shape[-1] % size))
        return padded.unflatten(-1, (-1, size)).sum(-1, dtype=torch.int32)

    def _draw_rows(self, f: int, uses: Tensor, page: Tensor, slot: Tensor, most: int) -> Tensor:
        """A row of scales for every group with a valid token, at most so many, and which tokens read it. uses: as of
        `_group_sizes`; page, slot: [Lt, N, Ht, n] → int32 [Lt, N, Ht, groups]."""
        row = self.free_rows.draw(uses > 0, most)
        self.row_uses[row.long()] = uses
        self.row_of[page, slot] = row.repeat_interleave(self.layouts[f].k.group, -1)[..., : page.shape[-1]]
        return row

    def _write_tokens(
        self, f: int, layer: int, rows: Tensor, base: Tensor, k: Tensor, v: Tensor, valid: Tensor,
        group: Tensor | None,
    ) -> None:  # fmt: skip
        """Quantize tokens of one layer into their slots. base: [N, Ht, n], k, v: [N, Hkv, n, D], valid: [N, Ht, n],
        group: rows of scales of keys by token, [N, Ht, groups]."""
        params = None
        if group is not None:
            k, params = self._quantize_groups(self.layouts[f].k, k, valid, self.scale[f, 0, layer, rows])
            number = group.long() * self.shape.sharing + self._lane(layer)[:, None]  # [N, Hkv, groups]
            self.scale_rows.view(-1, self.scale_rows.shape[-1])[number, : self.layouts[f].row] = params
        self._write(f, layer, rows, self._index(f, layer, base), k, v, params)

    def _quantize_groups(self, fmt: Format, k: Tensor, valid: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Keys by token. k: [N, Hkv, n, D], valid: [N, Ht, n] → codes [N, Hkv, n, …], params [N, Hkv, groups, …]."""
        n, more = k.shape[2], -k.shape[2] % fmt.group
        k = torch.nn.functional.pad(k, (0, 0, 0, more)).unflatten(2, (-1, fmt.group))
        valid = torch.nn.functional.pad(valid, (0, more)).unflatten(2, (-1, fmt.group)).expand(*k.shape[:-1])
        codes, params = self.backend.quantize(fmt, k, scale[:, None, None], valid)
        return codes.flatten(2, 3)[:, :, :n], params

    def _write_shrunk(
        self, f: int, to: int, layer: int, rows: Tensor, page: Tensor, slot: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Quantize in format f, shrink the integers to format `to`, write these (PM-KVQ: chained)."""
        first, last, one = self.layouts[f], self.layouts[to], torch.ones((), device=k.device)
        index = self._index(to, layer, self._base(to, page, slot))
        ops = self.backend
        k_codes, k_params = ops.shrink(first.k, last.k, *ops.quantize(first.k, k, one))
        v_codes, v_params = ops.shrink(first.v, last.v, *ops.quantize(first.v, v, one))
        self._codes[to][index, : last.codes] = torch.cat((k_codes, v_codes), dim=-1)
        self._sides[to][index, : last.side] = torch.cat((k_params, v_params), dim=-1)

    # -- what happens between steps

    @property
    def evicts_in_place(self) -> bool:
        """Whether `evict` asks nothing of the device."""
        return self.backend.in_place and not self.poison

    def evict(self, drop: Tensor, at: Tensor | None = None) -> None:
        """Forget tokens: bool [Lt, N, Ht, S]. Their slots are free at once; nothing moves, but by `compaction`.

        Args:
            at: int64 [N], of these rows, each once; None: of all B.
        """
        if at is not None and (self.compaction or not self.evicts_in_place):
            drop = torch.zeros_like(self.positions(), dtype=torch.bool).index_copy_(1, at, drop)
            at = None
        t, rows, keeps_pages = self.table, self.free_rows, False
        if self.compaction:
            drop, keeps_pages = self.compaction.plan(drop), self.compaction.late
        if self.evicts_in_place:
            at = torch.arange(self.shape.rows, device=drop.device) if at is None else at
            tables, top = (t.page[..., :0], t.pages.top.clone()) if keeps_pages else (t.page, t.pages.top)
            self.backend.evict(
                drop, at, self.place, self.pos, self.count, t.live, t.taken, t.format, tables, t.pages.stack, top,
                self.row_of, self.row_uses, rows.stack, rows.top, t.most,
            )  # fmt: skip
            if self.columns is None:
                self.refresh()
            return
        place, valid = self.place[..., : drop.shape[-1]], self.positions()[..., : drop.shape[-1]] >= 0
        self._release(place, drop & valid & (place >= 0), give=not keeps_pages)
        keep = valid & ~drop
        last = self.place.shape[-1] - 1
        column = torch.where(keep, keep.cumsum(-1) - 1, last)
        self.place.scatter_(-1, column, place.clone())
        pos = torch.full_like(self.pos, -1).scatter_(-1, column, self.pos[..., : drop.shape[-1]])
        pos[..., last] = -1
        count = keep.sum(-1, dtype=torch.int32)
        if self.columns is None:
            self.pos, self.count = pos, count
        else:  # where widths are fixed addresses are too
            self.pos.copy_(pos)
            self.count.copy_(count)
        if self.columns is None:
            self.refresh()

    def _release(self, place: Tensor, which: Tensor, give: bool = True) -> None:
        """Free slots, and the rows of scales whose last token they held. give: as of `BlockTable.release`."""
        page, slot = self._slots_of(place, which)
        if self.poison:
            self._poison(page, slot, which)
        if self.row_of.numel():
            rows = self.free_rows
            gone = release_rows(page, slot, which, self.row_of, self.row_uses, rows.stack, rows.top)
            if self.poison:
                self.scale_rows[gone] = 255
        self.table.release(page, slot, which, give)

    def _slots_of(self, place: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Pages and slots of places, of those that are meant; the others' page is none."""
        page = torch.where(which, place // self.table.most, self.table.pages.count).long()
        return page, torch.where(which, place % self.table.most, 0).long()

    def _poison(self, page: Tensor, slot: Tensor, which: Tensor) -> None:
        formats = self.table.format[page]
        for f in range(len(self.layouts)):
            mine = torch.where(which & (formats == f), page, self.trash_page)
            for layer in range(self.shape.layers):
                if mine.shape[0] > 1 or self.shape.scope != "sequence":
                    index = self._index(f, layer, self._base(f, mine[layer], slot[layer] % self.layouts[f].slots))
                else:
                    index = self._index(f, layer, self._base(f, mine[0], slot[0] % self.layouts[f].slots))
                codes = self._codes[f].view(torch.uint8) if self._codes[f].dtype != torch.uint8 else self._codes[f]
                codes[index] = 255
                self._sides[f][index] = 255

    def flush(self, rows: Sequence[int]) -> None:
        """Quantize the full ring of some rows, in the format of their running thought type.

        Raises:
            Exhausted: the pool has no pages left; the store is as it was.
        """
        at = torch.tensor(rows, device=self.shape.device)
        size = self.storage.buffer
        place = self.place[:, at, :, : self.seen]  # [Lt, N, Ht, S]
        waiting = (place < 0) & (self.positions()[:, at] >= 0)
        # from columns of the list to places in the ring, and back
        index = torch.where(waiting, -1 - place, size).long()
        valid = torch.zeros(*place.shape[:-1], size + 1, dtype=torch.bool, device=at.device)
        valid = valid.scatter_(-1, index, True)[..., :size]
        thought = self._thoughts(at)
        new = self._store(
            at, valid, lambda layer: (self.ring[layer, at, :, :, 0], self.ring[layer, at, :, :, 1]),
            self.home, self.thought_format[thought.long()], thought,
            f"quantizing the buffers of {len(rows)} sequences",
        )  # fmt: skip
        new = torch.nn.functional.pad(new, (0, 1)).gather(-1, index)
        self.place[:, at, :, : self.seen] = torch.where(waiting, new, place).to(torch.int32)
        for row in rows:
            self.waiting[row] = 0

    def flush_next(self, at: Tensor, active: Tensor) -> None:
        """`flush` from tensors alone, as `append_next`; the host tells afterwards what it knows (`flushed`).

        Args:
            at: int64 [N], rows, each once.
            active: bool [N], those whose ring is full; the others stay as they are.
        """
        bases, groups = self._allocate(at, active, self.storage.buffer), dict[int, Tensor]()
        for f in self.home:
            if self.layouts[f].by_token:
                uses = self._group_sizes(f, bases[f] < self.nowhere(f))
                self.overflow |= (uses > 0).sum() > self.free_rows.top
                page = self.shape.sharing * self.layouts[f].slots  # in slots
                groups[f] = self._draw_rows(f, uses, bases[f] // page, bases[f] % page, 0)
                self.free_rows.top.clamp_(min=0)
        self.backend.flush(_BufferWriter(self, at, bases, groups))

    def flushed(self, rows: Sequence[int]) -> None:
        """What the host must know after `flush_next`."""
        self.used.update(self.home)
        self.table.drawn()
        self.free_rows.at_least = 0  # some were drawn: ask when it matters
        for row in rows:
            self.waiting[row] = 0

    @property
    def flushes_next(self) -> bool:
        """Whether full rings can be quantized by `flush_next`."""
        return self.storage.buffer > 0 and not self.storage.shrink

    def measure(self, row: int) -> None:
        """The prompt is read, and nothing of it is evicted or moved yet: take the FP32 scales from it."""
        scaled = [f for f, lay in enumerate(self.layouts) if lay.k.tensor_scaled or lay.v.tensor_scaled]
        if not scaled:
            return
        read = self.reader(self._at(row))
        for layer in range(self.shape.layers):
            amax = [x.float().abs().amax() for x in read(layer)]
            for f in scaled:
                self.scale[f, 0, layer, row] = self.layouts[f].k.tensor_scale(amax[0])
                self.scale[f, 1, layer, row] = self.layouts[f].v.tensor_scale(amax[1])

    def settle(self, row: int, length: int) -> None:
        """The prompt of `length` tokens is read, and the policy has acted on it: store what is left as it will stay.

        The first `sink` tokens stay plain; the last, which fill no buffer, are quantized too or wait in the ring.
        """
        s = self.storage
        home = s.formats.index(s.thoughts[s.prompt])
        if self.layouts[home].plain and not s.buffer:
            self._settled(row)
            return
        at = self._at(row)
        read = self.reader(at)
        whole = s.sink + max(0, length - s.sink) // max(1, s.buffer) * max(1, s.buffer)
        keep = s.tail == "keep"
        place, pos = self.place[:, at, :, : self.seen], self.positions()[:, at]  # [Lt, 1, Ht, S]
        # what the policy has moved to another format already stays there
        here = (pos >= s.sink) & (self._format_of(place) == 0)
        moving, waiting = (here & (pos < whole), here & (pos >= whole)) if keep else (here, torch.zeros_like(here))
        # groups are made of neighbours in the text: from columns to positions, and back
        index = torch.where(moving, pos - s.sink, length).long()
        valid = torch.zeros(*place.shape[:-1], length + 1, dtype=torch.bool, device=at.device)
        valid = valid.scatter_(-1, index, True)[..., :length]

        def values(layer: int) -> tuple[Tensor, Tensor]:
            where = index[min(layer, index.shape[0] - 1)].expand(-1, self.shape.kv_heads, -1)
            out = []
            for x in read(layer):
                by_position = x.new_zeros(*x.shape[:2], length + 1, x.shape[-1])
                out.append(by_position.scatter_(2, where[..., None].expand(x.shape), x)[:, :, :length])
            return out[0], out[1]

        if not self.layouts[home].plain:
            thought = self._thoughts(at)
            new = self._store(
                at, valid, values, self.home, self.thought_format[thought.long()], thought,
                f"quantizing a prompt of {length:,} tokens",
            )  # fmt: skip
            new = torch.nn.functional.pad(new, (0, 1)).gather(-1, index)
        else:
            moving = torch.zeros_like(moving)
            new = place
        if keep:  # the ring holds position p at (p − sink) mod its size
            recent = here & (pos >= length - s.buffer)
            slots = torch.where(recent, (pos - s.sink) % s.buffer, s.buffer)
            for layer in range(self.shape.layers):
                into = slots[min(layer, place.shape[0] - 1)].long().expand(-1, self.shape.kv_heads, -1)
                ring = self.ring.new_zeros(1, self.shape.kv_heads, s.buffer + 1, 2, self.shape.head_dim)
                kv = torch.stack(read(layer), dim=3)
                ring.scatter_(2, into[..., None, None].expand(kv.shape), kv)
                self.ring[layer, row] = ring[0, :, :-1]
            self.waiting[row] = length - min(whole, length)
        self.place[:, at, :, : self.seen] = torch.where(
            moving, new, torch.where(waiting, -1 - (pos - whole), place)
        ).to(torch.int32)  # fmt: skip
        self._release(place, (moving | waiting) & (place >= 0))
        self._settled(row)

    def _settled(self, row: int) -> None:
        """Nothing plain is left when no prompt is, unless it stays so."""
        self.reading.discard(row)
        if not self.reading and not self.stays_plain:
            self.used.discard(0)

    def requantize(self, where: Tensor, name: str, how: str) -> None:
        """Move tokens to another format: bool [Lt, B, Ht, S]. Those in the ring stay; plain ones cannot shrink.

        Raises:
            Exhausted: there is no room for both forms at once; the tokens are where they were.
        """
        f = self.storage.formats.index(name)
        place, pos = self.place[..., : self.seen], self.positions()
        of = self.format()
        moving = where[..., : self.seen] & (pos >= 0) & (place >= 0) & (of != f)
        if how == "shrink":
            moving &= of != 0
        self.stays_plain |= f == 0
        n = int(moving.sum(-1).max())
        if n == 0:
            return
        # columns of the moving tokens, first of all: [Lt, B, Ht, n]
        column = moving.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :n]
        valid = moving.gather(-1, column)
        old = place.gather(-1, column)
        thought = self.table.thought[torch.where(valid, old // self.table.most, self.table.pages.count).long()]
        at = torch.arange(self.shape.rows, device=place.device)
        new, done = torch.zeros_like(old, dtype=torch.long), torch.zeros_like(valid)
        for kind in range(len(self.storage.thoughts)):  # a page holds one thought type
            mine = valid & (thought == kind)
            if not bool(mine.any()):
                continue
            if how == "shrink":
                sources = [g for g in sorted(self.used) if g != f and not self.layouts[g].plain]
                parts = [mine & (of.gather(-1, column) == g) for g in sources]
            else:
                sources, parts = [-1], [mine]
            for source, part in zip(sources, parts, strict=True):
                if not bool(part.any()):
                    continue
                type_ = torch.full(self.shape.tables, kind, dtype=torch.uint8, device=place.device)
                try:
                    if how == "shrink":
                        found = self._shrink_into(source, f, old, part, type_)
                    else:
                        read = self.reader()

                        def values(layer: int, read: Reader = read) -> tuple[Tensor, Tensor]:
                            which = column[min(layer, column.shape[0] - 1)].expand(-1, self.shape.kv_heads, -1)
                            k, v = read(layer)
                            pick = which[..., None].expand(*which.shape, k.shape[-1])
                            return k.gather(2, pick), v.gather(2, pick)

                        found = self._store(
                            at, part, values, (f,), torch.full(self.shape.tables, f, device=place.device), type_,
                            f"moving tokens to {name}",
                        )  # fmt: skip
                except Exhausted:
                    if bool(done.any()):
                        self._release(new, done)  # what found room before
                    raise
                new, done = torch.where(part, found, new), done | part
        self.place.scatter_(-1, torch.where(valid, column, self.place.shape[-1] - 1), new.to(torch.int32))
        self._release(old, valid)

    def _shrink_into(self, source: int, f: int, old: Tensor, valid: Tensor, thought: Tensor) -> Tensor:
        """Requantize integers to fewer bits, without their values."""
        start, end = self.layouts[source], self.layouts[f]
        # refuses, before anything is taken, what cannot be shrunk
        shrink(start.k, end.k, self.pool.new_empty(0, start.k_codes), self.side.new_empty(0, start.k_side))
        at = torch.arange(self.shape.rows, device=valid.device)
        page, slot = self._take(at, {f: valid}, thought, "shrinking tokens")[f]
        old_page = torch.where(valid, old // self.table.most, self.zero_page).long()
        old_slot = torch.where(valid, old % self.table.most, 0).long()
        for layer in range(self.shape.layers):
            t = min(layer, valid.shape[0] - 1)
            index = self._index(source, layer, self._base(source, old_page[t], old_slot[t]))
            codes, side = self._codes[source][index], self._sides[source][index]
            k, k_params = self.backend.shrink(start.k, end.k, codes[..., : start.k_codes], side[..., : start.k_side])
            v, v_params = self.backend.shrink(
                start.v, end.v, codes[..., start.k_codes : start.codes], side[..., start.k_side : start.side]
            )
            index = self._index(f, layer, self._base(f, page[t], slot[t]))
            self._codes[f][index, : end.codes] = torch.cat((k, v), dim=-1)
            self._sides[f][index, : end.side] = torch.cat((k_params, v_params), dim=-1)
        return self._join(page, slot)

    def open_segment(self, opened: Tensor, thought: Tensor) -> None:
        """Tokens that are stored from now on are of this type: bool [B], uint8 [B]."""
        self.thought.copy_(torch.where(opened, thought, self.thought))

    def open_next(self, at: Tensor, opened: Tensor, thought: Tensor) -> None:
        """`open_segment` from tensors alone, for some rows, before their full buffers are quantized: it holds from
        their next tokens on (`take_over`). at: int64 [N], rows, each once; opened: bool [N]; thought: uint8 [N]."""
        self.next_thought[at] = torch.where(opened, thought, self.next_thought[at])

    def take_over(self, at: Tensor, active: Tensor) -> None:
        """Tokens come: what `open_next` has opened begins. at: int64 [N], rows, each once; active: bool [N], those
        that bring a token."""
        begun = torch.where(active, self.next_thought[at], SAME)
        self.thought[at] = torch.where(begun != SAME, begun, self.thought[at])
        self.next_thought[at] = torch.where(active, SAME, self.next_thought[at])
        self.begun[at] = begun

    def begin(self, row: int, position: int, thought: int) -> None:
        """What the host must know of a segment, whose first token will be at this position."""
        self.starts[row].append(position)
        self.kinds[row].append(thought)

    def clear(self, row: int) -> None:
        """Forget a row."""
        at = self._at(row)
        if self.compaction:
            self.compaction.finish()
        self.evict(torch.ones_like(self.positions()[:, :1], dtype=torch.bool), at)
        if self.compaction:
            self.compaction.finish()
        self.thought[row], self.next_thought[row] = self.storage.prompt, SAME
        self.scale[..., row] = 1
        self.waiting[row], self.starts[row], self.kinds[row] = 0, [], []
        self.reading.discard(row)
        self.most[row] = self.lengths[row] = 0
        if self.poison:
            self.ring[:, row] = torch.nan

    # -- looking at it

    def entries(self, layer: int, row: int, head: int) -> list[Entry]:
        """The block table of one unit."""
        n = int(self.count[layer, row, head])
        place, pos = self.place[layer, row, head, :n].tolist(), self.pos[layer, row, head, :n].tolist()
        at = {divmod(p, self.table.most): q for p, q in zip(place, pos, strict=True) if p >= 0}
        return self.table.entries((layer, row, head), at, self.starts[row] or [0])

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the store occupies."""
        own = (self.pool, self.side, self.scale_rows, self.row_uses, self.row_of, self.ring, self.scale)
        lists = (self.place, self.pos, self.count, self.thought_format, self.slots, self.overflow)
        thoughts = (self.thought, self.next_thought, self.begun)
        moves = self.compaction.tensors if self.compaction else ()
        return *own, *lists, *thoughts, *moves, self.free_rows.stack, self.free_rows.top, *self.table.tensors

    def account(self, rows: Sequence[int] | None = None) -> Ledger:
        """Bytes that the tokens of some rows hold (None: of all), without the reserve."""
        rows = [row for row in (range(len(self.most)) if rows is None else rows) if self.most[row]]
        if not rows:
            return Ledger()
        payload, scales, tables, buffers = self.held(torch.tensor(rows, device=self.shape.device)).sum(1).tolist()
        return Ledger(payload=payload, scales=scales, tables=tables, buffers=buffers)

    def paged(self, row: int) -> int:
        """Tokens of a row that lie in pages, in all lanes together."""
        there = (self.positions()[:, row] >= 0) & (self.place[:, row, :, : self.seen] >= 0)
        return int(there.sum()) * self.shape.sharing

    def held(self, rows: Tensor | None = None) -> Tensor:
        """Bytes that the tokens of each row hold; nothing is asked of the device, so that a CUDA graph may do it.

        Args:
            rows: int64 [N]; None: all of them.

        Returns:
            int64 [4, N]: payload, scales, tables and buffers, as the ledger has them.
        """
        pages, tokens, t = self.table.page, self.count, self.table
        if rows is not None:
            pages, tokens = pages[:, rows], tokens[:, rows]
        tokens, lanes, each = tokens.sum((0, 2)), self.shape.sharing, (0, 2, 3)
        payload = scales = torch.zeros_like(tokens)
        if len(self.layouts) == 1 and not self.storage.buffer:  # nobody needs to look where they lie
            [lay] = self.layouts
            payload, scales = tokens * lanes * lay.codes, tokens * lanes * lay.side
        else:
            pos, place = self.positions(), self.place[..., : self.seen]
            if rows is not None:
                pos, place = pos[:, rows], place[:, rows]
            paged = (pos >= 0) & (place >= 0)
            page = torch.where(paged, place // t.most, t.pages.count).long()  # of the others the format is none
            formats = t.format[page]
            for f, lay in enumerate(self.layouts):
                mine = formats == f
                count = mine.sum(each) * lanes
                payload = payload + count * lay.codes
                scales = scales + count * lay.side
                if lay.by_token:  # n living tokens share a row of scales: each has one nth of it
                    row = self.row_of[page, torch.where(paged, place % t.most, 0).long()]
                    uses = self.row_uses[torch.where(mine, row, self.free_rows.count).long()]
                    share = torch.where(mine, 1 / uses.double(), 0).sum(each)
                    scales = scales + share.round().long() * lanes * lay.row
        scaled = sum(fmt.tensor_scaled for lay in self.layouts for fmt in (lay.k, lay.v))
        scales = scales + scaled * self.scale[0, 0, :, 0].nbytes
        slots = t.most * (1 + 4 * bool(self.row_of.numel()))  # is it live, which row of scales
        opened = (pages != t.pages.count).sum(each)
        tables = tokens * 8 + opened * (slots + 4 + 8) + self.count[:, 0].nbytes
        return torch.stack((payload, scales, tables, torch.full_like(payload, self.ring[:, 0].nbytes)))

    # -- helpers

    def _at(self, row: int) -> Tensor:
        """One row, int64 [1], without waiting for the device, as a copy from the host's memory would."""
        return torch.full((1,), row, device=self.shape.device)

    def _join(self, page: Tensor, slot: Tensor) -> Tensor:
        return page * self.table.most + slot

    def _thoughts(self, at: Tensor) -> Tensor:
        """The running thought type of every unit of some rows: uint8 [Lt, N, Ht]."""
        lt, _, ht = self.shape.tables
        return self.thought[at][None, :, None].expand(lt, len(at), ht)


class Writer:
    """Writes the keys and values of appended tokens. A kernel looks through it, at where they go."""

    store: PagedStore
    at: Tensor  # rows, int64 [N]
    index: Tensor | None = None  # their tokens' places in the ring, int64 [N]; None: the tokens go into pages
    # Of every format, slots in the first lane of their units, int64 [Lt, N, Ht, n]; on the trash page there is no
    # token of that format.
    bases: dict[int, Tensor]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v: [N, n, Hkv, D], padded to the longest, in the order of `append`'s rows."""
        raise NotImplementedError


class _PageWriter(Writer):
    def __init__(self, store: PagedStore, at: Tensor, bases: dict[int, Tensor]) -> None:
        self.store, self.at, self.bases = store, at, bases

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [N, Hkv, n, D]
        for f, base in self.bases.items():
            index = self.store._index(f, layer, base[min(layer, base.shape[0] - 1)])
            self.store._write(f, layer, self.at, index, k, v)


class _RingWriter(Writer):
    def __init__(self, store: PagedStore, at: Tensor, index: Tensor) -> None:
        self.store, self.at, self.index, self.bases = store, at, index, {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.store.ring[layer, self.at, :, self.index] = torch.stack((k[:, 0], v[:, 0]), dim=2)


class _BufferWriter:
    """Quantizes full rings. The kernel looks through it, as through a Writer."""

    def __init__(self, store: PagedStore, at: Tensor, bases: dict[int, Tensor], groups: dict[int, Tensor]) -> None:
        self.store, self.at, self.bases, self.layers = store, at, bases, store.shape.layers
        self.groups = groups  # of formats with keys by token, their rows of scales: int32 [Lt, N, Ht, groups]

    def store_layer(self, layer: int) -> None:
        store = self.store
        k, v = store.ring[layer, self.at].unbind(3)  # [N, Hkv, R, D] each
        for f, bases in self.bases.items():
            t = min(layer, len(bases) - 1)
            group = self.groups[f][t] if f in self.groups else None
            store._write_tokens(f, layer, self.at, bases[t], k, v, bases[t] < store.nowhere(f), group)
