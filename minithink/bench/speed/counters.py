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

from minithink.backend import triton_backend
from minithink.bench.speed import attention
from minithink.bench.speed.attention import DIM, DTYPE, FORMATS, HEADS
from minithink.errors import MinithinkError
from minithink.kv.reading import Reading
from minithink.results import record
from minithink.results.record import Measurement

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
    record.need_gpu(DEFAULT)
    if args.only:
        call(args.only)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        raise MinithinkError("bench counters needs NVIDIA's Nsight Compute: no program ncu is on the PATH.")
    return attention.report(DEFAULT, args, argv, {"metrics": METRICS}, lambda _: counted(ncu))


def counted(ncu: str) -> Iterator[Measurement]:
    """The kernels of every case, as the program ncu counts them."""
    words = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--nvtx", "--nvtx-include", "counted/"]
    words += ["--metrics", ",".join(METRICS.values()), sys.executable, "-m", "minithink.bench", "counters", "--only"]
    for name, (fmt, batch, length, _) in CASES.items():
        done = subprocess.run([*words, name], capture_output=True, text=True)
        kernels = list(parse(done.stdout))
        if done.returncode or not kernels:
            said = (done.stdout + done.stderr).strip().splitlines()
            raise MinithinkError(f"ncu ended with code {done.returncode} and counted nothing: {said[-1:]}.")
        yield from ({"case": name, "format": fmt, "batch": batch, "length": length, **kernel} for kernel in kernels)


def call(name: str) -> None:
    """Attention of one case, warmed up, within the range that is counted."""
    fmt, batch, length, group = CASES[name]
    q = torch.randn(batch, HEADS, DIM, device=attention.DEVICE, dtype=DTYPE)
    read = Reading(attention.used_store(FORMATS[fmt], 1, batch, length))
    triton_backend().paged_attention(q, read, 0, group)
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range("counted"):
        triton_backend().paged_attention(q, read, 0, group)
        torch.cuda.synchronize()


def parse(text: str) -> Iterator[dict[str, Any]]:
    """The kernels in ncu's raw CSV: a line of names, a line of units, then a line for each kernel."""
    table = list(csv.DictReader(io.StringIO(text[text.find('"ID"') :] if '"ID"' in text else "")))
    for row in table[1:]:
        numbers = {name: float(row[m].replace(",", "")) * UNITS.get(table[0][m], 1.0) for name, m in METRICS.items()}
        yield {"kernel": row["Kernel Name"], **numbers}
