"""The decode loop, part by part: how long the parts of a step take, and for how many sequences each is called.

On a GPU times are those between two CUDA events around a captured graph, without CUDA wall times of the same calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minithink.bench.speed import attention
from minithink.bench.speed.clock import timed
from minithink.bench.speed.steady import Steady
from minithink.errors import MinithinkError
from minithink.kv.batch import Batch
from minithink.kv.reading import Reading
from minithink.loop import DecodeLoop

GATHERS = 8  # that are timed alone
REPEATS = 10  # of a part


@dataclass
class Span:
    """A part of a step that has run."""

    part: str  # step, decide, flush or gather
    rows: int
    observed: bool  # attention was asked for its mass
    start: Any
    end: Any

    @property
    def seconds(self) -> float:
        """Of the device; everything before must be over. Wall time without CUDA."""
        if isinstance(self.start, float):
            return float(self.end - self.start)
        return float(self.start.elapsed_time(self.end)) / 1e3


class TimedLoop(DecodeLoop):
    """A loop that takes the time of its parts."""

    def __init__(self, steady: Steady) -> None:
        like = steady.loop(DecodeLoop)
        super().__init__(like.decoder, like.cache, like.params, like.sizes)
        self.steady = steady
        self.spans = list[Span]()
        self.tokens = [1] * len(steady.sequences)
        self.apart = False  # the gather is a call of its own

    def go(self) -> None:
        """One step more."""
        self.tokens = self.step(self.steady.sequences, self.tokens)

    def measure(self, warm: int, steps: int) -> dict[str, Any]:
        """Run steps → how long they take on average, and who is called how often.

        A step in which a graph is captured is counted, and its time left out.
        """
        for _ in range(warm):
            self.go()
        times = list[float]()
        made = 0
        called = list[dict[str, Tensor]]()
        before = counters_of(self.steady)
        taken: dict[str, list[int]] = {"refresh": [], "decide": [], "flush": []}
        every: list[Span] = []
        self._wait()
        for _ in range(steps):
            graphs = self._graphs()
            self.spans = []
            took = timed(self.go)
            if self._graphs() > graphs:
                made += 1
                self._wait()
            else:
                times.append(took)
                every += self.spans
            called.append(counters_of(self.steady))
            for part in ("decide", "flush"):
                taken[part].append(sum(span.rows for span in self.spans if span.part == part))
            taken["refresh"].append(self._refreshing())
        last = timed(self._wait)  # what the last step has launched
        if not times:
            raise MinithinkError(f"in each of {steps} steps a graph was captured: give more --steps, or more --warm")
        mean = (sum(times) + last) / len(times)
        counts = {"refresh": taken["refresh"], "flush": taken["flush"], "decision": taken["decide"]}
        grown = {name: torch.stack([x[name] for x in (before, *called)]).diff(dim=0) > 0 for name in before}
        if grown:  # [steps, B] each: an eviction is what the policy counts
            counts |= {name: of.sum(1).tolist() for name, of in grown.items()}
            counts["eviction"] = torch.stack([*grown.values()]).any(0).sum(1).tolist()
        elif self.steady.policy.budget is not None:
            counts["eviction"] = taken["decide"]
            counts["compaction"] = [n if self.cache.store.compaction else 0 for n in taken["decide"]]
        n = len(self.tokens)
        device_milliseconds = {}
        for part in ("step", "decide", "flush"):
            seconds_of_part = sum(s.seconds for s in every if s.part == part)
            device_milliseconds[part] = 1e3 * seconds_of_part / len(times)
        return {
            "steps": len(times),
            "recorded_steps": made,
            "step_milliseconds": mean * 1e3,
            "slowest_milliseconds": max(times) * 1e3,
            "tokens_per_second": n / mean,
            "rates": {name: rates(of, n) for name, of in counts.items()},
            **counted(self.steady, before),
            "observed_steps": sum(s.observed for s in every) / len(times),
            "device_milliseconds": device_milliseconds,
        }

    def gathers(self, most: int) -> list[float]:
        """Seconds of single gathers, in at most so many steps; the first compiles."""
        self.spans = []
        self.apart = True
        for _ in range(most):
            self.go()
            if sum(span.part == "gather" for span in self.spans) > GATHERS:
                break
        self.apart = False
        self._wait()
        return [span.seconds for span in self.spans if span.part == "gather"][1:]

    def run(self, graphs: Any, part: Any, batch: Batch, numbers: int = 0, **how: Any) -> Tensor:
        compaction = self.cache.store.compaction
        if graphs is self.decisions and self.apart and compaction is not None:
            late = compaction.late
            compaction.late = True  # only planned, so that it can be called
            self.cache.decide(batch.to(self.cache.device))
            start = self._now()
            compaction.gather()
            self.spans.append(Span("gather", len(batch), False, start, self._now()))
            compaction.finish()
            compaction.late = late
            return torch.empty(0)
        names = {id(self.steps): "step", id(self.decisions): "decide", id(self.flushes): "flush"}
        start = self._now()
        out = super().run(graphs, part, batch, numbers, **how)
        self.spans.append(Span(names[id(graphs)], len(batch), bool(how.get("observed")), start, self._now()))
        return out

    def _graphs(self) -> int:
        return len(self.steps) + len(self.decisions) + len(self.flushes)

    def _refreshing(self) -> int:
        """Sequences with types whose newest token ended a segment."""
        if not self.steady.stand_in.typed:
            return 0
        steady = self.steady
        prompt = self.steady.settings.prompt
        return sum((self.cache.length(i) - prompt) % steady.period == 0 for i in steady.sequences)

    def _now(self) -> Any:
        if self.cache.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)


def rates(counts: Sequence[int], batch: int) -> dict[str, float]:
    """Of how many steps something was called for any sequence, and for how many sequences of all steps. counts:
    sequences, of each step."""
    return {
        "steps": sum(n > 0 for n in counts) / len(counts),
        "sequence_steps": sum(counts) / len(counts) / batch,
    }


def counters_of(steady: Steady) -> dict[str, Tensor]:
    """What the policy has counted so far, by name: copies, [B]."""
    return {name: x.clone() for name, x in steady.stand_in.counters().items()}


def counted(steady: Steady, before: Mapping[str, Tensor] | None = None) -> dict[str, dict[str, int]]:
    """What all sequences have counted since, as a field of a result; nothing for policies that count nothing."""
    now = {name: int((x - (before[name] if before else 0)).sum()) for name, x in counters_of(steady).items()}
    return {"counts": now} if now else {}


@torch.inference_mode()
def parts(loop: TimedLoop, m: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a mean step, by part, and their shares; of single calls, too. m: of `TimedLoop.measure`."""
    steady = loop.steady
    cache = loop.cache
    policy = steady.policy
    batch = len(steady.sequences)
    layers = loop.cache.config.num_layers
    device_ms = m["device_milliseconds"]
    calls = dict[str, float]()
    attend = attention_seconds(steady) * 1e3
    gather = 0.0
    in_step = in_decide = 0.0  # what the step's graph does for refreshes, and the decisions' beside evictions
    found = dict[str, float]()  # parts of decisions that are timed alone
    watched = steady.stand_in.watched
    if watched:
        mass = attention_seconds(steady, watched) * 1e3 - attend
        share = m["rates"]["decision"]
        rows = max(1, round(share["sequence_steps"] * batch / max(share["steps"], 1e-9)))  # of one decision
        due = cache.batch(list(range(rows)), [0] * rows).to(cache.device)
        calls["decision_rows"] = rows
        in_step = mass * m["observed_steps"]
        for name, call in steady.stand_in.alone().items():
            took = seconds(lambda c=call: c(cache.view(due)), cache.device) * 1e3  # type: ignore[misc]
            calls[name] = mass + took
            found[name] = in_step + took * share["steps"]
            in_decide += took * share["steps"]
    elif cache.store.compaction:
        calls["gather"] = statistics.mean(loop.gathers(2 * steady.period + GATHERS)) * 1e3
        gather = calls["gather"] * m["rates"]["compaction"]["steps"]
        in_decide = gather if policy.storage.compaction == "gather" else 0.0
    of = {
        "attention": attend,
        "rest": device_ms["step"] - attend - in_step,
        "refresh": 0.0,
        **found,
        "eviction": device_ms["decide"] - in_decide,
        "gather": gather,
        "flush": device_ms["flush"],
    }
    whole = sum(of.values())
    return {
        "parts_milliseconds": of,
        "parts_shares": {name: x / whole for name, x in of.items()},
        "layer_microseconds": {name: x * 1e3 / layers for name, x in of.items()},
        "call_milliseconds": calls,
        "overhead": (of["refresh"] + of["eviction"]) / m["step_milliseconds"],
    }


@torch.inference_mode()
def attention_seconds(steady: Steady, watched: Sequence[int] = ()) -> float:
    """Of the attention of one step, all layers; watched: those whose attention is told."""
    cache = steady.cache
    batch = len(steady.sequences)
    c = cache.config
    q = torch.randn(batch, c.num_heads, c.head_dim, device=cache.device, dtype=cache.dtype)
    at = torch.arange(batch, device=cache.device)

    def attend() -> None:
        read = Reading(cache.store, at)  # what it finds once a step is part of it
        for layer in range(c.num_layers):
            cache.backend.paged_attention(q, read, layer, "max_logit" if layer in watched else None)

    return seconds(attend, cache.device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, on a GPU of its graph."""
    return attention.timed(lambda _: call(), 1, REPEATS, device)
