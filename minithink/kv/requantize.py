"""Moves: tokens that move to another format, outside of a decode step.

measure      the prompt was read: its numbers decide the FP32 scales of its sequence
settle       the policy has acted on the prompt: its remaining tokens move to their own format
requantize   the policy moves tokens to another format, by their numbers or by their integer codes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from minithink.kv.reading import Reader, Reading
from minithink.kv.store import PagedStore
from minithink.kv.table import Exhausted
from minithink.quant import shrink


@dataclass(frozen=True)
class _Prompt:
    """A prompt that is about to settle. Tensors have one row."""

    row: int
    at: Tensor  # int64 [1], the row
    length: int  # tokens of the prompt, evicted ones too
    whole: int  # tokens at positions below this fill whole buffers
    read: Reading
    place: Tensor  # int32 [Lt, 1, Ht, S]
    pos: Tensor
    plain: Tensor  # bool, the tokens in plain pages that may leave them
    moving: Tensor  # bool, those that move to their own format
    waiting: Tensor  # bool, those that will wait in the ring


@dataclass(frozen=True)
class _Chosen:
    """Tokens that are about to move to another format, N rows of them."""

    at: Tensor  # int64 [N], the rows
    column: Tensor  # int64 [Lt, N, Ht, n], columns of the tokens
    valid: Tensor  # bool [Lt, N, Ht, n], which columns are such tokens
    place: Tensor  # int32 [Lt, N, Ht, n], where they lie
    format: Tensor  # uint8 [Lt, N, Ht, n]
    thought: Tensor  # uint8 [Lt, N, Ht, n], the thought type of their page


@dataclass(frozen=True)
class _Part:
    """Some of the chosen tokens, which move together: a page holds one thought type."""

    kind: int  # their thought type
    source: int | None  # the format whose integers shrink; None: their numbers are quantized again
    where: Tensor  # bool [Lt, N, Ht, n]


class Moves:
    """Moves the tokens of one store to other formats."""

    def __init__(self, store: PagedStore) -> None:
        self.store = store
        self.shape = store.shape
        self.storage = store.storage
        self.lists = store.lists
        self.slots = store.slots
        self.pages = store.pages

    # -- a prompt that was read

    def measure(self, row: int) -> None:
        """Take the FP32 scales from the prompt, which was read and is still complete."""
        store = self.store
        layouts = self.pages.layouts
        scaled = [f for f, lay in enumerate(layouts) if lay.k.tensor_scaled or lay.v.tensor_scaled]
        if not scaled:
            return
        scale = self.pages.scale
        read = Reading(store, store.one_row(row))
        for layer in range(self.shape.layers):
            k, v = read(layer)
            k_amax = k.float().abs().amax()
            v_amax = v.float().abs().amax()
            for f in scaled:
                scale[f, 0, layer, row] = layouts[f].k.tensor_scale(k_amax)
                scale[f, 1, layer, row] = layouts[f].v.tensor_scale(v_amax)

    def settle(self, row: int, length: int) -> None:
        """Move the remaining tokens of a prompt to their own format. The policy has acted on the prompt.

        The first `sink` tokens stay plain. The last tokens, which do not fill a buffer, are quantized too or wait in
        the ring (`Storage.tail`).

        Args:
            row: of the sequence.
            length: tokens of the prompt, evicted ones too.
        """
        storage = self.storage
        home = self.pages.layouts[storage.formats.index(storage.thoughts[storage.prompt])]
        if home.plain and not storage.buffer:
            self._settled(row)
            return
        prompt = self._prompt(row, length)
        moving = prompt.moving
        if home.plain:
            moving = torch.zeros_like(moving)
            new = prompt.place
        else:
            new = self._quantize_prompt(prompt)
        if storage.tail == "keep":
            self._fill_ring(prompt)
        in_ring = -1 - (prompt.pos - prompt.whole)
        stay_or_wait = torch.where(prompt.waiting, in_ring, prompt.place)
        placed = torch.where(moving, new, stay_or_wait)
        self.lists.places()[:, prompt.at] = placed.to(torch.int32)
        leaves_page = (moving | prompt.waiting) & (prompt.place >= 0)
        self.slots.release(prompt.place, leaves_page, prompt.at)
        self._settled(row)

    def _prompt(self, row: int, length: int) -> _Prompt:
        """Find out which tokens of a prompt move, and which will wait in the ring."""
        store = self.store
        storage = self.storage
        at = store.one_row(row)
        place = self.lists.places()[:, at]
        pos = self.lists.positions()[:, at]
        size = max(1, storage.buffer)
        whole = storage.sink + max(0, length - storage.sink) // size * size
        # Tokens that the policy has moved to another format stay there.
        plain = (pos >= storage.sink) & (self.slots.format_of(place) == 0)
        if storage.tail == "keep":
            moving = plain & (pos < whole)
            waiting = plain & (pos >= whole)
        else:
            moving = plain
            waiting = torch.zeros_like(plain)
        return _Prompt(
            row=row,
            at=at,
            length=length,
            whole=whole,
            read=Reading(store, at),
            place=place,
            pos=pos,
            plain=plain,
            moving=moving,
            waiting=waiting,
        )

    def _quantize_prompt(self, prompt: _Prompt) -> Tensor:
        """Quantize the moving tokens of a prompt → their new places, int64 [Lt, 1, Ht, S]; others are undefined."""
        store = self.store
        length = prompt.length
        # Groups are made of neighbours in the text: from columns to positions, and back.
        index = torch.where(prompt.moving, prompt.pos - self.storage.sink, length).long()
        valid = torch.zeros(*index.shape[:-1], length + 1, dtype=torch.bool, device=index.device)
        valid = valid.scatter_(-1, index, True)[..., :length]

        def by_position(x: Tensor, layer: int) -> Tensor:
            """x: [1, Hkv, S, D] → [1, Hkv, length, D]."""
            into = index[min(layer, index.shape[0] - 1)].expand(-1, x.shape[1], -1)
            out = x.new_zeros(*x.shape[:2], length + 1, x.shape[-1])
            return out.scatter_(2, into[..., None].expand(x.shape), x)[:, :, :length]

        def values(layer: int) -> tuple[Tensor, Tensor]:
            k, v = prompt.read(layer)
            return by_position(k, layer), by_position(v, layer)

        new = self._into_pages(
            prompt.at,
            valid,
            values,
            purpose=f"quantizing a prompt of {length:,} tokens",
            f=None,
            thought=store.thought,
            through=self.slots.home[0] if self.storage.shrink else None,
        )
        return pad(new, (0, 1)).gather(-1, index)

    def _fill_ring(self, prompt: _Prompt) -> None:
        """Copy the last tokens of a prompt into the ring, which holds position p at (p − sink) mod its size."""
        store = self.store
        storage = self.storage
        size = storage.buffer
        heads = self.shape.kv_heads
        recent = prompt.plain & (prompt.pos >= prompt.length - size)
        number = torch.where(recent, (prompt.pos - storage.sink) % size, size).long()
        pushed_out = prompt.pos == prompt.length - 1 - size
        for layer in range(self.shape.layers):
            t = min(layer, len(number) - 1)
            kv = torch.stack(prompt.read(layer), dim=3)  # [1, Hkv, S, 2, D]
            into = number[t].expand(-1, heads, -1)
            ring = store.ring.new_zeros(1, heads, size + 1, 2, self.shape.head_dim)
            ring.scatter_(2, into[..., None, None].expand(kv.shape), kv)
            store.ring[layer, prompt.row] = ring[0, :, :-1]
            if storage.lag:
                other = ~pushed_out[t, 0]  # [Ht, S]
                values = kv[0, :, :, 1]
                store.outgoing[layer, prompt.row] = values.masked_fill(other[..., None], 0.0).sum(1)
        store.outgoing_at[prompt.row] = prompt.length - 1 - size
        store.waiting[prompt.row] = prompt.length - min(prompt.whole, prompt.length)

    def _settled(self, row: int) -> None:
        """Note that the prompt is settled. The plain format is unused then, unless other prompts are being read or
        plain tokens stay."""
        store = self.store
        store.unsettled.discard(row)
        if not store.unsettled and not self.slots.stays_plain:
            self.slots.used.discard(0)

    # -- tokens that the policy moves

    def requantize(self, where: Tensor, name: str, how: str) -> None:
        """Move tokens to another format. Tokens in the ring stay there; plain tokens cannot shrink.

        Args:
            where: bool [Lt, B, Ht, S], the tokens.
            name: of the format.
            how: "shrink": the integers lose bits; else the numbers are quantized again.

        Raises:
            Exhausted: there is no room for both forms at once; the tokens are where they were.
        """
        f = self.storage.formats.index(name)
        self.slots.stays_plain |= f == 0
        chosen = self._chosen(where, f, how)
        if chosen is None:
            return
        new = torch.zeros_like(chosen.place, dtype=torch.long)
        done = torch.zeros_like(chosen.valid)
        for part in self._parts(chosen, f, how):
            try:
                found = self._move(part, chosen, f)
            except Exhausted:
                if bool(done.any()):
                    self.slots.release(new, done, chosen.at)  # of the parts before this one
                raise
            new = torch.where(part.where, found, new)
            done = done | part.where
        place = self.lists.place
        into = torch.where(chosen.valid, chosen.column, place.shape[-1] - 1)
        place[:, chosen.at] = place[:, chosen.at].scatter_(-1, into, new.to(torch.int32))
        self.slots.release(chosen.place, chosen.valid, chosen.at)

    def _chosen(self, where: Tensor, f: int, how: str) -> _Chosen | None:
        """The tokens that really move; None: no token does. Arguments as of `requantize`; f: the format's index."""
        at = where.any(-1).any(2).any(0).nonzero().flatten()  # rows with such tokens
        if len(at) == 0:
            return None
        place = self.lists.places()[:, at]
        pos = self.lists.positions()[:, at]
        of = self.slots.format_of(place)
        moving = where[:, at] & (pos >= 0) & (place >= 0) & (of != f)
        if how == "shrink":
            moving &= of != 0
        n = int(moving.sum(-1).max())
        if n == 0:
            return None
        # The moving tokens' columns come first.
        column = moving.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :n]
        valid = moving.gather(-1, column)
        place = place.gather(-1, column)
        table = self.slots.table
        page = torch.where(valid, place // table.stride, self.pages.trash_page)
        return _Chosen(
            at=at,
            column=column,
            valid=valid,
            place=place,
            format=of.gather(-1, column),
            thought=table.thought[page.long()],
        )

    def _parts(self, chosen: _Chosen, f: int, how: str) -> list[_Part]:
        """The chosen tokens by thought type and, if their integers shrink, by their format."""
        sources: list[int | None] = [None]
        if how == "shrink":
            sources = [g for g in sorted(self.slots.used) if g != f and not self.pages.layouts[g].plain]
        parts = []
        for kind in range(len(self.storage.thoughts)):
            for source in sources:
                where = chosen.valid & (chosen.thought == kind)
                if source is not None:
                    where = where & (chosen.format == source)
                if bool(where.any()):
                    parts.append(_Part(kind, source, where))
        return parts

    def _move(self, part: _Part, chosen: _Chosen, f: int) -> Tensor:
        """Write one part in format f → the tokens' new places, int64 [Lt, N, Ht, n]."""
        if part.source is None:
            return self._copy_into(part, chosen, f)
        return self._shrink_into(part, chosen, part.source, f)

    def _copy_into(self, part: _Part, chosen: _Chosen, f: int) -> Tensor:
        """Quantize the numbers of the tokens in format f → their new places."""
        store = self.store
        read = Reading(self.store, chosen.at)
        column = chosen.column

        def values(layer: int) -> tuple[Tensor, Tensor]:
            which = column[min(layer, column.shape[0] - 1)].expand(-1, self.shape.kv_heads, -1)
            k, v = read(layer)
            pick = which[..., None].expand(*which.shape, k.shape[-1])
            return k.gather(2, pick), v.gather(2, pick)

        return self._into_pages(
            chosen.at,
            part.where,
            values,
            purpose=f"moving tokens to {self.storage.formats[f]}",
            f=f,
            thought=torch.full_like(store.thought, part.kind),
        )

    def _shrink_into(self, part: _Part, chosen: _Chosen, source: int, f: int) -> Tensor:
        """Shrink the integers of the tokens to fewer bits, from their codes alone → their new places."""
        pages = self.pages
        start = pages.layouts[source]
        end = pages.layouts[f]
        no_codes = pages.pool.new_empty(0, start.k_codes)
        no_params = pages.side.new_empty(0, start.k_side)
        shrink(start.k, end.k, no_codes, no_params)  # raises an error if this pair of formats cannot be shrunk
        at = chosen.at
        valid = part.where
        thought = torch.full_like(self.store.thought, part.kind)
        self.slots.require_pages(
            at,
            most=valid.shape[-1],
            count=lambda: valid.sum(-1),
            purpose="shrinking tokens",
            f=f,
            thought=thought,
        )
        bases = self.slots.allocate_many(at, valid, f, thought)
        stride = self.slots.table.stride
        page = torch.where(valid, chosen.place // stride, pages.zero_page).long()
        slot = torch.where(valid, chosen.place % stride, 0).long()
        old = pages.base(source, page, slot)
        ops = self.store.pages.backend
        for layer in range(self.shape.layers):
            t = min(layer, len(valid) - 1)
            index = pages.index(source, layer, old[t])
            k, v = start.parts(pages.codes[source][index])
            k_params, v_params = start.side_parts(pages.sides[source][index])
            k, k_params = ops.shrink(start.k, end.k, k, k_params)
            v, v_params = ops.shrink(start.v, end.v, v, v_params)
            index = pages.index(f, layer, bases[f][t])
            pages.codes[f][index, : end.codes] = torch.cat((k, v), dim=-1)
            pages.sides[f][index, : end.side] = torch.cat((k_params, v_params), dim=-1)
        return self.slots.places_of(bases)

    def _into_pages(
        self,
        at: Tensor,
        valid: Tensor,
        values: Reader,
        *,
        purpose: str,
        f: int | None,
        thought: Tensor,
        through: int | None = None,
    ) -> Tensor:
        """Quantize tokens into pages.

        Args:
            at: int64 [N], the rows of the tokens.
            valid: bool [Lt, N, Ht, n], the tokens.
            values: layer → K, V [N, Hkv, n, D], finite where valid.
            purpose, f, thought: as of `Slots.require_pages`.
            through: as of `Pages.write_tokens`.

        Returns:
            place, int64 [Lt, N, Ht, n], of the valid tokens.

        Raises:
            Exhausted: there is no room; the store is as it was.
        """
        slots = self.slots
        sizes = slots.require_groups(at, valid, purpose, f, thought)
        slots.require_pages(
            at,
            most=valid.shape[-1],
            count=lambda: valid.sum(-1),
            purpose=purpose,
            f=f,
            thought=thought,
        )
        bases = slots.allocate_many(at, valid, f, thought)
        groups = {g: slots.draw_groups(g, own, bases[g]) for g, own in sizes.items()}
        for layer in range(self.shape.layers):
            t = min(layer, len(valid) - 1)
            k, v = values(layer)
            for g, base in bases.items():
                group = groups[g][t] if g in groups else None
                self.pages.write_tokens(
                    g,
                    layer,
                    at,
                    base=base[t],
                    k=k,
                    v=v,
                    group=group,
                    through=through,
                )
        return slots.places_of(bases)
