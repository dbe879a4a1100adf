"""What every result file says: how it was measured, on what machine, by which version, and the measurements.

The files lie in `docs/results/`. To check a figure, run the command in its file again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from minithink.checkpoint.calibration import vectors_of
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import TINY
from minithink.errors import MinithinkError, reason, unwritable
from minithink.results.files import dumps, replace, rounded
from minithink.results.origin import RESULTS, ROOT, command, commit, date, machine, versions


def new(
    benchmark: str, argv: list[str], device: torch.device | str = "cpu", *, program: str = "minithink.bench"
) -> dict[str, Any]:
    """The beginning of a result: everything but the settings and measurements, which its benchmark adds.

    Args:
        benchmark: its name.
        argv: the arguments after `python -m PROGRAM`.
        device: where it runs; a GPU is described only if it is used.
        program: the module that measures.
    """
    return {
        "benchmark": benchmark,
        "complete": False,  # set when the last measurement is in
        "command": command(program, argv),
        "date": date(),
        "commit": commit(),
        "embedded_model": checkpoint_hash(TINY),
        "machine": machine(torch.device(device)),
        "versions": versions(),
    }


def default_path(name: str) -> Path:
    """docs/results/NAME.json of the checkout; of the current folder, if this is an installed package."""
    return (ROOT if (ROOT / "pyproject.toml").is_file() else Path()) / RESULTS / f"{name}.json"


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result. An earlier file of that name is replaced only by a whole one."""
    try:
        replace(path, dumps(rounded(result)) + "\n")
    except OSError as error:
        raise unwritable("The result", path, error, "--output") from None


def check(path: Path, option: str = "--output") -> None:
    """MinithinkError: a result could not be written there; its folder is made. To be asked before what takes long.
    option: what names the path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError("its folder may not be written to")
    except OSError as error:
        raise unwritable("The result", path, error, option) from None


Measurement = dict[str, Any]


def collect(
    path: Path, result: dict[str, Any], rows: Iterable[Measurement], line: Callable[[Measurement], str]
) -> int:
    """Put measurements into a result as they come, and write it after each → 0. line: a measurement for people. The
    result is complete if it has nothing in "left_out"."""
    result["measurements"] = []
    for m in rows:
        result["measurements"].append(m)
        write(path, result)
        print(line(m), flush=True)
    result["complete"] = not result.get("left_out")
    write(path, result)
    print(f"written to {path}", file=sys.stderr)
    return 0


def output(args: argparse.Namespace, name: str) -> Path:
    """Where `--output` puts a result, or its usual place. MinithinkError: it could not be written there."""
    path = Path(args.output) if args.output else default_path(name)
    check(path)
    return path


def need_gpu(benchmark: str) -> None:
    """MinithinkError: a benchmark measures kernels, and there is no GPU."""
    if not torch.cuda.is_available():
        raise MinithinkError(f"bench {benchmark} measures kernels on an NVIDIA GPU, and torch finds none here.")


def read(path: Path) -> dict[str, Any]:
    """Read a result."""
    try:
        vectors = path.suffix == ".safetensors"
        result = vectors_of(path)[0] if vectors else json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MinithinkError(f"{path} does not exist: run the benchmark that writes it.") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise MinithinkError(f"{path} is no readable result ({reason(error)}): run the benchmark again.") from None
    if not isinstance(result, dict) or "measurements" not in result:
        raise MinithinkError(f"{path} is no result of this benchmark: it holds no measurements.")
    return result
