"""The kernels' tests under NVIDIA's compute-sanitizer, on a GPU: wrong addresses (memcheck), races (racecheck).

All tests of `tests/kernels` run, with few examples each (HYPOTHESIS_PROFILE=sanitize), and torch takes every tensor
from the driver by itself, so that what lies beside one is nobody's.
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
from pathlib import Path
from typing import Any

import torch

from minithink.bench import record
from minithink.errors import MinithinkError

DEFAULT = "sanitize"
TOOLS = ("memcheck", "racecheck")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sanitize`."""
    add = parser.add_argument
    add("--tools", nargs="+", choices=TOOLS, default=TOOLS, metavar="TOOL", help="default: memcheck racecheck")
    add("--workers", type=record.positive, default=1, metavar="N", help="processes that run tests (pytest-xdist)")
    add("--tests", nargs="+", default=["tests/kernels"], metavar="PATH", help="default: tests/kernels")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the tests under each tool, write, print; exit code 1 if a tool found something or a test failed."""
    if not torch.cuda.is_available():
        raise MinithinkError("bench sanitize watches kernels on an NVIDIA GPU, and torch finds none here.")
    if (program := shutil.which("compute-sanitizer")) is None:
        raise MinithinkError("bench sanitize needs NVIDIA's compute-sanitizer, which is not on the PATH.")
    path = Path(args.output) if args.output else record.default_path(DEFAULT)
    result = record.new(DEFAULT, list(argv), "cuda")
    result["settings"] = {"workers": args.workers, "tests": args.tests, "profile": "sanitize"}
    result["measurements"] = []
    environment = os.environ | {"HYPOTHESIS_PROFILE": "sanitize", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in args.tools:
        began = time.monotonic()
        done = subprocess.run(
            [
                program, "--tool", tool, "--target-processes", "all", sys.executable, "-m", "pytest", "-q",
                "-p", "no:cacheprovider", *(["-n", str(args.workers)] if args.workers > 1 else []), *args.tests,
            ],
            cwd=record.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        m = {"tool": tool, **count(done.stdout), "exit_code": done.returncode, "seconds": time.monotonic() - began}
        result["measurements"].append(m)
        record.write(path, result)
        print(f"{tool}: {m['errors']} errors in {m['processes']} processes; tests: {m['tests']}", flush=True)
        if m["errors"] or done.returncode:
            print("\n".join(done.stdout.splitlines()[-60:]))
    result["complete"] = True
    record.write(path, result)
    print(f"written to {path}", file=sys.stderr)
    clean = all(m["processes"] and not m["errors"] and not m["exit_code"] for m in result["measurements"])
    return 0 if clean else 1


def count(text: str) -> dict[str, Any]:
    """Errors that the tool reports, in how many processes, and pytest's last line."""
    reports = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
    tests = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error)[^=\n]*?)(?: in [\d.]+s.*)?$", text, re.M)
    return {"errors": sum(map(int, reports)), "processes": len(reports), "tests": tests[-1] if tests else "none"}
