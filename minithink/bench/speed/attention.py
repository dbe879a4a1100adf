"""Speed of paged decode attention on a GPU, beside torch's attention over contiguous keys and values.

Lanes are as they are after long use: pages anywhere in the pool, and in every page slots that were taken again in
four generations of random evictions. Before anything is timed, each format's output is compared with the reference.
Timed are replays of a CUDA graph that goes through several layers, together larger than the cache; the median of the
replays, divided by the layers.

The other benchmarks of kernels (`append`, `ops`, `counters`, `steps`) use the stores, the clock and `report` of this
module.
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

from minithink.backend import REFERENCE, triton_backend
from minithink.bench.speed import clock
from minithink.cli.commands import positive
from minithink.errors import MinithinkError, UsageError, alternatives, quoted
from minithink.kv.contract import Shape, Storage
from minithink.kv.pages import Layout, layouts
from minithink.kv.reading import Reading
from minithink.kv.store import PagedStore
from minithink.loop import no_collections
from minithink.ref.paged_attention import paged_attention as reference
from minithink.results import record
from minithink.results.record import Measurement

FORMATS = {
    "bf16": Storage(),
    "fp8": Storage(("fp8",)),
    "nvfp4": Storage(("nvfp4",)),
    "nvfp4, keys by token": Storage(("nvfp4:by=token/nvfp4",), buffer=16),
    "ternary": Storage(("ternary",)),
    "ternary, keys by token": Storage(("ternary:by=token/ternary",), buffer=16),
    "int4": Storage(("int4:group=32",)),
    "tq4": Storage(("tq4",)),
    "tq3": Storage(("tq3",)),
    "tq2": Storage(("tq2",)),
    "int2, keys by token": Storage(("int2:group=32,by=token/int2:group=32",), buffer=32),
}
OPTIONS = {name.replace(", ", "-").replace(" ", "-"): name for name in FORMATS}  # names as single words
HEADS = 32
KV_HEADS = 8
DIM = 128
DTYPE = torch.bfloat16
DEVICE = "cuda"  # tests run the same code on a CPU, in Triton's interpreter
ROTATE = 400 * 2**20  # bytes that the layers hold together, at least: several times the cache
GENERATIONS = 4
# Sequences and tokens of each that are compared: for each way to cut lanes, and for each length of the parts.
CHECKED = (3, 1000), (9, 1500), (33, 1500), (1, 10_000), (9, 20_000)
DEFAULT = "attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench attention`."""
    add = parser.add_argument
    add("--formats", type=lambda text: text.split(","), default=[*OPTIONS], metavar="A,B", help="default: all")
    add("--batches", type=_numbers, default=[1, 16, 64, 256], metavar="N,N", help="default 1,16,64,256")
    add("--lengths", type=_numbers, default=[1024, 4096, 16384], metavar="N,N", help="default 1024,4096,16384")
    add("--repeats", type=positive, default=20, metavar="N", help="replays of each graph (default 20)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Check, measure, write, print."""
    names = [OPTIONS.get(name, name) for name in args.formats]
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise UsageError(f"The format {quoted(unknown[0])} is unknown; {alternatives(unknown[0], FORMATS)}.")

    def rows(result: dict[str, Any]) -> Iterator[Measurement]:
        result["errors"] = {name: check(name) for name in names}
        for batch in args.batches:
            for length in args.lengths:
                yield from shape(names, batch, length, args.repeats)

    return report(DEFAULT, args, argv, {"repeats": args.repeats, "generations": GENERATIONS}, rows)


def report(
    name: str,
    args: argparse.Namespace,
    argv: Sequence[str],
    settings: dict[str, Any],
    rows: Callable[[dict[str, Any]], Iterator[Measurement]],
    file: str = "",
) -> int:
    """Measure kernels, write after every row, print each → 0. MinithinkError: there is no GPU.

    Args:
        name: of the command.
        settings: beside the sizes of the heads.
        rows: takes the result, to which it may add, and yields its measurements.
        file: name of the result; "": the command's.
    """
    record.need_gpu(name)
    path = record.output(args, file or name)
    result = record.new(file or name, list(argv), DEVICE)
    heads = {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"}
    result["settings"] = heads | settings
    result["copy_bytes_per_second"] = copy_speed()
    return record.collect(path, result, rows(result), line)


def line(m: Measurement) -> str:
    """A measurement for people."""
    return "  ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in m.items())


def shape(names: list[str], batch: int, length: int, repeats: int) -> Iterator[Measurement]:
    """One batch size and length: torch's attention, then every format."""
    attend = triton_backend().paged_attention
    times = dict[str, float]()

    def row(label: str, layers: int, seconds: float, size: float, **more: Any) -> Measurement:
        times[label] = seconds
        out = {"batch": batch, "length": length, "layers": layers, "format": label, **more}
        out |= {"microseconds": seconds * 1e6, "bytes_per_second": size / seconds}
        beside = "sdpa" if label == "bf16" else "bf16"
        return out | ({"ratio": times[beside] / seconds, "beside": beside} if beside in times else {})

    torch.cuda.empty_cache()
    size = float(batch * length * KV_HEADS * DIM * 2 * DTYPE.itemsize)
    layers = math.ceil(ROTATE / size)
    seconds, backend = peer(batch, length, layers, repeats)
    yield row("sdpa", layers, seconds, size, backend=backend)
    for name in names:
        size = lane_bytes(layouts(FORMATS[name], DIM, DTYPE)[-1], length) * batch * KV_HEADS
        layers = math.ceil(ROTATE / size)
        store = used_store(FORMATS[name], layers, batch, length)
        q = torch.randn(layers, batch, HEADS, DIM, device=DEVICE, dtype=DTYPE).unbind()
        yield row(name, layers, timed(attending(attend, store, q, None), layers, repeats), size)
        if name == "bf16":
            seconds = timed(attending(attend, store, q, "mean"), layers, repeats)
            yield row("bf16, mass", layers, seconds, size)
        del store, q
        torch.cuda.empty_cache()


def attending(
    attend: Callable[..., Any], store: PagedStore, q: Sequence[Tensor], group: str | None
) -> Callable[[int], Any]:
    """Attention of the i-th layer; what is found once for all layers is found with the first."""
    reads: list[Any] = []

    def call(i: int) -> Any:
        if i == 0:
            reads[:] = [Reading(store)]
        return attend(q[i], reads[0], i, group)

    return call


def bytes_read(store: PagedStore, length: int) -> float:
    """Bytes that attention must read of one lane of a store in one format."""
    return lane_bytes(store.pages.layouts[max(store.slots.used)], length)


def lane_bytes(lay: Layout, length: int) -> float:
    """Bytes that attention must read of a lane of so many tokens: codes, scales, places."""
    shared = lay.shared / lay.k.group if lay.by_token else 0
    return length * (lay.codes + lay.side + shared + 4)


# The store ---------------------------------------------------------------------------------------------------------


def empty_store(storage: Storage, layers: int, batch: int, tokens: int) -> PagedStore:
    """A store with room for so many tokens of each lane in the last of its formats."""
    lay = layouts(storage, DIM, DTYPE)[-1]
    lanes = layers * batch * KV_HEADS
    shape = Shape(layers, batch, KV_HEADS, HEADS, DIM, HEADS * DIM, "head", torch.device(DEVICE))
    pages = -(-tokens // lay.slots)
    groups = -(-tokens // lay.k.group) + 1 if lay.by_token else 0
    return PagedStore(
        shape,
        storage,
        pages=lanes * pages,
        groups=lanes * groups,
        dtype=DTYPE,
        columns=tokens,
        table_width=pages,
        backend=triton_backend(),
    )


def used_store(storage: Storage, layers: int, batch: int, length: int) -> PagedStore:
    """A store whose lanes all hold `length` tokens of random numbers, in slots as they are after long use."""
    store = empty_store(storage, layers, batch, length)
    f = len(storage.formats) - 1
    lay = store.pages.layouts[-1]
    lanes = layers * batch * KV_HEADS
    store.slots.used = {f}
    store.slots.table.format.fill_(f)
    number = torch.randperm(store.slots.table.free_pages.count, device=DEVICE, dtype=torch.int32).view(lanes, -1)
    place = store.lists.place.view(lanes, -1)
    column = torch.arange(length, device=DEVICE)
    for part in range(0, lanes, 1024):  # a few at a time, for the memory
        here = number[part : part + 1024]
        order = column.expand(len(here), length)
        for _ in range(GENERATIONS):
            gone = torch.rand(order.shape, device=DEVICE) < 0.5
            # the tokens that stay keep their order; new tokens take the free slots in the order of the table
            order = order.gather(1, torch.where(gone, length + order, column).argsort(1))
        page = here.gather(1, order // lay.slots)
        place[part : part + 1024, :length] = (page * store.slots.table.stride + order % lay.slots).to(torch.int32)
    store.lists.count.fill_(length)
    store.lists.pos[..., :length] = column
    store.lists.longest = [length] * batch
    if lay.plain:
        for part in store.pages.pool.view(DTYPE).view(-1).split(2**28):
            part.normal_()
    else:
        for part in store.pages.pool.view(-1).split(2**30):
            part.random_(0, 256)
            if lay.k.name == "fp8":
                part.bitwise_and_(0xBF)  # below 2: its codes have NaNs among them
        side = store.pages.side
        of_keys = store.pages.group_params if lay.by_token else side
        for which, (params, fmt) in enumerate(((of_keys, lay.k), (side, lay.v))):
            if fmt.param_bytes == 1:
                params.random_(0x28, 0x40)
            elif fmt.param_bytes:
                params.view(torch.float16).uniform_(0.25, 2)
            if fmt.tensor_scaled:
                store.pages.scale[f, which] = 0.01
    if lay.by_token:  # tokens are quantized together with their neighbours
        group = column // lay.k.group
        row = torch.arange(lanes, device=DEVICE)[:, None] * (-(-length // lay.k.group)) + group
        store.slots.group_of.view(-1)[place[:, :length].long()] = row.to(torch.int32)
    return store


# The check ---------------------------------------------------------------------------------------------------------


def check(name: str) -> float:
    """The largest error of some small cases, relative to the largest value of the reference."""
    error = max(_difference(name, *size) for size in CHECKED)
    print(f"{name:24} error {error:.2e}", flush=True)
    if not error < 2e-2:
        raise MinithinkError(f"{name} differs from the reference by {error:.3g} of its largest value.")
    return error


def _difference(name: str, batch: int, length: int) -> float:
    """Of the outputs and of the mass, whichever is larger, relative to the largest value."""
    store = used_store(FORMATS[name], 2, batch, length)
    q = torch.randn(batch, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    want: Any = reference(q.float(), _as_float32(store), 1, "mean")
    got: Any = triton_backend().paged_attention(q, Reading(store), 1, "mean")
    return max(float((x.float() - y).abs().max() / y.abs().max()) for x, y in zip(got, want, strict=True))


def _as_float32(store: PagedStore) -> Any:
    """What the store gives to read, in float32: codes are not rounded to the model's type first."""
    wide = copy.copy(store)
    wide.pages = copy.copy(store.pages)
    wide.pages.backend = REFERENCE
    if not any(store.pages.layouts[f].plain for f in store.slots.used):
        wide.dtype = torch.float32
        wide.ring = store.ring.float()
    read = Reading(wide)

    class Wide:
        def valid(self, layer: int) -> Tensor | None:
            return read.valid(layer)

        def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
            k, v = read(layer)
            return k.float(), v.float()

    return Wide()


# The clock ---------------------------------------------------------------------------------------------------------


def peer(batch: int, length: int, layers: int, repeats: int) -> tuple[float, str]:
    """Seconds of torch's attention over contiguous keys and values, by its fastest backend."""
    k = torch.randn(layers, 2, batch, KV_HEADS, length, DIM, device=DEVICE, dtype=DTYPE)
    q = torch.randn(layers, batch, HEADS, 1, DIM, device=DEVICE, dtype=DTYPE)
    # the query heads of a group as several queries of their KV head, or as heads
    shapes = {"grouped": (q.view(layers, batch, KV_HEADS, HEADS // KV_HEADS, DIM), False), "gqa": (q, True)}
    best = (float("inf"), "")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for label, (queries, gqa) in shapes.items():

            def call(i: int, queries: Tensor = queries, gqa: bool = gqa) -> Tensor:
                return F.scaled_dot_product_attention(queries[i], k[i, 0], k[i, 1], enable_gqa=gqa)

            try:
                with sdpa_kernel(backend), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # why the others do not fit
                    best = min(best, (timed(call, layers, repeats), f"{backend.name.split('_')[0].lower()}, {label}"))
            except RuntimeError:  # no kernel of this backend for these inputs
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
    return best


def timed(call: Callable[[int], Any], layers: int, repeats: int, device: torch.device | str | None = None) -> float:
    """Median seconds of one layer."""

    def run() -> None:
        for i in range(layers):
            call(i)

    replay = captured(run, device)
    times = [elapsed(replay, device) for _ in range(repeats + 3)]
    return statistics.median(times[3:]) / layers


def captured(run: Callable[[], object], device: torch.device | str | None = None) -> Callable[[], object]:
    """Replays a CUDA graph of what `run` launches, after one run that compiles it; without CUDA `run` itself."""
    if torch.device(device or DEVICE).type != "cuda":
        run()
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_collections(), torch.cuda.graph(graph):
        run()
    return graph.replay


def elapsed(run: Callable[[], object], device: torch.device | str | None = None) -> float:
    """Seconds of the device, from before the first of its kernels until after the last; wall time without CUDA."""
    if torch.device(device or DEVICE).type != "cuda":
        return clock.timed(run)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_speed() -> float:
    """Bytes read and written a second by a kernel that copies 4 GiB (a copy inside of a graph is not one)."""
    x = torch.empty(2**29, dtype=torch.int64, device="cuda").random_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / timed(lambda i: torch.bitwise_not(x, out=y), 1, 10)
