"""End-to-end speed of an evaluation: tokens generated a second, from loading the model to the journal's last line.

Every policy has a run of its own, after a short one that compiles its kernels. All problems are drawn, read,
generated, graded, measured and written as by `python -m minithink.evaluate`; nothing is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minithink import results
from minithink.commands import positive
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate import runner
from minithink.evaluate.plan import plan
from minithink.evaluate.summary import FULL, Row
from minithink.policies import split

DEFAULT = "evaluate"
GOAL = 100_000  # tokens a second with the full cache, embedded model, batch 256, on an H200
LEAST = 4_000  # sequences from which on the goal counts
SHARE = 0.5  # of the full cache's speed, that a policy which evicts should reach


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench evaluate`."""
    add = parser.add_argument
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--policies", type=split, default=[FULL, "rkv:budget=384"], metavar="P,P,…",
        help="as of minithink.evaluate, budgets included (default: full,rkv:budget=384)")  # fmt: skip
    add("--dataset", default="facts", help="default: facts")
    add("--split", default="test", help="default: test")
    add("--limit", type=positive, metavar="N", help="only the first N problems")
    add("--num-samples", type=positive, default=6, metavar="N", help="sequences for each problem (default 6)")
    add("--batch-size", type=positive, default=256, metavar="N", help="default 256")
    add("--max-new-tokens", type=positive, metavar="N", help="default: what the context leaves")
    add("--warm", type=positive, default=256, metavar="N", help="problems of the first run (default 256)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every policy, print."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise MinithinkError("bench evaluate measures on an NVIDIA GPU, and torch finds none here: use --device cpu.")
    if FULL not in args.policies[:1]:
        raise UsageError(f"--policies {','.join(args.policies)}: full must come first: the others are held to it.")
    for policy in args.policies:  # before the first of them runs for a minute
        plan([policy], [])
    path = results.output(args, DEFAULT)
    result = results.new(DEFAULT, argv, args.device)
    result["settings"] = {name: x for name, x in vars(args).items() if name not in ("command", "output")}
    result["settings"] |= {"goal": GOAL, "goal_from_sequences": LEAST, "goal_of_full": SHARE}
    return results.collect(path, result, measurements(args), line)


def measurements(args: argparse.Namespace) -> Iterator[results.Measurement]:
    """Every policy after a short run that compiles its kernels, beside the first one's speed."""
    first = 0.0
    for policy in args.policies:
        measure(args, policy, args.warm, 1)
        m = measure(args, policy, args.limit, args.num_samples)
        yield m | ({"of_full": m["tokens_per_second"] / first} if first else {})
        first = first or m["tokens_per_second"]


def line(m: results.Measurement) -> str:
    """For people."""
    return f"{m['policy']:24} {m['sequences']:6,} sequences  {m['tokens_per_second']:10,.0f} tokens/s"


def measure(args: argparse.Namespace, policy: str, limit: int | None, samples: int) -> dict[str, Any]:
    """One evaluation of one policy: what it did, and how long that took."""
    options = ["--policies", policy, "--dataset", args.dataset, "--split", args.split, "--device", args.device]
    options += ["--num-samples", str(samples), "--batch-size", str(args.batch_size)]
    for name, number in (("--limit", limit), ("--max-new-tokens", args.max_new_tokens)):
        options += [name, str(number)] if number else []
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        rows = runner.evaluate_words([*options, "--output-dir", folder])
        seconds = time.perf_counter() - began
    if rows is None:
        raise KeyboardInterrupt
    return {"policy": policy, "seconds": seconds, **_of(rows[0], seconds)}


def _of(row: Row, seconds: float) -> dict[str, Any]:
    """What a summary says of all problems."""
    tokens = round(row.generated_mean * row.samples)
    return {
        "problems": row.problems, "sequences": row.samples, "tokens": tokens, "tokens_per_second": tokens / seconds,
        "pass_at_1": row.pass_at_1, "tokens_kept": row.tokens_mean, "evicting_share": row.evicting_share,
    }  # fmt: skip
