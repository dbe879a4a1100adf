"""Records of test runs. Run alone: pytest tests/test_record.py"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minithink.results import record as result_files
from tests import record


def report(name: str, why: object = None) -> Any:
    return SimpleNamespace(nodeid=name, longrepr=why)


STATS = {
    "passed": [report("tests/test_a.py::test_one"), report("tests/test_a.py::test_two[3]")],
    "failed": [report("tests/test_b.py::test_three")],
    "skipped": [
        report("tests/test_a.py::test_four", ("tests/test_a.py", 3, "Skipped: needs a GPU")),
        report("tests/test_a.py::test_five", ("tests/test_a.py", 9, "Skipped: needs a GPU")),
    ],
}


def reporter(folder: Any, words: list[str], stats: dict[str, list[Any]]) -> Any:
    config = SimpleNamespace(rootpath=folder, invocation_params=SimpleNamespace(args=words))
    return SimpleNamespace(config=config, stats=stats, _session_start=SimpleNamespace(time=0.0))


def test_outcomes_are_counted_by_file() -> None:
    assert record.count(STATS) == {
        "tests/test_a.py": {
            "file": "tests/test_a.py",
            "passed": 2,
            "failures": [],
            "skipped": 2,
            "reasons": {"needs a GPU": 2},
        },
        "tests/test_b.py": {
            "file": "tests/test_b.py",
            "passed": 0,
            "failures": ["tests/test_b.py::test_three"],
            "failed": 1,
        },
    }


def test_a_record_grows_part_by_part(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part replaces the lines of its own files. Files that are gone leave the record."""
    path = tmp_path / "gpu-tests.json"
    monkeypatch.setattr(result_files, "default_path", lambda name: tmp_path / f"{name}.json")
    (tmp_path / "tests").mkdir()
    for name in "abc":
        (tmp_path / f"tests/test_{name}.py").touch()
    record.write("gpu-tests", reporter(tmp_path, ["-n", "2"], STATS), "the profile ci")
    mended = {"passed": [report("tests/test_b.py::test_three"), report("tests/test_c.py::test_six")]}
    (tmp_path / "tests/test_a.py").unlink()
    record.write("gpu-tests", reporter(tmp_path, ["tests"], mended), "the profile ci")
    result = result_files.read(path)
    assert [(m["file"], m["passed"], m["failures"]) for m in result["measurements"]] == [
        ("tests/test_b.py", 1, []),
        ("tests/test_c.py", 1, []),
    ]
    assert [part["command"] for part in result["parts"]] == ["pytest -n 2", "pytest tests"]
    assert [(part["passed"], part.get("failed")) for part in result["parts"]] == [(2, 1), (2, None)]
    assert result["complete"]
    # The same tests again, and some of them.
    record.write("gpu-tests", reporter(tmp_path, ["-n", "4", "tests"], mended), "the profile ci")
    assert [part["command"] for part in result_files.read(path)["parts"]] == ["pytest -n 2", "pytest -n 4 tests"]
    record.write("gpu-tests", reporter(tmp_path, ["tests", "-k", "six"], mended), "the profile ci")
    assert len(result_files.read(path)["parts"]) == 3


def test_an_interrupted_part_leaves_the_record_incomplete(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_files, "default_path", lambda name: tmp_path / f"{name}.json")
    (tmp_path / "tests").mkdir()
    for name in "ab":
        (tmp_path / f"tests/test_{name}.py").touch()
    record.write("gpu-tests", reporter(tmp_path, ["tests"], STATS), "the profile ci", interrupted=True)
    record.write("gpu-tests", reporter(tmp_path, ["-x"], STATS), "the profile ci")
    result = result_files.read(tmp_path / "gpu-tests.json")
    assert [part.get("interrupted", False) for part in result["parts"]] == [True, False]
    assert not result["complete"]
    record.write("gpu-tests", reporter(tmp_path, ["tests"], STATS), "the profile ci")
    assert result_files.read(tmp_path / "gpu-tests.json")["complete"]
    record.write("nightly", reporter(tmp_path, ["tests"], STATS), "1000", interrupted=True)  # it has no parts
    assert not result_files.read(tmp_path / "nightly.json")["complete"]


HOOK = """
from tests import record

def pytest_terminal_summary(terminalreporter, exitstatus):
    print("interrupted:", record.is_interrupted(terminalreporter, exitstatus))
"""


@pytest.mark.parametrize(
    ("words", "second", "interrupted"),
    [
        ([], "pass", False),
        ([], "assert False", False),
        (["-x"], "pass", False),
        (["-x"], "assert False", True),
        (["--maxfail", "1"], "assert False", True),
        ([], "raise KeyboardInterrupt", True),
    ],
)
def test_a_run_that_stops_at_a_failure_is_interrupted(
    tmp_path: Path, words: list[str], second: str, interrupted: bool
) -> None:
    (tmp_path / "conftest.py").write_text(HOOK)
    tests = f"def test_one(): pass\ndef test_two(): {second}\ndef test_three(): pass\n"
    (tmp_path / "test_some.py").write_text(tests)
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *words, "test_some.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"interrupted: {interrupted}" in ran.stdout, ran.stdout + ran.stderr
