"""Decoding on a CPU whose cores other programs hold, by how threads wait for each other (`minithink/cli/cores.py`).

A program that loops without end holds a core. Every run is a process of its own, because OpenMP reads its settings
only once. Runs of all settings take turns, every second time in reverse order, so that a machine that slows down
slows all of them, and medians are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from minithink.bench.speed.clock import Deadline, in_turns
from minithink.cli import cores
from minithink.cli.commands import natural, positive
from minithink.engine import load
from minithink.errors import MinithinkError, counted
from minithink.results import record
from minithink.tasks import load_problems

DEFAULT = "busy-cpu"
WARMING = 8  # steps before the first that counts
HOLD = "while True: pass"  # the program that holds a core
LIMIT = 600  # seconds after which a run is given up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench busy`."""
    add = parser.add_argument
    add("--held", nargs="+", type=natural, metavar="N", help="cores that are held (default: 0, 1 … all)")
    add("--batch", nargs="+", type=positive, default=[1, 8], metavar="N", help="sequences (default: 1 8)")
    add(
        "--spins",
        nargs="*",
        type=positive,
        default=[1000, 100000],
        metavar="N",
        help="also try these lengths of GNU's loop (default: 1000 100000)",
    )
    add("--steps", type=positive, default=300, metavar="N", help="decoding steps of a run (default: 300)")
    add("--seconds", type=positive, default=5, metavar="N", help="end a run after this time (default: 5)")
    add("--repeats", type=positive, default=5, metavar="N", help="runs of each setting (default: 5)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every line, print."""
    result = record.new("busy", argv)
    names = ("steps", "seconds", "repeats")
    cpus = os.cpu_count() or 1
    result["settings"] = {"device": "cpu", "cores": cpus, "idle": cores.IDLE, "busy": cores.BUSY}
    result["settings"] |= {name: getattr(args, name) for name in names}
    held = list(range(cpus + 1)) if args.held is None else args.held
    return record.collect(record.output(args, DEFAULT), result, measurements(args, held), line)


def measurements(args: argparse.Namespace, held: list[int]) -> Iterator[record.Measurement]:
    """A measurement for every number of sequences and of cores that are held."""
    for batch in args.batch:
        for count in held:
            load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
            with holding(count):
                runs = speeds_by_setting(args, batch)
            speeds = {name: statistics.median(found) for name, found in runs.items()}
            yield {"batch": batch, "held": count, "load_before": load_before, "speeds": speeds, "runs": runs}


def line(m: record.Measurement) -> str:
    """A measurement in one line, for people."""
    speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in m["speeds"].items())
    return f"batch {m['batch']}, {counted(m['held'], 'core')} held: {speeds} tok/s"


def settings(spins: list[int]) -> dict[str, dict[str, str]]:
    """The settings that are compared: name → the environment of a run."""
    found = {"commands": cores.settings(), "default": {}}
    for spin in spins:
        found[f"spin {spin}"] = {"GOMP_SPINCOUNT": str(spin)}
    found["passive"] = {"OMP_WAIT_POLICY": "PASSIVE"}
    found["one thread"] = {**cores.IDLE, "OMP_NUM_THREADS": "1"}
    return found


@contextmanager
def holding(count: int) -> Iterator[None]:
    """Run this number of programs that each want a core for themselves."""
    holders = [subprocess.Popen([sys.executable, "-c", HOLD]) for _ in range(count)]
    try:
        yield
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def speeds_by_setting(args: argparse.Namespace, batch: int) -> dict[str, list[float]]:
    """Tokens per second of every run, by setting."""

    def speed_of_a_run(environment: dict[str, str], steps: int) -> list[float]:
        return [speed_in_a_process(environment, batch, steps, args.seconds)]

    sides = {name: partial(speed_of_a_run, environment) for name, environment in settings(args.spins).items()}
    return in_turns(sides, [args.steps] * args.repeats, Deadline(None))


def speed_in_a_process(environment: dict[str, str], batch: int, steps: int, seconds: int) -> float:
    """Tokens per second of a new process with these settings."""
    ours = (*cores.OF_USERS, "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    others = {name: value for name, value in os.environ.items() if name not in ours}
    words = [sys.executable, "-m", "minithink.bench.speed.busy", str(batch), str(steps), str(seconds)]
    try:
        done = subprocess.run(words, env=others | environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise MinithinkError(f"A run did not end within {LIMIT} seconds: give fewer --steps.") from None
    if done.returncode:
        raise MinithinkError(f"A run failed: {' '.join(done.stderr.split()[-20:]) or done.returncode}.")
    return float(done.stdout)


def speed(batch: int, steps: int, seconds: float) -> float:
    """Tokens per second of greedy decoding on test problems, here and now."""
    engine = load(None, device="cpu")
    questions = [problem.question for problem in load_problems("test")[:batch]]
    stream = engine.stream(questions, max_new_tokens=batch + WARMING + steps, temperature=0.0, batch_size=batch)
    counts = stream.steps()
    for _ in range(batch + WARMING):  # the first steps read a prompt each
        next(counts)
    begin = time.perf_counter()
    tokens = 0
    for count in counts:
        tokens += count
        if time.perf_counter() - begin > seconds:
            break
    return tokens / (time.perf_counter() - begin)


def main(words: list[str]) -> None:
    """One run: print its speed."""
    batch, steps, seconds = map(int, words)
    print(speed(batch, steps, seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
