"""Speed of paged decode attention on a GPU, beside torch's attention over contiguous keys and values.

Lanes are as they are after long use: pages anywhere in the pool, and in every page slots that were taken again in
four generations of random evictions. Before anything is timed, each format's output is compared with the reference.
Timed are replays of a CUDA graph that goes through several layers, together larger than the cache; the median of the
replays, divided by the layers.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minithink import results
from minithink.backend import REFERENCE, triton_backend
from minithink.commands import positive
from minithink.errors import MinithinkError, UsageError
from minithink.kv.contract import Shape, Storage
from minithink.kv.store import PagedStore
from minithink.ref.paged_attention import paged_attention as reference

FORMATS = {
    "bf16": Storage(),
    "fp8": Storage(("fp8",)),
    "nvfp4": Storage(("nvfp4",)),
    "nvfp4, keys by token": Storage(("nvfp4:by=token/nvfp4",), buffer=16),
    "ternary": Storage(("ternary",)),
    "ternary, keys by token": Storage(("ternary:by=token/ternary",), buffer=16),
    "int4": Storage(("int4:group=32",)),
    "int2, keys by token": Storage(("int2:group=32,by=token/int2:group=32",), buffer=32),
}
HEADS, KV_HEADS, DIM = 32, 8, 128
ROTATE = 400 * 2**20  # bytes that the layers hold together, at least: several times the cache
GENERATIONS = 4
# Sequences and tokens of each that are compared: for each way to cut lanes, and for each length of the parts.
CHECKED = (3, 1000), (9, 1500), (33, 1500), (1, 10_000), (9, 20_000)
DEFAULT = "attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench attention`."""
    add = parser.add_argument
    add("--formats", default=",".join(map(_option, FORMATS)), metavar="A,B", help="default: all")
    add("--batches", type=_numbers, default=[1, 16, 64, 256], metavar="N,N", help="default 1,16,64,256")
    add("--lengths", type=_numbers, default=[1024, 4096, 16384], metavar="N,N", help="default 1024,4096,16384")
    add("--repeats", type=positive, default=20, metavar="N", help="replays of each graph (default 20)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def _option(name: str) -> str:
    """A format's name as one word."""
    return name.replace(", ", "-").replace(" ", "-")


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Check, measure, write, print."""
    results.need_gpu(DEFAULT)
    known = {_option(name): name for name in FORMATS}
    names = [known.get(name, name) for name in args.formats.split(",")]
    if unknown := [name for name in names if name not in FORMATS]:
        raise UsageError(f"The format {unknown[0]!r} is unknown; there are {', '.join(FORMATS)}.")
    result = results.new(DEFAULT, list(argv), "cuda")
    result["settings"] = {
        "query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16", "repeats": args.repeats,
        "generations": GENERATIONS,
    }  # fmt: skip
    path = results.output(args, DEFAULT)
    result["copy_bytes_per_second"] = copy_speed()
    print(f"copy: {result['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    result["errors"] = {name: check(name) for name in names}
    shapes = ((batch, length) for batch in args.batches for length in args.lengths)
    rows = (m for batch, length in shapes for m in shape(names, batch, length, args.repeats))
    return results.collect(path, result, rows, line)


def line(m: results.Measurement) -> str:
    """For people."""
    return (
        f"{m['batch']:4} x {m['length']:6}  {m['format']:24} {m['microseconds']:10.1f} us  "
        f"{m['bytes_per_second'] / 1e12:5.2f} TB/s  {m.get('ratio', 0):5.2f} x"
    )


def shape(names: list[str], batch: int, length: int, repeats: int) -> Iterator[dict[str, Any]]:
    """One batch size and length: torch's attention, then every format."""
    from minithink.kernels.paged_attention import paged_attention  # here: Triton exists for Linux only

    torch.cuda.empty_cache()
    plain = batch * length * KV_HEADS * DIM * 4
    layers = max(1, -(-ROTATE // plain))
    here = {"batch": batch, "length": length}
    seconds, backend = peer(batch, length, layers, repeats)
    times = {"sdpa": seconds}
    yield here | {
        "layers": layers, "format": "sdpa", "backend": backend, "microseconds": seconds * 1e6,
        "bytes_per_second": plain / seconds,
    }  # fmt: skip
    for name in names:
        a_lane = bytes_read(used_store(FORMATS[name], 1, 1, length), length)
        layers = max(1, math.ceil(ROTATE / (batch * KV_HEADS * a_lane)))
        store = used_store(FORMATS[name], layers, batch, length)
        q = torch.randn(layers, batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16).unbind()
        groups = {name: None} | ({"bf16, mass": "mean"} if name == "bf16" else {})
        for label, group in groups.items():
            seconds = times[label] = timed(attending(paged_attention, store, q, group), layers, repeats)
            moved = bytes_read(store, length) * batch * KV_HEADS
            m = here | {
                "layers": layers,
                "format": label,
                "microseconds": seconds * 1e6,
                "bytes_per_second": moved / seconds,
            }
            against = "sdpa" if label == "bf16" else "bf16"
            if against in times:
                m |= {"ratio": times[against] / seconds, "beside": against}
            yield m
        del store, q
        torch.cuda.empty_cache()


def attending(
    attend: Callable[..., Any], store: PagedStore, q: Sequence[Tensor], group: str | None
) -> Callable[[int], Any]:
    """Attention of the i-th layer; what is found once for all layers is found with the first."""
    reads: list[Any] = []

    def call(i: int) -> Any:
        if i == 0:
            reads[:] = [store.reader()]
        return attend(q[i], reads[0], i, group)

    return call


def bytes_read(store: PagedStore, length: int) -> float:
    """Bytes that attention must read of one lane: codes, scales, places."""
    lay = store.layouts[max(store.used)]
    shared = lay.row / lay.k.group if lay.by_token else 0
    return length * (lay.codes + lay.side + shared + 4)


def used_store(storage: Storage, layers: int, batch: int, length: int) -> PagedStore:
    """A store whose lanes all hold `length` tokens of random numbers, in slots as they are after long use."""
    shape = Shape(layers, batch, KV_HEADS, HEADS, DIM, HEADS * DIM, "head", torch.device("cuda"))
    f = len(storage.formats) - 1
    store = PagedStore(shape, storage, pages=1, scale_rows=1, dtype=torch.bfloat16, columns=length)
    lay = store.layouts[f]
    per_unit, units = -(-length // lay.slots), layers * batch * KV_HEADS
    pages = units * per_unit
    del store
    groups = -(-length // lay.k.group) if lay.by_token else 0
    store = PagedStore(
        shape, storage, pages=pages, scale_rows=max(1, units * groups), dtype=torch.bfloat16, columns=length,
        backend=triton_backend(),
    )  # fmt: skip
    store.used = {f}
    store.table.format.fill_(f)
    number = torch.randperm(pages, device="cuda", dtype=torch.int32).view(units, per_unit)
    place = store.place.view(units, -1)
    for part in range(0, units, 1024):  # a few at a time, for the memory
        here = number[part : part + 1024]
        order = torch.arange(length, device="cuda").expand(len(here), length)
        for _ in range(GENERATIONS):
            gone = torch.rand(order.shape, device="cuda") < 0.5
            # who stays keeps its order; new tokens take the free slots in the order of the table
            key = torch.where(gone, length + order, torch.arange(length, device="cuda"))
            order = order.gather(1, key.argsort(1))
        page = here.gather(1, order // lay.slots)
        place[part : part + 1024, :length] = (page * store.table.most + order % lay.slots).to(torch.int32)
    store.count.fill_(length)
    store.pos[..., :length] = torch.arange(length, device="cuda", dtype=torch.int32)
    store.most = [length] * batch
    if lay.plain:
        numbers = store.pool.view(torch.bfloat16).view(-1)
        for part in range(0, numbers.numel(), 2**28):
            numbers[part : part + 2**28].normal_()
    else:
        for part in store.pool.view(-1).split(2**30):
            part.random_(0, 256)
            if lay.k.name == "fp8":
                part.bitwise_and_(0xBF)  # below 2: its codes have NaNs among them
        _random_params(store.side, lay.v)
        _random_params(store.scale_rows, lay.k)
        for which, fmt in enumerate((lay.k, lay.v)):
            if fmt.tensor_scaled:
                store.scale[f, which] = 0.01
    if lay.by_token:  # tokens are quantized together with their neighbours
        group = torch.arange(length, device="cuda") // lay.k.group
        row = torch.arange(units, device="cuda")[:, None] * groups + group
        at = place[:, :length].long()
        store.row_of.view(-1)[at.flatten()] = row.to(torch.int32).flatten()
    return store


def _random_params(of: Tensor, fmt: Any) -> None:
    """Scales between a quarter and two."""
    if not of.numel() or not fmt.group:
        return
    if fmt.param_bytes == 1:
        of.random_(0x28, 0x40)
    else:
        of.view(torch.float16).uniform_(0.25, 2)


def check(name: str) -> float:
    """The largest error of some small cases, relative to the largest value of the reference."""
    error = max(_difference(name, *size) for size in CHECKED)
    print(f"{name:24} error {error:.2e}", flush=True)
    if not error < 2e-2:
        raise MinithinkError(f"{name} differs from the reference by {error:.3g} of its largest value.")
    return error


def _difference(name: str, batch: int, length: int) -> float:
    """Of the outputs and of the mass, whichever is larger, relative to the largest value."""
    from minithink.kernels.paged_attention import paged_attention

    store = used_store(FORMATS[name], 2, batch, length)
    q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    want, mass = reference(q.float(), _as_float32(store), 1, "mean")
    got, got_mass = paged_attention(q, store.reader(), 1, "mean")
    assert mass is not None
    assert got_mass is not None
    error = float((got.float() - want).abs().max() / want.abs().max())
    return max(error, float((got_mass - mass).abs().max() / mass.abs().max()))


def _as_float32(store: PagedStore) -> Any:
    """What the store gives to read, in float32: codes are not rounded to the model's type first."""
    wide = copy.copy(store)
    wide.backend = REFERENCE
    if not any(store.layouts[f].plain for f in store.used):
        wide.dtype = torch.float32
    read = wide.reader()

    class Wide:
        def valid(self, layer: int) -> Tensor | None:
            return read.valid(layer)

        def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
            k, v = read(layer)
            return k.float(), v.float()

    return Wide()


def peer(batch: int, length: int, layers: int, repeats: int) -> tuple[float, str]:
    """Seconds of torch's attention over contiguous keys and values, by its fastest backend."""
    k = torch.randn(layers, 2, batch, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(layers, batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    # the query heads of a group as several queries of their KV head, or as heads
    grouped = q.view(layers, batch, KV_HEADS, HEADS // KV_HEADS, DIM)
    best = (float("inf"), "")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for label, queries, gqa in (("grouped", grouped, False), ("gqa", q, True)):

            def call(i: int, queries: Tensor = queries, gqa: bool = gqa) -> Tensor:
                return F.scaled_dot_product_attention(queries[i], k[i, 0], k[i, 1], enable_gqa=gqa)

            try:
                with sdpa_kernel(backend), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # why the others do not fit
                    best = min(best, (timed(call, layers, repeats), f"{backend.name.split('_')[0].lower()}, {label}"))
            except RuntimeError:  # no kernel of this backend for these inputs
                torch.cuda.synchronize()
    return best


def timed(call: Callable[[int], Any], layers: int, repeats: int) -> float:
    """Median seconds of one layer."""

    def run() -> None:
        for i in range(layers):
            call(i)

    graph = recorded(run)
    times = [microseconds(graph.replay) for _ in range(repeats + 3)]
    return statistics.median(times[3:]) / 1e6 / layers


def recorded(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `run` launches, after one run that compiles it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(run: Callable[[], object]) -> float:
    """Of the device, from before the first of its kernels until after the last."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_speed() -> float:
    """Bytes read and written a second by a kernel that copies 4 GiB (a copy inside of a graph is not one)."""
    x = torch.empty(2**29, dtype=torch.int64, device="cuda").random_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / timed(lambda i: torch.bitwise_not(x, out=y), 1, 10)
