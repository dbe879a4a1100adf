"""The decode loop: the parts of a decode step, and their order.

    step      take slots; every layer: append, attend; draw the next tokens; tell which rows are due   (captured)
    advance   the host counts the tokens
    decide    the policy acts on the rows that are due                                                 (captured)
    flush     full buffers are quantized                                                               (captured)
    close     segments begin, a recorder is told

On a CPU each part is a call. On a GPU the parts marked "captured" are CUDA graphs of the same calls.

A decode step of a small batch is several hundred kernels, each of a few microseconds. Launched one by one from Python
they take ten times as long as they run. A CUDA graph is captured once and launched as a whole. It replays the same
kernels on the same addresses. So everything that changes from step to step goes through one tensor of inputs, the
batch (`kv/batch.py`). Sequences come and go between replays.

    batch ──► take slots ──► layers: append, attend, … ──► logits ──► draw ──► tokens, rows that are due, overflow
                                                                                               │
    next step ◄── evict ◄── choose ◄── layers: score keys ◄── batch of the rows that are due ◄─┘

A policy decides in few steps and for few rows. These rows are a batch of their own, in a second graph. A policy that
is not `capturable` acts between steps, kernel by kernel: on the rows that are due, if it `tells_due`, else on all
rows after every step. Tokens that are quantized together wait in a buffer. The rows whose buffers are full are the
batch of a third graph.

A graph is captured when it is first needed. It holds for

    a number of rows         one of SIZES; if there are fewer sequences, padding rows follow. If these are all rows of
                             the cache, in order, nothing need be picked out of its tensors: a graph of its own
    a width of the lists     one of few that the lanes fit into (`fit_columns`); it decides the grid of attention
    the formats in use       of the tokens that the lanes hold
    the observations         a policy that demands attention every 128 tokens pays for it in 1 of 128 steps
    a given text             its next token is compared with the logits instead of one being drawn: a loss, float32

The host reads four things of a step: the drawn tokens, the rows that are due, the segments that began, and whether
the pool was too small.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minithink.kv.batch import ACTIVE, ROW, Batch
from minithink.kv.contract import Demand
from minithink.kv.manager import KVManager
from minithink.model import Decoder
from minithink.sampling import Sampler, SamplingParams, filter_logits, where_finite
from minithink.sampling import losses as losses_of

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of a graph; another size is all rows of the cache


class Key(NamedTuple):
    """What a graph holds for."""

    rows: int
    whole: bool  # these are all rows of the cache, in order
    columns: int
    formats: frozenset[int]
    observed: tuple[Demand, ...]
    decides: bool  # decisions are captured, unless a trace is being written
    compares: bool = False  # the texts are given: losses are written, and no token is drawn


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's garbage collector off until the end of the block.

    A CUDA graph that is freed while another one is captured invalidates the capture. The collector frees the graphs
    of earlier streams, and it may run at any allocation.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Captured:
    """Kernels that are captured once and replayed with other inputs."""

    def __init__(self, run: Callable[[Tensor, Tensor], object], values: Tensor, out: Tensor, pool: Any) -> None:
        """Run once with no active row, then capture. The first run compiles the kernels and changes nothing.

        Args:
            run: takes (inputs, out) and launches kernels; it must not read the device's memory on the host.
            values: int64 [k, N] on the host, inputs of N rows.
            out: the tensor on the device that `run` writes.
            pool: memory that all graphs share; no two graphs run at once.
        """
        self.out = out
        self._inputs = values.to(out.device)
        self._inputs[ACTIVE] = 0
        self._staging = torch.empty_like(values, pin_memory=True)
        self._copied = torch.cuda.Event()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(self._inputs, out)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with no_collections(), torch.cuda.graph(self._graph, pool=pool):
            run(self._inputs, out)

    def replay(self, values: Tensor) -> Tensor:
        """Replay with these inputs. Returns `out`; the host does not wait for it."""
        self._copied.synchronize()  # the copy of the last replay may still read the staging buffer
        self._staging.copy_(values)
        self._inputs.copy_(self._staging, non_blocking=True)
        self._copied.record()
        self._graph.replay()
        return self.out


Graphs = dict[Key, Captured]


def capturer(cache: KVManager) -> type[Captured] | None:
    """The class that captures the steps of a cache; None: steps run call by call."""
    able = cache.capturable and cache.backend.capturable and cache.device.type == "cuda"
    return Captured if able else None


@dataclass
class _Launched:
    """A step that was launched and may still run."""

    seqs: list[int]
    tokens: list[int]
    batch: Batch  # on the host, without padding
    tells_due: bool  # as it was at the launch: a recorder may come or go before the step ends
    out: Tensor  # int64 [3n + 1]: tokens, rows that are due, segments that began, overflow
    targets: list[int] | None = None  # the tokens that follow, if the texts are given
    losses: Tensor | None = None  # float32 [n], on the device: of the targets

    def told(self) -> _Told:
        """Wait for the step, and read what it tells the host. Padding rows are left out."""
        numbers = self.out.tolist()
        rows = len(self.out) // 3
        n = len(self.seqs)
        due = numbers[rows : rows + n]
        losses = [] if self.losses is None else self.losses[:n].tolist()
        return _Told(
            drawn=numbers[:n],
            losses=losses,
            due=due if self.tells_due else None,
            begun=numbers[2 * rows : 2 * rows + n],
            overflow=bool(numbers[-1]),
        )


@dataclass
class _Told:
    """What the host reads of a step."""

    drawn: list[int]  # the next token of each sequence; means nothing if the texts are given
    losses: list[float]  # of the next token of each sequence, if the texts are given
    due: list[int] | None  # whether each is due; None: the step does not tell
    begun: list[int]  # the type of the segment that began with each token
    overflow: bool  # whether the pool was too small


class DecodeLoop:
    """Decode steps of one model over one cache."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVManager,
        params: SamplingParams,
        sizes: Sequence[int] = SIZES,
        sampler: Sampler | None = None,
    ) -> None:
        """
        Args:
            sizes: numbers of rows of the step's graphs, beside all rows. If empty, no shape depends on the number of
                sequences.
            sampler: draws if steps are not captured: the same tokens, faster.
        """
        self.decoder = decoder
        self.cache = cache
        self.params = params
        self.sizes = sizes
        self.sampler = sampler
        self._capture = capturer(cache)
        cache.captured = self.captures
        self.steps: Graphs = {}
        self.decisions: Graphs = {}
        self.flushes: Graphs = {}
        self._losses: Tensor | None = None  # float32 [rows]: graphs write losses there
        self._pool = None
        if self.captures and cache.device.type == "cuda":
            gc.collect()  # the graphs of earlier streams give their memory back before new ones take theirs
            self._pool = torch.cuda.graph_pool_handle()
        self._launched: _Launched | None = None

    @property
    def captures(self) -> bool:
        """Whether steps are captured."""
        return self._capture is not None

    def step(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Feed every sequence its newest token → the next token of each; NO_TOKEN where logits are not finite.

        Raises:
            Exhausted: the pool of pages is too small. Nothing has changed; or, if it was a full buffer that found no
                page, the token is in the cache, and the buffer waits.
            MinithinkError: the pool is too small and the step was captured; the sequences cannot go on.
            UsageError: a lane is full; nothing has changed.
        """
        if self._launched is None:
            self.launch(seqs, tokens)
        return self._finish(seqs, tokens).drawn

    def read(self, seqs: Sequence[int], tokens: Sequence[int], targets: Sequence[int]) -> list[float]:
        """Feed every sequence its newest token, as `step` does → the loss of the token that follows in its text.

        Args:
            targets: the tokens that follow.

        Returns:
            −log p of each target in nats; NaN or ∞ where the logits are not finite. Raises: as `step`.
        """
        if self._launched is None:
            self.launch(seqs, tokens, targets)
        return self._finish(seqs, tokens, targets).losses

    @torch.inference_mode()
    def launch(self, seqs: Sequence[int], tokens: Sequence[int], targets: Sequence[int] | None = None) -> None:
        """Begin the next step and do not wait for it. `step` or `read` of the same sequences must follow; until then
        the cache must not be used. targets: as of `read`; None: `step` follows. Raises: Exhausted and UsageError as
        `step` does."""
        if self._launched is not None:
            raise ValueError("a step is under way already: call step before the next launch")
        self.cache.prepare(seqs)
        batch = self.cache.batch(seqs, tokens, targets)
        observed = self.cache.demands_now(seqs)
        losses = None if targets is None else self._room_for_losses()
        out = self.run(
            self.steps,
            lambda x, out: self._step(x, out, observed, losses),
            batch,
            numbers=3,
            observed=observed,
            compares=losses is not None,
            sizes=self.sizes,
            captured=self.captures,
        )
        self._launched = _Launched(
            seqs=list(seqs),
            tokens=list(tokens),
            batch=batch,
            tells_due=self.cache.tells_due,
            out=out,
            targets=None if targets is None else list(targets),
            losses=losses,
        )

    def _room_for_losses(self) -> Tensor:
        """Where a step writes its losses: float32 [rows]. Graphs keep the address, so there is one."""
        if self._losses is None:
            self._losses = torch.zeros(self.cache.shape.rows, device=self.cache.device)
        return self._losses

    @torch.inference_mode()
    def _finish(self, seqs: Sequence[int], tokens: Sequence[int], targets: Sequence[int] | None = None) -> _Told:
        """Wait for the step that was launched, and let the policy act → what the step told."""
        cache = self.cache
        launched = self._launched
        assert launched is not None
        if launched.seqs != list(seqs) or launched.tokens != list(tokens):
            raise ValueError(f"the step under way feeds other tokens than {list(tokens)} of sequences {list(seqs)}")
        if launched.targets != (None if targets is None else list(targets)):
            raise ValueError(f"the step under way has the targets {launched.targets}, not {targets}")
        self._launched = None
        told = launched.told()
        cache.advance(seqs, tokens, told.begun, told.overflow)
        acting = cache.acting(launched.batch, told.due)
        if acting is not None:
            self.run(self.decisions, lambda x, _: cache.decide(x), acting, captured=cache.captures_decisions)
        full = cache.full()
        if full is not None:
            self.run(self.flushes, lambda x, _: cache.flush(x), full, captured=self.captures)
        cache.close(seqs, tokens)
        return told

    def draw(self, logits: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
        """Draw the next token of every row, as `sampling.sample` does.

        Args:
            logits: [N, V].
            sequence: int64 [N], number of the sequence, which decides its draws.
            position: int64 [N], position of the token that is drawn.

        Returns:
            int64 [N]; NO_TOKEN where the logits are not finite.
        """
        if self.sampler is not None and not self.captures:
            return self.sampler.sample(logits, sequence.tolist(), position.tolist())
        if self.params.greedy:
            drawn = logits.argmax(-1)
        else:
            x = filter_logits(logits, self.params)
            drawn = self.decoder.backend.gumbel_argmax(x, self.params.seed, sequence, position)
        return where_finite(drawn, logits)

    def _step(self, batch: Batch, out: Tensor, observed: Sequence[Demand], losses: Tensor | None) -> None:
        """One token of every active row.

        Args:
            out: int64 [3N + 1], see `_Launched`.
            losses: float32 [rows], where the losses of the targets go; None: the next tokens are drawn.
        """
        cache = self.cache
        n = len(batch)
        cache.begin(batch, observed)
        logits = self.decoder.logits(self.decoder(batch.token, cache))
        if losses is None:
            out[:n].copy_(self.draw(logits, batch.sequence, batch.length))
        else:
            losses[:n].copy_(losses_of(logits, batch.target))
        if cache.tells_due:
            out[n : 2 * n].copy_(cache.due(batch))
        cache.tell(batch, out[2 * n :])

    def run(
        self,
        graphs: Graphs,
        part: Callable[[Batch, Tensor], object],
        batch: Batch,
        numbers: int = 0,
        *,
        captured: bool,
        observed: tuple[Demand, ...] = (),
        compares: bool = False,
        sizes: Sequence[int] = SIZES,
    ) -> Tensor:
        """Run one part of a step: call it, or replay its graph. A graph that is missing is captured first.

        Args:
            graphs: the captured graphs of this part.
            part: takes (batch, out); if it is captured, it must not read the device's memory on the host.
            batch: the rows, on the host.
            numbers: numbers that `out` has for each row; one more number follows them.
            captured: whether to replay a graph; then the batch is padded to one of the sizes.
            observed: the demands that the part observes; a graph holds for one set of them.
            compares: whether the part writes losses of given texts.
            sizes: numbers of rows that graphs may have.

        Returns:
            out: int64 [numbers · rows + 1], on the device.
        """
        cache = self.cache
        if self._capture is None or not captured:
            out = torch.zeros(numbers * len(batch) + 1, dtype=torch.int64, device=cache.device)
            part(batch.to(cache.device), out)
            return out
        padded = self._padded(batch, sizes)
        whole = padded.whole
        key = Key(
            rows=len(padded),
            whole=whole,
            columns=cache.columns_read,
            formats=cache.formats_in_use,
            observed=observed,
            decides=cache.captures_decisions,
            compares=compares,
        )
        if key not in graphs:
            out = torch.zeros(numbers * len(padded) + 1, dtype=torch.int64, device=cache.device)
            graphs[key] = self._capture(lambda x, out: part(Batch(x, whole), out), padded.values, out, self._pool)
        return graphs[key].replay(padded.values)

    def _padded(self, batch: Batch, sizes: Sequence[int]) -> Batch:
        """The batch, and behind it padding rows (not active) up to the next size of a graph."""
        if batch.whole:
            return batch
        all_rows = self.cache.shape.rows
        size = next((size for size in sizes if len(batch) <= size <= all_rows), all_rows)
        taken = set(batch.row.tolist())
        idle = [row for row in range(all_rows) if row not in taken]
        values = self.cache.pad(batch, idle[: size - len(batch)]).values
        return Batch(values, whole=values[ROW].tolist() == list(range(all_rows)))
