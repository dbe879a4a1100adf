"""KVManager: the step protocol, and all that is common to the policies.

    begin_step   which sequences run, with which new tokens; slots are taken for them
    attend       (per layer) rotate, append, attend; keep what a policy asked to see
    tap          (per layer) the residual stream passes by: steer it, keep it if asked
    end_step     the policy decides, its edits are applied

Append-only during the forward pass, edit-only between steps. A prompt may come in chunks; until the last one it
stays unedited and in full precision, then the policy acts once, and what is left goes where it will stay. Every
sequence has its own clock, the number of its generated tokens in the cache.

Order at the end of a step: the policy sees the cache as the forward pass left it. Tokens are moved to other formats,
then evicted, then full buffers are quantized with the thought type of the segment that has run until now, then new
segments and budgets begin.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.config import ModelConfig
from minithink.errors import UsageError
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
from minithink.kv.pages import Reading, layouts
from minithink.kv.store import SAME, PagedStore, Writer
from minithink.kv.view import STATE, View
from minithink.model import Rope
from minithink.ref.attention import of_any_length
from minithink.ref.decode_attention import decode_probabilities, group_reduce

UNLIMITED = 2**30  # a budget that nothing exceeds
NARROWEST = 256  # columns, where they follow the lanes
QUERY_BLOCK = 128  # prompt queries whose probabilities are in memory at once


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
    constant: np.ndarray  # int64 [2, N]: rows, lengths of the prompts
    steps: int = 0  # of one token each, that all of them may still take, as far as was looked


@dataclass
class _Pass:
    """One forward pass."""

    rows: list[int]
    counts: list[int]
    prompt: bool  # prompts are read; otherwise one token each
    tokens: list[int]  # the last token of each
    ids: Sequence[int]  # all new tokens, one sequence after the other; empty where nobody told
    writer: Writer
    at: Tensor  # int64 [N]: the rows
    lengths: Tensor  # int64 [N]: tokens that each has seen before
    cos: Tensor
    sin: Tensor
    each: Tensor | None = None  # int64 [N, longest]: of every prompt the tokens' rows; the last one's behind its end
    masked: bool = False  # does attention need a mask: later chunks of a prompt
    read: Reading | None = None
    valid: Tensor | None = None  # bool [Lt, N, Ht, S]
    dense: bool = False  # no lane is shorter than the others
    near: tuple[Tensor, Tensor, Tensor] | None = None  # pulled tokens [Lt, N, Ht, S], cos and sin of their query
    due: Sequence[Demand] = ()
    active: Tensor | None = None  # bool [N]: those of the rows that take part; None: all


NOBODY = _Group([], [], [], np.zeros((2, 0), dtype=np.int64))


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
        self.rows: list[_Row | None] = [None] * rows
        self._row_of: dict[int, int] = {}
        self._last = NOBODY  # see `_of`
        self.budgets = {
            id(p): torch.full(self.shape.tables, UNLIMITED, dtype=torch.int32, device=self.device)
            for p in members(policy)
        }
        self.steers = any(type(p).steer is not Policy.steer for p in members(policy))
        self.deciding = tuple(p for p in members(policy) if type(p).decide is not Policy.decide)
        self.observed: Counter[str] = Counter()  # observations made, by kind
        self.recorder: Recorder | None = None  # to be set before those join that it records
        self._pass: _Pass | None = None
        self._waiting_prompts: list[int] = []  # rows whose prompt is read and not stored yet
        # (layer, group rule) → [B, heads, S]: of MASS, and of ROWS that are one row
        self._mass: dict[tuple[int, str], Tensor] = {}
        self._newest: dict[tuple[int, str], Tensor] = {}
        self._hidden: dict[int, Tensor] = {}  # layer → [B, d]
        asked = max((d.queries for d in policy.demands), default=0)
        # the last queries of every row, in a ring
        ring = (c.num_layers if asked else 0, rows, c.num_heads, asked, c.head_dim)
        self._queries = torch.zeros(ring, dtype=dtype, device=self.device)

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
        self._queries[:, row] = 0
        for held in (*self._mass.values(), *self._newest.values(), *self._hidden.values()):
            held[row] = 0
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

    # -- a step

    @torch.inference_mode()
    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """Announce one forward pass: sequence seqs[i] brings counts[i] new tokens, in this order.

        Args:
            tokens: ids of all new tokens, one sequence after the other; policies and the think stage look at them.

        Raises:
            Exhausted: the pool is full; nothing has changed.
        """
        group, counts = self._announced(seqs, counts), list(counts)
        rows, records, prompt = group.rows, group.records, group.records[0].clock < 0
        self._store_what_waits()
        if self.policy.opens and self.records_decisions and not prompt:  # what `decide_next` has opened
            everyone = torch.ones(len(rows), dtype=torch.bool, device=self.device)
            self.store.take_over(torch.tensor(rows, device=self.device), everyone)
            self._begun(rows)
        self.fit_columns(max(counts))
        lengths = [r.length for r in records]
        writer = self.store.append(rows, counts, lengths, prompt=prompt)
        position = [p for start, count in zip(lengths, counts, strict=True) for p in range(start, start + count)]
        cos, sin = self.rope.at(torch.tensor(position, device=self.device))
        last, at = [], -1
        for count in counts:
            at += count
            last.append(-1 if tokens is None else tokens[at])
        here, before = torch.tensor(rows, device=self.device), torch.tensor(lengths, device=self.device)
        now = _Pass(rows, counts, prompt, last, tokens or (), writer, here, before, cos, sin)
        if not now.prompt:
            for r, thinks in zip(records, self._think(records, last), strict=True):
                r.thinking = thinks
        self._pass = now
        if now.prompt:
            first, step = np.cumsum([0, *counts[:-1]]), np.arange(max(counts))
            each = first[:, None] + np.minimum(step, np.array(counts)[:, None] - 1)
            now.each, now.masked = torch.from_numpy(each).to(self.device), any(lengths)
            now.due = list(self.policy.demands)
            return
        if self.store.compaction:
            self.store.compaction.start()
        whole = rows == list(range(len(self.rows)))
        pos = self.store.positions()
        now.valid = pos >= 0 if whole else pos[:, now.at] >= 0
        # Sums over a mask of ones only differ from sums without one in time, and only where the width is not fixed.
        now.dense = self.store.columns is None and self.device.type == "cpu" and bool(now.valid.all())
        now.read = self.store.reader(None if whole else now.at)
        now.due = self.demands_due(seqs)
        if self.policy.pull:
            self._pull(now)

    @torch.inference_mode()
    def prepare_next(self, seqs: Sequence[int]) -> None:
        """What the host does before a step that begins with `begin_next`, where nobody can be asked: refuse what does
        not fit, make the lists as wide as these sequences need them.

        Raises:
            Exhausted: the pool is too small for what still waits from the step before.
            UsageError: a lane is full.
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
        if max(self.store.most) >= self.store.seen:  # as the host counts, who does not know of evictions
            self.store.require_columns(group.rows, [1] * len(group.rows))
        self.store.used.update(self.store.appends)

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

    @torch.inference_mode()
    def begin_next(
        self, at: Tensor, active: Tensor, lengths: Tensor, waiting: Tensor, due: Sequence[Demand] | None = None
    ) -> None:
        """`begin_step` for one generated token each, from tensors alone, as a CUDA graph captures it. Before it the
        host calls `prepare_next`, `end_next` follows when it has run.

        Args:
            at: int64 [N], rows, each once.
            active: bool [N], those that bring a token; the others change nothing, and their outputs mean nothing.
            lengths: int64 [N], tokens that each row has seen.
            waiting: int64 [N], tokens in each row's buffer.
            due: what is observed, see `demands_due`; None: all that the policy asks for.
        """
        if self.policy.opens:
            self.store.take_over(at, active)
        writer = self.store.append_next(at, active, lengths, waiting)
        if self.store.compaction:
            self.store.compaction.start()
        cos, sin = self.rope.at(lengths)
        now = _Pass([], [1] * len(at), False, [], (), writer, at, lengths, cos, sin, active=active)
        now.due = self.policy.demands if due is None else due
        self._pass, now.read = now, self.store.reader(at)
        if self.policy.pull or not self.backend.in_place:
            now.valid = self.store.positions()[:, at] >= 0
        if self.policy.pull:
            self._pull(now)

    @torch.inference_mode()
    def end_next(
        self, seqs: Sequence[int], tokens: Sequence[int], decide: Callable[[], object] | None = None,
        flush: Callable[[Sequence[int]], object] | None = None, begun: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """After a step that began with `begin_next`: the host learns of it, the policy acts.

        Args:
            decide: is called in place of the policy, when the tokens are counted and before full buffers are stored.
            flush: is called with the rows whose buffers are full, in place of the store's `flush`.
            begun: the segments that began, `store.begun` of these sequences' rows; None: the device is asked.
        """
        group = self._of(seqs)
        rows, records = group.rows, group.records
        self._begun(rows, begun)
        self.store.appended(rows, [r.length for r in records])
        if {*self.think_ids}.intersection(tokens):
            for r, thinks in zip(records, self._think(records, tokens), strict=True):
                r.thinking = thinks
        none = torch.empty(0)
        self._pass = _Pass(rows, [1] * len(rows), False, list(tokens), tokens, Writer(), none, none, none, none)
        steps = max(0, group.steps - 1)
        self._end_step(decide, flush)
        group.steps = steps

    def _begun(self, rows: Sequence[int], begun: Sequence[int] | None = None) -> None:
        """What the host must know of segments that began with the tokens of these rows."""
        if not self.policy.opens:
            return
        for row, thought in zip(rows, self.store.begun[list(rows)].tolist() if begun is None else begun, strict=True):
            if thought != SAME:
                self.store.begin(row, self._row(row).length, thought)

    @torch.inference_mode()
    def due_next(self, state: Tensor) -> Tensor:
        """Which rows the policy will act on after a step that began with `begin_next`: bool [R]. From tensors alone,
        as a CUDA graph captures it.

        Args:
            state: int64 [view.STATE, R], see `states_after`; each row once.
        """
        view = View(self, self.policy, state, recorded=True)
        due = torch.zeros_like(view.active)
        for policy in self.deciding:
            due |= policy.due(view.seen_by(policy))[0].any(2).any(0)
        return due & view.active

    @torch.inference_mode()
    def decide_next(self, state: Tensor) -> None:
        """Let the policy act on these rows alone, in the same way: for `end_next`. Rows that did not take part stay
        as they are. state: as of `due_next`."""
        view = View(self, self.policy, state, recorded=True)
        openings, others = list[OpenSegment](), list[Edit]()
        for _, edit in self._edits(view):
            if isinstance(edit, OpenSegment) and self.policy.opens:
                openings.append(edit)
            else:
                others.append(edit)
        if others:
            self.store.evict(self._dropped(others, view), view.row)
        for opening in openings:
            self.store.open_next(view.row, opening.open & view.active, opening.thought)

    @property
    def capturable(self) -> bool:
        """Whether steps may begin with `begin_next`: widths are fixed, and nobody needs the host inside of a step."""
        return self.store.columns is not None and not self.steers and not self.store.storage.lag

    @property
    def records_decisions(self) -> bool:
        """Whether `decide_next` can be captured and does all that the policy does. A recorder wants to see it."""
        return self.recorder is None and bool(self.deciding) and self.policy.recordable and self.store.evicts_in_place

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
        """What `begin_next` must know of a sequence: its row, the tokens it has seen, those in its buffer."""
        row = self._row_of[seq]
        return row, self._row(row).length, self.store.waiting[row]

    def states_after(self, seqs: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """What the policy must know of sequences when these tokens will be in the cache: int64 [view.STATE, N]."""
        group = self._of(seqs)
        out = np.ones((STATE, len(tokens)), dtype=np.int64)  # see kv/view.py; ones: all take part
        out[0], out[3] = group.constant
        out[2] = [r.length + 1 for r in group.records]
        out[4], out[5] = self._think(group.records, tokens), tokens
        return out

    def _pull(self, now: _Pass) -> None:
        """Tokens below `pull` are attended as if they stood directly before the next one that is held."""
        pull, pos = self.policy.pull, self.store.positions()[:, now.at]
        others = torch.where(pos >= pull, pos, UNLIMITED).amin(-1)  # [Lt, N, Ht]
        gap = torch.where(others < UNLIMITED, others - pull, 0).long()
        at = (now.lengths[None, :, None] - gap).clamp(min=0)
        cos, sin = self.rope.at(at.flatten())  # [Lt·N·Ht, 1, D]
        near = (pos >= 0) & (pos < pull)
        now.near = near, cos.view(*at.shape, -1), sin.view(*at.shape, -1)

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Append and attend. qk: [n, Hq + Hkv, D], unrotated, v: [n, Hkv, D]; returns [n, Hq, D]."""
        now, heads = self._now, (self.config.num_heads, self.config.num_kv_heads)
        if not now.prompt:
            if self.store.compaction:
                self.store.compaction.wait(layer)
            raw, k = qk.split_with_sizes(heads, dim=1)
            q = self.backend.append(raw, k, v, now.cos, now.sin, now.writer, layer)
            self._keep_queries(layer, q, now)
            return self._decode(layer, raw, q, now)
        rows = sum(now.counts)  # those behind are idle
        idle, qk, v = len(qk) - rows, qk[:rows], v[:rows]
        q, k = self.backend.rope(qk, now.cos, now.sin).split_with_sizes(heads, dim=1)
        both = torch.stack((k, v), dim=1)  # [n, 2, Hkv, D]
        now.writer.write(layer, *both[now.each].unbind(2))
        kv = both.split(now.counts)
        self._keep_queries(layer, q, now)
        out = []
        with of_any_length(self.device, now.masked):
            for i, (row, q_i) in enumerate(zip(now.rows, q.split(now.counts), strict=True)):
                before = self._row(row).length
                if before:
                    read = self.store.reader(now.at[i : i + 1])(layer)
                    k_i, v_i = (x[0, :, : before + now.counts[i]] for x in read)  # [Hkv, T, D]
                else:  # all that it may look at is in this pass
                    k_i, v_i = kv[i].permute(1, 2, 0, 3).unbind()
                out.append(self.backend.attention(q_i, k_i, v_i))
                for demand in (d for d in self._due(See.MASS, layer) if d.prompt):
                    self._prompt_mass(layer, row, demand.group, q_i, k_i)
                if before + now.counts[i] == self._row(row).prompt:
                    for group, what in self._asked(layer).items():
                        if what & See.ROWS:
                            self._prompt_row(layer, row, group, q_i[-1:], k_i)
        if idle:
            out.append(q.new_zeros(idle, *q.shape[1:]))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _decode(self, layer: int, raw: Tensor, q: Tensor, now: _Pass) -> Tensor:
        """Attention of one new token each, over whatever the lanes hold. raw, q: [N, Hq, D]."""
        assert now.read is not None
        if self.backend.in_place and now.near is None and not self.store.storage.lag:
            asked = self._asked(layer)
            for group in asked or (None,):
                attended, mass = self.backend.paged_attention(q, now.read, layer, group)
                if group is not None and mass is not None:
                    self._observe_weights(layer, group, asked[group], now, mass)
            return attended
        assert now.valid is not None
        t = min(layer, now.valid.shape[0] - 1)
        valid = now.valid[t]  # [N, Ht, S]
        k, v = now.read(layer)
        watching = self._asked(layer)
        # Who is due differs from step to step, and the companions with it: no output may depend on that, so what is
        # not observed in every step is computed beside the output.
        always = any(d.every == 1 and d.weights and (d.layers is None or layer in d.layers) for d in now.due)
        out = None
        if now.near is None and not always:
            out = self.backend.decode_attention(q, k, v, None if now.dense else valid)
            if not watching:
                return out
        n, hq, d = q.shape
        grouped = q.view(n, k.shape[1], -1, d)
        logits = grouped @ k.transpose(-1, -2) / d**0.5  # [N, Hkv, g, S]
        if now.near is not None:
            near, cos, sin = (x[t] for x in now.near)
            cos, sin = (x.expand(-1, k.shape[1], -1).reshape(-1, 1, d) for x in (cos, sin))  # [N·Hkv, 1, D]
            closer = self.backend.rope(raw.reshape(n * k.shape[1], -1, d), cos, sin).view(grouped.shape)
            logits = torch.where(near.unsqueeze(2), closer @ k.transpose(-1, -2) / d**0.5, logits)
        for group, what in watching.items():
            self._observe_weights(layer, group, what, now, group_reduce(logits, valid, group))
        if out is not None:
            return out
        p = decode_probabilities(logits, valid)
        return (p.to(v.dtype) @ v).view(n, hq, d)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Steer the residual stream, and keep what is due. hidden: [n, d]."""
        now = self._now
        if self.steers and not now.prompt:
            whole = hidden.new_zeros(len(self.rows), hidden.shape[-1]).index_copy(0, now.at, hidden)
            hidden = self.policy.steer(self._step(now.rows), layer, whole)[now.at]
        for _ in self._due(See.HIDDEN, layer):
            held = self._hidden.setdefault(
                layer, torch.zeros(len(self.rows), hidden.shape[-1], dtype=torch.float32, device=self.device)
            )
            if now.prompt:
                hidden_last = hidden[torch.tensor(now.counts, device=self.device).cumsum(0) - 1]
            else:
                hidden_last = hidden
            held[now.at] = _of_active(hidden_last.float(), held, now)
            self.observed["HIDDEN"] += 1
        return hidden

    @torch.inference_mode()
    def end_step(self) -> None:
        """Close the step: count its tokens, let the policy act, store what must be stored."""
        self._end_step()

    def _end_step(
        self, decide: Callable[[], object] | None = None, flush: Callable[[Sequence[int]], object] | None = None
    ) -> None:
        now = self._now
        last = self._last
        records = last.records if last.rows is now.rows else [self._row(row) for row in now.rows]
        for r, count in zip(records, now.counts, strict=True):
            r.length += count
        last.steps = 0  # to be looked at anew, but see `end_next`
        settled = [r for r, x in zip(now.rows, records, strict=True) if x.clock == 0] if now.prompt else []
        active = settled if now.prompt else now.rows
        edits: list[tuple[Policy, Edit]] = []
        if active:
            for row in settled:
                self.store.measure(row)
            if decide is not None:
                decide()
            elif now.prompt and self.records_decisions:  # of these rows alone
                self.decide_next(self._states(settled)[:, settled])
            elif self.deciding:
                step = self._step(active)
                edits = self._edits(step)
                self._apply(edits, step)
        self._pass = None  # the step is over, also if the pool is exhausted now
        self._waiting_prompts += settled
        self._store_what_waits(flush)
        for author, edit in edits:
            self._begin(author, edit, active)
        if self.recorder is not None:
            self.recorder.stepped(now.rows, now.counts, now.ids, edits)

    def _edits(self, step: View) -> list[tuple[Policy, Edit]]:
        """The edits of all members, and whose they are."""
        return [(p, edit) for p in self.deciding for edit in p.decide(step.seen_by(p))]

    def _store_what_waits(self, flush: Callable[[Sequence[int]], object] | None = None) -> None:
        """Quantize full buffers, and prompts that are read. If the pool is exhausted they wait for the next step."""
        size = self.store.storage.buffer
        if size and (full := [row for row, r in enumerate(self.rows) if r and self.store.waiting[row] == size]):
            (flush or self.store.flush)(full)
        while self._waiting_prompts:
            row = self._waiting_prompts[0]
            self.store.settle(row, self._row(row).length)
            self._waiting_prompts.pop(0)

    def _apply(self, edits: Sequence[tuple[Policy, Edit]], step: View) -> None:
        """Moves, then evictions, of all edits together."""
        evictions = [edit for _, edit in edits if isinstance(edit, Evict)]
        moves = [edit for _, edit in edits if isinstance(edit, Requantize)]
        if not evictions and not moves:
            return
        drop = self._dropped(evictions, step)
        for edit in moves:
            where = torch.zeros_like(drop)
            where[slice(None) if edit.layer is None else min(edit.layer, len(where) - 1)] = edit.where
            where &= step.active[None, :, None, None]
            self.store.requantize(where & ~drop, edit.fmt, edit.how)
        if evictions and bool(drop.any()):
            if self.recorder is not None:
                self.recorder.evicting(step, edits, drop)
            self.store.evict(drop)

    @staticmethod
    def _dropped(edits: Sequence[Edit], step: View) -> Tensor:
        """Tokens that go, of the rows that are shown: bool [Lt, R, Ht, S]."""
        whole: Tensor | None = None
        for edit in edits:
            if not isinstance(edit, Evict):
                raise ValueError(f"{step.policy.name} is recordable and yields {type(edit).__name__}")
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

    def _begin(self, author: Policy, edit: Edit, active: Sequence[int]) -> None:
        """Segments and budgets that hold from now on."""
        if isinstance(edit, OpenSegment):
            opened = [row for row in active if bool(edit.open[row])]
            mask = torch.zeros_like(edit.open)
            mask[opened] = True
            self.store.open_segment(mask, edit.thought)
            for row in opened:
                self.store.begin(row, self._row(row).length, int(edit.thought[row]))
        elif isinstance(edit, SetBudget):
            budget = self.budgets[id(author)]
            budget[min(edit.layer, len(budget) - 1)] = edit.tokens

    # -- observations

    def _due(self, what: See, layer: int) -> Iterator[Demand]:
        """Demands of this kind that are due in this pass, each group rule once."""
        seen = set()
        for demand in self._now.due:
            fits = demand.what & what and (demand.layers is None or layer in demand.layers)
            if what is See.HIDDEN and demand.layers is None:
                fits = fits and layer >= 0
            if fits and demand.group not in seen:
                seen.add(demand.group)
                yield demand

    def _asked(self, layer: int) -> dict[str, See]:
        """The group rules by which this pass's attention is to be told, and for what: MASS, ROWS or both."""
        asked: dict[str, See] = {}
        for demand in self._now.due:
            if demand.weights and (demand.layers is None or layer in demand.layers):
                asked[demand.group] = asked.get(demand.group, demand.weights) | demand.weights
        return asked

    def _observe_weights(self, layer: int, group: str, what: See, now: _Pass, mass: Tensor) -> None:
        """mass: [N, heads, S] of this pass, one query each."""
        for kind, all_held in ((See.MASS, self._mass), (See.ROWS, self._newest)):
            if what & kind:
                self.observed[kind.name or ""] += 1
                self._hold(all_held, (layer, group), now, mass)

    def _hold(self, all_held: dict[tuple[int, str], Tensor], key: tuple[int, str], now: _Pass, mass: Tensor) -> None:
        """Of the rows of this pass."""
        if self.store.columns is not None:  # widths are fixed: in place, for addresses must stay
            size = (len(self.rows), mass.shape[1], self.width)
            if key not in all_held or all_held[key].shape != size:
                all_held[key] = mass.new_zeros(size)
            held = all_held[key][..., : mass.shape[-1]]
            held[now.at] = _of_active(mass, held, now)
            return
        held = mass.new_zeros(len(self.rows), *mass.shape[1:]).index_copy_(0, now.at, mass)
        if self.store.reading and key in all_held:  # whose sums are not complete
            rows, before = list(self.store.reading), all_held[key]
            before = torch.nn.functional.pad(before[rows], (0, max(0, held.shape[-1] - before.shape[-1])))
            held = torch.nn.functional.pad(held, (0, before.shape[-1] - held.shape[-1]))
            held[rows] = before
        all_held[key] = held

    def _prompt_mass(self, layer: int, row: int, group: str, q: Tensor, k: Tensor) -> None:
        """Add the attention that a chunk pays, some queries at a time. q: [n, Hq, D], k: [Hkv, S, D]."""
        self.observed["MASS"] += 1
        held = self._room(self._mass, (layer, group), row, k.shape[1])
        for start in range(0, len(q), QUERY_BLOCK):
            block = q[start : start + QUERY_BLOCK]
            held += _weights(block, k, k.shape[1] - len(q) + start, group).sum(0)

    def _prompt_row(self, layer: int, row: int, group: str, q: Tensor, k: Tensor) -> None:
        """The attention that the prompt's last query pays. q: [1, Hq, D], k: [Hkv, S, D]."""
        self.observed["ROWS"] += 1
        self._room(self._newest, (layer, group), row, k.shape[1])[:] = _weights(q, k, k.shape[1] - 1, group)[0]

    def _room(self, all_held: dict[tuple[int, str], Tensor], key: tuple[int, str], row: int, total: int) -> Tensor:
        """Where the weights of a prompt's tokens are held, so many so far: a view, [heads, total]."""
        held = all_held.get(key)
        if held is None or held.shape[-1] < total:
            heads = self.shape.query_heads if key[1] == "none" else self.shape.kv_heads
            width = self.width if self.store.columns is not None else max(total, self._row(row).prompt)
            wider = torch.zeros(len(self.rows), heads, width, device=self.device)
            if held is not None:
                wider[..., : held.shape[-1]] = held
            held = all_held[key] = wider
        return held[row, :, :total]

    def _keep_queries(self, layer: int, q: Tensor, now: _Pass) -> None:
        """The newest queries enter the ring at (position mod rows)."""
        if not self._queries.numel() or not any(
            d.queries and (d.layers is None or layer in d.layers) for d in self.policy.demands
        ):
            return
        self.observed["QUERY"] += 1
        size = self._queries.shape[3]
        if not now.prompt:
            self._queries[layer].transpose(1, 2)[now.at, now.lengths % size] = q
            return
        for row, count, q_i in zip(now.rows, now.counts, q.split(now.counts), strict=True):
            end = self._row(row).length + count
            kept = range(max(end - count, end - size), end)
            index = torch.tensor([p % size for p in kept], device=self.device)
            self._queries[layer, row, :, index] = q_i[-len(kept) :].transpose(0, 1)

    # -- what the host knows of the rows

    def _step(self, active: Sequence[int] = ()) -> View:
        """All rows, as the policy sees them."""
        return View(self, self.policy, self._states(active))

    def _states(self, active: Sequence[int]) -> Tensor:
        """Of all rows, after a step of some: int64 [view.STATE, B]."""
        last = dict(zip(self._now.rows, self._now.tokens, strict=True))
        state = []
        for row, r in enumerate(self.rows):
            known = (r.length, r.prompt, int(r.thinking)) if r else (0, 0, 0)
            state.append((row, int(row in active), *known, last.get(row, -1)))
        return torch.tensor(list(zip(*state, strict=True)), device=self.device)

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
            self._last = _Group(list(seqs), rows, records, np.array([rows, [r.prompt for r in records]]))
        return self._last

    def _row(self, row: int) -> _Row:
        record = self.rows[row]
        if record is None:
            raise ValueError(f"row {row} holds no sequence")
        return record

    @property
    def _now(self) -> _Pass:
        if self._pass is None:
            raise ValueError("there is no step: call begin_step first")
        return self._pass

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
        return [self._queries, *self._mass.values(), *self._newest.values(), *self._hidden.values()]

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


def _weights(q: Tensor, k: Tensor, first: int, group: str) -> Tensor:
    """What attention queries of a prompt pay, which stand at `first` and after it: [n, heads, S].

    q: [n, Hq, D], k: [Hkv, S, D].
    """
    # as one product per KV head: torch would copy the keys for every query
    grouped = q.unflatten(1, (k.shape[0], -1)).transpose(0, 1)  # [Hkv, n, g, D]
    logits = (grouped.flatten(1, 2) @ k.mT).unflatten(1, (len(q), -1)).transpose(0, 1)
    own = first + torch.arange(len(q), device=q.device)
    valid = (torch.arange(k.shape[1], device=q.device) <= own[:, None])[:, None]  # [n, 1, S]
    return group_reduce(logits / q.shape[-1] ** 0.5, valid, group)


def _of_active(new: Tensor, held: Tensor, now: _Pass) -> Tensor:
    """What is observed of the rows that take part, and what is held of the others. new: [N, …], held: [B, …]."""
    if now.active is None:
        return new
    return torch.where(now.active.view(-1, *[1] * (new.ndim - 1)), new, held[now.at])


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
