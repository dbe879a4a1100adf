"""The kernels' tests under NVIDIA's compute-sanitizer, on a GPU: wrong addresses (memcheck), races (racecheck).

All tests of `tests/kernels` run, with few examples each (HYPOTHESIS_PROFILE=sanitize). For memcheck torch takes every
tensor from the driver by itself, so that what lies beside one is nobody's. Tests run in parts, in processes side by
side, on all GPUs that there are; what has gone well at this commit, on such a GPU, is in the file and not repeated.
torch's own kernels run, but are not watched: that would take most of the time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from minithink import results
from minithink.commands import positive
from minithink.errors import MinithinkError

DEFAULT = "sanitize"
TOOLS = ("memcheck", "racecheck")
PART = 16  # tests of one process
TORCH = "at6native"  # in the names of its kernels
SHOWN = 12  # lines of a report that are kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sanitize`."""
    add = parser.add_argument
    add("--tools", nargs="+", choices=TOOLS, default=TOOLS, metavar="TOOL", help="default: memcheck racecheck")
    add("--workers", type=positive, default=1, metavar="N", help="processes at a time (default 1)")
    add("--tests", nargs="+", default=["tests/kernels"], metavar="PATH", help="default: tests/kernels")
    add("--torch", action="store_true", help="watch torch's kernels, too")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the tests under each tool, write, print; exit code 1 if a tool found something or a test failed."""
    if not torch.cuda.is_available():
        raise MinithinkError("bench sanitize watches kernels on an NVIDIA GPU, and torch finds none here.")
    if (program := shutil.which("compute-sanitizer")) is None:
        raise MinithinkError("bench sanitize needs NVIDIA's compute-sanitizer, which is not on the PATH.")
    path = Path(args.output) if args.output else results.default_path(DEFAULT)
    results.check(path)
    parts = in_parts(collect(args.tests))
    result = results.new(DEFAULT, list(argv), "cuda")
    result["settings"] = {"tests": args.tests, "profile": "sanitize", "torch": args.torch}
    jobs = [(tool, part) for tool in args.tools for part in parts]
    result["measurements"] = [m for m in before(path, result) if (m["tool"], m["tests"]) in jobs]
    there = [(m["tool"], m["tests"]) for m in result["measurements"]]
    jobs = [job for job in jobs if job not in there]
    free = SimpleQueue[int]()  # GPUs, each as often as it may be used at a time
    for i in range(args.workers):
        free.put(i % torch.cuda.device_count())
    with ThreadPoolExecutor(args.workers) as pool:
        words = [program, *([] if args.torch else ["--kernel-name-exclude", f"kns={TORCH}"])]
        running = [pool.submit(watch, words, tool, part, free) for tool, part in jobs]
        try:
            for done in as_completed(running):
                result["measurements"].append(m := done.result())
                results.write(path, result)
                whole = f"{len(result['measurements'])} of {len(args.tools) * len(parts)}"
                print(f"{whole}  {m['tool']}: {m['errors']} errors; {m['outcome']}  {m['tests'][0]}", flush=True)
                print("".join(f"    {line}\n" for line in m["report"]), end="")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    result["complete"] = True
    results.write(path, result)
    print(f"written to {path}", file=sys.stderr)
    return 0 if all(map(is_clean, result["measurements"])) else 1


def before(path: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run left that this one need not repeat: it watched the same code in the same way on the same
    kind of machine, and found nothing. result: of this run."""
    if not path.is_file():
        return []
    other = results.read(path)
    if any(other.get(name) != result[name] for name in ("benchmark", "commit", "settings", "machine", "versions")):
        return []
    clean = not result["commit"].endswith("-dirty") and result["commit"] != "unknown"
    return [m for m in other["measurements"] if is_clean(m)] if clean else []


def collect(paths: Sequence[str]) -> list[str]:
    """The names of all tests there, as pytest has them. MinithinkError: it cannot read them."""
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", *paths]
    done = subprocess.run(words, cwd=results.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    names = re.findall(r"^\S+\.py::.*$", done.stdout, re.M)
    if done.returncode or not names:
        raise MinithinkError(f"pytest finds no tests in {' '.join(paths)}: {done.stdout.strip()[-500:]}")
    return names


def in_parts(names: Sequence[str]) -> list[list[str]]:
    """Tests of one file, at most PART together."""
    out = []
    for _, own in groupby(names, lambda name: name.split("::")[0]):
        tests = list(own)
        out += [tests[i : i + PART] for i in range(0, len(tests), PART)]
    return out


def watch(program: list[str], tool: str, tests: list[str], free: SimpleQueue[int]) -> dict[str, Any]:
    """Run these tests under the tool, on one of the free GPUs → a line of the result.

    Args:
        program: compute-sanitizer and its options.
    """
    gpu = free.get()
    visible = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    environment = os.environ | {
        "HYPOTHESIS_PROFILE": "sanitize", "CUDA_VISIBLE_DEVICES": visible[gpu] if visible else str(gpu),
    }  # fmt: skip
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    words = [*program, "--tool", tool, "--target-processes", "all"]
    words += [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    try:
        done = subprocess.run(
            words, cwd=results.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        free.put(gpu)
    about = {"tool": tool, "tests": tests, "exit_code": done.returncode, "seconds": time.monotonic() - began}
    about |= count(done.stdout)
    said = re.findall(r"^(?:=========|E  |FAILED).*", done.stdout, re.M)
    said = [line for line in said if not re.search(r"Frame:|SUMMARY|^=+ +(COMPUTE-SANITIZER)?$", line)]
    return about | {"report": [] if is_clean(about) else said[:SHOWN]}


def count(text: str) -> dict[str, Any]:
    """Errors that the tool reports, in how many processes, and how many tests went how."""
    reports = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
    tests = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error)[^=\n]*?)(?: in [\d.]+s.*)?$", text, re.M)
    return {"errors": sum(map(int, reports)), "processes": len(reports), "outcome": tests[-1] if tests else "none"}


def is_clean(m: dict[str, Any]) -> bool:
    """Whether the tool watched, found nothing, and all tests passed."""
    return bool(m["processes"] and not m["errors"] and not m["exit_code"])
