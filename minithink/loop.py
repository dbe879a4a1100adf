"""The decode loop of a GPU: one CUDA graph a step, one for what the policy decides, one for buffers that are full.

A decoding step of a small batch is several hundred kernels, each of a few microseconds; launched one by one from
Python they take ten times as long as they run. A CUDA graph is recorded once and launched as a whole. It replays the
same kernels on the same addresses, so everything that changes from step to step goes through one tensor of inputs:
which rows take part, how long they are, their newest tokens. Sequences come and go between replays.

    inputs ──► take slots ──► layers: append, attend, … ──► logits ──► draw ──► tokens, rows that are due, overflow
                                                                                                │
    next step ◄── evict ◄── choose ◄── layers: score keys ◄── inputs of the rows that are due ◄─┘

A policy has something to decide in few steps, and for few rows: these are a batch of their own, in a second graph. A
policy that cannot be recorded (`Policy.recordable`) acts between steps, kernel by kernel. Tokens that are quantized
together wait in a buffer; the rows whose buffers are full are a batch of a third graph.

A graph belongs to a number of rows (SIZES: fewer sequences leave some rows idle), to a bound on how long the lanes
are (powers of two: it decides the grid of attention), to the formats that the lanes hold, and to what the policy is
shown of this step: who asks for attention every 128 tokens pays for it in few steps. Each is recorded when it is
first needed. The host reads the tokens that were drawn, who is due, which segments began and whether the pool
was too small, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minithink.errors import MinithinkError
from minithink.kv.contract import Demand
from minithink.kv.manager import KVManager
from minithink.kv.view import ACTIVE, STATE
from minithink.model import Decoder
from minithink.sampling import SamplingParams, filter_logits

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows of a graph; and as many as there are

# of a graph: rows, columns, formats, what is observed, whether it says who is due (not while a recorder watches)
Key = tuple[int, int, frozenset[int], tuple[Demand, ...], bool]


class Recorded:
    """Kernels that are recorded once and replayed with other inputs."""

    def __init__(self, run: Callable[[Tensor, Tensor], object], values: Tensor, out: Tensor, pool: Any) -> None:
        """Run once with nobody active, which compiles what must be compiled and changes nothing; then record.

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


@dataclass
class _Launched:
    """A step that may run still."""

    seqs: list[int]
    tokens: list[int]
    states: np.ndarray  # int64 [STATE, len(seqs)]
    decides: bool  # whether `out` says who is due
    out: Tensor


