"""What tests of several benchmarks share."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.bench.__main__ import main

# A result file without its name and measurements.
RESULT: dict[str, Any] = {
    "complete": True,
    "command": "python -m minithink.bench",
    "date": "2031-02-03T04:05:06Z",
    "commit": "0123456789abcdef",
    "machine": {"cpu": "A CPU", "gpu": "A GPU"},
    "versions": {"torch": "2.9"},
}


def says_that_there_is_no_gpu(benchmark: str, folder: Path) -> None:
    """One sentence, exit code 1, nothing written."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main([benchmark, "--output", str(folder / "result.json")]) == 1
    [line] = said.getvalue().splitlines()
    assert "NVIDIA GPU" in line
    assert not list(folder.iterdir())
