"""Where a result comes from: the commit, the machine and the versions that made it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import minithink

ROOT = Path(minithink.__file__).resolve().parent.parent  # of the checkout, where this is one
RESULTS = Path("docs") / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy")


def command(program: str, argv: Sequence[str]) -> str:
    """The command line, with folders left out: where files lay on one machine helps nobody on another."""
    words = [Path(word).name if word.startswith(("/", "~")) else word for word in argv]
    return shlex.join(["python", "-m", program, *words])


def date() -> str:
    """Now, in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> str:
    """What is measured: MINITHINK_COMMIT, else the checkout's commit ("-dirty" if it was changed), else unknown."""
    if named := os.environ.get("MINITHINK_COMMIT"):
        return named
    top = _git("rev-parse", "--show-toplevel")
    head = _git("rev-parse", "HEAD")
    if not head or not top or Path(top).resolve() != ROOT:  # installed below some other repository
        return "unknown"
    # A result that was written a minute ago changes nothing that is measured.
    changes = _git("status", "--porcelain", "--", ".", f":(exclude){RESULTS.as_posix()}")
    return head + ("-dirty" if changes else "")


def _git(*args: str) -> str | None:
    """What git answers in the checkout; None: no git, no repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cores() -> int | None:
    """How many cores this process may use; None: the system does not say it."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def machine(device: torch.device) -> dict[str, Any]:
    """CPU model and cores that this process may use; GPU and driver, if the device is one."""
    out: dict[str, Any] = {
        "cpu": _line_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores(),
    }
    if device.type == "cuda":
        out["gpu"] = torch.cuda.get_device_name(device)
        words = (_line_of("/proc/driver/nvidia/version", "NVRM version") or "").split()
        out["driver"] = next((w for w in words if w[:1].isdigit() and "." in w), "unknown")
        out["cuda"] = torch.version.cuda
    return out


def _line_of(path: str, name: str) -> str | None:
    """The value of the first line `name : value` of a file; None: no such file or line."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
            return next(found, None)
    except OSError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of what is measured and of what may be compared with; None: not installed."""
    out: dict[str, str | None] = {"minithink": minithink.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = None
    return out
