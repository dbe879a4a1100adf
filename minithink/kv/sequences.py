"""Sequences: which row of the cache each sequence has, and what the host knows of it.

A sequence takes a free row when it joins, and frees the row when it leaves. Everything here is Python numbers on the
host. `batch` writes what a step must know of its rows into one tensor (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minithink.kv.batch import ACTIVE, FIELDS, LENGTH, PROMPT, ROW, SEQUENCE, TARGET, THINKING, TOKEN, WAITING, Batch


@dataclass
class Known:
    """What the host knows of one sequence."""

    seq: int
    prompt: int  # tokens
    thinking: bool  # whether it is in the think stage
    capacity: int  # tokens that the sequence may have at most
    staged: bool  # whether it has ever been in the think stage
    length: int = 0  # tokens so far, evicted ones too

    @property
    def clock(self) -> int:
        """Generated tokens in the cache; negative while the prompt is read."""
        return self.length - self.prompt


@dataclass
class Lineup:
    """The sequences that take part in a step, in the order of its batch."""

    seqs: list[int]
    rows: list[int]
    known: list[Known]
    constant: np.ndarray  # int64 [FIELDS, N]: the fields of a batch that are the same in every step
    whole: bool = False  # these are all rows, in order
    steps: int = 0  # so many steps fit into the capacities of all its sequences, without another check; 0: check


NOBODY = Lineup([], [], [], np.zeros((len(FIELDS), 0), dtype=np.int64))


class Sequences:
    """The sequences of a manager."""

    def __init__(self, rows: int, think_ids: tuple[int | None, int | None]) -> None:
        """think_ids: the tokens that open and close the think stage; without them a sequence always thinks."""
        self.rows: list[Known | None] = [None] * rows
        self.row_of: dict[int, int] = {}  # number of a sequence → its row
        self.think_ids = think_ids
        self._last = NOBODY

    # -- sequences come and go

    def join(self, seq: int, capacity: int, prompt: int, thinking: bool) -> int:
        """A new sequence takes the first free row → the row. Arguments as of `KVManager.join`."""
        row = self.rows.index(None)
        thinking = thinking or None in self.think_ids
        self.rows[row] = Known(seq, prompt, thinking, capacity, staged=thinking)
        self.row_of[seq] = row
        self.recheck()
        return row

    def check_free(self, seq: int) -> None:
        """ValueError: this sequence is here already, or no row is free for it."""
        if seq in self.row_of:
            raise ValueError(f"sequence {seq} is in the cache already")
        if None not in self.rows:
            raise ValueError(f"all {len(self.rows)} rows are taken; sequence {seq} must wait")

    def leave(self, seq: int) -> int:
        """A sequence frees its row → the row."""
        row = self.row_of.pop(seq)
        self.rows[row] = None
        self.recheck()
        return row

    def at(self, row: int) -> Known:
        """What the host knows of the sequence in a row. ValueError: the row is free."""
        known = self.rows[row]
        if known is None:
            raise ValueError(f"row {row} holds no sequence")
        return known

    def taken(self) -> list[int]:
        """The rows that hold a sequence."""
        return [row for row, known in enumerate(self.rows) if known is not None]

    # -- the sequences of a step

    def of(self, seqs: Sequence[int]) -> Lineup:
        """The lineup of these sequences. A step asks for it several times, and most steps have the same sequences as
        the step before, so the last lineup is kept."""
        if self._last.seqs != seqs:
            rows = [self.row_of[seq] for seq in seqs]
            known = [self.at(row) for row in rows]
            constant = np.zeros((len(FIELDS), len(rows)), dtype=np.int64)
            constant[ROW] = rows
            constant[ACTIVE] = 1
            constant[PROMPT] = [k.prompt for k in known]
            constant[SEQUENCE] = seqs
            whole = rows == list(range(len(self.rows)))
            self._last = Lineup(list(seqs), rows, known, constant, whole)
        return self._last

    def recheck(self) -> None:
        """Forget the last lineup, so that the next step checks the capacities again."""
        self._last = NOBODY

    def announced(self, seqs: Sequence[int], counts: Sequence[int]) -> Lineup:
        """The lineup of a step in which seqs[i] brings counts[i] new tokens.

        Raises:
            ValueError: some read prompts while others generate, or the counts of new tokens are wrong.
        """
        if not seqs or len(set(seqs)) < len(seqs) or min(counts) < 1:
            raise ValueError(f"a step needs sequences, each once, with new tokens: {list(seqs)} with {list(counts)}")
        lineup = self.of(seqs)
        in_prompt = [known.clock < 0 for known in lineup.known]
        if any(in_prompt) != all(in_prompt):
            raise ValueError("a step reads prompts or generates, not both: announce them apart")
        for known, count in zip(lineup.known, counts, strict=True):
            if known.length + count > known.capacity:
                raise ValueError(
                    f"sequence {known.seq} has {known.length} tokens of {known.capacity}: {count} do not fit"
                )
            if in_prompt[0] and known.length + count > known.prompt:
                raise ValueError(f"sequence {known.seq} announced a prompt of {known.prompt} tokens and brings more")
            if not in_prompt[0] and count != 1:
                raise ValueError(f"sequence {known.seq} generates: it brings one token a step, not {count}")
        return lineup

    def ready(self, seqs: Sequence[int]) -> Lineup:
        """The lineup of a decode step, in which each sequence brings one token.

        Raises:
            ValueError: a sequence is full, or has not read its prompt.
        """
        lineup = self.of(seqs)
        if not lineup.steps:
            self.announced(seqs, [1] * len(seqs))
            first = lineup.known[0]
            if first.clock < 0:
                raise ValueError(
                    f"sequence {first.seq} generates, and has read {first.length} of {first.prompt} prompt tokens"
                )
            lineup.steps = min(known.capacity - known.length for known in lineup.known)
        return lineup

    def count(self, lineup: Lineup, tokens: Sequence[int]) -> None:
        """Count one generated token of each sequence of a lineup."""
        for known in lineup.known:
            known.length += 1
        if self._tagged(tokens):
            stages = self._stages(lineup.known, tokens)
            for known, token, thinks in zip(lineup.known, tokens, stages, strict=True):
                known.thinking = thinks
                known.staged = known.staged or token in self.think_ids
        lineup.steps = max(0, lineup.steps - 1)

    # -- batches

    def batch(
        self,
        lineup: Lineup,
        tokens: Sequence[int],
        waiting: Sequence[int] | None,
        targets: Sequence[int] | None = None,
    ) -> Batch:
        """The batch of a step that feeds these tokens.

        Args:
            tokens: one for each sequence of the lineup.
            waiting: tokens in each row's full-precision buffer; None: there are no buffers.
            targets: the tokens that follow in given texts; None: they are drawn.
        """
        values = lineup.constant.copy()
        values[LENGTH] = [known.length + 1 for known in lineup.known]
        values[THINKING] = self._count_as_thinking(lineup.known, tokens)
        values[TOKEN] = tokens
        if waiting is not None:
            values[WAITING] = waiting
        if targets is not None:
            values[TARGET] = targets
        return Batch(torch.from_numpy(values), lineup.whole)

    def everybody(self, batch: Batch) -> Batch:
        """All rows, in order. Rows of the batch are as in the batch; all other rows are not active."""
        if batch.whole:
            return batch
        values = np.zeros((len(FIELDS), len(self.rows)), dtype=np.int64)
        values[ROW] = range(len(self.rows))
        values[TOKEN] = -1
        for row in self.taken():
            known = self.at(row)
            values[LENGTH, row] = known.length
            values[PROMPT, row] = known.prompt
            values[THINKING, row] = known.thinking
        values[:, batch.row.numpy()] = batch.values.numpy()
        return Batch(torch.from_numpy(values), whole=True)

    def _count_as_thinking(self, known: Sequence[Known], tokens: Sequence[int]) -> list[bool]:
        """Whether each sequence counts as thinking after its token: it thinks, or no tag has ever come."""
        if not self._tagged(tokens):
            return [k.thinking or not k.staged for k in known]
        stages = self._stages(known, tokens)
        out = []
        for k, token, thinks in zip(known, tokens, stages, strict=True):
            tagged = k.staged or token in self.think_ids
            out.append(thinks or not tagged)
        return out

    def _tagged(self, tokens: Sequence[int]) -> bool:
        """Whether one of these tokens opens or closes the think stage."""
        return None not in self.think_ids and not set(self.think_ids).isdisjoint(tokens)

    def _stages(self, known: Sequence[Known], tokens: Sequence[int]) -> list[bool]:
        """Whether each sequence is in the think stage after its token."""
        opens, closes = self.think_ids
        out = []
        for k, token in zip(known, tokens, strict=True):
            is_tag = token in (opens, closes)
            out.append(token == opens if is_tag else k.thinking)
        return out
