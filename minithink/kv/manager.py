"""KVManager: keys and values of many sequences under one policy. It defines the step protocol, the same for all.

A decode step feeds one token to each of some sequences. Its parts, in order:

    prepare   the host refuses a token that does not fit
    batch     the host writes what it knows of the rows into one tensor (`batch.py`)
    begin     tokens take slots
    attend    (per layer) rotate, append, attend; keep the observations that the policy demands
    tap       (per layer) steer the residual stream, keep it if the policy demands it
    due       which rows the policy will act on
    tell      copy what the host must read: segments that began, and whether the pool was too small
    advance   the host counts the tokens
    acting    the host selects the rows that are due, as a batch of their own
    decide    the policy acts on these rows, its edits are applied
    full      the host selects the rows whose buffers are full
    flush     full buffers are quantized
    close     segments begin, a recorder is told

`begin` to `tell`, `decide` and `flush` read everything from tensors. `minithink/loop.py` calls them, or captures them
as CUDA graphs. The other parts run on the host.

A prompt is read by `begin_step`, `attend`, `tap` and `end_step`. These four can also feed one generated token to each
sequence; they then run all parts above. A prompt may come in chunks. Until the last chunk it is not edited and has
full precision. Then the policy acts once, and the remaining tokens are stored in their own format.

The forward pass only appends to the cache; edits happen only between steps. So the policy sees the cache as the
forward pass left it. The edits have a fixed order:

    1. tokens move to other formats
    2. tokens are evicted
    3. full buffers are quantized, in the thought type of the segment that has run until now
    4. new segments begin

Every sequence has its own clock, the number of its generated tokens in the cache.

`attend.py` has `begin`, `attend` and `tap`. `rows.py` has the sequences, what the host knows of them, and the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minithink.config import ModelConfig
from minithink.errors import MinithinkError
from minithink.kv import checks
from minithink.kv.attend import Pass, _Read
from minithink.kv.batch import Batch
from minithink.kv.contract import Edit, Evict, OpenSegment, Policy, Requantize, SetBudget
from minithink.kv.rows import _Group
from minithink.kv.store import SAME
from minithink.kv.view import View
from minithink.model import Rope

NARROWEST = 256  # columns, where they follow the lanes
FINE = 1024  # columns; above, where tokens were evicted, widths come closer to the lanes than powers of two


class KVManager(Pass):
    """Keys and values of up to `rows` sequences under one policy."""

    _edits: Sequence[tuple[Policy, Edit]] = ()  # of the last decision, for a recorder
    _evicts = False  # whether the host has found that lanes hold fewer tokens than it had counted

    # -- a decode step; `attend.py` has `begin`, `attend` and `tap`, `rows.py` has `batch`

    @torch.inference_mode()
    def prepare(self, seqs: Sequence[int]) -> None:
        """Before a decode step of these sequences: refuse a token that does not fit, make the lists wide enough.

        Raises:
            Exhausted: the pool is full, or too small for buffers or prompts that still wait; nothing has changed.
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

    def fit_columns(self, more: int) -> None:
        """With columns="fit": set the width so that each lane has room for `more` tokens.

        It is a power of two, for a graph is captured for each width, and lanes that only grow shall need few. Lanes
        that lose tokens stay about as long as they are. So above FINE their width is a sixteenth of a power of two,
        with room for a sixteenth more tokens, so that the host seldom asks what the lanes hold.
        """
        if not self._fits:
            return
        store = self.store
        if (counted := max(store.most)) + more > store.seen:
            store.refresh()  # the host has not counted evictions
            self._evicts |= max(store.most) < counted
        wanted = max(NARROWEST, max(store.most) + more)
        width = 1 << (wanted - 1).bit_length()
        if self._evicts and wanted > FINE:
            step = width // 16
            width = -(-(wanted + wanted // 16) // step) * step
            if wanted <= store.seen < width:  # what it was when the host last asked
                return
        store.columns = min(self.width, width)

    @torch.inference_mode()
    def due(self, batch: Batch) -> Tensor:
        """The rows of a step on which the policy will act: bool [N]."""
        view = self.view(batch)
        due = torch.zeros_like(view.active)
        for policy in self.deciding:
            seen = view.seen_by(policy)
            which, _ = checks.due(policy, policy.due(seen), seen)
            due |= which.any(2).any(0)
        return due & view.active

    def tell(self, batch: Batch, out: Tensor) -> None:
        """Write what the host must read of a step.

        Args:
            out: int64 [N + 1]: for each row the type of the segment that began (if the policy opens segments), and at
                the end whether the pool was too small.
        """
        if self._opens:
            out[:-1].copy_(self.store.begun[batch.row])
        out[-1:].copy_(self.store.overflow)

    @torch.inference_mode()
    def advance(
        self, seqs: Sequence[int], tokens: Sequence[int], begun: Sequence[int] | None = None, overflow: bool = False
    ) -> None:
        """Count the tokens of a step, which are in the cache now, on the host.

        Args:
            begun: for each row the type of the segment that began with its token (`store.begun`); None: no segment
                began.
            overflow: whether the pool was too small for the step, or for a buffer before it (`store.overflow`).

        Raises:
            MinithinkError: it was too small; no token is counted, and the sequences cannot go on.
        """
        if overflow:
            pages = self.store.table.pages.count
            raise MinithinkError(
                f"The KV pool of {pages:,} pages is exhausted: use a smaller --batch-size, budget or "
                "--max-new-tokens."
            )
        group = self._of(seqs)
        if begun is not None and self._opens:
            self._begun(group.rows, begun)
        stages = self._think(group.records, tokens)
        for r, token, thinks in zip(group.records, tokens, stages, strict=True):
            r.length += 1
            r.thinking = thinks
            r.staged = r.staged or token in self.think_ids
        self._listen(group.rows, [[token] for token in tokens])
        self.store.appended(group.rows, [r.length for r in group.records])
        group.steps = max(0, group.steps - 1)
        self._pass = None

    def _listen(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Tell the policies that follow texts the new tokens of these rows, which are known (not −1)."""
        for policy in self.listening:
            for row, ids in zip(rows, texts, strict=True):
                policy.listen(row, [token for token in ids if token >= 0])

    def acting(self, batch: Batch, due: Sequence[int] | None = None) -> Batch | None:
        """The rows on which the policy acts after a step, as a batch of their own; None: no row is due.

        Args:
            batch: the step's rows, on the host, without padding.
            due: for each row whether it is due; None: all rows are.
        """
        if not self.deciding:
            return None
        if not self.tells_due:
            return self._everybody(batch)
        which = [i for i in range(len(batch)) if due is None or due[i]]
        if len(which) == len(batch):
            return batch
        return batch[which] if which else None

    @torch.inference_mode()
    def decide(self, batch: Batch) -> None:
        """Let the policy act on these rows. Rows that are not active stay as they are."""
        view = self.view(batch)
        edits = list[tuple[Policy, Edit]]()
        for policy in self.deciding:
            seen = view.seen_by(policy)
            found = checks.yielded(
                policy,
                policy.decide(seen),
                seen,
                self.store.storage,
                captures=self.policy.capturable,
                asks=view.asks,
            )
            edits += [(policy, edit) for edit in found]
        evictions = [edit for _, edit in edits if isinstance(edit, Evict)]
        moves = [edit for _, edit in edits if isinstance(edit, Requantize)]
        drop = self._dropped(evictions, view) if evictions or moves else view.active
        for move in moves:  # such a policy is not capturable, so it sees all rows
            where = torch.zeros_like(view.pos(), dtype=torch.bool)
            where[slice(None) if move.layer is None else min(move.layer, len(where) - 1)] = move.where
            where &= view.active[None, :, None, None]
            self.store.requantize(where & ~drop, move.fmt, move.how)
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
                budget = budget if edit.layer is None else budget[min(edit.layer, len(budget) - 1)]
                old = budget[..., view.row, :]
                budget[..., view.row, :] = torch.where(view.active[:, None], edit.tokens, old)
        self._edits = edits

    @staticmethod
    def _dropped(edits: Sequence[Evict], step: View) -> Tensor:
        """Tokens that these edits evict, of the rows that the policy sees: bool [Lt, R, Ht, S]."""
        whole: Tensor | None = None
        for edit in edits:
            # a prompt of which chunks are still to be read loses no token
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
        """The rows whose buffers are full, for `flush`, which must follow; None: no buffer is full.

        Raises:
            Exhausted: the pool is too small; nothing has changed, and the buffers wait.
        """
        size = self.store.storage.buffer
        full = [row for row, r in enumerate(self.rows) if r and self.store.waiting[row] == size] if size else []
        if not full:
            return None
        if self.store.asks or not self.captures_flushes:
            self.store.require_flush(full)
        self.store.flushed(full)
        return Batch.of(row=full)

    @torch.inference_mode()
    def flush(self, batch: Batch) -> None:
        """Quantize the full buffers of these rows."""
        self.store.flush_rings(batch)

    def _flush_full(self) -> None:
        if (full := self.full()) is not None:
            self.flush(full.to(self.device))

    @torch.inference_mode()
    def close(self, seqs: Sequence[int], tokens: Sequence[int]) -> None:
        """End the step on the host: segments begin, a recorder is told."""
        self._begin_segments()
        self._tell(self._of(seqs).rows, [1] * len(seqs), tokens)

    def _begin_segments(self) -> None:
        """Begin the segments that the policy has opened. If decisions are captured, the host does not wait for them;
        the segments begin with the next step's tokens instead."""
        if not self._opened or self.captures_decisions:
            return
        self._opened = False
        rows = [row for row, r in enumerate(self.rows) if r]  # all: an exhausted pool may have delayed some
        at = torch.tensor(rows, device=self.device)
        self.store.begin_segments(at, torch.ones_like(at, dtype=torch.bool))
        self._begun(rows, self.store.begun[at].tolist())

    def _begun(self, rows: Sequence[int], begun: Sequence[int]) -> None:
        """Tell the store's host part which segments begin at the end of these rows."""
        for row, thought in zip(rows, begun, strict=True):
            if thought != SAME:
                self.store.begin(row, self._row(row).length, thought)

    def _tell(self, rows: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        edits, self._edits = self._edits, ()
        if self.recorder is not None:
            self.recorder.stepped(rows, counts, tokens, edits)

    def _store_what_waits(self) -> None:
        """Quantize full buffers and prompts that were read. If the pool is exhausted, they wait for the next step."""
        self._flush_full()
        while self._waiting_prompts:
            row = self._waiting_prompts[0]
            self.store.settle(row, self._row(row).length)
            self._waiting_prompts.pop(0)

    # -- a step without the decode loop: it reads prompts, or feeds one generated token to each sequence

    @torch.inference_mode()
    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """Announce one forward pass: sequence seqs[i] brings counts[i] new tokens, in this order.

        Args:
            tokens: ids of all new tokens, one sequence after the other, for policies and the think stage; None: they
                are not known.

        Raises:
            Exhausted: the pool is full; nothing has changed.
        """
        group, counts = self._announced(seqs, counts), list(counts)
        if group.records[0].clock < 0:
            self._begin_reading(group, counts, tokens or ())
            return
        self.prepare(seqs)
        batch = self.batch(seqs, [-1] * len(counts) if tokens is None else tokens)
        now = self.begin(batch.to(self.device), self.demands_due(seqs))
        now.fed = list(seqs), tokens or (), batch

    @torch.inference_mode()
    def end_step(self) -> None:
        """Close the step: count its tokens, let the policy act, quantize full buffers and prompts that were read.

        Raises:
            Exhausted: a full buffer or a prompt found no page; it waits for the next step.
            MinithinkError: the pool is too small and steps are captured; the sequences cannot go on.
        """
        now = self._now
        if isinstance(now, _Read):
            self._end_reading(now)
            return
        assert now.fed is not None
        seqs, tokens, batch = now.fed
        begun = self.store.begun[now.batch.row].tolist() if self._opens else None
        due = self.due(now.batch).tolist() if self.tells_due else None
        # The host has checked the pool, unless steps are captured.
        self.advance(seqs, batch.token.tolist(), begun, self.captured and bool(self.store.overflow))
        if (acting := self.acting(batch, due)) is not None:
            self.decide(acting.to(self.device))
        self._flush_full()
        self.close(seqs, tokens)

    def _announced(self, seqs: Sequence[int], counts: Sequence[int]) -> _Group:
        """The sequences of a step (`_of`). ValueError: some read prompts while others generate, or the counts of new
        tokens are wrong."""
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
        """Take plain slots for the next tokens of prompts."""
        rows, records = group.rows, group.records
        self._store_what_waits()
        self.fit_columns(max(counts))
        lengths = [r.length for r in records]
        writer = self.store.append(rows, counts, lengths)
        position = [p for start, count in zip(lengths, counts, strict=True) for p in range(start, start + count)]
        cos, sin = self.rope.at(torch.tensor(position, device=self.device))
        first, step = np.cumsum([0, *counts[:-1]]), np.arange(max(counts))
        each = first[:, None] + np.minimum(step, np.array(counts)[:, None] - 1)
        self._pass = _Read(
            rows, records, counts, tokens, writer, torch.tensor(rows, device=self.device), cos, sin,
            torch.from_numpy(each).to(self.device), any(lengths), list(self.policy.demands),
        )  # fmt: skip

    def _end_reading(self, now: _Read) -> None:
        """Count the tokens. Let the policy act on a prompt that is complete, then store the remaining tokens."""
        for r, count in zip(now.records, now.counts, strict=True):
            r.length += count
        if now.tokens:
            ends = np.cumsum(now.counts)
            self._listen(now.rows, [now.tokens[end - n : end] for end, n in zip(ends, now.counts, strict=True)])
        self._last.steps = 0  # `prepare` must check the sequences again
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
        self._pass = None  # the step is over, even if the pool turns out to be exhausted below
        self._waiting_prompts += rows
        self._store_what_waits()
        self._begin_segments()
        self._tell(now.rows, now.counts, now.tokens)


def bytes_for(
    config: ModelConfig, policy: Policy, dtype: torch.dtype, *, rows: int, tokens: int, prompt: int,
    prompts: int = 1, columns: Literal["fit"] | None = None,
) -> int:  # fmt: skip
    """Bytes of all tensors of a manager with so many rows; nothing is allocated. Arguments as of KVManager."""
    rope = Rope(replace(config, max_position=1), "meta")
    policy = copy.deepcopy(policy)
    manager = KVManager(
        config, rope, policy, rows=rows, tokens=tokens, prompt=prompt, prompts=prompts, device="meta", dtype=dtype,
        columns=columns,
    )  # fmt: skip
    return sum(x.nbytes for x in manager.tensors())
