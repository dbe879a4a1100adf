"""KVManager: the step protocol, and all that is common to the policies.

A decode step takes one token of each of some sequences. Its parts, in order:

    prepare   the host refuses what does not fit; `batch` tells what it knows of the rows
    begin     slots are taken
    attend    (per layer) rotate, append, attend; keep what a policy asked to see
    tap       (per layer) the residual stream passes by: steer it, keep it if asked
    due       which rows the policy will act on
    advance   the host counts the tokens
    decide    the policy acts on the rows that are due, its edits are applied
    flush     full buffers are quantized
    close     the step is over

`begin` to `due`, `decide` and `flush` read everything from tensors: `minithink/loop.py` records them as CUDA graphs,
or calls them. The others run on the host.

A prompt is read by `begin_step`, `attend`, `tap` and `end_step`, which take a generated token each, too, and then do
all of the above. A prompt may come in chunks; until the last one it stays unedited and in full precision, then the
policy acts once, and the remaining tokens are stored in their own format.

Append-only during the forward pass, edit-only between steps: the policy sees the cache as the forward pass left it.
Tokens are moved to other formats, then evicted, then full buffers are quantized with the thought type of the segment
that has run until now, then new segments begin. Every sequence has its own clock, the number of its generated tokens
in the cache.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.config import ModelConfig
from minithink.errors import UsageError
from minithink.kv.batch import FIELDS, Batch
from minithink.kv.contract import (
    Demand,
    Edit,
    Evict,
    OpenSegment,
    Policy,
    Requantize,
    Schedule,
    See,
    SetBudget,
    Shape,
    Stack,
)
from minithink.kv.ledger import Ledger, Told
from minithink.kv.observe import Observations
from minithink.kv.pages import Reading, layouts
from minithink.kv.store import SAME, PagedStore, Writer
from minithink.kv.view import View
from minithink.model import Rope
from minithink.ref.attention import of_any_length
from minithink.ref.decode_attention import decode_probabilities, group_reduce

UNLIMITED = 2**30  # a budget that nothing exceeds
NARROWEST = 256  # columns, where they follow the lanes


@dataclass
class _Row:
    """What the host knows of one sequence."""

    seq: int
    prompt: int  # tokens
    thinking: bool
    capacity: int  # tokens that it may become
    length: int = 0  # tokens seen, evicted ones too

    @property
    def clock(self) -> int:
        """Generated tokens in the cache; negative while the prompt is read."""
        return self.length - self.prompt


@dataclass
class _Group:
    """Sequences that go together. A generation asks for the same ones step after step."""

    seqs: list[int]
    rows: list[int]
    records: list[_Row]
    constant: np.ndarray  # int64 [3, N]: rows, lengths of the prompts, numbers of the sequences
    whole: bool = False  # these are all rows, in order
    steps: int = 0  # of one token each, that all of them may still take, as far as was looked


@dataclass
class _Step:
    """One decode step."""

    batch: Batch
    writer: Writer
    read: Reading
    cos: Tensor
    sin: Tensor
    due: Sequence[Demand]  # what is observed
    active: Tensor | None  # bool [N]: the rows that take part; None: all
    near: tuple[Tensor, Tensor, Tensor] | None = None  # pulled tokens [Lt, N, Ht, S], cos and sin of their query
    # What the host knows; empty where the step is recorded.
    seqs: Sequence[int] = ()
    rows: Sequence[int] = ()
    tokens: Sequence[int] = ()
    known: Batch | None = None  # the batch on the host
    told: bool = True  # whether the tokens are known

    @property
    def counts(self) -> list[int]:
        """New tokens of each row."""
        return [1] * len(self.rows)


@dataclass
class _Read:
    """One forward pass that reads prompts."""

    rows: list[int]
    records: list[_Row]
    counts: list[int]
    tokens: Sequence[int]  # all new tokens, one sequence after the other; empty: they were not told
    writer: Writer
    at: Tensor  # int64 [N]: the rows
    cos: Tensor
    sin: Tensor
    each: Tensor  # int64 [N, longest]: of every prompt the tokens' rows; the last one's behind its end
    masked: bool  # does attention need a mask: later chunks of a prompt
    due: Sequence[Demand]


NOBODY = _Group([], [], [], np.zeros((3, 0), dtype=np.int64))


class Recorder(Protocol):
    """Who is told what happens in a cache, see `minithink/trace/`. It changes nothing."""

    def joined(self, manager: KVManager, seq: int, row: int) -> None:
        """A sequence has come."""

    def noted(self, step: View, policy: Policy, score: Tensor, where: Tensor | None) -> None:
        """A policy says what it thinks of the tokens, see `Step.note`."""

    def evicting(self, step: View, edits: Sequence[tuple[Policy, Edit]], drop: Tensor) -> None:
        """Tokens go, bool [Lt, B, Ht, S], of these edits and whose they are. They are in the cache still."""

    def stepped(
        self, rows: Sequence[int], counts: Sequence[int], ids: Sequence[int], edits: Sequence[tuple[Policy, Edit]]
    ) -> None:
        """A step of these rows is over, with so many new tokens each and all of their ids (none: nobody told). The
        cache is as the next step will find it."""

    def left(self, seq: int) -> None:
        """A sequence is about to go."""


class KVManager:
    """Keys and values of up to `rows` sequences under one policy."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        policy: Policy,
        *,
        rows: int,
        tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: Backend = REFERENCE,
        prompt: int | None = None,
        prompts: int | None = None,
        think_ids: tuple[int | None, int | None] = (None, None),
        pages: int | None = None,
        columns: int | Literal["fit"] | None = None,
        poison: bool = False,
    ) -> None:
        """
        Args:
            policy: decides what stays; it belongs to this manager from now on.
            rows: sequences at once.
            tokens: the longest a sequence may become, prompt and answer; the pool is made for `rows` of these, held
                as the policy holds them.
            prompt: the longest prompt; None: it may be all of `tokens`.
            prompts: how many are read at once, in full precision; None: all rows may.
            think_ids: the tokens that open and close the think stage; without them a sequence always thinks.
            pages: of the pool; None: what the worst case needs.
            columns: fix the width of what is read, so that no shape depends on what the lanes hold; "fit": all
                tensors have the worst case's width, and what is read is a power of two that the lanes fit into.
            poison: see PagedStore.
        """
        self.config, self.rope, self.policy, self.backend = config, rope, policy, backend
        self.device, self.dtype, self.think_ids = torch.device(device), dtype, think_ids
        c = config
        self.shape = Shape(
            c.num_layers, rows, c.num_kv_heads, c.num_heads, c.head_dim, c.hidden_size, policy.scope, self.device,
            tokens,
        )  # fmt: skip
        self.prompt = prompt = tokens if prompt is None else prompt
        need = needs(policy, c.head_dim, dtype, tokens, prompt)
        units = self.shape.tables[0] * self.shape.tables[2]  # of a row
        if pages is None:
            pages = units * (rows * need.pages + (rows if prompts is None else prompts) * need.prompt_pages)
        self._fits = columns == "fit"
        if columns == "fit":
            columns = need.width
        self.width = need.width if columns is None else columns  # of the lists
        self.store = PagedStore(
            self.shape, policy.storage, pages=pages, scale_rows=units * rows * need.scale_rows, dtype=dtype,
            columns=columns, width=need.width, table_width=4 if columns is None else need.pages + need.prompt_pages,
            backend=backend, poison=poison,
        )  # fmt: skip
        policy.setup(self.shape)
        self.observations = Observations(self.store, policy.demands, self.width)
        self.rows: list[_Row | None] = [None] * rows
        self._row_of: dict[int, int] = {}
        self._last = NOBODY  # see `_of`
        self.budgets = {
            id(p): torch.full(self.shape.tables, UNLIMITED, dtype=torch.int32, device=self.device)
            for p in members(policy)
        }
        self.steers = any(type(p).steer is not Policy.steer for p in members(policy))
        self.deciding = tuple(p for p in members(policy) if type(p).decide is not Policy.decide)
        self.recorder: Recorder | None = None  # to be set before those join that it records
        self._pass: _Step | _Read | None = None
        self._edits: list[tuple[Policy, Edit]] = []  # of the last decision, for a recorder
        self._opened = False  # were segments opened that have not begun, as far as the host knows
        self._full: list[int] = []  # rows whose buffers are being quantized
        self._waiting_prompts: list[int] = []  # rows whose prompt is read and not stored yet

    # -- sequences come and go

    def check(self, prompt: int, budget: int | None = None) -> None:
        """Refuse a budget that a protected prompt does not fit into. UsageError: says what would be enough."""
        check_budget(self.policy, prompt, budget)

    @torch.inference_mode()
    def join(
        self, seq: int, capacity: int, prompt: int = 0, thinking: bool = True, budget: int | None = None
    ) -> None:
        """A new sequence.

        Args:
            seq: its number.
            capacity: tokens that it may become at most (the pool was made for `tokens`).
            prompt: tokens of its prompt; the policy acts when they are read.
            thinking: whether the prompt ends inside the think stage.
            budget: for this sequence alone; None: the policy's own.
        """
        if seq in self._row_of:
            raise ValueError(f"sequence {seq} is in the cache already")
        free = [row for row, taken in enumerate(self.rows) if taken is None]
        if not free:
            raise ValueError(f"all {len(self.rows)} rows are taken; sequence {seq} must wait")
        if self.store.columns is not None and prompt > self.prompt:  # tables would grow, and addresses change
            raise ValueError(f"sequence {seq} has a prompt of {prompt} tokens, and room was made for {self.prompt}")
        self.check(prompt, budget)
        row = free[0]
        self.rows[row], self._row_of[seq] = _Row(seq, prompt, thinking or None in self.think_ids, capacity), row
        self._last = NOBODY
        for policy in members(self.policy):
            limit = policy.budget if budget is None else budget
            self.budgets[id(policy)][:, row] = UNLIMITED if limit is None else limit
        self.policy.reset(row)
        self.observations.reset(row)
        if self.recorder is not None:
            self.recorder.joined(self, seq, row)

    @torch.inference_mode()
    def leave(self, seq: int) -> None:
        """Free a sequence's memory."""
        if self.recorder is not None:
            self.recorder.left(seq)
        row = self._row_of.pop(seq)
        self.rows[row], self._last = None, NOBODY
        self._waiting_prompts = [r for r in self._waiting_prompts if r != row]
        self.store.clear(row)

    def length(self, seq: int) -> int:
        """Tokens that the sequence has seen; what is left of them is `held`."""
        return self._row(self._row_of[seq]).length

    def held(self, seq: int) -> int:
        """Tokens that the fullest lane of a sequence holds."""
        return int(self.store.count[:, self._row_of[seq]].max())

    # -- a decode step

    @torch.inference_mode()
    def prepare(self, seqs: Sequence[int]) -> None:
        """Before a decode step of these sequences: refuse what does not fit, make the lists wide enough.

        Raises:
            Exhausted: the pool is full, or too small for what still waits from the step before; nothing has changed.
            UsageError: a lane is full; nothing has changed.
        """
        group = self._of(seqs)
        if not group.steps:
            self._announced(seqs, [1] * len(seqs))
            r = group.records[0]
            if r.clock < 0:
                raise ValueError(f"sequence {r.seq} generates, and has read {r.length} of {r.prompt} prompt tokens")
            group.steps = min(r.capacity - r.length for r in group.records)
        self._store_what_waits()
        self.fit_columns(1)
        self.store.require(group.rows)
        self.store.used.update(self.store.appends)

    def batch(self, seqs: Sequence[int], tokens: Sequence[int]) -> Batch:
        """What the host knows of a step that feeds these tokens, on the host."""
        group = self._of(seqs)
        values = np.zeros((len(FIELDS), len(tokens)), dtype=np.int64)
        values[0], values[3], values[7] = group.constant
        values[1] = 1
        values[2] = [r.length + 1 for r in group.records]
        values[4], values[5] = self._think(group.records, tokens), tokens
        if self.store.storage.buffer:
            values[6] = [self.store.waiting[row] for row in group.rows]
        return Batch(torch.from_numpy(values), group.whole)

    @torch.inference_mode()
    def begin(self, batch: Batch, due: Sequence[Demand] | None = None) -> None:
        """Take slots for the tokens of a step. due: what is observed, see `demands_due`; None: all demands."""
        at, active, position = batch.row, batch.active, batch.length - 1
        if self._opens:
            self.store.begin_segments(at, active)
        writer = self.store.take(batch)
        if self.store.compaction:
            self.store.compaction.start()
        cos, sin = self.rope.at(position)
        read = self.store.reader(None if batch.whole else at, batch.length)
        self._pass = now = _Step(
            batch, writer, read, cos, sin, self.policy.demands if due is None else due,
            None if self.store.columns is None else active,
        )  # fmt: skip
        if self.policy.pull:
            self._pull(now)

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Append and attend. qk: [n, Hq + Hkv, D], unrotated, v: [n, Hkv, D]; returns [n, Hq, D]."""
        now = self._now
        if isinstance(now, _Read):
            return self._attend_prompts(layer, qk, v, now)
        if self.store.compaction:
            self.store.compaction.wait(layer)
        raw, k = qk.split_with_sizes((self.config.num_heads, self.config.num_kv_heads), dim=1)
        q = self.backend.append(raw, k, v, now.cos, now.sin, now.writer, layer)
        self.observations.keep_queries(layer, q, now.batch.row, now.batch.length - 1)
        return self._decode(layer, raw, q, now)

    def _decode(self, layer: int, raw: Tensor, q: Tensor, now: _Step) -> Tensor:
        """Attention of one new token each, over whatever the lanes hold. raw, q: [N, Hq, D]."""
        asked = self.observations.asked(now.due, layer)
        if now.near is not None or self.store.storage.lag:
            return self._decode_dense(layer, raw, q, now, asked)
        for group in asked or (None,):
            attended, mass = self.backend.paged_attention(q, now.read, layer, group)
            if group is not None and mass is not None:
                self._keep_weights(layer, group, asked[group], now, mass)
        return attended

    def _decode_dense(self, layer: int, raw: Tensor, q: Tensor, now: _Step, asked: dict[str, See]) -> Tensor:
        """The same over dense copies of keys and values, for what no kernel reads in place: pulled tokens, and values
        that lag. raw: [N, Hq, D], the unrotated queries."""
        (k, v), valid = now.read(layer), now.read.valid(layer)  # valid: [N, Ht, S]
        if now.near is None and not asked:
            return self.backend.decode_attention(q, k, v, valid)
        n, hq, d = q.shape
        grouped = q.view(n, k.shape[1], -1, d)
        logits = grouped @ k.transpose(-1, -2) / d**0.5  # [N, Hkv, g, S]
        if now.near is not None:
            near, cos, sin = (x[min(layer, len(x) - 1)] for x in now.near)
            cos, sin = (x.expand(-1, k.shape[1], -1).reshape(-1, 1, d) for x in (cos, sin))  # [N·Hkv, 1, D]
            closer = self.backend.rope(raw.reshape(n * k.shape[1], -1, d), cos, sin).view(grouped.shape)
            logits = torch.where(near.unsqueeze(2), closer @ k.transpose(-1, -2) / d**0.5, logits)
        for group, what in asked.items():
            self._keep_weights(layer, group, what, now, group_reduce(logits, valid, group))
        if now.near is None:  # the output must not depend on whether it is observed
            return self.backend.decode_attention(q, k, v, valid)
        p = decode_probabilities(logits, valid)
        return (p.to(v.dtype) @ v).view(n, hq, d)

    def _keep_weights(self, layer: int, group: str, what: See, now: _Step, mass: Tensor) -> None:
        self.observations.keep_weights(layer, group, what, now.batch.row, now.active, mass)

    def _pull(self, now: _Step) -> None:
        """Tokens below `pull` are attended as if they stood directly before the next one that is held."""
        pull, pos = self.policy.pull, now.read.pos
        others = torch.where(pos >= pull, pos, UNLIMITED).amin(-1)  # [Lt, N, Ht]
        gap = torch.where(others < UNLIMITED, others - pull, 0).long()
        at = ((now.batch.length - 1)[None, :, None] - gap).clamp(min=0)
        cos, sin = self.rope.at(at.flatten())  # [Lt·N·Ht, 1, D]
        near = (pos >= 0) & (pos < pull)
        now.near = near, cos.view(*at.shape, -1), sin.view(*at.shape, -1)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Steer the residual stream, and keep what is due. hidden: [n, d]."""
        now = self._now
        if isinstance(now, _Read):
            for _ in self.observations.of(now.due, See.HIDDEN, layer):
                last = torch.tensor(now.counts, device=self.device).cumsum(0) - 1
                self.observations.keep_hidden(layer, hidden[last], now.at, None)
            return hidden
        at = now.batch.row
        if self.steers:  # the policy is shown all rows, before the step's tokens are counted
            values = now.batch.values.new_zeros(len(FIELDS), len(self.rows))
            values[0] = torch.arange(len(self.rows), device=self.device)
            values[:, at] = now.batch.values
            values[2, at] -= 1
            whole = hidden.new_zeros(len(self.rows), hidden.shape[-1]).index_copy(0, at, hidden)
            hidden = self.policy.steer(self.view(Batch(values, whole=True)), layer, whole)[at]
        for _ in self.observations.of(now.due, See.HIDDEN, layer):
            self.observations.keep_hidden(layer, hidden, at, now.active)
        return hidden

    @torch.inference_mode()
    def due(self, batch: Batch) -> Tensor:
        """The rows of a step on which the policy will act: bool [N]."""
        view = self.view(batch)
        due = torch.zeros_like(view.active)
        for policy in self.deciding:
            due |= policy.due(view.seen_by(policy))[0].any(2).any(0)
        return due & view.active

    @property
    def tells_due(self) -> bool:
        """Whether the policy acts on the rows that are `due` alone. Others are shown all rows in every step."""
        return bool(self.deciding) and self.policy.recordable

    @torch.inference_mode()
    def advance(self, seqs: Sequence[int], tokens: Sequence[int], begun: Sequence[int] | None = None) -> None:
        """The tokens of a step are in the cache: the host counts them.

        Args:
            begun: types of the segments that began with these tokens, `store.begun`; None: none did.
        """
        group = self._of(seqs)
        if begun is not None and self._opens:
            self._begun(group.rows, begun)
            self._opened = False
        for r, thinks in zip(group.records, self._think(group.records, tokens), strict=True):
            r.length += 1
            r.thinking = thinks
        self.store.appended(group.rows, [r.length for r in group.records])
        group.steps = max(0, group.steps - 1)
        self._pass = None

    def acting(self, batch: Batch, due: Sequence[int] | None = None) -> Batch | None:
        """The rows on which the policy acts after a step, as a batch of their own; None: there are none.

        Args:
            batch: of the step, on the host, without padding.
            due: of its rows those that are due; None: all.
        """
        if not self.deciding:
            return None
        if not self.tells_due or self.recorder is not None:
            return self._everybody(batch)
        which = [i for i in range(len(batch)) if due is None or due[i]]
        if len(which) == len(batch):
            return batch
        return batch[which] if which else None

    @torch.inference_mode()
    def decide(self, batch: Batch) -> None:
        """Let the policy act on these rows. Rows that are not active stay as they are."""
        view = self.view(batch)
        edits = [(p, edit) for p in self.deciding for edit in p.decide(view.seen_by(p))]
        evictions = [edit for _, edit in edits if isinstance(edit, Evict)]
        moves = [edit for _, edit in edits if isinstance(edit, Requantize)]
        if self.policy.recordable:
            for _, edit in edits:
                if not isinstance(edit, Evict) and not (isinstance(edit, OpenSegment) and self.policy.opens):
                    raise ValueError(f"{self.policy.name} is recordable and yields {type(edit).__name__}")
        drop = self._dropped(evictions, view) if evictions or moves else view.active
        for edit in moves:  # of policies that are shown all rows
            where = torch.zeros_like(view.pos(), dtype=torch.bool)
            where[slice(None) if edit.layer is None else min(edit.layer, len(where) - 1)] = edit.where
            where &= view.active[None, :, None, None]
            self.store.requantize(where & ~drop, edit.fmt, edit.how)
        if evictions and view.any(drop):
            if self.recorder is not None:
                self.recorder.evicting(view, edits, drop)
            self.store.evict(drop, None if batch.whole else view.row)
        for author, edit in edits:
            if isinstance(edit, OpenSegment):
                self._opened = True
                self.store.open_segment(view.row, edit.open & view.active, edit.thought)
            elif isinstance(edit, SetBudget):
                budget = self.budgets[id(author)]
                budget[min(edit.layer, len(budget) - 1)] = edit.tokens
        self._edits = edits

    @staticmethod
    def _dropped(edits: Sequence[Evict], step: View) -> Tensor:
        """Tokens that go, of the rows that are shown: bool [Lt, R, Ht, S]."""
        whole: Tensor | None = None
        for edit in edits:
            # a prompt that is read in chunks stays whole
            may = step.active[:, None, None] if edit.even_protected else step.droppable
            if edit.layer is None:
                drop = edit.drop & may
                whole = drop if whole is None else whole | drop
                continue
            if whole is None:
                whole = torch.zeros_like(step.pos(), dtype=torch.bool)
            at = min(edit.layer, len(whole) - 1)
            whole[at] |= edit.drop & (may if edit.even_protected else may[at])
        return torch.zeros_like(step.pos(), dtype=torch.bool) if whole is None else whole

    def full(self) -> Batch | None:
        """The rows whose buffers are full, to be quantized by `flush`; None: there are none.

        Raises:
            Exhausted: the pool is too small; nothing has changed, and the buffers wait.
        """
        size = self.store.storage.buffer
        full = [row for row, r in enumerate(self.rows) if r and self.store.waiting[row] == size] if size else []
        if not full:
            return None
        if self.store.asks or not self.records_flushes:
            self.store.require_flush(full)
        self._full = full
        return Batch.of(row=full)

    @torch.inference_mode()
    def flush(self, batch: Batch) -> None:
        """Quantize the full buffers of these rows."""
        self.store.flush_rings(batch)

    def tell(self, batch: Batch, out: Tensor) -> None:
        """What the host must hear of a step. out: int64 [N + 1], the types of the segments that began (of policies
        that open some), and whether the pool was too small."""
        if self._opens:
            out[:-1].copy_(self.store.begun[batch.row])
        out[-1:].copy_(self.store.overflow)

    def pad(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch, and behind it other rows that take no part."""
        if not rows:
            return Batch(batch.values)
        waiting = [self.store.waiting[row] for row in rows]
        idle = Batch.of(row=rows, active=[0] * len(rows), length=[self.store.lengths[row] + 1 for row in rows],
                        waiting=waiting)  # fmt: skip
        return Batch(torch.cat((batch.values, idle.values), dim=1))

    @torch.inference_mode()
    def close(self, seqs: Sequence[int], tokens: Sequence[int]) -> None:
        """The step is over: buffers that were full are empty, segments begin, a recorder is told."""
        self.store.flushed(self._full)
        self._full = []
        group = self._of(seqs)
        self._begin_segments(group.rows)
        self._tell(group.rows, [1] * len(group.rows), tokens)

    @property
    def _opens(self) -> bool:
        """Whether segments may begin with the tokens of a step."""
        return self.policy.opens if self.recorded else self._opened

    def _begin_segments(self, rows: Sequence[int]) -> None:
        """What the policy has opened begins. Where decisions are recorded it begins with the next step's tokens, for
        the host does not wait for them."""
        if not self._opened or self.records_decisions:
            return
        self._opened = False
        at = torch.tensor(rows, device=self.device)
        self.store.begin_segments(at, torch.ones_like(at, dtype=torch.bool))
        self._begun(rows, self.store.begun[at].tolist())

    def _begun(self, rows: Sequence[int], begun: Sequence[int]) -> None:
        """What the host must know of segments that begin at the end of these rows."""
        for row, thought in zip(rows, begun, strict=True):
            if thought != SAME:
                self.store.begin(row, self._row(row).length, thought)

    def _tell(self, rows: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        edits, self._edits = self._edits, []
        if self.recorder is not None:
            self.recorder.stepped(rows, counts, tokens, edits)

    def _store_what_waits(self) -> None:
        """Quantize full buffers, and prompts that are read. If the pool is exhausted they wait for the next step."""
        if (full := self.full()) is not None:
            self.flush(full.to(self.device))
            self.store.flushed(self._full)
            self._full = []
        while self._waiting_prompts:
            row = self._waiting_prompts[0]
            self.store.settle(row, self._row(row).length)
            self._waiting_prompts.pop(0)

    # -- what is recorded, and how wide it is

    @property
    def seen(self) -> int:
        """Columns of the lists that are read."""
        return self.store.seen

    @property
    def formats(self) -> frozenset[int]:
        """Formats that tokens may have."""
        return frozenset(self.store.used)

    @property
    def pages(self) -> int:
        """Of the pool, used or not."""
        return self.store.table.pages.count

    @property
    def recordable(self) -> bool:
        """Whether a step can be recorded: widths are fixed, and no policy steers, which may ask the host."""
        return self.store.columns is not None and not self.steers

    @property
    def recorded(self) -> bool:
        """Whether steps are recorded: then the host may ask nothing of the device inside of their parts."""
        return not self.store.asks

    @recorded.setter
    def recorded(self, value: bool) -> None:
        self.store.asks = not value

    @property
    def records_decisions(self) -> bool:
        """Whether `decide` is recorded. A recorder wants to see what is decided."""
        return self.recorded and self.tells_due and self.recorder is None

    @property
    def records_flushes(self) -> bool:
        """Whether `flush` is recorded. Where integers are shrunk the host makes sure of the room first."""
        return self.recorded and not self.store.storage.shrink

    def fit_columns(self, more: int) -> None:
        """With columns="fit": the width that lanes need which may grow by so many tokens."""
        if not self._fits:
            return
        if max(self.store.most) + more > self.store.seen:
            self.store.refresh()  # evictions were not counted
        wanted = max(NARROWEST, max(self.store.most) + more)
        self.store.columns = min(self.width, 1 << (wanted - 1).bit_length())

    def demands_due(self, seqs: Sequence[int]) -> tuple[Demand, ...]:
        """What must be observed when each of these sequences brings its next token."""
        if not self.policy.demands:
            return ()
        clocks = {r.clock + 1 for r in self._of(seqs).records}
        return tuple(d for d in self.policy.demands if any(clock % d.every == 0 for clock in clocks))

    def next_state(self, seq: int) -> tuple[int, int, int]:
        """What the host knows of a sequence: its row, the tokens it has seen, those in its buffer."""
        row = self._row_of[seq]
        return row, self._row(row).length, self.store.waiting[row]

    # -- a step that the host takes part by part: reads prompts, or feeds a generated token each

    @torch.inference_mode()
    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """Announce one forward pass: sequence seqs[i] brings counts[i] new tokens, in this order.

        Args:
            tokens: ids of all new tokens, one sequence after the other; policies and the think stage look at them.

        Raises:
            Exhausted: the pool is full; nothing has changed.
        """
        group, counts = self._announced(seqs, counts), list(counts)
        if group.records[0].clock < 0:
            self._begin_reading(group, counts, tokens or ())
            return
        self.prepare(seqs)
        known = [-1] * len(counts) if tokens is None else tokens
        batch = self.batch(seqs, known)
        self.begin(batch.to(self.device), self.demands_due(seqs))
        now = self._pass
        assert isinstance(now, _Step)
        now.seqs, now.rows, now.tokens, now.known, now.told = list(seqs), group.rows, known, batch, tokens is not None

    @torch.inference_mode()
    def end_step(self) -> None:
        """Close the step: count its tokens, let the policy act, store what must be stored."""
        now = self._now
        if isinstance(now, _Read):
            self._end_reading(now)
            return
        begun = self.store.begun[now.batch.row].tolist() if self._opens else None
        due = self.due(now.batch).tolist() if self.tells_due and self.recorder is None else None
        assert now.known is not None
        self.advance(now.seqs, now.tokens, begun)
        if (acting := self.acting(now.known, due)) is not None:
            self.decide(acting.to(self.device))
        if (full := self.full()) is not None:
            self.flush(full.to(self.device))
        self.close(now.seqs, now.tokens if now.told else ())

    def _announced(self, seqs: Sequence[int], counts: Sequence[int]) -> _Group:
        """The sequences of a step, as of `_of`: all of them read their prompts, or all generate. ValueError: there is
        no such step."""
        if not seqs or len(set(seqs)) < len(seqs) or min(counts) < 1:
            raise ValueError(f"a step needs sequences, each once, with new tokens: {list(seqs)} with {list(counts)}")
        group = self._of(seqs)
        reading = [r.clock < 0 for r in group.records]
        if any(reading) != all(reading):
            raise ValueError("a step reads prompts or generates, not both: announce them apart")
        for r, count in zip(group.records, counts, strict=True):
            if r.length + count > r.capacity:
                raise ValueError(f"sequence {r.seq} has {r.length} tokens of {r.capacity}: {count} do not fit")
            if reading[0] and r.length + count > r.prompt:
                raise ValueError(f"sequence {r.seq} announced a prompt of {r.prompt} tokens and brings more")
            if not reading[0] and count != 1:
                raise ValueError(f"sequence {r.seq} generates: it brings one token a step, not {count}")
        return group

    def _begin_reading(self, group: _Group, counts: list[int], tokens: Sequence[int]) -> None:
        """Plain slots for the next tokens of prompts."""
        rows, records = group.rows, group.records
        self._store_what_waits()
        self.fit_columns(max(counts))
        lengths = [r.length for r in records]
        writer = self.store.append(rows, counts, lengths, prompt=True)
        position = [p for start, count in zip(lengths, counts, strict=True) for p in range(start, start + count)]
        cos, sin = self.rope.at(torch.tensor(position, device=self.device))
        first, step = np.cumsum([0, *counts[:-1]]), np.arange(max(counts))
        each = first[:, None] + np.minimum(step, np.array(counts)[:, None] - 1)
        self._pass = _Read(
            rows, records, counts, tokens, writer, torch.tensor(rows, device=self.device), cos, sin,
            torch.from_numpy(each).to(self.device), any(lengths), list(self.policy.demands),
        )  # fmt: skip

    def _attend_prompts(self, layer: int, qk: Tensor, v: Tensor, now: _Read) -> Tensor:
        """Causal attention of every prompt by itself, over the keys and values of this pass and those before."""
        heads, seen = (self.config.num_heads, self.config.num_kv_heads), self.observations
        rows = sum(now.counts)  # those behind are idle
        idle, qk, v = len(qk) - rows, qk[:rows], v[:rows]
        q, k = self.backend.rope(qk, now.cos, now.sin).split_with_sizes(heads, dim=1)
        both = torch.stack((k, v), dim=1)  # [n, 2, Hkv, D]
        now.writer.write(layer, *both[now.each].unbind(2))
        kv = both.split(now.counts)
        parts, ends = q.split(now.counts), [r.length + n for r, n in zip(now.records, now.counts, strict=True)]
        seen.keep_prompt_queries(layer, now.rows, parts, ends)
        out = []
        with of_any_length(self.device, now.masked):
            for i, (row, q_i) in enumerate(zip(now.rows, parts, strict=True)):
                before, prompt = now.records[i].length, now.records[i].prompt
                if before:
                    read = self.store.reader(now.at[i : i + 1])(layer)
                    k_i, v_i = (x[0, :, : before + now.counts[i]] for x in read)  # [Hkv, T, D]
                else:  # all that it may look at is in this pass
                    k_i, v_i = kv[i].permute(1, 2, 0, 3).unbind()
                out.append(self.backend.attention(q_i, k_i, v_i))
                for demand in (d for d in seen.of(now.due, See.MASS, layer) if d.prompt):
                    seen.add_prompt_mass(layer, row, demand.group, q_i, k_i, prompt)
                if ends[i] == prompt:
                    for group, what in seen.asked(now.due, layer).items():
                        if what & See.ROWS:
                            seen.keep_prompt_row(layer, row, group, q_i[-1:], k_i, prompt)
        if idle:
            out.append(q.new_zeros(idle, *q.shape[1:]))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _end_reading(self, now: _Read) -> None:
        """Count the tokens; where a prompt is read, let the policy act on it, and store what is left."""
        for r, count in zip(now.records, now.counts, strict=True):
            r.length += count
        self._last.steps = 0  # to be looked at anew
        settled = [i for i, r in enumerate(now.records) if r.clock == 0]
        rows = [now.rows[i] for i in settled]
        last = np.cumsum(now.counts) - 1
        if settled:
            for row in rows:
                self.store.measure(row)
            records = [now.records[i] for i in settled]
            batch = Batch.of(
                row=rows, length=[r.length for r in records], prompt=[r.prompt for r in records],
                thinking=[int(r.thinking) for r in records],
                token=[now.tokens[last[i]] if now.tokens else -1 for i in settled],
            )  # fmt: skip
            if (acting := self.acting(batch)) is not None:
                self.decide(acting.to(self.device))
        self._pass = None  # the step is over, also if the pool is exhausted now
        self._waiting_prompts += rows
        self._store_what_waits()
        if rows:
            self._begin_segments(rows)
        self._tell(now.rows, now.counts, now.tokens)

    # -- what the host knows of the rows

    def view(self, batch: Batch) -> View:
        """These rows, as the policy sees them."""
        asks = self.store.asks or not self.tells_due or self.recorder is not None
        noted = None if self.recorder is None else self.recorder.noted
        return View(self.store, self.observations, self.policy, self.budgets, batch, asks, noted)

    def _everybody(self, batch: Batch) -> Batch:
        """All rows, in order; those of the batch are as they are there, the others take no part."""
        if batch.whole:
            return batch
        known = [(r.length, r.prompt, int(r.thinking)) if r else (0, 0, 0) for r in self.rows]
        values = np.zeros((len(FIELDS), len(known)), dtype=np.int64)
        values[0], values[2:5], values[5] = range(len(known)), list(zip(*known, strict=True)), -1
        values[:, batch.row.numpy()] = batch.values.numpy()
        return Batch(torch.from_numpy(values), whole=True)

    def _think(self, records: Sequence[_Row], tokens: Sequence[int]) -> list[bool]:
        """Whether each sequence thinks after its token."""
        opens, closes = self.think_ids
        if None in (opens, closes) or not {opens, closes}.intersection(tokens):
            return [r.thinking for r in records]
        pairs = zip(records, tokens, strict=True)
        return [token == opens if token in (opens, closes) else r.thinking for r, token in pairs]

    def _of(self, seqs: Sequence[int]) -> _Group:
        """What is known of these sequences. A step asks several times for the same ones."""
        if self._last.seqs != seqs:
            rows = [self._row_of[seq] for seq in seqs]
            records = [self._row(row) for row in rows]
            whole = rows == list(range(len(self.rows)))
            self._last = _Group(list(seqs), rows, records, np.array([rows, [r.prompt for r in records], seqs]), whole)
        return self._last

    def _row(self, row: int) -> _Row:
        record = self.rows[row]
        if record is None:
            raise ValueError(f"row {row} holds no sequence")
        return record

    @property
    def _now(self) -> _Step | _Read:
        if self._pass is None:
            raise ValueError("there is no step: call begin_step first")
        return self._pass

    @property
    def observed(self) -> Counter[str]:
        """Observations made, by kind."""
        return self.observations.made

    # -- bytes

    def ledger(self) -> Ledger:
        """What every byte of this manager is for, at this moment."""
        total = sum(x.nbytes for x in self.tensors())
        state, observed = (sum(x.nbytes for x in kind) for kind in (self._state(), self._observed()))
        ledger = replace(self.store.account(), state=state, observations=observed)
        return replace(ledger, reserve=total - ledger.total)

    def tensors(self) -> list[Tensor]:
        """Everything that the manager, its store and its policy occupy."""
        return [*self.store.tensors(), *self._state(), *self._observed()]

    def _state(self) -> list[Tensor]:
        return [*self.policy.state(), *self.budgets.values()]

    def _observed(self) -> list[Tensor]:
        return self.observations.tensors

    def account(self, seq: int) -> Ledger:
        """What one sequence holds, by kind: its tokens, their scales and tables, its buffers, and its row's share of
        what the policy remembers and sees."""
        return replace(self.store.account([self._row_of[seq]]), **self.row_shares())

    def row_shares(self) -> dict[str, int]:
        """Bytes of what the policy remembers and sees, divided by the rows: state and observations."""
        kinds = {"state": self._state(), "observations": self._observed()}
        return {name: sum(x.nbytes for x in kind) // len(self.rows) for name, kind in kinds.items()}

    def told(self, seq: int) -> Told:
        """What there is to tell about one sequence: its thoughts, bits a number, and the policy's own words."""
        row, names = self._row_of[seq], self.store.storage.names
        account, numbers = self.store.account([row]), self.store.paged(row) * 2 * self.shape.head_dim
        return Told(
            thoughts=tuple(names[kind] for kind in self.store.kinds[row]) if names else (),
            bits=8 * (account.payload + account.scales) / numbers if numbers else None,
            notes="; ".join(note for p in members(self.policy) if (note := p.notes(row))),
        )

    def counts(self, seq: int) -> dict[str, int]:
        """What the policy has counted of one sequence, see `Policy.counts`."""
        row = self._row_of[seq]
        return {name: n for p in members(self.policy) for name, n in p.counts(row).items()}

    def thought(self, seq: int) -> str:
        """The name of the running segment's type; "": types have none, or no segment has begun."""
        kinds, names = self.store.kinds[self._row_of[seq]], self.store.storage.names
        return names[kinds[-1]] if names and kinds else ""

    def held_bytes(self, seq: int) -> int:
        """Bytes that one sequence holds."""
        return self.account(seq).total

    def reserved_bytes(self) -> int:
        """All bytes, used or not."""
        return self.ledger().total


def members(policy: Policy) -> tuple[Policy, ...]:
    """Of a stack; of any other policy, itself."""
    return policy.members if isinstance(policy, Stack) else (policy,)


def check_budget(policy: Policy, prompt: int, budget: int | None = None) -> None:
    """UsageError: the budget is no positive number, or a protected prompt leaves no room in it."""
    # A stack protects the prompt if one of its members does, and its smallest budget must hold it.
    tokens = policy.budget if budget is None else budget
    stays = prompt if policy.cap is None else min(prompt, policy.cap)
    kept = [k for m in members(policy) if (k := Schedule.parse(m.schedule).keep) is not None]
    for what, number in (("a budget of", tokens), *(("a schedule that keeps", k) for k in kept)):
        if number is None:
            continue
        if not 1 <= number <= UNLIMITED:
            raise UsageError(f"{policy.name}: {what} {number} tokens makes no sense: give 1 to {UNLIMITED:,}.")
        if policy.protect_prompt and number < stays + policy.beside:
            more = "anything else" if policy.beside == 1 else f"{policy.beside} tokens beside it"
            ours = any("protect_prompt" in getattr(m, "__dataclass_fields__", ()) for m in members(policy))
            spared = ", or protect_prompt=false" if ours else ""
            raise UsageError(
                f"{policy.name}: {what} {number} tokens cannot hold the protected prompt of {stays} and {more}: "
                f"give at least {stays + policy.beside}{spared}."
            )


def bytes_for(
    config: ModelConfig, policy: Policy, dtype: torch.dtype, *, rows: int, tokens: int, prompt: int,
    prompts: int = 1, columns: Literal["fit"] | None = None,
) -> int:  # fmt: skip
    """Bytes that a manager of so many rows takes, everything counted; nothing is allocated. Arguments as of
    KVManager."""
    rope = Rope(replace(config, max_position=1), "meta")
    policy = copy.deepcopy(policy)
    manager = KVManager(
        config, rope, policy, rows=rows, tokens=tokens, prompt=prompt, prompts=prompts, device="meta", dtype=dtype,
        columns=columns,
    )  # fmt: skip
    return sum(x.nbytes for x in manager.tensors())


@dataclass(frozen=True)
class Needs:
    """What one unit needs at worst, for one sequence."""

    pages: int
    prompt_pages: int  # beside these, while the prompt is read
    scale_rows: int  # groups of keys by token
    width: int  # tokens in its list


def needs(policy: Policy, dim: int, dtype: torch.dtype, tokens: int, prompt: int) -> Needs:
    """Sizes for a sequence of at most `tokens` tokens, of which at most `prompt` are its prompt.

    A page is opened only when all slots of its thought type are taken, so a type never has more pages than its
    fullest moment needs; but few survivors may keep all of them. A prompt that is quantized when it is read needs
    plain pages until then, and leaves all of them but the sink's.
    """
    storage = policy.storage
    lay = dict(zip(storage.formats, layouts(storage, dim, dtype), strict=True))
    home = storage.thoughts[storage.prompt]
    stays = lay[home].plain and not storage.buffer  # the prompt's tokens never move
    at_home = prompt if stays or policy.cap is None else min(prompt, policy.cap)
    moments = policy.peaks(tokens, prompt)
    peaks = [[(name, max(n, at_home) if name == home else n) for name, n in moment] for moment in moments]
    pages = max(sum(-(-n // lay[name].slots) for name, n in moment) for moment in peaks)
    most = max(sum(n for _, n in moment) for moment in peaks)
    sink = 0 if stays else -(-storage.sink // lay["plain"].slots)
    # A buffer that is no multiple of a group makes a short group whenever it is full: 2 of 24 tokens in groups of 16.
    groups = max((-(-storage.buffer // x.k.group) for x in lay.values() if x.by_token), default=0)  # of a buffer
    return Needs(
        pages=pages + sink,
        prompt_pages=0 if stays else -(-prompt // lay["plain"].slots),
        scale_rows=min(most, -(-tokens * groups // storage.buffer) + 2) if groups else 0,
        width=max(prompt, min(tokens, most)) + 1,
    )