class DecodeLoop:
    """Steps of one model over one cache."""

    def __init__(
        self, decoder: Decoder, cache: KVManager, params: SamplingParams, sizes: Sequence[int] = SIZES
    ) -> None:
        """sizes: of the graphs of steps, beside all rows; with none of them, no shape depends on who takes part."""
        if not cache.capturable:
            raise ValueError(f"steps under {cache.policy.name} cannot be recorded")
        self.decoder, self.cache, self.params, self.sizes = decoder, cache, params, sizes
        self.recorded: dict[Key, Recorded] = {}  # steps
        self.decisions: dict[Key, Recorded] = {}
        self.flushes: dict[Key, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None
        self._launched: _Launched | None = None

    def step(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Feed every sequence its newest token, draw the next ones.

        Raises:
            MinithinkError: the pool of pages is too small; the sequences cannot go on.
            UsageError: a lane is full; nothing has changed.
        """
        if self._launched is None:
            self.launch(seqs, tokens)
        return self._finish(seqs, tokens)

    @torch.inference_mode()
    def launch(self, seqs: Sequence[int], tokens: Sequence[int]) -> None:
        """Begin the next step, without waiting for it: `step` of the same sequences must follow, and until then
        nobody may look into the cache or change it. Raises: UsageError as `step` does."""
        if self._launched is not None:
            raise ValueError("a step is under way already: call step before the next launch")
        cache, store = self.cache, self.cache.store
        cache.prepare_next(seqs)
        states = cache.states_after(seqs, tokens)  # [STATE, len(seqs)]
        inputs = self._with_idle(np.vstack((states, np.zeros_like(seqs), seqs)), self.sizes)
        rows, n = inputs[0].tolist(), inputs.shape[1]
        inputs[2, len(seqs) :] = [store.lengths[row] + 1 for row in rows[len(seqs) :]]
        if store.storage.buffer:
            inputs[STATE] = [store.waiting[row] for row in rows]
        observed = cache.demands_due(seqs)
        out = self._replay(self.recorded, lambda x, out: self._step(x, out, observed), inputs, 3 * n + 1, observed)
        self._launched = _Launched(list(seqs), list(tokens), states, cache.records_decisions, out)

    @torch.inference_mode()
    def _finish(self, seqs: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Wait for the step that was launched, and let the policy act."""
        cache, store, launched = self.cache, self.cache.store, self._launched
        assert launched is not None
        if (launched.seqs, launched.tokens) != (list(seqs), list(tokens)):
            raise ValueError(f"the step under way feeds other tokens than {list(tokens)} of sequences {list(seqs)}")
        self._launched, states = None, launched.states
        out, n = launched.out.tolist(), len(launched.out) // 3
        (drawn, due, begun), overflow = (out[i * n : i * n + len(seqs)] for i in range(3)), out[-1]
        if overflow:
            raise MinithinkError(
                f"The KV pool of {store.table.pages.count:,} pages is exhausted: use a smaller --batch-size, "
                "budget or --max-new-tokens."
            )
        cache.end_next(
            seqs, tokens,
            decide=(lambda: self._decide(states[:, np.array(due, dtype=bool)])) if launched.decides else None,
            flush=self._flush if store.flushes_next else None, begun=begun,
        )  # fmt: skip
        return drawn

    def draw(self, logits: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
        """The next token of every row, as `sampling.sample` does. logits: [N, V]; numbers of the draws and positions
        of what is drawn: int64 [N]; → int64 [N]."""
        if self.params.greedy:
            return logits.argmax(-1)
        x = filter_logits(logits, self.params)
        drawn: Tensor = self.decoder.backend.gumbel_argmax(x, self.params.seed, sequence, position)
        return drawn

    def _decide(self, states: np.ndarray) -> None:
        """Let the policy act on the rows of these states, those that are due: int64 [STATE, N]."""
        if states.size:
            inputs = self._with_idle(states, SIZES)  # each row decides for itself, in any number
            self._replay(self.decisions, lambda state, _: self.cache.decide_next(state), inputs, 0)

    def _flush(self, rows: Sequence[int]) -> None:
        """Quantize the buffers of these rows, which are full. Whether there was room the next step will say."""
        store = self.cache.store
        inputs = self._with_idle(np.array([rows, [1] * len(rows)]), SIZES)
        self._replay(self.flushes, lambda x, _: store.flush_next(x[0], x[ACTIVE].bool()), inputs, 0)
        store.flushed(rows)

    def _with_idle(self, inputs: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """Inputs of rows, int64 [k, N], whose numbers come first; behind them, with zeros, those of the rows that a
        graph has beside these."""
        count, n, taken = len(self.cache.rows), inputs.shape[1], set(inputs[0].tolist())
        size = next((size for size in sizes if n <= size <= count), count)
        out = np.zeros((len(inputs), size), dtype=np.int64)
        out[:, :n] = inputs
        out[0, n:] = [row for row in range(count) if row not in taken][: size - n]
        return out

    def _replay(
        self, recorded: dict[Key, Recorded], run: Callable[[Tensor, Tensor], object],
        inputs: np.ndarray, numbers: int, observed: tuple[Demand, ...] = (),
    ) -> Tensor:  # fmt: skip
        """Replay the graph of so many rows, recorded now if there is none. inputs: int64 [k, N]; → `numbers` ints."""
        values, cache = torch.from_numpy(inputs), self.cache
        key = inputs.shape[1], cache.store.seen, frozenset(cache.store.used), observed, cache.records_decisions
        if key not in recorded:
            out = torch.zeros(numbers, dtype=torch.int64, device=self.cache.device)
            recorded[key] = Recorded(run, values, out, self._pool)
        return recorded[key].replay(values)

    def _step(self, inputs: Tensor, out: Tensor, observed: Sequence[Demand]) -> None:
        """What is recorded of a step. inputs: int64 [STATE + 2, N], the rows' states when the newest token is in the
        cache; how many tokens wait in each row's full-precision buffer (`Storage.buffer`); numbers of the draws. out:
        int64 [3N + 1], tokens, who is due, which types of thoughts began (where the policy opens segments),
        overflow."""
        state, (waiting, sequence) = inputs[:STATE], inputs[STATE:]
        at, active, lengths, _, _, tokens = state  # see kv/view.py, STATE
        self.cache.begin_next(at, active.bool(), lengths - 1, waiting, observed)
        logits = self.decoder.logits(self.decoder(tokens, self.cache))
        n = len(at)
        out[:n].copy_(self.draw(logits, sequence, lengths))
        if self.cache.records_decisions:
            out[n : 2 * n].copy_(self.cache.due_next(state))
        if self.cache.policy.opens:
            out[2 * n : -1].copy_(self.cache.store.begun[at])
        out[-1:].copy_(self.cache.store.overflow)
