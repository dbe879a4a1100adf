"""Decoding on a CPU with each of the caches: one buffer a sequence, the plain manager, pages.

Streams of all caches run side by side, some steps of one, then some steps of the next, so that a machine that slows
down slows all of them. Times are CPU seconds of one thread, because other programs on the machine change these least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from minithink.cli.commands import positive
from minithink.engine import Engine, load
from minithink.errors import UsageError
from minithink.policies import load as load_policy
from minithink.results import record
from minithink.stream import Stream
from minithink.tasks import load_problems

DEFAULT = "caches-cpu"
POLICIES = (
    "none",
    "full",
    "window:budget=160",
    "h2o:budget=320",
    "rkv:budget=160",
    "thinkv:budget=448",
    "crystal_kv:budget=448",
    "kivi",
)
WARMING = 8  # steps before the first that counts
BLOCK = 16  # steps of one cache before it is the next one's turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench caches`."""
    add = parser.add_argument
    add(
        "--policies",
        nargs="+",
        type=load_policy,
        default=POLICIES,
        metavar="P",
        help="policies (none: no policy at all)",
    )
    add("--batch", nargs="+", type=positive, default=[1, 8], metavar="N", help="sequences (default: 1 8)")
    add("--steps", type=positive, default=256, metavar="N", help="decoding steps of each cache (default: 256)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every line, print."""
    if args.steps < BLOCK:
        raise UsageError(f"--steps {args.steps} is less than a turn of {BLOCK} steps: give {BLOCK} or more.")
    torch.set_num_threads(1)
    result = record.new("caches", argv)
    result["settings"] = {"device": "cpu", "threads": 1, "steps": args.steps, "block": BLOCK}
    return record.collect(record.output(args, DEFAULT), result, measurements(args), line)


def measurements(args: argparse.Namespace) -> Iterator[record.Measurement]:
    """A measurement for every policy and number of sequences."""
    engine = load(None, device="cpu", backend="reference")
    for policy in args.policies:
        for batch in args.batch:
            yield {"policy": policy, "batch": batch, "ms": milliseconds(engine, policy, batch, args.steps)}


def milliseconds(engine: Engine, policy: str, batch: int, steps: int) -> dict[str, float]:
    """The median CPU time of a decoding step with each cache, in milliseconds."""
    caches = ("auto", "plain", "paged") if policy == "none" else ("plain", "paged")
    running = {}
    for cache in caches:
        running[cache] = stream_of(engine, None if policy == "none" else policy, cache, batch, steps)
    times: dict[str, list[float]] = {cache: [] for cache in caches}
    for _ in range(steps // BLOCK):
        for cache, stream in running.items():
            times[cache].append(seconds_a_step(stream))
    return {cache: 1000 * statistics.median(found) for cache, found in times.items()}


def stream_of(engine: Engine, policy: str | None, cache: str, batch: int, steps: int) -> Iterator[int]:
    """Greedy decoding of test problems that have been read."""
    stream: Stream = engine.stream(
        [problem.question for problem in load_problems("test")[:batch]],
        policy=policy,
        cache=cache,
        temperature=0.0,
        max_new_tokens=batch + WARMING + steps + 1,
        batch_size=batch,
    )
    stream.stop_ids = frozenset()  # no sequence ends before the others
    stream.accounts = False
    counts = stream.steps()
    for _ in range(batch + WARMING):  # the first steps read a prompt each
        next(counts)
    return counts


def seconds_a_step(counts: Iterator[int]) -> float:
    """The CPU time of the next steps, divided by their number."""
    begin = time.process_time()
    for _ in range(BLOCK):
        next(counts)
    return (time.process_time() - begin) / BLOCK


def line(m: record.Measurement) -> str:
    """A measurement in one line, for people."""
    times = ", ".join(f"{cache} {ms:.2f}" for cache, ms in m["ms"].items())
    return f"{m['policy']}, batch {m['batch']}: {times} ms a step"
