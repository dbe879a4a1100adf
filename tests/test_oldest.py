"""The versions in .ci/oldest.txt are the lower bounds in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEWER = {
    ("test", "triton"),
    ("tutorials", "triton"),
    ("hf", "transformers"),
}  # extras that need more than the project itself


def number(version: str) -> list[int]:
    """2.9.0 and 2.9 are the same."""
    parts = [int(part) for part in version.split(".")]
    while parts[-1] == 0:
        parts.pop()
    return parts


def test_ci_tries_the_lower_bounds() -> None:
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / ".ci" / "oldest.txt").read_text().splitlines() if line[0] != "#"]
    oldest = dict(line.split("==") for line in lines)
    bounds = [
        (extra, *re.match(r"([\w-]+)>=([\d.]+)", word).groups())  # type: ignore[union-attr]
        for extra, words in {"": project["dependencies"], **project["optional-dependencies"]}.items()
        for word in words
    ]
    assert {name for extra, name, _ in bounds if not extra} <= oldest.keys()
    for extra, name, version in bounds:
        if name in oldest and (extra, name) not in NEWER:
            assert number(oldest[name]) == number(version), (extra, name)
