"""Requantize: tokens that move to another format, outside of a decode step.

measure      the prompt was read: its numbers decide the FP32 scales of its sequence
settle       the policy has acted on the prompt: its remaining tokens move to their own format
requantize   the policy moves tokens to another format, by their numbers or by their integer codes
"""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.kv.pages import Reader
from minithink.kv.slots import Slots
from minithink.kv.table import Exhausted
from minithink.quant import shrink


class Moves(Slots):
    """Slots whose tokens can move to other formats."""

    def measure(self, row: int) -> None:
        """Take the FP32 scales from the prompt, which was read and is still complete."""
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
        """Move the remaining tokens of a prompt to their own format. The policy has acted on the prompt.

        The first `sink` tokens stay plain. The last tokens, which do not fill a buffer, are quantized too or wait in
        the ring (`Storage.tail`).

        Args:
            row: of the sequence.
            length: tokens of the prompt, evicted ones too.
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
        place = self.place[:, at, :, : self.seen]
        pos = self.positions()[:, at]  # [Lt, 1, Ht, S]
        # tokens that the policy has moved to another format stay there
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
            purpose = f"quantizing a prompt of {length:,} tokens"
            through = self.home[0] if s.shrink else None
            new = self._store(at, valid, values, purpose, None, self.thought, through)
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
                if s.lag:
                    before = (pos == length - 1 - s.buffer)[min(layer, place.shape[0] - 1), 0]  # [Ht, S]
                    self.outgoing[layer, row] = kv[0, :, :, 1].masked_fill(~before[..., None], 0.0).sum(1)
            self.outgoing_at[row] = length - 1 - s.buffer
            self.waiting[row] = length - min(whole, length)
        self.place[:, at, :, : self.seen] = torch.where(
            moving, new, torch.where(waiting, -1 - (pos - whole), place)
        ).to(torch.int32)
        self._release(place, (moving | waiting) & (place >= 0), at)
        self._settled(row)

    def _settled(self, row: int) -> None:
        """Note that the prompt is settled. The plain format is unused then, unless other prompts are being read or
        plain tokens stay."""
        self.reading.discard(row)
        if not self.reading and not self.stays_plain:
            self.used.discard(0)

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
        self.stays_plain |= f == 0
        at = where.any(-1).any(2).any(0).nonzero().flatten()  # rows with such tokens
        if len(at) == 0:
            return
        place = self.place[:, at, :, : self.seen]
        pos = self.positions()[:, at]
        of = self._format_of(place)
        moving = where[:, at, :, : self.seen] & (pos >= 0) & (place >= 0) & (of != f)
        if how == "shrink":
            moving &= of != 0
        n = int(moving.sum(-1).max())
        if n == 0:
            return
        # columns, those of the moving tokens first: [Lt, N, Ht, n]
        column = moving.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :n]
        valid = moving.gather(-1, column)
        old = place.gather(-1, column)
        thought = self.table.thought[torch.where(valid, old // self.table.most, self.table.pages.count).long()]
        new = torch.zeros_like(old, dtype=torch.long)
        done = torch.zeros_like(valid)
        for kind in range(len(self.storage.thoughts)):  # a page holds one thought type
            mine = valid & (thought == kind)
            if not bool(mine.any()):
                continue
            if how == "shrink":
                sources = [g for g in sorted(self.used) if g != f and not self.layouts[g].plain]
                parts = [mine & (of.gather(-1, column) == g) for g in sources]
            else:
                sources = [-1]
                parts = [mine]
            for source, part in zip(sources, parts, strict=True):
                if not bool(part.any()):
                    continue
                kinds = torch.full_like(self.thought, kind)
                try:
                    if how == "shrink":
                        found = self._shrink_into(source, f, at, old, part, kinds)
                    else:
                        found = self._copy_into(f, at, column, part, kinds)
                except Exhausted:
                    if bool(done.any()):
                        self._release(new, done, at)  # of the sources before this one
                    raise
                new = torch.where(part, found, new)
                done = done | part
        lists = self.place[:, at]
        self.place[:, at] = lists.scatter_(-1, torch.where(valid, column, lists.shape[-1] - 1), new.to(torch.int32))
        self._release(old, valid, at)

    def _copy_into(self, f: int, at: Tensor, column: Tensor, valid: Tensor, thought: Tensor) -> Tensor:
        """Quantize the values of tokens in format f → their new places. at: int64 [N], rows; column, valid: [Lt, N,
        Ht, n]; thought: uint8 [B]."""
        read = self.reader(at)

        def values(layer: int) -> tuple[Tensor, Tensor]:
            which = column[min(layer, column.shape[0] - 1)].expand(-1, self.shape.kv_heads, -1)
            k, v = read(layer)
            pick = which[..., None].expand(*which.shape, k.shape[-1])
            return k.gather(2, pick), v.gather(2, pick)

        return self._store(at, valid, values, f"moving tokens to {self.storage.formats[f]}", f, thought)

    def _shrink_into(self, source: int, f: int, at: Tensor, old: Tensor, valid: Tensor, thought: Tensor) -> Tensor:
        """Shrink integers to fewer bits, from their codes alone. Arguments as of `_copy_into`; old: their places."""
        start = self.layouts[source]
        end = self.layouts[f]
        # raises an error if this pair of formats cannot be shrunk, before slots are taken
        shrink(start.k, end.k, self.pool.new_empty(0, start.k_codes), self.side.new_empty(0, start.k_side))
        self._require(at, valid.shape[-1], lambda: valid.sum(-1), "shrinking tokens", f, thought)
        bases = self._allocate_many(at, valid, f, thought)
        old_page = torch.where(valid, old // self.table.most, self.zero_page).long()
        old_slot = torch.where(valid, old % self.table.most, 0).long()
        for layer in range(self.shape.layers):
            t = min(layer, valid.shape[0] - 1)
            index = self._index(source, layer, self._base(source, old_page[t], old_slot[t]))
            codes = self._codes[source][index]
            side = self._sides[source][index]
            k, k_params = self.backend.shrink(start.k, end.k, codes[..., : start.k_codes], side[..., : start.k_side])
            v, v_params = self.backend.shrink(
                start.v, end.v, codes[..., start.k_codes : start.codes], side[..., start.k_side : start.side]
            )
            index = self._index(f, layer, bases[f][t])
            self._codes[f][index, : end.codes] = torch.cat((k, v), dim=-1)
            self._sides[f][index, : end.side] = torch.cat((k_params, v_params), dim=-1)
        return self._places(bases)

    def _store(
        self,
        at: Tensor,
        valid: Tensor,
        values: Reader,
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
            purpose, f, thought: as of `_require`.
            through: as of `_write_tokens`.

        Returns:
            place, int64 [Lt, N, Ht, n], of the valid tokens.

        Raises:
            Exhausted: there is no room; the store is as it was.
        """
        uses = self._require_rows(at, valid, purpose, f, thought)
        self._require(at, valid.shape[-1], lambda: valid.sum(-1), purpose, f, thought)
        bases = self._allocate_many(at, valid, f, thought)
        groups = {g: self._draw_rows(g, own, bases[g], own.numel()) for g, own in uses.items()}
        for layer in range(self.shape.layers):
            t = min(layer, valid.shape[0] - 1)
            k, v = values(layer)
            for g, base in bases.items():
                own = groups[g][t] if g in groups else None
                self._write_tokens(g, layer, at, base[t], k, v, own, through)
        return self._places(bases)
