"""The recorder writes a trace of what happens in the cache of a manager (`format.py` describes the file).

    recorder = Recorder(Path("run.trace"), engine.tokenizer)
    engine.generate(question, policy="rkv", budget=384, recorder=recorder)
    recorder.close()

The manager calls the recorder (`kv/recorder.py`, `Recorder`) at joins, evictions and finished steps, and with the
scores that policies note. The recorder changes nothing, and no token depends on it. It reads the ledger after every
step, and the formats of tokens if some may have moved. It counts the seconds that it takes. On a GPU with a recorder,
policies decide kernel by kernel, and every step waits until the host has read what changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from minithink.kv.contract import UNLIMITED, Edit, Evict, OpenSegment, Policy, Requantize, SetBudget, name_of
from minithink.kv.manager import KVManager
from minithink.kv.stack import members
from minithink.kv.view import View
from minithink.text.tokenizer import TextStream, Tokenizer
from minithink.trace.format import ARRAYS, GONE, KINDS, VERSION, WAITS, Array, Head, Writer, as_json, pack
from minithink.trace.format import check_place as check_place

PART_STEPS, PART_EVENTS = 256, 2**16  # a part is written after so many steps or events
Hook = TypeVar("Hook", bound=Callable[..., None])


def timed(hook: Hook) -> Hook:
    """A method of the recorder that adds the time it takes to `seconds`."""

    @wraps(hook)
    def run(self: Recorder, *arguments: Any) -> None:
        begin = time.perf_counter()
        try:
            hook(self, *arguments)
        finally:
            self.seconds += time.perf_counter() - begin

    return run  # type: ignore[return-value]


@dataclass
class _Sequence:
    """A sequence that is recorded and has not ended."""

    number: int
    row: int
    prompt: int
    format: Array  # uint8 [units, capacity]: of every token; GONE: the unit does not hold it
    text: TextStream | None
    thinks: bool
    thought: int
    length: int = 0  # tokens that were fed
    waiting: int = 0  # tokens in the full-precision buffer
    scored: float = -math.inf  # the step of the last snapshot
    snapshot: tuple[int, Array, Array] | None = None  # of this step: author, positions, ranks
    evicted: list[tuple[Array, Array, Array, Array]] = field(
        default_factory=list
    )  # in this step: unit, pos, by, score
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in ARRAYS})  # not written yet
    whole: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ARRAYS, 0))  # entries up to the last step
    events: int = 0

    def mark(self) -> None:
        """Note that a step is complete: if Ctrl-C comes within the next one, that one is not written."""
        self.whole = {name: len(parts) for name, parts in self.columns.items()}


class Recorder:
    """Records some sequences of one manager, see `KVManager.recorder`."""

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer | None = None,
        *,
        about: Mapping[str, Any] | None = None,
        sequences: Collection[int] | None = None,
        score_every: int = 32,
    ) -> None:
        """
        Args:
            path: of the file; an earlier one is replaced.
            tokenizer: for the text of the tokens; None: the trace has no text.
            about: values, as JSON knows them, that are shown with the trace: the model, the policy, …
            sequences: numbers of the sequences that are recorded; None: all.
            score_every: generated tokens between two snapshots of a policy's scores. Scores of evicted tokens are
                kept in any case.

        Raises:
            MinithinkError: the file cannot be written; later too, when the disk is full.
        """
        self.tokenizer = tokenizer
        self.about = dict(about or {})
        self.sequences = sequences
        self.score_every = score_every
        self.seconds = 0.0  # time taken
        self.events = 0  # evictions and moves
        self.steps = 0  # of all sequences
        self._file = Writer(path)
        self._manager: KVManager | None = None
        self._of_row: dict[int, _Sequence] = {}
        self._scores: dict[int, Tensor] = {}  # of this step, by the policy's id
        self._closed = False

    # -- what the manager calls

    @timed
    def joined(self, manager: KVManager, seq: int, row: int) -> None:
        """A sequence has joined, in this row."""
        self._of_row.pop(row, None)
        if self._manager is None:
            head = _head(manager, self.about)
            self._manager = manager
            self._authors = {id(policy): i for i, policy in enumerate(members(manager.policy))}
            self._units = head.units
            self._file.chunk(b"HEAD", as_json({"version": VERSION, **vars(head)}))
        elif manager is not self._manager:
            raise ValueError("a recorder belongs to one manager")
        if self.sequences is not None and seq not in self.sequences:
            return
        record = manager.sequences.at(row)
        s = self._of_row[row] = _Sequence(
            seq,
            row,
            record.prompt,
            np.full((self._units, record.capacity), GONE, dtype=np.uint8),
            self.tokenizer.stream() if self.tokenizer else None,
            record.thinking,
            manager.store.storage.prompt,
        )
        self._budget(s, 0)

    @timed
    def noted(self, step: View, policy: Policy, score: Tensor, where: Tensor | None) -> None:
        """A policy has noted its scores of the tokens; `where`: tokens that have a score."""
        self._scores[id(policy)] = score
        pos = None
        for row, s in self._of_row.items():
            if max(0, s.length + 1 - s.prompt) - s.scored < self.score_every:  # one more token than was recorded yet
                continue
            pos = step.pos() if pos is None else pos
            own = pos[:, row].flatten(0, 1).cpu().numpy()
            has = own >= 0
            if where is not None:
                has &= where[:, row].flatten(0, 1).cpu().numpy()
            if has.any():
                # What a score means differs between policies, and its scale between heads: their order is comparable.
                value = np.where(has, score[:, row].flatten(0, 1).float().cpu().numpy(), np.inf)
                order = value.argsort(-1, kind="stable").argsort(-1, kind="stable")
                share = order / np.maximum(1, has.sum(-1, keepdims=True) - 1)
                sums, counts = (np.bincount(own[has], x) for x in (share[has], None))
                at = counts.nonzero()[0]
                s.snapshot = self._authors[id(policy)], at, 255 * sums[at] / counts[at]

    @timed
    def evicting(self, step: View, edits: Sequence[tuple[Policy, Edit]], drop: Tensor) -> None:
        """Tokens are about to be evicted. edits: of this step, with their policies; drop: the tokens."""
        pos = step.pos()
        authors = list(dict.fromkeys(self._authors[id(p)] for p, edit in edits if isinstance(edit, Evict)))
        for row, s in self._of_row.items():
            own = pos[:, row].flatten(0, 1).cpu().numpy()
            going = drop[:, row].flatten(0, 1).cpu().numpy() & (own >= 0)
            if not going.any():
                continue
            unit, column = going.nonzero()
            by = np.full(len(unit), authors[0], dtype=np.uint8)
            if len(authors) > 1:  # a token that several policies drop counts for the first one
                for policy, edit in reversed(edits):
                    if isinstance(edit, Evict):
                        by[_mask(edit, drop, row)[unit, column]] = self._authors[id(policy)]
            score = np.full(len(unit), np.nan, dtype=np.float32)
            for policy, _ in edits:
                if (noted := self._scores.get(id(policy))) is not None:
                    value = noted[:, row].flatten(0, 1).float().cpu().numpy()[unit, column]
                    score = np.where(by == self._authors[id(policy)], value, score)
            s.evicted.append((unit, own[unit, column], by, score))

    @timed
    def stepped(
        self, rows: Sequence[int], counts: Sequence[int], ids: Sequence[int], edits: Sequence[tuple[Policy, Edit]]
    ) -> None:
        """A step is over, in which these rows took part with so many tokens each. ids: of these tokens."""
        self._scores.clear()
        manager = self._manager
        kinds = {type(edit) for _, edit in edits}
        at = 0
        assert manager is not None
        for row, count in zip(rows, counts, strict=True):
            if (s := self._of_row.get(row)) is not None:
                self._feed(s, ids[at : at + count] or [-1] * count)
                if s.length >= s.prompt:
                    self._step(manager, s, s.length - s.prompt, kinds)
                s.mark()
                if len(s.columns["thinks"]) >= PART_STEPS or s.events >= PART_EVENTS:
                    self._write(s)
            at += count

    @timed
    def left(self, seq: int) -> None:
        """A sequence is about to leave: write the steps that are not written yet."""
        for row, s in list(self._of_row.items()):
            if s.number == seq:
                self._write(s, last=True)
                del self._of_row[row]

    # -- the file

    def close(self) -> None:
        """Write the steps that are not written yet, and what recording took. Traces of running sequences end here."""
        if self._closed:
            return
        self._closed = True
        begin = time.perf_counter()
        for s in self._of_row.values():
            self._write(s, last=True)
        self._of_row.clear()
        self.seconds += time.perf_counter() - begin
        if self._manager is not None:
            cost = {"seconds": round(self.seconds, 4), "steps": self.steps, "events": self.events}
            self._file.chunk(b"DONE", as_json(cost))
        self._file.close()

    @property
    def size(self) -> int:
        """Bytes written."""
        return self._file.size

    # -- one sequence

    def _feed(self, s: _Sequence, ids: Sequence[int]) -> None:
        pieces = [s.text.put(i).encode() if s.text and i >= 0 else b"" for i in ids]
        s.columns["ids"] += ids
        s.columns["pieces"] += map(len, pieces)
        s.columns["text"].append(np.frombuffer(b"".join(pieces), dtype=np.uint8))
        s.length += len(ids)

    def _step(self, manager: KVManager, s: _Sequence, t: int, kinds: Collection[type[Edit]]) -> None:
        """The sequence's step t is over. kinds: of the edits in this step."""
        store = manager.store
        c = s.columns
        row = s.row
        storage = store.storage
        own = slice(0, s.length) if t == 0 else s.length - 1
        home = storage.formats.index(storage.thoughts[s.thought])
        s.format[:, own] = 0 if t == 0 else WAITS if storage.buffer else home
        self._evict(s, t)
        waiting = store.waiting[row]
        if t == 0 or Requantize in kinds or (storage.buffer and waiting != s.waiting + 1):
            self._moved(manager, s, t)
        s.waiting = waiting
        thinks = manager.sequences.at(row).thinking
        c["thinks"].append(int(thinks if t == 0 else s.thinks or thinks))  # tags belong to the thinking
        c["thought"].append(s.thought)
        s.thinks = thinks
        ledger = manager.account(s.number)
        c["bytes"] += (getattr(ledger, kind) for kind in KINDS)
        if OpenSegment in kinds:
            s.thought = int(store.thought[row])
        if SetBudget in kinds:
            self._budget(s, t)
        if s.snapshot is not None:
            by, at, rank = s.snapshot
            for name, value in (("score_step", t), ("score_by", by), ("score_count", len(at))):
                c[name].append(value)
            c["score_pos"].append(at)
            c["rank"].append(rank.round())
            s.scored = t
            s.snapshot = None
        self.steps += 1

    def _evict(self, s: _Sequence, t: int) -> None:
        for unit, pos, by, score in s.evicted:
            s.format[unit, pos] = GONE
            for name, x in zip(("unit", "pos", "by", "score"), (unit, pos, by, score), strict=True):
                s.columns[f"evict_{name}"].append(x)
            s.columns["evict_step"].append(np.full(len(pos), t))
            self._count(s, len(pos))
        s.evicted.clear()

    def _moved(self, manager: KVManager, s: _Sequence, t: int) -> None:
        """Record tokens whose format has changed."""
        pos = manager.store.lists.positions()[:, s.row].flatten(0, 1).cpu().numpy()
        now = manager.store.format()[:, s.row].flatten(0, 1).cpu().numpy()
        unit, column = (pos >= 0).nonzero()
        pos = pos[unit, column]
        now = now[unit, column]
        moved = s.format[unit, pos] != now
        unit = unit[moved]
        pos = pos[moved]
        now = now[moved]
        s.format[unit, pos] = now
        for name, x in (("step", np.full(len(pos), t)), ("unit", unit), ("pos", pos), ("to", now)):
            s.columns[f"move_{name}"].append(x)
        self._count(s, len(pos))

    def _budget(self, s: _Sequence, t: int) -> None:
        assert self._manager is not None
        each = np.stack([b[:, s.row].flatten().cpu().numpy() for b in self._manager.budgets.values()]).min(0)
        s.columns["budget_step"].append(t)
        s.columns["budget"].append(np.where(each >= UNLIMITED, -1, each))

    def _count(self, s: _Sequence, events: int) -> None:
        s.events += events
        self.events += events

    def _write(self, s: _Sequence, last: bool = False) -> None:
        """Write a part: all complete steps that are not written yet. last: no more parts of this sequence follow."""
        c = {name: parts[: s.whole[name]] for name, parts in s.columns.items()}
        broken = any(len(c[name]) < len(parts) for name, parts in s.columns.items())
        if last and not broken and s.text and c["pieces"] and (rest := s.text.flush().encode()):
            c["pieces"][-1] += len(rest)
            c["text"].append(np.frombuffer(rest, dtype=np.uint8))
        if not any(c.values()):
            return
        arrays = {}
        for name, (dtype, _) in ARRAYS.items():
            parts = c[name]
            joined = np.concatenate(parts) if parts and isinstance(parts[0], np.ndarray) else np.array(parts)
            arrays[name] = joined.astype(dtype)
        content = pack({"sequence": s.number, "prompt": s.prompt}, arrays)
        # First, so that nothing is ever written twice.
        s.columns = {name: [] for name in ARRAYS}
        s.events = 0
        s.mark()
        self._file.chunk(b"PART", content)


def _head(manager: KVManager, about: dict[str, Any]) -> Head:
    shape = manager.shape
    storage = manager.store.storage
    return Head(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        scope=shape.scope,
        policies=[name_of(p) for p in members(manager.policy)],
        formats=list(storage.formats),
        thoughts=[storage.formats.index(name) for name in storage.thoughts],
        thought_names=list(storage.names),
        prompt_thought=storage.prompt,
        buffer=storage.buffer,
        full_bytes=manager.config.kv_bytes_per_token(manager.dtype.itemsize),
        about=about,
    )


def _mask(edit: Evict, drop: Tensor, row: int) -> Array:
    """The tokens of a row that one edit drops: bool [units, S]."""
    whole = np.zeros((drop.shape[0], *drop.shape[2:]), dtype=bool)
    if edit.layer is None:
        whole[:] = edit.drop[:, row].cpu().numpy()
    else:
        whole[min(edit.layer, len(whole) - 1)] = edit.drop[row].cpu().numpy()
    return whole.reshape(-1, whole.shape[-1])
