"""Rows: the sequences of a manager. What the host knows of each, how they come and go, and what their bytes are for.

A sequence takes a free row when it joins and frees it when it leaves. `batch` writes what the host knows of some rows
into one tensor, `view` shows these rows to a policy. A `Recorder` hears what happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.config import ModelConfig
from minithink.kv import checks
from minithink.kv.batch import FIELDS, Batch
from minithink.kv.contract import Demand, Edit, Policy, Shape
from minithink.kv.ledger import Ledger, Told
from minithink.kv.observe import Observations
from minithink.kv.sizes import UNLIMITED, check_budget, needs
from minithink.kv.stack import members
from minithink.kv.store import PagedStore
from minithink.kv.view import View
from minithink.model import Rope


@dataclass
class _Row:
    """What the host knows of one sequence."""

    seq: int
    prompt: int  # tokens
    thinking: bool  # whether it is in the think stage
    capacity: int  # tokens that the sequence may have at most
    staged: bool  # whether it has ever been in the think stage
    length: int = 0  # tokens seen, evicted ones too

    @property
    def clock(self) -> int:
        """Generated tokens in the cache; negative while the prompt is read."""
        return self.length - self.prompt


@dataclass
class _Group:
    """The sequences of a step. A generation asks for the same ones step after step, so the last group is kept."""

    seqs: list[int]
    rows: list[int]
    records: list[_Row]
    constant: np.ndarray  # int64 [3, N]: rows, lengths of the prompts, numbers of the sequences
    whole: bool = False  # these are all rows, in order
    steps: int = 0  # steps that need no check of capacities; 0: check


NOBODY = _Group([], [], [], np.zeros((3, 0), dtype=np.int64))


class Recorder(Protocol):
    """Hears what happens in a cache and changes nothing (`minithink/trace/` has one that writes a file)."""

    def joined(self, manager: Any, seq: int, row: int) -> None:
        """A sequence has taken a row."""

    def noted(self, step: View, policy: Policy, score: Tensor, where: Tensor | None) -> None:
        """A policy tells the scores of tokens, see `Step.note`."""

    def evicting(self, step: View, edits: Sequence[tuple[Policy, Edit]], drop: Tensor) -> None:
        """Tokens are about to be evicted and are still in the cache.

        Args:
            edits: of the decision, each with the policy that made it.
            drop: bool [Lt, B, Ht, S], the tokens.
        """

    def stepped(
        self, rows: Sequence[int], counts: Sequence[int], ids: Sequence[int], edits: Sequence[tuple[Policy, Edit]]
    ) -> None:
        """A step is over; the cache is as the next step will find it.

        Args:
            rows: of the step.
            counts: new tokens of each row.
            ids: of all new tokens, one row after the other; empty: they are not known.
            edits: of the decision, each with the policy that made it.
        """

    def left(self, seq: int) -> None:
        """A sequence is about to free its row."""


class Rows:
    """Up to `rows` sequences under one policy, between steps."""

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
    ) -> None:
        """
        Args:
            policy: decides which tokens stay; it belongs to this manager from now on.
            rows: sequences at once.
            tokens: the longest that a sequence may become, prompt and answer; the pool has room for `rows` sequences
                of this length, held as the policy holds them.
            prompt: the longest prompt; None: a prompt may have all of `tokens`.
            prompts: prompts that are read at once, in full precision; None: as many as there are rows.
            think_ids: the tokens that open and close the think stage; without them a sequence always thinks.
            pages: of the pool; None: as many as the worst case needs.
            columns: width of the lists that are read, fixed so that no shape depends on what the lanes hold; "fit":
                all tensors have the worst case's width, and the width that is read is one of few that the lanes fit
                into.
        """
        for member in members(policy):
            checks.declared(member)
        self.config, self.rope, self.policy, self.backend = config, rope, policy, backend
        self.device, self.dtype, self.think_ids = torch.device(device), dtype, think_ids
        c = config
        self.shape = Shape(
            c.num_layers, rows, c.num_kv_heads, c.num_heads, c.head_dim, c.hidden_size, policy.scope, self.device,
            tokens, dtype,
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
        storage = policy.storage
        if storage.buffer > tokens:  # such a buffer is never full; it needs no more room than a sequence
            storage = replace(storage, buffer=tokens + 1)
        self.store = PagedStore(
            self.shape, storage, pages=pages, scale_rows=units * rows * need.scale_rows, dtype=dtype,
            columns=columns, width=need.width, table_width=4 if columns is None else need.pages + need.prompt_pages,
            backend=backend,
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
        steering = [p for p in members(policy) if type(p).steer is not Policy.steer]
        watching = [p for p in members(policy) if type(p).watch is not Policy.watch]
        self.steers, self.watches = bool(steering), bool(watching)
        self.captures_steering = all(p.capturable for p in (*steering, *watching))
        self.listening = tuple(p for p in members(policy) if type(p).listen is not Policy.listen)
        self.deciding = tuple(p for p in members(policy) if type(p).decide is not Policy.decide)
        self.recorder: Recorder | None = None  # set it before the sequences join that it records
        self._waiting_prompts: list[int] = []  # rows whose prompt is read and not stored yet

    # -- sequences come and go

    def check(self, prompt: int, budget: int | None = None) -> None:
        """Refuse a budget that a protected prompt does not fit into. UsageError: names a budget that is enough."""
        check_budget(self.policy, prompt, budget)

    @torch.inference_mode()
    def join(
        self, seq: int, capacity: int, prompt: int = 0, thinking: bool = True, budget: int | None = None
    ) -> None:
        """Give a row to a new sequence.

        Args:
            seq: its number.
            capacity: tokens that it may have at most (the pool was made for `tokens`).
            prompt: tokens of its prompt; the policy acts when they are read.
            thinking: whether the prompt ends inside the think stage. If it does not, and the first token that is
                generated does not open the stage, the text does not think. Then it is treated as thinking
                (`Step.thinking`) as long as no tag comes: otherwise budgets of policies that evict only while a
                model thinks would never apply.
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
        thinking = thinking or None in self.think_ids
        self.rows[row] = _Row(seq, prompt, thinking, capacity, staged=thinking)
        self._row_of[seq] = row
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
        """Tokens that the sequence has seen; `held` counts those that are still in the cache."""
        return self._row(self._row_of[seq]).length

    def held(self, seq: int) -> int:
        """Tokens that the fullest lane of a sequence holds."""
        return int(self.store.count[:, self._row_of[seq]].max())

    def positions(self, seq: int) -> Tensor:
        """Original positions of the tokens that a sequence holds, oldest first, −1 after them: int32 [Lt, Ht, S]."""
        return self.store.positions()[:, self._row_of[seq]]

    def formats(self, seq: int) -> Tensor:
        """Index into Storage.formats of every token, 255 in the buffer: uint8 [Lt, Ht, S]; undefined after them."""
        return self.store.format()[:, self._row_of[seq]]

    def row_of(self, seq: int) -> int:
        """The row of a sequence."""
        return self._row_of[seq]

    # -- the rows of a step

    def batch(self, seqs: Sequence[int], tokens: Sequence[int]) -> Batch:
        """The batch of a step that feeds these tokens, on the host."""
        group = self._of(seqs)
        values = np.zeros((len(FIELDS), len(tokens)), dtype=np.int64)
        values[0], values[3], values[7] = group.constant
        values[1] = 1
        values[2] = [r.length + 1 for r in group.records]
        values[4] = self._evictable(group.records, tokens)
        values[5] = tokens
        if self.store.storage.buffer:
            values[6] = [self.store.waiting[row] for row in group.rows]
        return Batch(torch.from_numpy(values), group.whole)

    def pad(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch, and behind it other rows as padding."""
        if not rows:
            return Batch(batch.values)
        waiting = [self.store.waiting[row] for row in rows]
        idle = Batch.of(row=rows, active=[0] * len(rows), length=[self.store.lengths[row] + 1 for row in rows],
                        waiting=waiting)  # fmt: skip
        return Batch(torch.cat((batch.values, idle.values), dim=1))

    def _everybody(self, batch: Batch) -> Batch:
        """All rows, in order. Rows of the batch are as in the batch; all other rows are not active."""
        if batch.whole:
            return batch
        known = [(r.length, r.prompt, int(r.thinking)) if r else (0, 0, 0) for r in self.rows]
        values = np.zeros((len(FIELDS), len(known)), dtype=np.int64)
        values[0], values[2:5], values[5] = range(len(known)), list(zip(*known, strict=True)), -1
        values[:, batch.row.numpy()] = batch.values.numpy()
        return Batch(torch.from_numpy(values), whole=True)

    def view(self, batch: Batch) -> View:
        """The rows of a batch as the policy sees them."""
        asks = self.store.asks or not self.tells_due
        noted = None if self.recorder is None else self.recorder.noted
        return View(self.store, self.observations, self.policy, self.budgets, batch, asks, noted)

    def demands_due(self, seqs: Sequence[int]) -> tuple[Demand, ...]:
        """The demands that are due when each of these sequences brings its next token."""
        if not self.policy.demands:
            return ()
        clocks = {r.clock + 1 for r in self._of(seqs).records}
        return tuple(d for d in self.policy.demands if any(clock % d.every == 0 for clock in clocks))

    def _evictable(self, records: Sequence[_Row], tokens: Sequence[int]) -> list[bool]:
        """Whether each sequence counts as thinking after its token: it thinks, or no tag has ever come."""
        stages = self._think(records, tokens)
        if all(r.staged for r in records):
            return stages
        triples = zip(records, tokens, stages, strict=True)
        return [thinks or not (r.staged or token in self.think_ids) for r, token, thinks in triples]

    def _think(self, records: Sequence[_Row], tokens: Sequence[int]) -> list[bool]:
        """Whether each sequence is in the think stage after its token."""
        opens, closes = self.think_ids
        if None in (opens, closes) or not {opens, closes}.intersection(tokens):
            return [r.thinking for r in records]
        pairs = zip(records, tokens, strict=True)
        return [token == opens if token in (opens, closes) else r.thinking for r, token in pairs]

    def _of(self, seqs: Sequence[int]) -> _Group:
        """The group of these sequences; the last one is kept, because a step asks for it several times."""
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

    # -- which parts of a step are captured

    @property
    def tells_due(self) -> bool:
        """Whether a step tells the rows that are `due` and the policy sees these alone. If not, it sees all rows in
        every step; so does a recorder."""
        return bool(self.deciding) and self.policy.capturable and self.recorder is None

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured: widths are fixed, and no policy steers with the host's help."""
        return self.store.columns is not None and self.captures_steering

    @property
    def dense(self) -> bool:
        """Whether decode steps attend over dense copies, for pulled tokens and for values that lag. The copies are as
        wide as the longest lane, so the last bits of a sequence's sums depend on the sequences beside it."""
        return self.policy.pull > 0 or self.store.storage.lag

    @property
    def captured(self) -> bool:
        """Whether steps are captured. If so, no part of a step may read the device's memory on the host."""
        return not self.store.asks

    @captured.setter
    def captured(self, value: bool) -> None:
        self.store.asks = not value

    @property
    def captures_decisions(self) -> bool:
        """Whether `decide` is captured. It is not if there is a recorder, which must see the decisions."""
        return self.captured and self.tells_due

    @property
    def captures_flushes(self) -> bool:
        """Whether `flush` is captured. It is not if integers are shrunk: then the host checks first that there is
        room."""
        return self.captured and not self.store.storage.shrink

    @property
    def seen(self) -> int:
        """Columns of the lists that are read (the width)."""
        return self.store.seen

    @property
    def formats_in_use(self) -> frozenset[int]:
        """Formats that tokens may have."""
        return frozenset(self.store.used)

    # -- bytes

    def ledger(self) -> Ledger:
        """What every byte of this manager is for now."""
        total = sum(x.nbytes for x in self.tensors())
        state, observed = (sum(x.nbytes for x in kind) for kind in (self._state(), self._observed()))
        ledger = replace(self.store.account(), state=state, observations=observed)
        return replace(ledger, reserve=total - ledger.held)

    def tensors(self) -> list[Tensor]:
        """Everything that the manager, its store and its policy occupy."""
        return [*self.store.tensors(), *self._state(), *self._observed()]

    def _state(self) -> list[Tensor]:
        return [*self.policy.state(), *self.budgets.values()]

    def _observed(self) -> list[Tensor]:
        return self.observations.tensors

    def account(self, seq: int) -> Ledger:
        """Bytes that one sequence holds, by kind: its tokens, their scales and tables, its buffers, and its row's
        share of the policy's state and observations. Its reserve is the free slots of its pages."""
        return replace(self.store.account([self._row_of[seq]]), **self.row_shares())

    def row_shares(self) -> dict[str, int]:
        """Bytes of the policy's state and observations, divided by the number of rows."""
        kinds = {"state": self._state(), "observations": self._observed()}
        return {name: sum(x.nbytes for x in kind) // len(self.rows) for name, kind in kinds.items()}

    def told(self, seq: int) -> Told:
        """A summary of one sequence for people: its thoughts, bits a number, and the policy's own words."""
        row = self._row_of[seq]
        names = self.store.storage.names
        account = self.store.account([row])
        numbers = self.store.paged(row) * 2 * self.shape.head_dim
        lanes = self.shape.layers * self.shape.kv_heads
        held = int(self.store.count[:, row].sum()) * self.shape.sharing
        return Told(
            evicted=self._row(row).length * lanes - held,
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

    def reserved_bytes(self) -> int:
        """All bytes, used or not."""
        return self.ledger().total
