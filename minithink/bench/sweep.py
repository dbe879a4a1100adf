"""Comparisons whose tables and plots the documents show: which policies, at which budgets, on which problems.

Each has a name (`SWEEPS`) and is run as by `python -m minithink.evaluate`, on both embedded families, one after the
other; a run that was interrupted is resumed. What comes out is one file for both, with a line for every family,
policy and budget. Settings are chosen on validation problems; the test split is for `main` alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minithink.bench import record
from minithink.commands import INTERRUPTED, location
from minithink.evaluate import plots, runner
from minithink.evaluate.plan import plan
from minithink.evaluate.summary import FULL, Row
from minithink.figures import need_matplotlib
from minithink.tasks import families


@dataclass(frozen=True)
class Sweep:
    """A comparison."""

    what: str  # is compared
    policies: tuple[str, ...]  # beside full
    budgets: tuple[float, ...] = (0.125, 0.25, 0.5)  # shares of what the full cache generates, beside the prompt
    split: str = "validation"
    problems: int = 200
    samples: int = 1


def _of_thinkv(*options: str) -> tuple[str, ...]:
    return tuple(f"thinkv:{option}" if option else "thinkv" for option in options)


PRECISIONS = ("R8E8T8", "R8E4T2", "R4E4T4", "R4E2T2", "R2E4T2", "R4E4T0", "R2E2T2")  # beside R4E4T2
RETENTIONS = ("64", "64/32", "64/32/16", "64/32/16/8", "64/32/16/8/4/2")  # beside 64/32/16/8/4

SWEEPS = {
    "main": Sweep(
        "ThinKV, its two halves and other methods",
        ("thinkv", "tbq", "tbe", "rkv", "kivi", "pm_kvq", "crystal_kv_lite"), split="test", samples=2,
    ),
    "formats": Sweep("floating points and integers of 4 and 2 bits", _of_thinkv("", "four=int4s,two=int2s")),
    "precision": Sweep(
        "bits by thought type",
        _of_thinkv("", *(f"precision={p}" for p in PRECISIONS)), budgets=(0.25, 0.5),
    ),
    "tau": Sweep("the tokens of a segment, τ", _of_thinkv("tau=32", "tau=64", "", "tau=256")),
    "types": Sweep("the number of types, |T|", _of_thinkv("types=1", "types=2", "")),
    "retention": Sweep(
        "the last number of the retention schedule",
        _of_thinkv(*(f"retention={r}" for r in RETENTIONS), ""),
    ),
    "block": Sweep("slots of a page", _of_thinkv("block=4", "", "block=16", "block=32")),
    "key-axis": Sweep(
        "a scale for each channel of a group of keys, or for each key", _of_thinkv("", "key_axis=token"),
        budgets=(0.0625, 0.125, 0.25, 0.5),
    ),
    "snapkv": Sweep("a prompt that is cut, too", ("thinkv", "snapkv:cap=128+thinkv"), budgets=(0.25, 0.5)),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sweep`."""
    add = parser.add_argument
    add("name", choices=tuple(SWEEPS), help="which comparison")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--families", nargs="+", default=families(), choices=families(), help="default: all")
    add("--limit", type=record.positive, metavar="N", help="fewer problems, for a quick look")
    add("--batch-size", type=record.positive, metavar="N", help="as of minithink.evaluate")
    add("--max-new-tokens", type=record.positive, metavar="N", help="as of minithink.evaluate")
    add(
        "--runs", type=location, default=Path("runs"), metavar="DIR", help="where unfinished runs lie (default: runs)"
    )
    add("--plot", type=location, metavar="DIR", help="draw accuracy by bytes, DIR/sweep-NAME-FAMILY.svg")
    add("--output", metavar="FILE", help="default: docs/results/sweep-NAME.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Evaluate, write, draw."""
    sweep = SWEEPS[args.name]
    path = Path(args.output) if args.output else record.default_path(f"sweep-{args.name}")
    record.check(path)
    plan(policies_of(sweep), sweep.budgets)
    if args.plot is not None:
        need_matplotlib()
    result = record.new("sweep", argv, "cpu" if args.device == "cpu" else "cuda")
    result["settings"] = {"name": args.name, **asdict(sweep), "limit": args.limit or sweep.problems}
    result["measurements"] = []
    for family in args.families:
        rows = evaluated(args, sweep, family)
        if rows is None:
            return INTERRUPTED
        result["measurements"] += [{"family": family, **asdict(row)} for row in rows]
        record.write(path, result)
        if args.plot is not None:
            plots.draw_bytes(rows, args.plot / f"sweep-{args.name}-{family}.svg")
    result["complete"] = True
    record.write(path, result)
    print(f"written to {path}", file=sys.stderr)
    return 0


def policies_of(sweep: Sweep) -> list[str]:
    """With the full cache, which is first."""
    return [FULL, *sweep.policies]


def evaluated(args: argparse.Namespace, sweep: Sweep, family: str) -> list[Row] | None:
    """The rows of one family, over all its problems; None: interrupted."""
    folder = args.runs / f"sweep-{args.name}-{family}"
    words: list[Any] = ["--policies", ",".join(policies_of(sweep)), "--budgets", ",".join(map(str, sweep.budgets))]
    words += ["--dataset", family, "--split", sweep.split, "--num-samples", sweep.samples, "--device", args.device]
    words += ["--limit", args.limit or sweep.problems, "--output-dir", folder, "--resume"]
    for name in ("batch_size", "max_new_tokens"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value]
    rows = runner.evaluate_words([str(word) for word in words])
    return None if rows is None else [row for row in rows if row.group is None]
