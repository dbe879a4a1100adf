"""The speed of each step of tutorial 05 (`speed/steps.py`), beside the kernel and beside torch's attention.

`kernels/paged_attention.py` reads the same store, torch's attention contiguous keys and values. Lanes are as they are
after long use, and each step is compared with the reference before it is timed: see `speed/attention.py`. What is
100 % is the bandwidth of a kernel that only reads, in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minithink.bench.speed import attention
from minithink.bench.speed.attention import DIM, HEADS, KV_HEADS
from minithink.bench.speed.steps import SHAPES, STEPS, SWEEP, _read, inputs, parts
from minithink.cli.commands import positive
from minithink.errors import MinithinkError
from minithink.kernels._common import INTERPRETED
from minithink.kernels.paged_attention import paged_attention
from minithink.kv.contract import Storage
from minithink.kv.reading import Reading
from minithink.ref.paged_attention import paged_attention as reference
from minithink.results.record import Measurement

DEFAULT = "steps"
CHECKED = 3, 1500  # sequences, tokens of each
TOLERANCE = 2e-2  # of the largest value, in bfloat16
KERNEL = "`kernels/paged_attention.py`"
PEER = "torch's attention, contiguous"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench steps`."""
    add = parser.add_argument
    add(
        "--shapes",
        type=_shapes,
        default=list(SHAPES),
        metavar="NxT,NxT",
        help=f"sequences x tokens of each (default {','.join(f'{n}x{t}' for n, t in SHAPES)})",
    )
    add("--sweep", action=argparse.BooleanOptionalAction, default=True, help="time other cuts too (default)")
    add("--repeats", type=positive, default=20, metavar="N", help="replays of each graph (default 20)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def _shapes(text: str) -> list[tuple[int, int]]:
    """For argparse: "64x4096,1x16384"."""
    parts = [part.split("x") for part in text.split(",")]
    wrong = next((part for part in parts if len(part) != 2), None)
    if wrong:
        raise argparse.ArgumentTypeError(f"{'x'.join(wrong)!r} is not like 64x4096, sequences x tokens")
    return [(positive(batch), positive(length)) for batch, length in parts]


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Check, measure, write, print."""
    settings = {"repeats": args.repeats, "generations": attention.GENERATIONS}
    return attention.report(DEFAULT, args, argv, settings, partial(measurements, args))


def measurements(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[Measurement]:
    """Every shape. Times of cuts other than the chosen ones go to result["sweep"]."""
    if INTERPRETED:
        raise MinithinkError("bench steps cannot measure what is interpreted: unset TRITON_INTERPRET.")
    cuts = {name: step.run.keywords["cut"]._asdict() for name, step in STEPS.items() if isinstance(step.run, partial)}
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    result["settings"] |= {"multiprocessors": multiprocessors, "cuts": cuts}
    result["sweep"] = list[Measurement]()
    result["read_bytes_per_second"] = limit = read_speed()
    result["errors"] = check()
    for batch, length in args.shapes:
        for m in shape(batch, length, args.repeats, args.sweep):
            m["share"] = m["bytes"] / m["microseconds"] * 1e6 / limit
            if "cut" not in m:
                yield m
                continue
            result["sweep"].append(m)
            print(attention.line(m), flush=True)


def shape(batch: int, length: int, repeats: int, sweep: bool) -> Iterator[Measurement]:
    """One batch size and length: every step, the kernel, other cuts; then torch's attention."""
    plain = batch * length * KV_HEADS * DIM * 4  # bytes of keys and values
    layers = max(1, -(-attention.ROTATE // plain))
    here = {"batch": batch, "length": length, "layers": layers}
    for row in paged(batch, length, layers, repeats, sweep):
        yield here | row
    torch.cuda.empty_cache()
    seconds, backend = attention.peer(batch, length, layers, repeats)
    yield here | {"step": "sdpa", "what": PEER, "microseconds": seconds * 1e6, "bytes": plain, "backend": backend}
    torch.cuda.empty_cache()


def paged(batch: int, length: int, layers: int, repeats: int, sweep: bool) -> Iterator[Measurement]:
    """What reads pages, all from one store."""
    store = attention.used_store(Storage(), layers, batch, length)
    q = torch.randn(layers, batch, HEADS, DIM, device=attention.DEVICE, dtype=torch.bfloat16)
    read = Reading(store)
    sources = [inputs(store, layer) for layer in range(layers)]
    bound = attention.bytes_read(store, length) * batch * KV_HEADS

    def row(name: str, title: str, call: Callable[[int], Any]) -> Measurement:
        microseconds = attention.timed(call, layers, repeats) * 1e6
        return {"step": name, "what": title, "microseconds": microseconds, "bytes": bound}

    def step(run: Callable[..., Tensor], **how: Any) -> Callable[[int], Any]:
        return lambda i: run(q[i], *sources[i], **how)

    for name, (title, run) in STEPS.items():
        yield row(name, title, step(run, **({"longest": length} if name in ("split", "flight", "swap") else {})))
    yield row("kernel", KERNEL, lambda i: paged_attention(q[i], read, i))
    for cut in SWEEP if sweep else ():
        yield row("flight", STEPS["flight"].title, step(parts, cut=cut, longest=length)) | {"cut": cut._asdict()}


def check() -> dict[str, float]:
    """The largest error of each step on a small case, relative to the largest value of the reference."""
    batch, length = CHECKED
    store = attention.used_store(Storage(), 2, batch, length)
    store.lists.count[1] = torch.randint(
        1, length, store.lists.count[1].shape, device=attention.DEVICE, dtype=store.lists.count.dtype
    )
    store.lists.pos.masked_fill_(
        torch.arange(store.lists.pos.shape[-1], device=attention.DEVICE) >= store.lists.count[..., None], -1
    )
    q = torch.randn(batch, HEADS, DIM, device=attention.DEVICE, dtype=torch.bfloat16)
    want, _ = reference(q.float(), attention._as_float32(store), 1)
    runs: dict[str, Callable[..., Tensor]] = {name: step.run for name, step in STEPS.items()}
    runs |= {f"tokens, warps, stages {tuple(cut)}": partial(parts, cut=cut) for cut in SWEEP}
    errors = {}
    for name, run in runs.items():
        got = run(q, *inputs(store, 1)).float()
        errors[name] = float((got - want).abs().max() / want.abs().max())
        if not errors[name] < TOLERANCE:
            raise MinithinkError(f"{name} differs from the reference by {errors[name]:.3g} of its largest value.")
    return errors


def read_speed() -> float:
    """Bytes read a second by a kernel that reads 4 GiB and does nothing else."""
    block = 4096
    times = 4
    x = torch.empty(2**30, dtype=torch.int32, device=attention.DEVICE).random_()
    programs = x.numel() // (block * times)
    out = torch.empty(programs, dtype=torch.int32, device=attention.DEVICE)
    return x.nbytes / attention.timed(lambda i: _read[(programs,)](x, out, block, times, num_warps=8), 1, 10)
