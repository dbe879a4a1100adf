"""Decoding speed of this checkout, beside that of another one: has a change cost anything?

Each checkout decodes in a process of its own (`versus_side.py`), the same problems under the same policy. Only one of
them works at a time: some steps of one, then as many of the other, and they take turns to begin. So a machine that
slows down slows both, and each pair of turns gives one ratio, speed here / speed there. Below 1, this checkout is
slower.

Two processes with the same code may differ by a tenth for as long as they live. With `--processes 3`, three pairs of
processes measure, one after the other. Each pair gives the median of its turns; the result is the median of these.

    git worktree add ../before main
    python -m minithink.bench versus ../before --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from minithink.bench.speed import versus_side
from minithink.bench.speed.clock import Deadline, in_turns
from minithink.cli.commands import positive
from minithink.errors import MinithinkError, UsageError, quoted
from minithink.policies import own
from minithink.results import record
from minithink.results.origin import ROOT

POLICIES = ("none", "full", "rkv:budget=256,buffer=32", "thinkv:budget=512")
HERE = "here"
THERE = "there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench versus`."""
    add = parser.add_argument
    add("other", type=Path, metavar="FOLDER", help="another checkout of minithink")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--policies", nargs="+", default=POLICIES, metavar="P", help="policies (none: no policy at all)")
    add("--batch", nargs="+", type=positive, metavar="N", help="sequences (default: 1 8; 1 64 256 on a GPU)")
    add("--steps", type=positive, default=32, metavar="N", help="decoding steps of a turn (default: 32)")
    add("--turns", type=positive, default=12, metavar="N", help="turns of each side (default: 12)")
    add("--processes", type=positive, default=1, metavar="N", help="processes of each side, in turn (default: 1)")
    add("--output", metavar="FILE", help="default: docs/results/versus-cpu.json, versus-gpu.json")


class Side:
    """A process that decodes with the code of one checkout."""

    def __init__(self, root: Path, device: str) -> None:
        self.root = root
        dtype = "bfloat16" if device == "cuda" else "float32"
        self.process = subprocess.Popen(
            [sys.executable, versus_side.__file__, device, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        package = Path(self.answer()["package"])
        if package != root / "minithink":
            raise MinithinkError(f"{root} was to be measured, and Python took {package}: uninstall minithink first.")

    def ask(self, **request: Any) -> None:
        """Send a request."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.answer()

    def answer(self) -> Any:
        """What the process answers. MinithinkError: it has ended."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            raise MinithinkError(f"The side in {self.root} failed: {last[:200]}.")
        return json.loads(line)

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.communicate()


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, write after every policy of every pair of processes, print when the last pair has measured it."""
    other = args.other.resolve()
    if not (other / "minithink" / "__init__.py").is_file():
        raise UsageError(f"{quoted(str(args.other))} is no checkout of minithink: it has no minithink/__init__.py.")
    _refuse_own(args.policies)
    name = "versus-gpu" if args.device == "cuda" else "versus-cpu"
    result = record.new("versus", argv, args.device)
    result["settings"] = {
        "device": args.device,
        "steps": args.steps,
        "turns": args.turns,
        "processes": args.processes,
        "other": commit_of(other),
    }
    path = record.output(args, name)
    latest = dict[tuple[str, int], record.Measurement]()  # by policy and sequences
    for m in measurements(args, other):
        latest[m["policy"], m["batch"]] = m
        result["measurements"] = list(latest.values())
        record.write(path, result)
        if len(m["ratios"]) == args.processes:
            print(line(m), flush=True)
    result["complete"] = True
    record.write(path, result)
    print(f"written to {path}", file=sys.stderr)
    return 0


def _refuse_own(policies: Sequence[str]) -> None:
    """UsageError: a policy is in a file or module of the user's own."""
    for policy in policies:
        if any(own.OWN.match(member.strip()) for member in policy.split("+")):
            raise UsageError(
                f"Both checkouts decode under their own policies, and {quoted(policy)} is in a file or module of "
                "yours: name policies of minithink."
            )


def measurements(args: argparse.Namespace, other: Path) -> Iterator[record.Measurement]:
    """A measurement for every policy and number of sequences, of all pairs of processes so far."""
    batches = args.batch or ([1, 64, 256] if args.device == "cuda" else [1, 8])
    pairs: dict[tuple[str, int], list[dict[str, list[float]]]] = {}
    for _ in range(args.processes):
        with ExitStack() as stack:
            sides = {}
            for name, root in ((HERE, ROOT), (THERE, other)):
                sides[name] = Side(root, args.device)
                stack.callback(sides[name].end)
            for policy in args.policies:
                for batch in batches:
                    found = pairs.setdefault((policy, batch), [])
                    found.append(turns_of_a_pair(sides, policy, batch, args))
                    yield {"policy": policy, "batch": batch, **summary(found, args.steps)}


def turns_of_a_pair(
    sides: dict[str, Side], policy: str, batch: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Let a pair of processes read the prompts, and decode in turns → the seconds of each turn, by side."""
    made = {"policy": None if policy == "none" else policy, "batch": batch, "steps": args.steps * args.turns}
    for side in sides.values():  # both at once
        side.ask(make=made)
    for side in sides.values():
        side.answer()
    timed = {name: partial(seconds, side) for name, side in sides.items()}
    return in_turns(timed, [args.steps] * args.turns, Deadline(None))


def seconds(side: Side, steps: int) -> list[float]:
    """Let a side take so many steps → the seconds that they took."""
    side.ask(go=steps)
    return [side.answer()]


def summary(pairs: list[dict[str, list[float]]], steps: int) -> record.Measurement:
    """What the turns of all pairs of processes say: speed here / speed there, and milliseconds a step."""
    ratios = [[there / here for here, there in zip(pair[HERE], pair[THERE], strict=True)] for pair in pairs]
    medians = {}
    for name in (HERE, THERE):
        all_turns = [turn for pair in pairs for turn in pair[name]]
        medians[name] = statistics.median(all_turns) / steps * 1e3
    by_pair = [statistics.median(found) for found in ratios]
    return {
        "step_milliseconds": medians,
        "ratios": ratios,
        "ratio_by_pair": by_pair,
        "ratio": statistics.median(by_pair),
    }


def line(m: record.Measurement) -> str:
    """A measurement in one line, for people."""
    here, there = (m["step_milliseconds"][name] for name in (HERE, THERE))
    all_turns = [ratio for found in m["ratios"] for ratio in found]
    least = min(all_turns)
    most = max(all_turns)
    return (
        f"{m['policy']}, batch {m['batch']}: {here:.3f} ms a step here, {there:.3f} there: "
        f"{m['ratio']:.3f} × as fast ({least:.3f} to {most:.3f})"
    )


def commit_of(root: Path) -> str | None:
    """The commit of a checkout; None: it is in no repository."""
    words = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
