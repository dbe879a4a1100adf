"""Operations that methods choose with, on a GPU: each kernel beside its twin, and what telling a row costs.

`bench/methods` lists the operations (OPERATIONS): inputs of whole numbers, on which a kernel and its twin are
equal, and the cases that are timed. A kernel is timed as a CUDA graph replays it, its inputs together larger than the
cache; the twin is timed on the same GPU, launched from Python. If a CUDA graph can capture the twin, the twin is also
timed as the kernel is. The bandwidth is that of a copy in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from minithink.backend import REFERENCE, triton_backend
from minithink.bench.methods import LAYERS, MEASURED, Inputs, Operation, collected
from minithink.bench.speed import attention
from minithink.bench.speed.attention import DIM, DTYPE, FORMATS, HEADS, KV_HEADS
from minithink.cli.commands import positive
from minithink.errors import MinithinkError
from minithink.kv.reading import Reading
from minithink.results.record import Measurement

DEFAULT = "thought-kernels"
OPERATIONS: dict[str, Operation] = collected("OPERATIONS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench thoughts`."""
    add = parser.add_argument
    add("--batch", type=positive, default=64, metavar="N", help="sequences that attention reads (default 64)")
    add(
        "--lengths",
        type=positive,
        nargs="+",
        default=[1024, 32768],
        metavar="N",
        help="tokens of each (default 1024 32768)",
    )
    add(
        "--due",
        type=positive,
        nargs="+",
        default=[1, 8],
        metavar="N",
        help="sequences that are due in one step (default 1 8)",
    )
    add("--repeats", type=positive, default=20, metavar="N", help="replays of each graph (default 20)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Check, measure, write, print."""

    def rows(result: dict[str, Any]) -> Iterator[Measurement]:
        check(attention.DEVICE)
        for m in measurements(args.batch, args.lengths, args.due, args.repeats):
            yield m | {"share": m["bytes"] / m["microseconds"] * 1e6 / result["copy_bytes_per_second"]}

    settings = {"layers": LAYERS, "measured_layers": MEASURED, "batch": args.batch, "repeats": args.repeats}
    return attention.report("thoughts", args, argv, settings, rows, DEFAULT)


def check(device: str, tokens: int = 128) -> None:
    """Kernels and twins on whole numbers, where both are exact."""
    for name, operation in OPERATIONS.items():
        inputs = operation.exact(device, tokens)
        got, want = (outcome(getattr(ops, name), inputs) for ops in (triton_backend(), REFERENCE))
        if not all(map(torch.equal, got, want)):
            raise MinithinkError(f"The kernel {name} and its twin differ on whole numbers.")


def outcome(call: Callable[..., Tensor | None], inputs: Inputs) -> list[Tensor]:
    """What a call returns or, if it returns nothing, its inputs as it has changed them. `inputs` stay as they are."""
    own = deepcopy(inputs)
    out = call(*own)
    if out is not None:
        return [out]
    changed: list[Tensor] = []
    for part in own:
        changed += part if isinstance(part, tuple) else (part,)
    return changed


def measurements(batch: int, lengths: Sequence[int], due: Sequence[int], repeats: int) -> Iterator[Measurement]:
    """All cases; bytes are the least that must be moved."""
    for length in lengths:
        yield row(batch, length, repeats)
    for name, operation in OPERATIONS.items():
        for case, size, inputs in operation.cases(lengths, due, attention.ROTATE):
            yield {"case": case, "bytes": size} | beside_twin(name, inputs, repeats)
            torch.cuda.empty_cache()


def row(batch: int, length: int, repeats: int) -> Measurement:
    """What attention's time grows by when it tells the row; bytes: of the weights, written once."""
    read = Reading(attention.used_store(FORMATS["nvfp4"], MEASURED, batch, length))
    attend = triton_backend().paged_attention
    q = torch.randn(batch, HEADS, DIM, device=attention.DEVICE, dtype=DTYPE)
    silent = attention.timed(lambda i: attend(q, read, i, None), MEASURED, repeats) * 1e6
    telling = attention.timed(lambda i: attend(q, read, i, "max_logit"), MEASURED, repeats) * 1e6
    return {
        "kernel": "row",
        "case": f"{batch} × {length:,} tokens, a layer",
        "bytes": 4 * batch * KV_HEADS * length,
        "microseconds": telling - silent,
        "attention_microseconds": silent,
    }


def beside_twin(name: str, inputs: Sequence[tuple[Tensor, ...]], repeats: int) -> Measurement:
    """Microseconds of the kernel in a CUDA graph, and of the twin; if the twin is capturable, also in a graph."""
    kernel, twin = (getattr(ops, name) for ops in (triton_backend(), REFERENCE))

    def captured(call: Callable[..., object]) -> float:
        return attention.timed(lambda i: call(*inputs[i]), len(inputs), repeats) * 1e6

    own = {"microseconds": captured(kernel)}
    runs = [attention.elapsed(lambda: twin(*inputs[0])) for _ in range(4)]
    own["twin_microseconds"] = statistics.median(runs[1:]) * 1e6
    if OPERATIONS[name].capturable:
        own["twin_recorded_microseconds"] = captured(twin)
    return {"kernel": name, **own}
