"""The decode loop: what happens in a step, and in which order.

    step      take slots; every layer: append, attend; draw the next tokens; tell which rows are due   (recorded)
    advance   the host counts the tokens
    decide    the policy acts on the rows that are due                                                 (recorded)
    flush     buffers that are full are quantized                                                      (recorded)
    close     segments begin

On a CPU each part is a call. On a GPU it is a CUDA graph of the same call: one a step, one for what the policy
decides, one for buffers that are full.

A decoding step of a small batch is several hundred kernels, each of a few microseconds; launched one by one from
Python they take ten times as long as they run. A CUDA graph is recorded once and launched as a whole. It replays the
same kernels on the same addresses, so everything that changes from step to step goes through one tensor of inputs,
the batch (`kv/batch.py`). Sequences come and go between replays.

    batch ──► take slots ──► layers: append, attend, … ──► logits ──► draw ──► tokens, rows that are due, overflow
                                                                                               │
    next step ◄── evict ◄── choose ◄── layers: score keys ◄── batch of the rows that are due ◄─┘

A policy has something to decide in few steps, and for few rows: these are a batch of their own, in a second graph. A
policy that cannot be recorded (`Policy.recordable`) acts between steps, kernel by kernel. Tokens that are quantized
together wait in a buffer; the rows whose buffers are full are a batch of a third graph.

A graph belongs to a number of rows (SIZES: fewer sequences leave some rows idle), to a bound on how long the lanes
are (powers of two: it decides the grid of attention), to the formats that the lanes hold, and to what the policy is
shown of this step: a policy that demands attention every 128 tokens pays for it in 1 of 128 steps. Each is recorded
when it is first needed. The host reads the tokens that were drawn, which rows are due, which segments began and
whether the pool was too small, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minithink.errors import MinithinkError
from minithink.kv.batch import ACTIVE, Batch
from minithink.kv.contract import Demand
from minithink.kv.manager import KVManager
from minithink.model import Decoder
from minithink.sampling import Sampler, SamplingParams, filter_logits

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of a graph; and as many as there are

# of a graph: rows, columns, formats, what is observed, whether it tells the rows that are due (not beside a recorder)
Key = tuple[int, int, frozenset[int], tuple[Demand, ...], bool]


class Recorded:
    """Kernels that are recorded once and replayed with other inputs."""

    def __init__(self, run: Callable[[Tensor, Tensor], object], values: Tensor, out: Tensor, pool: Any) -> None:
        """Run once with no row active, which compiles what must be compiled and changes nothing; then record.

        Args:
            run: of (inputs, out); it launches kernels and asks nothing of the device.
            values: int64 [k, N] on the host, inputs of N rows.
            out: what `run` writes to, on the device.
            pool: memory that all graphs share, for no two of them run at once.
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
        with torch.cuda.graph(self._graph, pool=pool):
            run(self._inputs, out)

    def replay(self, values: Tensor) -> Tensor:
        """`out`, for these inputs; the host does not wait for it."""
        self._copied.synchronize()  # the staging buffer may be on its way still, from the last replay
        self._staging.copy_(values)
        self._inputs.copy_(self._staging, non_blocking=True)
        self._copied.record()
        self._graph.replay()
        return self.out


Graphs = dict[Key, Recorded]


def recorder(cache: KVManager) -> type[Recorded] | None:
    """What records the steps of a cache; None: they run call by call."""
    able = cache.recordable and cache.backend.recordable and cache.device.type == "cuda"
    return Recorded if able else None


@dataclass
class _Launched:
    """A step that may run still."""

    seqs: list[int]
    tokens: list[int]
    batch: Batch  # on the host, without padding
    tells_due: bool  # not beside a recorder, which may come or go before the step ends
    out: Tensor  # int64 [3n + 1]: tokens, rows that are due, segments that began, overflow


