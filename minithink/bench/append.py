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
from collections.abc import Sequence
from typing import Any

import torch

from minithink import results
from minithink.backend import triton_backend
from minithink.bench.attention import DIM, FORMATS, HEADS, KV_HEADS, attending, microseconds, recorded, timed
from minithink.commands import positive
from minithink.errors import MinithinkError
from minithink.kv.batch import ACTIVE, Batch
from minithink.kv.contract import Shape, Storage
from minithink.kv.store import PagedStore

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
    results.need_gpu(DEFAULT)
    result = results.new(DEFAULT, list(argv), "cuda")
    result["settings"] = {
        "query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16", "layers": LAYERS,
        "repeats": args.repeats, "goal": LIMIT, "goal_from_batch": FROM,
    }  # fmt: skip
    rows = (
        {"batch": batch, "length": args.length, "format": name} | measure(storage, batch, args.length, args.repeats)
        for batch in args.batches
        for name, storage in FORMATS.items()
    )
    return results.collect(results.output(args, DEFAULT), result, rows, line)


def line(m: results.Measurement) -> str:
    """For people."""
    return (
        f"{m['batch']:4} x {m['length']:6}  {m['format']:24} append {m['append_microseconds']:7.2f} us  "
        f"buffer {m['buffer_microseconds']:7.2f} us  attention {m['attention_microseconds']:8.1f} us  "
        f"{m['share']:6.1%}"
    )


def measure(storage: Storage, batch: int, length: int, repeats: int) -> dict[str, Any]:
    """Microseconds of a layer in one step: to append, for full buffers, to attend; and the share of the first two."""
    torch.cuda.empty_cache()
    ops = triton_backend()
    shape = Shape(LAYERS, batch, KV_HEADS, HEADS, DIM, HEADS * DIM, "head", torch.device("cuda"))
    size, total = storage.buffer, length + repeats
    store = _store(shape, storage, total + 1)
    store.used = set(store.home)  # no prompt is in it
    step_of = Batch.of("cuda", row=range(batch), active=[0] * batch, length=[1] * batch)
    # Sequences are at different points of their buffers; in a step as many are full as in any other.
    points = [row * size // batch for row in range(batch)]
    step_of.waiting[:] = torch.tensor(points, device="cuda")
    none = [0] * -(-batch // max(1, size))
    full = Batch.of("cuda", row=none, active=none)
    q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).unbind()
    cos, sin = torch.rand(2, batch, 1, DIM, device="cuda").unbind()

    def step() -> None:
        writer = store.take(step_of)
        for layer in range(LAYERS):
            ops.append(q, k, v, cos, sin, writer, layer)
        step_of.length.add_(step_of.active)
        if size:
            step_of.waiting.add_(step_of.active)

    step_graph = recorded(step)  # while nobody is active
    flush_graph = recorded(lambda: store.flush_rings(full)) if size else None
    step_of.values[ACTIVE] = 1
    steps: list[float] = []
    flushes: list[float] = []
    for n in range(total):
        if flush_graph and (rows := [row for row, point in enumerate(points) if point == size]):
            full.row[: len(rows)] = torch.tensor(rows, device="cuda")
            full.values[ACTIVE] = torch.arange(len(full), device="cuda") < len(rows)
            flushes.append(microseconds(flush_graph.replay))
            step_of.waiting[rows] = 0
            points = [0 if point == size else point for point in points]
        steps.append(microseconds(step_graph.replay))
        store.most = [n + 1] * batch
        store.appended(range(batch), [n + 1] * batch)
        points = [point + 1 for point in points]
    if bool(store.overflow):
        raise MinithinkError(f"The pool was too small for {batch} sequences of {total} tokens.")
    attention = timed(attending(ops.paged_attention, store, [q] * LAYERS, None), LAYERS, 20) * 1e6
    append = statistics.median(steps[-repeats:]) / LAYERS
    buffer = statistics.median(flushes[len(flushes) // 2 :]) * len(flushes) / total / LAYERS if flushes else 0.0
    out = {"append_microseconds": append, "buffer_microseconds": buffer, "attention_microseconds": attention}
    share = (append + buffer) / attention
    return out | {"share": share} | ({"target_reached": share <= LIMIT} if batch >= FROM else {})


def _store(shape: Shape, storage: Storage, tokens: int) -> PagedStore:
    """An empty store with room for so many tokens of each row."""
    lanes = shape.layers * shape.rows * shape.kv_heads
    one = PagedStore(
        Shape(1, 1, 1, 1, DIM, DIM, "head", shape.device), storage, pages=1, scale_rows=1, dtype=torch.bfloat16
    )
    lay = one.layouts[one.home[0]]
    pages = -(-tokens // lay.slots)
    rows = lanes * (-(-tokens // lay.k.group) + 1) if lay.by_token else 0
    return PagedStore(
        shape, storage, pages=lanes * pages, scale_rows=rows, dtype=torch.bfloat16, columns=tokens, table_width=pages,
        backend=triton_backend(),
    )  # fmt: skip
