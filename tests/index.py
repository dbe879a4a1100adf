"""Packages from the index that pip is set up for, for the tests that need a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120  # that pip may take


def fetch(folder: Path, *requirements: str) -> None:
    """Let pip put wheels into a folder. Where there is no network, or the index lacks one, the test is skipped."""
    names = " and ".join(requirements)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--retries", "0"]
    command += ["--timeout", "5", "--dest", str(folder), *requirements]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip could not fetch {names} in {SECONDS} seconds")
    if done.returncode:
        pytest.skip(f"pip cannot fetch {names} here: {done.stderr.strip().splitlines()[-1:]}")
