"""What ThinKV does beside attention: measuring which thought begins, and choosing what survives of segments.

    row        what it costs attention to tell the row of weights that sparsity is counted from
    sparsity   of the rows that are due, in four layers
    kmeans     of segments on their way down the retention schedule, in 32 layers

Each kernel is compared with its twin on whole numbers, then timed as a CUDA graph replays it, the keys together
larger than the cache; the twin is timed on the same GPU, launched from Python. The bandwidth is that of a copy in the
same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink import results
from minithink.backend import REFERENCE, triton_backend
from minithink.bench import attention
from minithink.bench.attention import DIM, HEADS, KV_HEADS
from minithink.commands import positive
from minithink.errors import MinithinkError
from minithink.kv.contract import Storage

DEFAULT = "thought-kernels"
MEASURED, LAYERS = 4, 32  # |L*|, L
SCHEDULE = (128, 64, 32, 16, 8, 4)  # τ, R


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench thoughts`."""
    add = parser.add_argument
    add("--batch", type=positive, default=64, metavar="N", help="sequences that attention reads (default 64)")
    add("--lengths", type=positive, nargs="+", default=[1024, 32768], metavar="N",
        help="tokens of each (default 1024 32768)")  # fmt: skip
    add("--due", type=positive, nargs="+", default=[1, 8], metavar="N",
        help="sequences that are due in one step (default 1 8)")  # fmt: skip
    add("--repeats", type=positive, default=20, metavar="N", help="replays of each graph (default 20)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Check, measure, write, print."""
    if not torch.cuda.is_available():
        raise MinithinkError("bench thoughts measures kernels on an NVIDIA GPU, and torch finds none here.")
    check("cuda")
    path = Path(args.output) if args.output else results.default_path(DEFAULT)
    result = results.new(DEFAULT, list(argv), "cuda")
    result["settings"] = {
        "query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16", "layers": LAYERS,
        "measured_layers": MEASURED, "batch": args.batch, "repeats": args.repeats,
    }  # fmt: skip
    result["copy_bytes_per_second"] = limit = attention.copy_speed()
    result["measurements"] = []
    for m in measurements(args.batch, args.lengths, args.due, args.repeats):
        m["share"] = m["bytes"] / m["microseconds"] * 1e6 / limit
        result["measurements"].append(m)
        results.write(path, result)
        print(f"{m['kernel']:9} {m['case']:40} {m['microseconds']:9.1f} us  {m['share']:6.1%}", flush=True)
        torch.cuda.empty_cache()
    result["complete"] = True
    results.write(path, result)
    print(f"written to {path}", file=sys.stderr)
    return 0


def check(device: str, tokens: int = 128) -> None:
    """Kernels and twins on whole numbers, where both are exact."""
    ours, keys = triton_backend(), torch.randint(-2, 3, (2, tokens, 64), device=device).to(torch.bfloat16)
    valid = torch.arange(tokens, device=device) < torch.tensor([[tokens], [tokens - 3]], device=device)
    sets = keys, valid, torch.tensor([tokens // 2, 3], device=device)
    row = torch.rand(2, KV_HEADS, tokens, device=device).pow(4), valid[:, None]
    for name, inputs in (("kmeans", sets), ("sparsity", row)):
        got, want = (getattr(ops, name)(*inputs) for ops in (ours, REFERENCE))
        if not torch.equal(got, want):
            raise MinithinkError(f"The kernel {name} and its twin differ on whole numbers.")


def measurements(batch: int, lengths: Sequence[int], due: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """All cases; bytes are the least that must be moved."""
    for length in lengths:
        yield row(batch, length, repeats)
        for n in due:
            p = torch.rand(MEASURED, n, KV_HEADS, length, device="cuda")
            valid = torch.ones(MEASURED, n, 1, length, dtype=torch.bool, device="cuda")
            m = beside_twin("sparsity", [(p, valid)] * 16, repeats)  # attention has just written them: cached
            yield {"case": f"{n} × {MEASURED} rows of {length:,} tokens", "bytes": p.nbytes + valid.nbytes} | m
    for n in due:
        for tokens, kept in pairwise(SCHEDULE):
            sets = n * LAYERS
            size = sets * tokens * KV_HEADS * DIM * 2
            copies = -(-attention.ROTATE // size)
            x = torch.randn(copies, sets, tokens, KV_HEADS * DIM, device="cuda", dtype=torch.bfloat16)
            valid = torch.ones(sets, tokens, dtype=torch.bool, device="cuda")
            count = torch.full((sets,), kept, dtype=torch.int32, device="cuda")
            m = beside_twin("kmeans", [(one, valid, count) for one in x], repeats)
            yield {"case": f"{n} × {LAYERS} segments, {tokens} → {kept} tokens", "bytes": size} | m


def row(batch: int, length: int, repeats: int) -> dict[str, Any]:
    """What attention's time grows by when it tells the row; bytes: of the weights, written once."""
    store = attention.used_store(Storage(("nvfp4",)), MEASURED, batch, length)
    read, ops = store.reader(), triton_backend()
    q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    silent = attention.timed(lambda i: ops.paged_attention(q, read, i, None), MEASURED, repeats) * 1e6
    telling = attention.timed(lambda i: ops.paged_attention(q, read, i, "max_logit"), MEASURED, repeats) * 1e6
    return {
        "kernel": "row", "case": f"{batch} × {length:,} tokens, a layer", "bytes": 4 * batch * KV_HEADS * length,
        "microseconds": telling - silent, "attention_microseconds": silent,
    }  # fmt: skip


def beside_twin(name: str, inputs: Sequence[tuple[Tensor, ...]], repeats: int) -> dict[str, Any]:
    """Microseconds of the kernel in a CUDA graph, and of the twin."""
    kernel: Callable[..., Tensor] = getattr(triton_backend(), name)
    twin: Callable[..., Tensor] = getattr(REFERENCE, name)
    seconds = attention.timed(lambda i: kernel(*inputs[i]), len(inputs), repeats)
    runs = [attention.microseconds(lambda: twin(*inputs[0])) for _ in range(4)]
    return {"kernel": name, "microseconds": seconds * 1e6, "twin_microseconds": statistics.median(runs[1:])}
