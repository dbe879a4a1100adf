"""The decode loop of a GPU: one CUDA graph a step.

A decoding step of a small batch is some hundred kernels, each of a few microseconds; launched one by one from Python
they take ten times as long as they run. A CUDA graph is recorded once and launched as a whole. It replays the same
kernels on the same addresses, so everything that changes from step to step goes through one tensor of inputs: which
rows take part, how long they are, their newest tokens. Sequences come and go between replays.

    inputs ──► take slots ──► layers: append, attend, … ──► logits ──► draw ──► tokens, overflow flag

A graph belongs to a number of rows (SIZES: fewer sequences leave some rows idle), to a bound on how long the lanes
are (powers of two: it decides the grid of attention) and to the formats that the lanes hold. Each is recorded when it
is first needed. The host reads the tokens that were drawn and whether the pool was too small, nothing else; then the
policy acts, outside of the graph, if it has something to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import MinithinkError
from minithink.kv.manager import KVManager
from minithink.model import Decoder
from minithink.sampling import SamplingParams, filter_logits

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of a graph; and as many as there are
INPUTS = 7  # row, active, tokens seen, tokens in the buffer, newest token, number in the draws, position to draw for


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int64 [INPUTS, N], on the device
    staging: Tensor  # the same, pinned on the host
    out: Tensor  # int64 [N + 1]: tokens, overflow


class DecodeLoop:
    """Steps of one model over one cache."""

    def __init__(self, decoder: Decoder, cache: KVManager, params: SamplingParams) -> None:
        if not cache.capturable:
            raise ValueError(f"steps under {cache.policy.name} cannot be recorded")
        self.decoder, self.cache, self.params = decoder, cache, params
        self.recorded: dict[tuple[int, int, frozenset[int]], _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def step(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Feed every sequence its newest token, draw the next ones.

        Raises:
            MinithinkError: the pool of pages is too small; the sequences cannot go on.
        """
        cache = self.cache
        rows, lengths, waiting = zip(*(cache.next_state(seq) for seq in seqs), strict=True)
        n = next((size for size in SIZES if len(seqs) <= size <= len(cache.rows)), len(cache.rows))
        taken = set(rows)
        idle = [row for row in range(len(cache.rows)) if row not in taken][: n - len(seqs)]
        more = [0] * len(idle)
        values = [
            [*rows, *idle], [1] * len(rows) + more, [*lengths, *(cache.store.lengths[row] for row in idle)],
            [*waiting, *(cache.store.waiting[row] for row in idle)], [*tokens, *more],
            [*seqs, *more], [*(length + 1 for length in lengths), *more],
        ]  # fmt: skip
        cache.fit_columns(1)
        key = n, cache.store.seen, frozenset(cache.store.used | set(cache.store.appends))
        found = self.recorded.get(key)
        if found is None:
            found = self.recorded[key] = self._record(n, torch.tensor(values))
        found.staging.copy_(torch.tensor(values))
        found.inputs.copy_(found.staging, non_blocking=True)
        found.graph.replay()
        *drawn, overflow = found.out.tolist()
        if overflow:
            raise MinithinkError(
                f"The KV pool of {cache.store.table.pages.count:,} pages is exhausted: use a smaller --batch-size, "
                "budget or --max-new-tokens."
            )
        cache.end_next(seqs, tokens)
        return drawn[: len(seqs)]

    def _record(self, n: int, values: Tensor) -> _Recorded:
        """Run once with nobody active, which compiles what must be compiled and changes nothing; then record."""
        device = self.cache.device
        inputs = values.to(device)
        inputs[1] = 0
        out = torch.zeros(n + 1, dtype=torch.int64, device=device)
        self.cache.store.used.update(self.cache.store.appends)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(inputs, out)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(inputs, out)
        return _Recorded(graph, inputs, torch.empty(INPUTS, n, dtype=torch.int64, pin_memory=True), out)

    def _run(self, inputs: Tensor, out: Tensor) -> None:
        """What is recorded."""
        at, active, lengths, waiting, tokens, sequence, position = inputs
        self.cache.begin_next(at, active.bool(), lengths, waiting)
        logits = self.decoder.logits(self.decoder(tokens, self.cache))
        if self.params.greedy:
            drawn = logits.argmax(-1)
        else:
            x = filter_logits(logits, self.params)
            drawn = self.decoder.backend.gumbel_argmax(x, self.params.seed, sequence, position)
        out[:-1].copy_(drawn)
        out[-1:].copy_(self.cache.store.overflow)
