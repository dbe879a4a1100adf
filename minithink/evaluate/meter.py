"""Measures the tokens and bytes that every sequence of a stream holds, after each of its decoding steps.

If decoding steps are CUDA graphs, one more graph counts on the device, for all rows at once, while the host prepares
the next step. The host reads a sequence's sums only when the sequence ends. If each sequence has a cache of its own
(`kv/apart.py`), the host asks the ledger after every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minithink import loop
from minithink.kv.apart import Apart
from minithink.kv.batch import ACTIVE
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.sequence import Track
from minithink.stream import Stream

Watch = Callable[[list[Track]], object]  # Stream.on_step


class Held(NamedTuple):
    """What one sequence held over its decoding steps; if it took none, after its prompt. Tokens are means over its
    lanes (a lane is a KV head of a layer)."""

    steps: int
    evicting_steps: int  # steps after which some lane held no more tokens than before
    tokens_peak: float
    tokens_mean: float
    bytes_peak: int
    bytes_mean: float


class Meter(Protocol):
    """Called after every forward pass of a stream (`Stream.on_step`)."""

    def __call__(self, sequences: Sequence[Track]) -> None:
        """Measure the sequences of a step: those whose prompts were read, or all that decode."""

    def take(self, sequences: Sequence[Track]) -> list[Held]:
        """What sequences held that have just ended. Call it before the stream goes on; it forgets them."""


def meter(stream: Stream) -> Meter:
    """The meter of a stream of a fixed shape, which measures from the first step on."""
    if isinstance(stream.cache, Apart):
        measure: Meter = LedgerMeter(stream.cache)
    elif isinstance(stream.cache, KVManager):
        measure = DeviceMeter(stream.cache)
    else:
        raise ValueError("only streams of a fixed shape are measured: Engine.stream(fixed=True)")
    stream.on_step = measure
    return measure


def both(one: Watch, other: Watch) -> Watch:
    """A function that calls both, in this order."""

    def call(sequences: list[Track]) -> None:
        one(sequences)
        other(sequences)

    return call


class Seconds:
    """The time of each sequence: of every step, the duration divided by the sequences that got a new token."""

    def __init__(self) -> None:
        self._began = dict[int, float]()  # of sequences that decode, by their numbers: `_each` less their seconds
        self._spent = dict[int, float]()  # of sequences that were preempted: their seconds
        self._each = 0.0  # seconds that a sequence would have if it had decoded from the start
        self._last = time.perf_counter()
        self._decoding: Sequence[Track] = ()  # the sequences of the last decode step

    def step(self, sequences: Sequence[Track]) -> None:
        """A step of these sequences has ended."""
        now = time.perf_counter()
        own = (now - self._last) / len(sequences)
        self._last = now
        if len(sequences[0].tokens) <= 1:  # a step that has only read prompts
            for s in sequences:
                self._began[s.number] = self._each - own
            return
        if sequences is not self._decoding:
            self._decoding = sequences
            self._note_pauses({s.number for s in sequences})
        self._each += own

    def _note_pauses(self, decoding: set[int]) -> None:
        """Stop the time of sequences that no longer decode, and go on with that of sequences that decode again."""
        for number in self._began.keys() - decoding:
            self._spent[number] = self._each - self._began.pop(number)
        for number in self._spent.keys() & decoding:
            self._began[number] = self._each - self._spent.pop(number)

    def take(self, s: Track) -> float:
        """The seconds of a sequence that has just ended."""
        return self._each - self._began.pop(s.number)


class DeviceMeter:
    """Measures the rows of one manager by a CUDA graph."""

    def __init__(self, cache: KVManager) -> None:
        self.cache = cache
        rows = cache.shape.rows
        # tokens and bytes after the prompt; steps, steps with an eviction; sums of tokens and of bytes; their peaks
        self.sums = torch.zeros(8, rows, dtype=torch.float64, device=cache.device)
        self.before = cache.store.lists.count.clone()  # tokens that the lanes held
        self._row = dict[int, int]()  # of a sequence's number
        self._last: tuple[Sequence[Track], int, Tensor] | None = None  # sequences, bytes of state, inputs for them
        self._captured: dict[int, loop.Captured] = {}  # by the width that is read
        self._pool = torch.cuda.graph_pool_handle()
        # `take` reads this copy of the sums: the device may be at the next step by then.
        self._told = torch.zeros(self.sums.shape, dtype=self.sums.dtype, pin_memory=self.sums.is_cuda)
        self._copied = torch.cuda.Event() if self.sums.is_cuda else None

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Track]) -> None:
        self._measure(sequences)
        self._told.copy_(self.sums, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _measure(self, sequences: Sequence[Track]) -> None:
        if not sequences[0].tokens:
            rows = [self.cache.row_of(s.number) for s in sequences]
            self._row.update(zip((s.number for s in sequences), rows, strict=True))
            at = torch.tensor(rows, device=self.sums.device)
            count = self.cache.store.lists.count[:, at]  # [Lt, N, Ht]
            self.before[:, at] = count
            self.sums[:, at] = 0
            self.sums[0, at] = count.double().mean((0, 2))
            self.sums[1, at] = (self.cache.store.bytes_of(at).sum(0) + self._state()).double()
            return
        values = self._inputs(sequences)
        width = self.cache.store.lists.columns_read
        if width not in self._captured:
            self._captured[width] = loop.Captured(self._add, values, self.sums, self._pool)
        self._captured[width].replay(values)

    def _state(self) -> int:
        """Bytes of a row's share of the policy's state and of its observations."""
        return sum(self.cache.row_shares().values())

    def _inputs(self, sequences: Sequence[Track]) -> Tensor:
        """int64 [3, B]: the rows, whether each took part (0 or 1), bytes of a row's state. A new list of sequences
        has new ones."""
        state = self._state()
        if self._last is None or self._last[0] is not sequences or self._last[1] != state:
            values = torch.zeros(3, self.cache.shape.rows, dtype=torch.int64)
            values[0] = torch.arange(values.shape[1])
            values[ACTIVE, [self._row[s.number] for s in sequences]] = 1
            values[2] = state
            self._last = sequences, state, values
        return self._last[2]

    def _add(self, values: Tensor, sums: Tensor) -> None:
        """The captured part: count one more step of the rows that took part."""
        active = values[ACTIVE].bool()  # [B]
        count = self.cache.store.lists.count  # [Lt, B, Ht]
        tokens = count.double().mean((0, 2))
        size = (self.cache.store.bytes_of().sum(0) + values[2]).double()
        lost = (count <= self.before).any(2).any(0)
        now = torch.stack((torch.ones_like(tokens), lost.double(), tokens, size)).masked_fill(~active, 0)
        sums[2:6] += now
        sums[6:8] = torch.maximum(sums[6:8], now[2:])
        self.before.copy_(torch.where(active[None, :, None], count, self.before))

    def take(self, sequences: Sequence[Track]) -> list[Held]:
        rows = [self._row.pop(s.number) for s in sequences]
        if not rows:
            return []
        if self._copied is not None:
            self._copied.synchronize()
        return [_held(*column) for column in zip(*self._told[:, rows].tolist(), strict=True)]


def _held(
    prompt_tokens: float,
    prompt_bytes: float,
    steps: float,
    evicting: float,
    tokens: float,
    size: float,
    tokens_peak: float,
    size_peak: float,
) -> Held:
    """The figures of a sequence from its sums."""
    if not steps:
        return Held(0, 0, prompt_tokens, prompt_tokens, round(prompt_bytes), prompt_bytes)
    return Held(int(steps), int(evicting), tokens_peak, tokens / steps, round(size_peak), size / steps)


@dataclass
class _Sums:
    """The sums of one sequence so far."""

    prompt: tuple[float, int]  # tokens and bytes after the prompt
    before: Tensor | None  # tokens that the lanes held after the step before; None: a plain cache evicts nothing
    steps: int = 0
    evicting: int = 0
    tokens: float = 0.0
    tokens_peak: float = 0.0
    size: int = 0
    size_peak: int = 0


class LedgerMeter:
    """Measures sequences that have caches of their own, by the ledger."""

    def __init__(self, cache: Apart) -> None:
        self.cache = cache
        self._sums = dict[int, _Sums]()

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Track]) -> None:
        for s in sequences:
            cache = self.cache.caches[s.number]
            size = cache.account(s.number).held
            if isinstance(cache, FullCache):
                count = None
                tokens = float(cache.held(s.number))
            else:
                count = cache.store.lists.count.clone()
                tokens = float(count.double().mean())
            if not s.tokens:
                self._sums[s.number] = _Sums((tokens, size), count)
                continue
            x = self._sums[s.number]
            x.steps += 1
            x.evicting += count is not None and x.before is not None and bool((count <= x.before).any())
            x.tokens = x.tokens + tokens
            x.tokens_peak = max(x.tokens_peak, tokens)
            x.size = x.size + size
            x.size_peak = max(x.size_peak, size)
            x.before = count

    def take(self, sequences: Sequence[Track]) -> list[Held]:
        ended = [self._sums.pop(s.number) for s in sequences]
        return [_held(*x.prompt, x.steps, x.evicting, x.tokens, x.size, x.tokens_peak, x.size_peak) for x in ended]