class DecodeLoop:
    """Steps of one model over one cache."""

    def __init__(
        self, decoder: Decoder, cache: KVManager, params: SamplingParams, sizes: Sequence[int] = SIZES,
        sampler: Sampler | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            sizes: of the graphs of steps, beside all rows; with none of them, no shape depends on who takes part.
            sampler: draws where steps are not recorded: the same tokens, faster.
        """
        self.decoder, self.cache, self.params, self.sizes, self.sampler = decoder, cache, params, sizes, sampler
        self._record = recorder(cache)
        cache.recorded = self.records
        self.recorded: Graphs = {}  # steps
        self.decisions: Graphs = {}
        self.flushes: Graphs = {}
        self._pool = torch.cuda.graph_pool_handle() if self.records and cache.device.type == "cuda" else None
        self._launched: _Launched | None = None

    @property
    def records(self) -> bool:
        """Whether steps are recorded."""
        return self._record is not None

    def step(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Feed every sequence its newest token, draw the next ones.

        Raises:
            Exhausted: the pool of pages is too small. Nothing has changed; or, if it was a full buffer that found no
                page, the token is in the cache, and the buffer waits.
            MinithinkError: the same where steps are recorded; the sequences cannot go on.
            UsageError: a lane is full; nothing has changed.
        """
        if self._launched is None:
            self.launch(seqs, tokens)
        return self._finish(seqs, tokens)

    @torch.inference_mode()
    def launch(self, seqs: Sequence[int], tokens: Sequence[int]) -> None:
        """Begin the next step, without waiting for it: `step` of the same sequences must follow, and until then the
        cache must be left alone. Raises: Exhausted and UsageError as `step` does."""
        if self._launched is not None:
            raise ValueError("a step is under way already: call step before the next launch")
        self.cache.prepare(seqs)
        batch, observed = self.cache.batch(seqs, tokens), self.cache.demands_due(seqs)
        out = self.run(
            self.recorded, lambda x, out: self._step(x, out, observed), batch, 3, observed=observed,
            sizes=self.sizes, recorded=self.records,
        )  # fmt: skip
        self._launched = _Launched(list(seqs), list(tokens), batch, self._tells_due, out)

    @torch.inference_mode()
    def _finish(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Wait for the step that was launched, and let the policy act."""
        cache, launched = self.cache, self._launched
        assert launched is not None
        if (launched.seqs, launched.tokens) != (list(seqs), list(tokens)):
            raise ValueError(f"the step under way feeds other tokens than {list(tokens)} of sequences {list(seqs)}")
        self._launched = None
        out, n = launched.out.tolist(), len(launched.out) // 3
        (drawn, due, begun), overflow = (out[i * n : i * n + len(seqs)] for i in range(3)), out[-1]
        if overflow:
            raise MinithinkError(
                f"The KV pool of {cache.pages:,} pages is exhausted: use a smaller --batch-size, budget or "
                "--max-new-tokens."
            )
        cache.advance(seqs, tokens, begun)
        if (acting := cache.acting(launched.batch, due if launched.tells_due else None)) is not None:
            self.run(self.decisions, lambda x, _: cache.decide(x), acting, recorded=cache.records_decisions)
        if (full := cache.full()) is not None:
            self.run(self.flushes, lambda x, _: cache.flush(x), full, recorded=cache.records_flushes)
        cache.close(seqs, tokens)
        return drawn

    def draw(self, logits: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
        """The next token of every row, as `sampling.sample` does. logits: [N, V]; numbers of the draws and positions
        of what is drawn: int64 [N]; → int64 [N]."""
        if self.sampler is not None and not self.records:
            return self.sampler.sample(logits, sequence.tolist(), position.tolist())
        if self.params.greedy:
            return logits.argmax(-1)
        x = filter_logits(logits, self.params)
        drawn: Tensor = self.decoder.backend.gumbel_argmax(x, self.params.seed, sequence, position)
        return drawn

    def _step(self, batch: Batch, out: Tensor, observed: Sequence[Demand]) -> None:
        """One token of every active row. out: int64 [3N + 1], see `_Launched`."""
        cache, n = self.cache, len(batch)
        cache.begin(batch, observed)
        logits = self.decoder.logits(self.decoder(batch.token, cache))
        out[:n].copy_(self.draw(logits, batch.sequence, batch.length))
        if self._tells_due:
            out[n : 2 * n].copy_(cache.due(batch))
        cache.tell(batch, out[2 * n :])

    @property
    def _tells_due(self) -> bool:
        """Whether a step tells the rows that are due. Beside a recorder the policy is shown all rows."""
        return self.cache.tells_due and self.cache.recorder is None

    def run(
        self, graphs: Graphs, part: Callable[[Batch, Tensor], object], batch: Batch, numbers: int = 0, *,
        recorded: bool, observed: tuple[Demand, ...] = (), sizes: Sequence[int] = SIZES,
    ) -> Tensor:  # fmt: skip
        """Call a part of a step, or replay its graph, which is recorded now if there is none.

        Args:
            graphs: of this part.
            part: of (batch, out); where it is recorded it asks nothing of the device.
            batch: the rows, on the host.
            numbers: that `out` has of each row; one more follows.
            recorded: whether it is a graph; then the batch is padded to one of the sizes.

        Returns:
            out, int64; on the device.
        """
        cache = self.cache
        if self._record is None or not recorded:
            out = torch.zeros(numbers * len(batch) + 1, dtype=torch.int64, device=cache.device)
            part(batch.to(cache.device), out)
            return out
        values = self._padded(batch, sizes).values
        key = values.shape[1], cache.seen, cache.formats, observed, cache.records_decisions
        if key not in graphs:
            out = torch.zeros(numbers * values.shape[1] + 1, dtype=torch.int64, device=cache.device)
            graphs[key] = self._record(lambda x, out: part(Batch(x), out), values, out, self._pool)
        return graphs[key].replay(values)

    def _padded(self, batch: Batch, sizes: Sequence[int]) -> Batch:
        """The rows of a batch first, behind them others that are not active, as many as a graph has beside these."""
        count, n, taken = len(self.cache.rows), len(batch), set(batch.row.tolist())
        size = next((size for size in sizes if n <= size <= count), count)
        return self.cache.pad(batch, [row for row in range(count) if row not in taken][: size - n])
