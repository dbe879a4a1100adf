"""The versions that CI tries are the lower bounds in pyproject.toml. To run it alone: pytest tests/test_oldest.py"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minithink.hf import OLDEST

ROOT = Path(__file__).parent.parent
HF = "transformers"  # of which minithink.hf needs a newer one than the tests
NEWER = {
    ("test", "triton"),
    ("tutorials", "triton"),
    ("hf", HF),
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


def test_ci_tries_the_oldest_transformers_of_hf() -> None:
    """The pages say that it runs there."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, OLDEST))
    assert project["optional-dependencies"]["hf"] == [f"{HF}>={oldest}"]
    steps = (ROOT / ".ci" / "run").read_text()
    _, _, after = steps.partition(f"pip install -q '{HF}=={oldest}.*'\n")
    assert "pytest -n 2 tests/test_hf.py" in after.partition('step "the oldest libraries')[0]
    assert f"With {HF} {oldest} and " in (ROOT / "docs" / "hf.md").read_text(encoding="utf-8")
