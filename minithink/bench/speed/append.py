"""What a new token costs before attention: its slots are taken, it is rotated, quantized and written.

A store of several layers is filled token by token, as decoding fills it, by a CUDA graph that moves itself on; its
last replays are timed, and attention over the same store. Formats whose groups span tokens write to a buffer, which
another graph quantizes for the sequences whose buffers are full; as in decoding they are at different points, and in
every step some are due. Everything counts that the cache does once a step for all layers: listing the tokens, taking
slots.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from minithink.backend import triton_backend
from minithink.bench.speed import attention
from minithink.bench.speed.attention import DIM, DTYPE, FORMATS, HEADS, KV_HEADS
from minithink.cli.commands import positive
from minithink.errors import MinithinkError
from minithink.kv.batch import ACTIVE, Batch
from minithink.kv.contract import Storage
from minithink.results.record import Measurement

DEFAULT = "append"
LAYERS = 32
LIMIT = 0.05  # of attention's time, from FROM sequences on
FROM = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench append`."""
    add = parser.add_argument
    add("--batches", type=positive, nargs="+", default=[1, 64, 256], metavar="N", help="default: 1 64 256")
    add("--length", type=positive, default=1024, metavar="N", help="tokens of each (default 1024)")
    add("--repeats", type=positive, default=64, metavar="N", help="steps that are timed (default 64)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, write, print."""

    def rows(result: dict[str, Any]) -> Iterator[Measurement]:
        for batch in args.batches:
            for name, storage in FORMATS.items():
                here = {"batch": batch, "length": args.length, "format": name}
                yield here | measure(storage, batch, args.length, args.repeats)

    goal = {"layers": LAYERS, "repeats": args.repeats, "goal": LIMIT, "goal_from_batch": FROM}
    return attention.report(DEFAULT, args, argv, goal, rows)


def measure(storage: Storage, batch: int, length: int, repeats: int) -> Measurement:
    """Microseconds of a layer in one step: to append, for full buffers, to attend; and the share of the first two."""
    torch.cuda.empty_cache()
    ops = triton_backend()
    device = attention.DEVICE
    size = storage.buffer
    total = length + repeats
    store = attention.empty_store(storage, LAYERS, batch, total + 1)
    store.slots.used = set(store.slots.home)  # no prompt is in it
    step_of = Batch.of(device, row=range(batch), active=[0] * batch, length=[1] * batch)
    # Sequences are at different points of their buffers; in a step as many are full as in any other.
    points = [row * size // batch for row in range(batch)]
    step_of.waiting[:] = torch.tensor(points, device=device)
    none = [0] * -(-batch // max(1, size))
    full = Batch.of(device, row=none, active=none)
    q = torch.randn(batch, HEADS, DIM, device=device, dtype=DTYPE)
    k, v = torch.randn(2, batch, KV_HEADS, DIM, device=device, dtype=DTYPE).unbind()
    cos, sin = torch.rand(2, batch, 1, DIM, device=device).unbind()

    def step() -> None:
        writer = store.take(step_of)
        for layer in range(LAYERS):
            ops.append(q, k, v, cos, sin, writer, layer)
        step_of.length.add_(step_of.active)
        if size:
            step_of.waiting.add_(step_of.active)

    step_graph = attention.captured(step)  # while no sequence is active
    flush_graph = attention.captured(lambda: store.flush_rings(full)) if size else None
    step_of.values[ACTIVE] = 1
    steps = list[float]()
    flushes = list[float]()
    for n in range(total):
        rows = [row for row, point in enumerate(points) if point == size]
        if flush_graph and rows:
            full.row[: len(rows)] = torch.tensor(rows, device=device)
            full.values[ACTIVE] = torch.arange(len(full), device=device) < len(rows)
            flushes.append(attention.elapsed(flush_graph))
            step_of.waiting[rows] = 0
            points = [0 if point == size else point for point in points]
        steps.append(attention.elapsed(step_graph))
        store.lists.longest = [n + 1] * batch
        store.appended(range(batch), [n + 1] * batch)
        points = [point + 1 for point in points]
    if bool(store.slots.overflow):
        raise MinithinkError(f"The pool was too small for {batch} sequences of {total} tokens.")
    append = statistics.median(steps[-repeats:]) / LAYERS
    buffer = statistics.median(flushes[len(flushes) // 2 :]) * len(flushes) / total / LAYERS if flushes else 0.0
    attend = attention.attending(ops.paged_attention, store, [q] * LAYERS, None)
    seconds = {"append": append, "buffer": buffer, "attention": attention.timed(attend, LAYERS, min(20, repeats))}
    share = (append + buffer) / seconds["attention"]
    out = {f"{name}_microseconds": x * 1e6 for name, x in seconds.items()} | {"share": share}
    return out | ({"target_reached": share <= LIMIT} if batch >= FROM else {})
