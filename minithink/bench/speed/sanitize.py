"""The kernels' tests under NVIDIA's compute-sanitizer, on a GPU.

    memcheck    wrong addresses
    racecheck   races
    initcheck   reads of memory that nothing has written

All tests of `tests/kernels` run, with few examples each (HYPOTHESIS_PROFILE=sanitize). A process runs some tests of
one file. For memcheck and initcheck torch takes every tensor from the driver by itself, so that the memory beside a
tensor belongs to no other tensor, and that of a new tensor was never written. torch's own kernels run, but are not
watched, because that would take most of the time; only initcheck watches them, for they write what ours read.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from typing import Any

from minithink.cli.commands import positive
from minithink.errors import MinithinkError, counted
from minithink.results import origin, record
from minithink.results.record import Measurement

DEFAULT = "sanitize"
TOOLS = ("memcheck", "racecheck", "initcheck")
UNCACHED = ("memcheck", "initcheck")  # need tensors of memory of their own
PART = 16  # tests of one process
TORCH = "at6native"  # in the names of its kernels
SHOWN = 12  # lines of a report that are kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sanitize`."""
    add = parser.add_argument
    add("--tools", nargs="+", choices=TOOLS, default=TOOLS, metavar="TOOL", help="default: all three")
    add("--workers", type=positive, default=1, metavar="N", help="processes at a time (default 1)")
    add("--tests", nargs="+", default=["tests/kernels"], metavar="PATH", help="default: tests/kernels")
    add("--torch", action="store_true", help="watch torch's kernels, too")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the tests under each tool, write, print; exit code 1 if a tool found something or a test failed."""
    record.need_gpu(DEFAULT)
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise MinithinkError("bench sanitize needs NVIDIA's compute-sanitizer, which is not on the PATH.")
    path = record.output(args, DEFAULT)
    parts = in_parts(collect(args.tests))
    jobs = []
    for tool in args.tools:
        watches_torch = args.torch or tool == "initcheck"
        words = [program, *([] if watches_torch else ["--kernel-name-exclude", f"kns={TORCH}"])]
        jobs += [(words, tool, part) for part in parts]
    result = record.new(DEFAULT, list(argv), "cuda")
    result["settings"] = {"tests": args.tests, "profile": "sanitize", "torch": args.torch}

    def rows() -> Iterator[Measurement]:
        with ThreadPoolExecutor(args.workers) as pool:
            running = [pool.submit(watch, *job) for job in jobs]
            try:
                yield from (done.result() for done in as_completed(running))
            finally:  # after an error or an interrupt no further process begins
                pool.shutdown(wait=False, cancel_futures=True)

    record.collect(path, result, rows(), line)
    return 0 if all(map(is_clean, result["measurements"])) else 1


def line(m: Measurement) -> str:
    """A process for people, and what was reported."""
    said = f"{m['tool']}: {counted(m['errors'], 'error')}; {m['outcome']}  {m['tests'][0]}"
    return "\n    ".join([said, *m["report"]])


def collect(paths: Sequence[str]) -> list[str]:
    """The names of all tests there, as pytest has them. MinithinkError: it cannot read them."""
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", *paths]
    done = subprocess.run(
        words,
        cwd=origin.ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": ""},  # one more -q there, and pytest counts the tests instead
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    names = re.findall(r"^\S+\.py::.*$", done.stdout, re.M)
    if done.returncode or not names:
        raise MinithinkError(f"pytest finds no tests in {' '.join(paths)}: {done.stdout.strip()[-500:]}")
    return names


def in_parts(names: Sequence[str]) -> list[list[str]]:
    """Tests of one file, at most PART together."""
    files = [list(own) for _, own in groupby(names, lambda name: name.split("::")[0])]
    return [tests[i : i + PART] for tests in files for i in range(0, len(tests), PART)]


def watch(program: list[str], tool: str, tests: list[str]) -> Measurement:
    """Run these tests under the tool → a line of the result. program: compute-sanitizer and its options."""
    environment = os.environ | {"HYPOTHESIS_PROFILE": "sanitize"}
    if tool in UNCACHED:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    words = [*program, "--tool", tool, "--target-processes", "all"]
    words += [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    done = subprocess.run(
        words, cwd=origin.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    m = {"tool": tool, "tests": tests, "exit_code": done.returncode, "seconds": time.monotonic() - began}
    m |= count(done.stdout)
    said = re.findall(r"^(?:=========|E  |FAILED).*", done.stdout, re.M)
    said = [line for line in said if not re.search(r"Frame:|SUMMARY|^=+ +(COMPUTE-SANITIZER)?$", line)]
    return m | {"report": [] if is_clean(m) else said[:SHOWN]}


def count(text: str) -> dict[str, Any]:
    """Errors that the tool reports, in how many processes, and how many tests went how."""
    reports = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
    tests = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error)[^=\n]*?)(?: in [\d.]+s.*)?$", text, re.M)
    return {"errors": sum(map(int, reports)), "processes": len(reports), "outcome": tests[-1] if tests else "none"}


def is_clean(m: Measurement) -> bool:
    """Whether the tool watched, found nothing, and all tests passed."""
    return bool(m["processes"] and not m["errors"] and not m["exit_code"])
