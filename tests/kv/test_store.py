"""PagedStore against a model of dictionaries: no token is lost or moved, no slot leaks, nothing freed is read.

The model quantizes by itself, a lane's tokens at a time, so that what the store reads back is compared bit for bit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minithink.errors import UsageError
from minithink.kv.contract import BUFFER, SCOPES, Scope, Shape, Storage
from minithink.kv.reading import Reading
from minithink.kv.requantize import Moves
from minithink.kv.store import SAME, PagedStore
from minithink.kv.table import Exhausted
from minithink.quant import Format, parse_pair, shrink
from minithink.quant.int_asymmetric import IntAsymmetric
from minithink.quant.plain import DTYPES, Plain
from tests.compare import assert_same
from tests.kv.poison import poison
from tests.kv.run import append_one, flush, open_now

torch.set_num_threads(1)

LAYERS, ROWS, HEADS, LONGEST = 2, 3, 2, 56

Unit = tuple[int, int, int]  # table layer, row, table head


@dataclass(frozen=True)
class Case:
    """A storage, and the model that it serves."""

    storage: Storage
    dim: int = 16
    dtype: torch.dtype = torch.float32


PM_KVQ = ("int16", "int8:params=fp32", "int4:params=fp32", "int2:params=fp32")
CASES = {
    "plain": Case(Storage(block=4), dim=10),
    "bf16": Case(Storage(("bf16",), block=4), dim=6),
    "wider than the model": Case(Storage(("fp32",), block=2), dtype=torch.bfloat16),
    "nvfp4": Case(Storage(("nvfp4",), block=8), dim=32),
    "one token a page": Case(Storage(("fp8",), block=1), dtype=torch.bfloat16),
    "keys by token": Case(Storage(("int4:by=token/int4",), also=("int2:by=token/int2",), buffer=5, block=4)),
    "short groups kept": Case(Storage(("int2:by=token/int2",), buffer=19, tail="keep", sink=1, block=8)),
    "thoughts": Case(Storage(("ternary", "nvfp4:by=token/nvfp4", "fp8"), prompt=1, buffer=4, block=8)),
    "no buffer": Case(Storage(("int8", "plain", "int4s"), also=("nvfp4",), block=2), dtype=torch.bfloat16),
    "thoughts of one format": Case(Storage(("plain",) * 3, also=("fp8",), block=4)),
    "plain in a buffer": Case(Storage(("plain", "int8"), buffer=3, tail="keep", block=2)),
    "shrink": Case(Storage(PM_KVQ[:3], also=PM_KVQ[3:], buffer=3, tail="keep", sink=2, block=2, shrink=True)),
}


@dataclass
class Token:
    """What the model knows of one token of one unit."""

    format: int  # index into Storage.formats, or BUFFER
    thought: int
    place: int | None = None  # where the store has put it, from when that was first seen
    index: int = 0  # in the ring
    group: int | None = None  # tokens that share a row of key scales
    codes: tuple[tuple[Tensor, Tensor], ...] = ()  # of K and of V: codes and parameters, [l, h, bytes] each


@dataclass
class Sequence_:
    """What the model knows of one row."""

    thought: int
    length: int = 0
    state: str = "reading"  # then "read", then "settled"
    waiting: int = 0
    scale: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # (format, side, layer)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.storage, self.dim, self.dtype = case.storage, case.dim, case.dtype

    @initialize(
        scope=st.sampled_from(SCOPES),
        pages=st.sampled_from([20, 20, 20, 6, 2]),
        groups=st.sampled_from([None, None, 5]),
        columns=st.sampled_from([None, None, 20]),
        seed=st.integers(0, 999),
    )
    def start(self, scope: Scope, pages: int, groups: int | None, columns: int | None, seed: int) -> None:
        self.shape = Shape(LAYERS, ROWS, HEADS, 2 * HEADS, self.dim, 8, scope, torch.device("cpu"))
        lt, b, ht = self.shape.tables
        self.columns, plenty, self.pages = columns, pages == 20, max(3, pages * lt * ht)
        store = PagedStore(
            self.shape,
            self.storage,
            pages=self.pages,
            groups=200 if plenty else groups,
            dtype=self.dtype,
            columns=columns,
        )
        self.store = poison(store)
        plain = Plain(next(name for name, dtype in DTYPES.items() if dtype == self.dtype))
        self.formats = [
            (plain, plain) if name == "plain" else tuple(fmt.fit(self.dim) for fmt in parse_pair(name))
            for name in self.storage.formats
        ]
        self.home = [self.storage.formats.index(name) for name in self.storage.thoughts]  # of each thought type
        self.tokens: dict[Unit, dict[int, Token]] = {u: {} for u in product(range(lt), range(b), range(ht))}
        self.sequences: dict[int, Sequence_] = {}
        # what reading must give, by layer, row, head and position
        self.values = torch.zeros(2, LAYERS, ROWS, HEADS, LONGEST, self.dim, dtype=self.dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.groups = 0  # made so far

    # -- rules

    @rule(data=st.data(), ends=st.booleans())
    def read(self, data: st.DataObject, ends: bool) -> None:
        """Chunks of prompts, of new sequences too, in any order."""
        free = [r for r in range(ROWS) if r not in self.sequences or self.sequences[r].state == "reading"]
        if free:
            rows = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
            self._read(rows, [data.draw(st.integers(1, 9)) for _ in rows])
            for row in rows if ends else ():
                self._finish(row, data)

    @rule(data=st.data(), steps=st.integers(1, 6))
    def generate_more(self, data: st.DataObject, steps: int) -> None:
        """Twice as likely as other rules."""
        self.generate(data, steps)

    @rule(data=st.data(), steps=st.integers(1, 6))
    def generate(self, data: st.DataObject, steps: int) -> None:
        """One token for some rows, a few times; full buffers are quantized at once, if there is room."""
        for row, sequence in self.sequences.items():
            if sequence.state == "read":
                self._settle(row)
        if not self.sequences:
            self._read([0, 2], [4, 9])
        settled = [r for r, s in self.sequences.items() if s.state == "settled"]
        if not settled:
            for row in sorted(self.sequences):
                self._finish(row, data)
            return
        chosen = data.draw(st.lists(st.sampled_from(settled), min_size=1, unique=True))
        for _ in range(steps):
            rows = [r for r in chosen if self.sequences[r].length < LONGEST and not self._full(r)]
            if not rows or not self._append(rows, [1] * len(rows), [self.sequences[r] for r in rows], prompt=False):
                return
            self._flush([r for r in rows if self._full(r)])

    @precondition(lambda self: any(map(self._full, self.sequences)))
    @rule()
    def flush(self) -> None:
        """What did not fit before may fit now."""
        self._flush([r for r in self.sequences if self._full(r)])

    @rule(seed=st.integers(0, 999), share=st.sampled_from([0.1, 0.5, 0.9, 1.0]), row=st.sampled_from([0, 1, 2, None]))
    def evict(self, seed: int, share: float, row: int | None) -> None:
        self._evict(self._mask(seed, share, row))

    @rule(data=st.data(), seed=st.integers(0, 999), share=st.sampled_from([0.1, 0.5, 1.0]), shrinks=st.booleans())
    def requantize(self, data: st.DataObject, seed: int, share: float, shrinks: bool) -> None:
        name = data.draw(st.sampled_from(self.storage.formats))
        self._requantize(name, self._mask(seed, share, None), shrinks)

    @rule(opened=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS), data=st.data())
    def open_segment(self, opened: list[bool], data: st.DataObject) -> None:
        kinds = [data.draw(st.integers(0, len(self.home) - 1)) for _ in range(ROWS)]
        opened = [o and r in self.sequences and self.sequences[r].state == "settled" for r, o in enumerate(opened)]
        open_now(self.store, torch.tensor(opened), torch.tensor(kinds, dtype=torch.uint8))
        for row, kind in enumerate(kinds):
            if opened[row]:
                self.sequences[row].thought = kind

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.sequences)))
        self.store.clear(row)
        del self.sequences[row]
        for _, tokens, _ in self._units(row):
            tokens.clear()

    # -- laws

    @invariant()
    def tokens_are_where_they_were(self) -> None:
        """Lists, places, pages and rows of scales, all of them."""
        if not hasattr(self, "store"):
            return
        store, table = self.store, self.store.slots.table
        pos, place, count = store.lists.pos.tolist(), store.lists.place.tolist(), store.lists.count.tolist()
        formats = store.format().tolist()
        living: dict[int, Token] = {}
        owners: dict[int, tuple[Unit, int, int]] = {}
        for unit, tokens in self.tokens.items():
            t, b, h = unit
            n = len(tokens)
            assert count[t][b][h] == n
            assert pos[t][b][h] == [*tokens, *[-1] * (len(pos[t][b][h]) - n)]
            for token, at, f in zip(tokens.values(), place[t][b][h], formats[t][b][h], strict=False):
                assert f == token.format
                if token.format == BUFFER:
                    assert at == -1 - token.index
                    continue
                assert token.place in (None, at), "a token has moved"
                assert at not in living, "two tokens in one slot"
                token.place, living[at] = at, token
                page, slot = divmod(at, table.stride)
                assert slot < min(table.per_page[f], int(table.filled[page]))
                assert owners.setdefault(page, (unit, f, token.thought)) == (unit, f, token.thought), "mixed page"
        live = table.live[: self.pages].nonzero().tolist()
        assert [page * table.stride + slot for page, slot in live] == sorted(living)
        for page, (_, f, thought) in owners.items():
            assert (int(table.format[page]), int(table.thought[page])) == (f, thought)
        for unit in self.tokens:
            held = [page for page in table.page[unit].tolist() if page != self.pages]
            assert sorted(held) == sorted(page for page, owner in owners.items() if owner[0] == unit)
        assert sorted([*table.free_pages.stack[: table.free_pages.free].tolist(), *owners]) == list(range(self.pages))
        self._check_groups(living)

    def _check_groups(self, living: dict[int, Token]) -> None:
        store, count = self.store, self.store.slots.free_groups.count
        rows: dict[int, int] = {}  # group → row
        uses = Counter[int]()
        for at, token in living.items():
            if token.group is not None:
                row = int(store.slots.group_of[divmod(at, store.slots.table.stride)])
                assert rows.setdefault(token.group, row) == row
                uses[row] += 1
        assert len(set(rows.values())) == len(rows), "two groups share a row"
        assert store.slots.group_uses[:count].tolist() == [uses[row] for row in range(count)]
        assert sorted([*store.slots.free_groups.stack[: store.slots.free_groups.free].tolist(), *uses]) == list(
            range(count)
        )

    @invariant()
    def values_are_what_was_stored(self) -> None:
        """Bit for bit what the model has, and 0 where there is no token; what nobody needs is NaN."""
        if not hasattr(self, "store"):
            return
        store = self.store
        if self.storage.buffer:
            needed = torch.zeros(store.ring.shape[:4], dtype=torch.bool)
            for unit, tokens in self.tokens.items():
                index = [token.index for token in tokens.values() if token.format == BUFFER]
                layers, b, heads = self._lanes(unit)
                needed[layers, b, heads][..., index] = True
            store.ring[~needed] = torch.nan
        pos = store.lists.positions()
        order = torch.tensor([2, 0])
        whole, some = Reading(store), Reading(store, order)
        for layer in range(LAYERS):
            at = pos[min(layer, len(pos) - 1)].expand(-1, HEADS, -1)  # [B, Hkv, S]
            index = at.clamp(min=0).long()[None, ..., None].expand(2, -1, -1, -1, self.dim)
            want = self.values[:, layer].gather(3, index).masked_fill(at[None, ..., None] < 0, 0)
            got = torch.stack(whole(layer))
            if not torch.equal(got, want):
                assert_same(f"layer {layer}", got, want)
        assert_same("rows 2 and 0", torch.stack(some(layer)), want[:, order])

    @invariant()
    def bytes_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        store, dim, lanes = self.store, self.dim, self.shape.sharing
        payload = scales = 0
        groups = set()
        for tokens in self.tokens.values():
            for token in tokens.values():
                if token.format != BUFFER:
                    k, v = self.formats[token.format]
                    payload += lanes * (k.code_bytes(dim) + v.code_bytes(dim))
                    scales += lanes * (v.params_bytes(dim) + (k.params_bytes(dim) if k.by == "channel" else 0))
                    groups.add((token.format, token.group))
        scales += sum(lanes * self.formats[f][0].params_bytes(dim) for f, group in groups if group is not None)
        rows = {unit[1] for unit, tokens in self.tokens.items() if tokens}
        scaled = 4 * LAYERS * sum(fmt.tensor_scaled for pair in self.formats for fmt in pair)
        ledger = store.account(sorted(rows))
        assert (ledger.payload, ledger.scales) == (payload, scales + scaled * len(rows))
        assert ledger.buffers == len(rows) * store.ring.nbytes // ROWS
        assert ledger.total <= sum(x.nbytes for x in store.tensors())
        if self.columns is None:  # otherwise a row whose tokens are all evicted may count as running
            assert store.account() == ledger

    # -- the model

    def _units(self, row: int) -> Iterator[tuple[Unit, dict[int, Token], Tensor]]:
        """Units of a row, their tokens, and their values [2, l, h, LONGEST, D], a view."""
        for unit, tokens in self.tokens.items():
            if unit[1] == row:
                layers, _, heads = self._lanes(unit)
                yield unit, tokens, self.values[:, layers, row, heads]

    def _lanes(self, unit: Unit) -> tuple[slice, int, slice]:
        """Which layers and heads share a unit's table."""
        t, b, h = unit
        layers = slice(None) if self.shape.scope == "sequence" else slice(t, t + 1)
        return layers, b, slice(h, h + 1) if self.shape.scope == "head" else slice(None)

    def _full(self, row: int) -> bool:
        return 0 < self.storage.buffer == self.sequences[row].waiting

    def _by_token(self, f: int) -> bool:
        return f != BUFFER and self.formats[f][0].by == "token"

    def _shrinks(self, token: Token, f: int) -> bool:
        """Whether integers can be shrunk to format f; plain tokens may be asked for, and stay."""
        if token.format in (0, BUFFER, f):
            return True
        source, target = self.formats[token.format][0], self.formats[f][0]
        return isinstance(source, IntAsymmetric) and source.by == "channel" and source.bits > target.bits

    def _mask(self, seed: int, share: float, row: int | None) -> Tensor:
        """Any tokens, and any columns that hold none."""
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(*self.shape.tables, self.store.lists.columns_read, generator=generator) < share
        if row is not None:
            others = [r for r in range(ROWS) if r != row]
            mask[:, others] = False
        return mask

    def _grouped(self, f: int, positions: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
        """Tokens that are quantized together: by token those whose numbers fall into one group, otherwise any."""
        if not self._by_token(f):
            return [list(positions)] if positions else []
        groups: dict[int, list[int]] = {}
        for p, number in zip(positions, numbers, strict=True):
            groups.setdefault(number // self.formats[f][0].group, []).append(p)
        return list(groups.values())

    def _quantize(self, unit: Unit, groups: Iterable[list[int]], f: int, thought: int, chained: bool = True) -> None:
        """What the values of these tokens become."""
        layers, b, heads = self._lanes(unit)
        first = self.home[0] if chained and self.storage.shrink else f
        for group in groups:
            self.groups += 1
            codes: list[tuple[Tensor, Tensor]] = []
            for side in range(2):
                x = self.values[side, layers, b, heads][:, :, group].float()  # [l, h, n, D]
                codes.append(self._encode(self.formats[first][side], x, self._scale(b, first, side, layers)))
                if first != f:
                    codes[side] = shrink(self.formats[first][side], self.formats[f][side], *codes[side])
            for i, p in enumerate(group):
                mine = tuple((c[:, :, i], params[:, :, i]) for c, params in codes)
                of = self.groups if self._by_token(f) else None
                self.tokens[unit][p] = Token(f, thought, group=of, codes=mine)
            self._decode(unit, group, f, codes)

    def _shrink(self, unit: Unit, positions: list[int], f: int) -> None:
        for p in positions:
            token = self.tokens[unit][p]
            pairs = zip(self.formats[token.format], self.formats[f], token.codes, strict=True)
            codes = tuple(shrink(source, target, *c) for source, target, c in pairs)
            self.tokens[unit][p] = Token(f, token.thought, codes=codes)
            self._decode(unit, [p], f, [(c.unsqueeze(2), params.unsqueeze(2)) for c, params in codes])

    def _encode(self, fmt: Format, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """x: [l, h, n, D], one group if by token; scale: [l] → codes and parameters of every token."""
        if fmt.by == "token":
            codes, params = fmt.quantize(x, scale[:, None])
            return codes, params.unsqueeze(2).expand(*codes.shape[:3], -1)
        if isinstance(fmt, Plain):
            x = x.to(self.dtype)
        return fmt.quantize(x, scale[:, None, None])

    def _decode(self, unit: Unit, positions: list[int], f: int, codes: Sequence[tuple[Tensor, Tensor]]) -> None:
        layers, b, heads = self._lanes(unit)
        for side in range(2):
            scale = self._scale(b, f, side, layers)[:, None, None]
            out = self.formats[f][side].dequantize(*codes[side], scale, self.dtype)
            self.values[side, layers, b, heads][:, :, positions] = out

    def _scale(self, row: int, f: int, side: int, layers: slice) -> Tensor:
        return torch.stack([self.sequences[row].scale[f, side, layer] for layer in range(LAYERS)[layers]])

    # -- what takes slots, or gives them back

    def _read(self, rows: list[int], counts: list[int]) -> None:
        sequences = [self.sequences.get(r, Sequence_(self.storage.prompt)) for r in rows]
        if all(s.length + n <= LONGEST // 2 for s, n in zip(sequences, counts, strict=True)):  # noqa: SIM102
            if self._append(rows, counts, sequences, prompt=True):
                self.sequences.update(zip(rows, sequences, strict=True))

    def _finish(self, row: int, data: st.DataObject) -> None:
        """The prompt is read: scales are taken, a policy acts, what is left goes where it stays."""
        if row not in self.sequences or self.sequences[row].state != "reading":
            return
        self.sequences[row].state = "read"
        Moves(self.store).measure(row)
        for f, side, layer in product(range(len(self.formats)), range(2), range(LAYERS)):
            amax = torch.zeros(())
            for unit, tokens, _ in self._units(row):
                if tokens and layer in range(LAYERS)[self._lanes(unit)[0]]:
                    held = self.values[side, layer, row, self._lanes(unit)[2]][:, list(tokens)]
                    amax = amax.maximum(held.float().abs().amax())
            self.sequences[row].scale[f, side, layer] = self.formats[f][side].tensor_scale(amax)

        if data.draw(st.booleans()):
            self._requantize(data.draw(st.sampled_from(self.storage.formats)), self._mask(row, 0.5, row), False)
        if data.draw(st.booleans()):
            self._evict(self._mask(row, 0.3, row))
        self._settle(row)

    def _settle(self, row: int) -> None:
        sequence, s = self.sequences[row], self.storage
        home, size, length = self.home[s.prompt], max(1, s.buffer), sequence.length
        whole = s.sink + max(0, length - s.sink) // size * size
        moving: dict[Unit, list[list[int]]] = {}
        waiting: dict[Unit, list[int]] = {}
        for unit, tokens, _ in self._units(row):
            plain = [p for p, token in tokens.items() if p >= s.sink and token.format == 0]
            waiting[unit] = [p for p in plain if p >= whole and s.tail == "keep" and s.buffer]
            if home:
                rest = [p for p in plain if p not in waiting[unit]]
                moving[unit] = self._grouped(home, rest, [p - s.sink for p in rest])
        if not self._attempt(lambda: Moves(self.store).settle(row, length), home, moving, sequence.thought):
            return
        sequence.state = "settled"
        for unit, groups in moving.items():
            self._quantize(unit, groups, home, sequence.thought)
        for unit, positions in waiting.items():
            for p in positions:
                self.tokens[unit][p] = Token(BUFFER, sequence.thought, index=p - whole)
        sequence.waiting = length - min(whole, length) if s.tail == "keep" and s.buffer else 0

    def _evict(self, drop: Tensor) -> None:
        self.tokens_are_where_they_were()
        gone = {u: [p for p, d in zip(t, drop[u].tolist(), strict=False) if d] for u, t in self.tokens.items()}
        freed = [(u, self.tokens[u][p]) for u, positions in gone.items() for p in positions]
        self.store.evict(drop)
        for unit, positions in gone.items():
            for p in positions:
                del self.tokens[unit][p]
        for unit, token in freed:
            if token.format == 0:  # freed slots hold NaN
                assert token.place is not None
                page, slot = divmod(token.place, self.store.slots.table.stride)
                index = self.store.pages.index(
                    0, unit[0], self.store.pages.base(0, *torch.tensor([[[[page]]], [[[slot]]]]))
                )
                assert self.store.pages.codes[0][index].isnan().all()

    def _requantize(self, name: str, where: Tensor, shrinks: bool) -> None:
        f = self.storage.formats.index(name)
        shrinks = shrinks and isinstance(self.formats[f][0], IntAsymmetric) and self.formats[f][0].by == "channel"
        for unit, tokens in self.tokens.items():
            reading = unit[1] in self.sequences and self.sequences[unit[1]].state == "reading"
            for column, token in enumerate(tokens.values()):
                if reading or (shrinks and not self._shrinks(token, f)):
                    where[unit][column] = False
        moving: dict[int, dict[Unit, list[list[int]]]] = {}  # of each thought type
        for unit, tokens in self.tokens.items():
            moves = [
                p
                for (p, token), w in zip(tokens.items(), where[unit].tolist(), strict=False)
                if w and token.format not in (BUFFER, f) and not (shrinks and token.format == 0)
            ]
            for kind in range(len(self.home)):
                mine = [(p, i) for i, p in enumerate(moves) if tokens[p].thought == kind]
                if mine:
                    groups = self._grouped(f, [p for p, _ in mine], [i for _, i in mine])
                    moving.setdefault(kind, {})[unit] = groups
        needs = Counter[tuple[Unit, int, int]]()
        for kind, units in moving.items():
            needs.update({(u, f, kind): sum(map(len, groups)) for u, groups in units.items()})
        rows = sum(len(g) for units in moving.values() for g in units.values()) if self._by_token(f) else 0
        how, parts = "shrink" if shrinks else "values", 2 if shrinks else len(moving)
        if not self._fits(lambda: Moves(self.store).requantize(where, name, how), needs, rows, parts):
            return
        for kind, units in moving.items():
            for unit, groups in units.items():
                if shrinks:
                    self._shrink(unit, [p for group in groups for p in group], f)
                else:
                    self._quantize(unit, groups, f, kind, chained=False)

    def _append(self, rows: list[int], counts: list[int], sequences: list[Sequence_], prompt: bool) -> bool:
        """New tokens, written layer by layer; False: there was no room."""
        in_ring = not prompt and self.storage.buffer > 0
        needs = Counter[tuple[Unit, int, int]]()
        fits = True
        for row, count, s in zip(rows, counts, sequences, strict=True):
            f = 0 if prompt else self.home[s.thought]
            for unit, tokens, _ in self._units(row):
                fits &= self.columns is None or len(tokens) + count <= self.columns
                if not in_ring:
                    needs[unit, f, s.thought] = count
        lengths = [s.length for s in sequences]

        def call() -> None:
            writer = self.store.append(rows, counts, lengths) if prompt else append_one(self.store, rows, lengths)
            for layer in range(LAYERS):
                writer.write(layer, *x[:, layer].unbind(0))

        x = torch.randn(2, LAYERS, len(rows), max(counts), HEADS, self.dim, generator=self.generator)
        x *= 4.0 ** torch.randint(-3, 3, (*x.shape[:-1], 1), generator=self.generator)
        x = x.to(self.dtype)
        if not fits:
            before = self._snapshot()
            with pytest.raises(UsageError, match=f"fixed to {self.columns}"):
                call()
            self._unchanged(before)
            return False
        if not self._fits(call, needs):
            return False
        for i, (row, count, s) in enumerate(zip(rows, counts, sequences, strict=True)):
            new = list(range(s.length, s.length + count))
            f = BUFFER if in_ring else 0 if prompt else self.home[s.thought]
            self.values[:, :, row, :, new] = x[:, :, i, :count].transpose(2, 3)
            for unit, tokens, _ in self._units(row):
                tokens.update({p: Token(f, s.thought, index=s.waiting) for p in new})
                if f not in (BUFFER, 0):
                    self._quantize(unit, [new], f, s.thought)
            s.length += count
            s.waiting += in_ring
        return True

    def _flush(self, rows: list[int]) -> None:
        if not rows:
            return
        moving: dict[Unit, tuple[int, list[list[int]]]] = {}
        needs = Counter[tuple[Unit, int, int]]()
        groups = 0
        for row in rows:
            f = self.home[self.sequences[row].thought]
            for unit, tokens, _ in self._units(row):
                waiting = [p for p, token in tokens.items() if token.format == BUFFER]
                moving[unit] = f, self._grouped(f, waiting, [tokens[p].index for p in waiting])
                needs[unit, f, self.sequences[row].thought] = len(waiting)
                groups += len(moving[unit][1]) if self._by_token(f) else 0
        if self._fits(lambda: flush(self.store, rows), needs, groups):
            for unit, (f, grouped) in moving.items():
                self._quantize(unit, grouped, f, self.sequences[unit[1]].thought)
            for row in rows:
                self.sequences[row].waiting = 0

    def _attempt(self, call: Callable[[], None], f: int, moving: dict[Unit, list[list[int]]], thought: int) -> bool:
        needs = Counter({(unit, f, thought): sum(map(len, groups)) for unit, groups in moving.items()})
        return self._fits(call, needs, sum(map(len, moving.values())) if self._by_token(f) else 0)

    def _fits(
        self, call: Callable[[], None], needs: Counter[tuple[Unit, int, int]], groups: int = 0, parts: int = 1
    ) -> bool:
        """Do something that takes slots and rows of scales: it works exactly if there are enough, and else it says
        how many are missing and changes nothing. In several parts, the number is that of the part that did not fit,
        and free pages may have changed their order."""
        store, table, pages = self.store, self.store.slots.table, 0
        for (unit, f, thought), count in needs.items():
            own = [page for page in table.page[unit].tolist() if page != self.pages]
            mine = [page for page in own if (int(table.format[page]), int(table.thought[page])) == (f, thought)]
            held = sum((token.format, token.thought) == (f, thought) for token in self.tokens[unit].values())
            pages += -(-max(0, count - (len(mine) * table.per_page[f] - held)) // table.per_page[f])
        free, free_rows = store.slots.table.free_pages.free, store.slots.free_groups.free
        before = self._snapshot()
        if pages <= free and groups <= free_rows:
            call()
            return True
        with pytest.raises(Exhausted) as error:
            call()
        found = re.search(r"needs ([\d,]+) ([a-z ]+) and ([\d,]+) of ([\d,]+) are free", str(error.value))
        assert found, str(error.value)
        needed, what, left = int(found[1]), found[2], int(found[3])
        assert needed > left
        if parts > 1:
            return False
        if groups > free_rows:
            assert (what, needed, left) == ("rows of key scales", groups, free_rows)
        else:
            assert (what, needed, left) == ("pages", pages, free)
        self._unchanged(before)
        return False

    def _snapshot(self) -> tuple[list[Tensor], object]:
        s = self.store
        host = (
            s.lists.longest.copy(),
            s.waiting.copy(),
            s.unsettled.copy(),
            s.slots.used.copy(),
            [x.copy() for x in s.starts],
        )
        return [x.clone() for x in s.tensors()], host

    def _unchanged(self, before: tuple[list[Tensor], object]) -> None:
        tensors, host = self._snapshot()
        assert host == before[1]
        for i, (now, then) in enumerate(zip(tensors, before[0], strict=True)):
            assert torch.equal(now.reshape(-1).view(torch.uint8), then.reshape(-1).view(torch.uint8)), f"tensor {i}"


@pytest.mark.parametrize("case", CASES)
def test_store(case: str) -> None:
    """The storages share the profile's examples."""
    most = settings().max_examples
    share, steps = most // len(CASES), 50 if most <= 100 else 200
    run_state_machine_as_test(
        lambda: StoreMachine(CASES[case]), settings=settings(max_examples=share, stateful_step_count=steps)
    )


@pytest.mark.parametrize(("formats", "most"), [(("plain",), 16), (("ternary",), 16), (("nvfp4", "ternary"), 32)])
def test_slots_have_numbers_of_32_bits(formats: tuple[str, ...], most: int) -> None:
    """One more page than there are, for writes that are masked out."""
    shape = Shape(1, 1, 1, 2, 64, 8, "head", torch.device("meta"))
    store = PagedStore(shape, Storage(formats), pages=2**31 // most - 1, dtype=torch.bfloat16)
    assert store.slots.table.stride == most
    with pytest.raises(UsageError, match=f"of up to {most} slots has more slots than 32 bits can number"):
        PagedStore(shape, Storage(formats), pages=2**31 // most, dtype=torch.bfloat16)


def test_a_segment_begins_with_the_next_token_of_its_row() -> None:
    """`open_segment` and `begin_segments`: rows that bring no token wait, and a row that leaves forgets it."""
    shape = Shape(1, 4, 1, 1, 16, 8, "layer", torch.device("cpu"))
    store = PagedStore(shape, Storage(("plain", "fp8", "nvfp4"), prompt=1), pages=9)
    store.open_segment(torch.tensor([3, 0, 1]), torch.tensor([True, True, False]), torch.tensor([2, 0, 2]).byte())
    assert store.thought.tolist() == [1, 1, 1, 1], "buffers that are full go where they would have gone"
    assert store.next_thought.tolist() == [0, SAME, SAME, 2]
    store.begin_segments(torch.tensor([1, 3, 0]), torch.tensor([True, True, False]))
    assert store.thought.tolist() == [1, 1, 1, 2]
    assert store.begun[[1, 3, 0]].tolist() == [SAME, 2, SAME]
    assert store.next_thought.tolist() == [0, SAME, SAME, SAME]
    store.begin_segments(torch.tensor([0, 3]), torch.tensor([True, True]))
    assert store.thought.tolist() == [0, 1, 1, 2]
    assert store.begun[[0, 3]].tolist() == [0, SAME], "once"
    store.open_segment(torch.tensor([3]), torch.tensor([True]), torch.tensor([0]).byte())
    store.clear(3)
    assert (store.thought.tolist()[3], store.next_thought.tolist()[3]) == (1, SAME)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:  # no view, not in place
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("case", ["plain", "thoughts", "short groups kept"])
def test_a_prompt_costs_memory_for_its_own_row_only(case: str) -> None:
    """What is made while one prompt is read and settled does not grow with the rows of the store."""

    def largest(rows: int) -> int:
        shape = Shape(1, rows, HEADS, HEADS, 16, 8, "head", torch.device("cpu"))
        store = PagedStore(shape, CASES[case].storage, pages=100, groups=60, columns=40, table_width=50)
        kv = torch.randn(2, 1, 37, HEADS, 16)
        with Largest() as seen:
            store.append([1], [37], [0]).write(0, *kv)
            Moves(store).settle(1, 37)
        return seen.elements

    assert largest(2) == largest(64)


def test_slots_are_numbered_as_the_example_says() -> None:
    """The example is at the top of `minithink/kv/slots.py`."""
    shape = Shape(1, 1, 2, 2, 16, 8, "layer", torch.device("cpu"))
    store = PagedStore(shape, Storage(thoughts=("int4",), block=8), pages=6, dtype=torch.bfloat16)
    pages = store.pages
    assert [lay.slots for lay in pages.layouts] == [2, 8]
    assert store.slots.table.stride == 8
    page = torch.tensor([[[5]]])
    slot = torch.tensor([[[1]]])
    b = pages.base(0, page, slot)
    d = pages.base(1, page - 3, slot + 2)
    assert [int(b), int(d)] == [21, 35]
    assert pages.index(0, 0, b).flatten().tolist() == [21, 23]
    assert pages.index(1, 0, d).flatten().tolist() == [35, 43]
    assert int(store.slots.places_of({0: b})) == 41
    assert int(store.slots.places_of({1: d})) == 19
    assert store.slots.format_of(torch.tensor([-2])).tolist() == [BUFFER]
