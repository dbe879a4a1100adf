"""Accuracy of a full cache on the embedded problems, by length of the reference trace.

The run is one of `python -m minithink.evaluate`: every finished sequence is kept at once beside the output, and
--resume continues from there. A sequence's draws depend on the seed and its number in the split alone, so neither
--limit, nor the batch size, nor an interruption changes which tokens it draws.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from minithink import results
from minithink.commands import INTERRUPTED, finite, natural, positive
from minithink.engine import DTYPES
from minithink.evaluate import journal, runner
from minithink.evaluate.summary import Row
from minithink.tasks import SPLITS, families
from minithink.tasks.facts import FAMILY as FACTS

OPTIONS = ("model", "split", "temperature", "num_samples", "seed", "max_new_tokens", "batch_size", "device", "dtype",
           "limit")  # fmt: skip
SETTINGS = ("checkpoint", "temperature", "num_samples", "seed", "max_new_tokens", "dtype", "device", "limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench accuracy`."""
    add = parser.add_argument
    add("--model", default="tiny", help="folder, Hugging Face id, or tiny: the embedded one (default)")
    add("--family", default=FACTS, choices=families(), help="of the problems (default: facts)")
    add("--split", default="test", choices=SPLITS)
    add("--temperature", type=finite, default=0.6, help="0: greedy (default 0.6)")
    add("--num-samples", type=positive, default=1, metavar="N", help="sequences for each problem (default 1)")
    add("--seed", type=natural, default=0, metavar="N")
    add("--max-new-tokens", type=positive, metavar="N", help="default: what the context leaves")
    add("--batch-size", type=positive, metavar="N", help="as of minithink.evaluate")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--limit", type=positive, metavar="N", help="only the first N problems")
    add("--resume", action="store_true", help="continue an interrupted run")
    add("--output", type=Path, metavar="FILE", help="default: docs/results/accuracy.json; with -MODEL, with "
        "-FAMILY where these are others")  # fmt: skip


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, grade, write the result, print a table."""
    others = [] if args.model == "tiny" else [args.model.rstrip("/").rpartition("/")[2]]
    others += [] if args.family == FACTS else [args.family]
    output = args.output or results.default_path("-".join(["accuracy", *others]))
    results.check(output)
    folder = output.with_suffix(".run")
    words = ["--policies", "full", "--dataset", args.family, "--output-dir", folder]
    for name in OPTIONS:
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value]
    rows = runner.evaluate_words([str(word) for word in [*words, *(["--resume"] if args.resume else [])]])
    if rows is None:
        return INTERRUPTED
    settings = journal.settings_of(folder)
    result = results.new("accuracy", argv, settings["device"])
    result["settings"] = {"family": args.family, "split": args.split, **{name: settings[name] for name in SETTINGS}}
    code = results.collect(output, result, map(measured, [*rows[1:], rows[0]]), line)
    shutil.rmtree(folder)  # the result says what it came to
    return code


def measured(row: Row) -> dict[str, object]:
    """What is told of a length bin, or of all problems."""
    share, low, high = row.accuracy
    return {
        "bin": row.group or "all", "problems": row.problems, "n": row.samples,
        "right": round(share * row.samples), "share": share,
        "interval": [low, high], "mean_tokens": row.generated_mean,
        "cut_off": row.cut_off,
    }  # fmt: skip


def line(m: results.Measurement) -> str:
    """For people."""
    low, high = m["interval"]
    return (
        f"{m['bin']:>10}  n {m['n']:4}  right {m['right']:4}  {m['share']:6.1%} ({low:.1%} to {high:.1%})  "
        f"{m['mean_tokens']:,.0f} tokens  cut off {m['cut_off']:.1%}"
    )
