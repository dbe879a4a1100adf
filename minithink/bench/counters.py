"""What limits attention on a GPU: hardware counters of its kernels, read by NVIDIA's Nsight Compute (`ncu`).

`ncu` runs this program again (`--only SHAPE`) and replays each kernel of one call as often as it needs to read all
counters. Times under it are not times of the benchmark: its clocks are fixed by nothing here, and caches are flushed.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from minithink import results
from minithink.bench.attention import DIM, FORMATS, HEADS, used_store
from minithink.errors import MinithinkError

DEFAULT = "counters"
CASES = {  # format, sequences, tokens of each, rule of the mass
    "bf16": ("bf16", 64, 4096, None),
    "bf16, mass": ("bf16", 64, 4096, "mean"),
    "bf16, one sequence": ("bf16", 1, 16384, None),
    "nvfp4": ("nvfp4", 64, 4096, None),
    "nvfp4, keys by token": ("nvfp4, keys by token", 64, 4096, None),
    "ternary": ("ternary", 64, 4096, None),
}
METRICS = {  # name here → Nsight Compute's
    "microseconds": "gpu__time_duration.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes.sum",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "waiting_for_memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "registers": "launch__registers_per_thread",
}
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench counters`."""
    parser.add_argument("--only", choices=CASES, metavar="CASE", help="call attention once, and nothing else")
    parser.add_argument("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Read the counters of every case, write, print."""
    if not torch.cuda.is_available():
        raise MinithinkError("bench counters reads the counters of an NVIDIA GPU, and torch finds none here.")
    if args.only:
        call(args.only)
        return 0
    if (ncu := shutil.which("ncu")) is None:
        raise MinithinkError("bench counters needs NVIDIA's Nsight Compute: no program ncu is on the PATH.")
    result = results.new(DEFAULT, list(argv), "cuda")
    result["settings"] = {"metrics": METRICS}
    return results.collect(results.output(args, DEFAULT), result, counted(ncu), line)


def counted(ncu: str) -> Iterator[results.Measurement]:
    """The kernels of every case, as the program ncu counts them."""
    for name, (fmt, batch, length, _) in CASES.items():
        done = subprocess.run(
            [
                ncu, "--csv", "--page", "raw", "--clock-control", "none", "--nvtx", "--nvtx-include", "counted/",
                "--metrics", ",".join(METRICS.values()), sys.executable, "-m", "minithink.bench", "counters",
                "--only", name,
            ],
            capture_output=True, text=True,
        )  # fmt: skip
        kernels = list(parse(done.stdout))
        if done.returncode or not kernels:
            said = (done.stdout + done.stderr).strip().splitlines()
            raise MinithinkError(f"ncu ended with code {done.returncode} and counted nothing: {said[-1:]}.")
        yield from ({"case": name, "format": fmt, "batch": batch, "length": length, **kernel} for kernel in kernels)


def line(m: results.Measurement) -> str:
    """For people."""
    return (
        f"{m['case']:22} {m['kernel']:14} {m['microseconds']:8.1f} us  memory {m['dram']:5.1f} %  issue "
        f"{m['issue']:5.1f} %  warps {m['warps']:5.1f} %  wait {m['waiting_for_memory']:5.1f}"
    )


def call(name: str) -> None:
    """Attention of one case, warmed up, within the range that is counted."""
    from minithink.kernels.paged_attention import paged_attention  # here: Triton exists for Linux only

    fmt, batch, length, group = CASES[name]
    store = used_store(FORMATS[fmt], 1, batch, length)
    q = torch.randn(batch, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    read = store.reader()
    paged_attention(q, read, 0, group)
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range("counted"):
        paged_attention(q, read, 0, group)
        torch.cuda.synchronize()


def parse(text: str) -> Iterator[dict[str, Any]]:
    """The kernels in ncu's raw CSV: a line of names, a line of units, then a line for each kernel."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    for row in table[1:]:
        found: dict[str, Any] = {"kernel": row["Kernel Name"]}
        for name, metric in METRICS.items():
            number = float(row[metric].replace(",", ""))
            found[name] = number * UNITS.get(table[0][metric], 1.0)
        yield found
