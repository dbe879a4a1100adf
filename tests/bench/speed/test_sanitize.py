"""The tests under compute-sanitizer: what is said without a GPU, how its output is counted, and the table."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.speed import sanitize
from minithink.bench.tables import pages
from minithink.errors import MinithinkError
from minithink.results import record
from tests.bench.result import RESULT, says_that_there_is_no_gpu


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    says_that_there_is_no_gpu("sanitize", tmp_path)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "........ [100%]\n312 passed, 3 skipped in 61.20s (0:01:01)\n========= ERROR SUMMARY: 0 errors\n",
            {"errors": 0, "processes": 1, "outcome": "312 passed, 3 skipped"},
        ),
        (
            "===== 1 failed, 7 passed in 5.01s =====\n===== ERROR SUMMARY: 3 errors\n===== ERROR SUMMARY: 1 error\n",
            {"errors": 4, "processes": 2, "outcome": "1 failed, 7 passed"},
        ),
        (
            "9 passed in 1.00s\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
            {"errors": 2, "processes": 1, "outcome": "9 passed"},
        ),
        ("========= Error: Target application not found\n", {"errors": 0, "processes": 0, "outcome": "none"}),
    ],
)
def test_reports_are_counted(text: str, want: dict[str, object]) -> None:
    assert sanitize.count(text) == want


def test_tests_are_run_in_parts() -> None:
    """No test is lost or run twice, and files stay apart."""
    names = sanitize.collect(["tests/kernels/test_swiglu.py", "tests/kernels/test_rope.py"])
    parts = sanitize.in_parts(names)
    assert [name for part in parts for name in part] == names
    assert len(parts) == 2
    many = [f"a.py::{i}" for i in range(2 * sanitize.PART + 1)]
    assert [len(part) for part in sanitize.in_parts([*many, "b.py::0"])] == [sanitize.PART, sanitize.PART, 1, 1]


def test_there_are_no_such_tests() -> None:
    with pytest.raises(MinithinkError, match=r"pytest finds no tests in tests/kernels/test_nothing\.py"):
        sanitize.collect(["tests/kernels/test_nothing.py"])


PROGRAM = """#!/bin/sh
echo "$HYPOTHESIS_PROFILE, $PYTORCH_NO_CUDA_MEMORY_CACHING: $*" > "$(dirname "$0")/said"
echo "========= COMPUTE-SANITIZER"
echo "========= Invalid __global__ read of size 4 bytes"
echo "=========     at _merge+0x80"
echo "=========     Host Frame: main in main.c"
echo "========= "
echo "9 passed in 1.00s"
echo "========= ERROR SUMMARY: 2 errors"
"""


def test_the_tool_is_run(tmp_path: Path) -> None:
    """With few examples, and for two tools without torch's cache of memory; what it says is counted."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    m = sanitize.watch([str(program), "--more"], "memcheck", ["a.py::b"])
    said = (tmp_path / "said").read_text()
    assert "sanitize, 1: --more --tool memcheck" in said
    assert said.endswith("a.py::b\n")
    assert (m["errors"], m["exit_code"], m["outcome"]) == (2, 0, "9 passed")
    assert m["report"] == ["========= Invalid __global__ read of size 4 bytes", "=========     at _merge+0x80"]
    assert not sanitize.is_clean(m)
    assert sanitize.is_clean(m | {"errors": 0})
    assert not sanitize.is_clean(m | {"errors": 0, "exit_code": 1})
    assert not sanitize.is_clean(m | {"errors": 0, "processes": 0})
    sanitize.watch([str(program)], "racecheck", ["a.py::b"])
    assert "sanitize, : --tool racecheck" in (tmp_path / "said").read_text()
    sanitize.watch([str(program)], "initcheck", ["a.py::b"])
    assert "sanitize, 1: --tool initcheck" in (tmp_path / "said").read_text()


@pytest.mark.parametrize("flaw", [False, True])
def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flaw: bool
) -> None:
    """All parts run under each tool; the exit code says whether a tool found something."""
    asked = list[tuple[str, str]]()

    def watch(words: list[str], tool: str, tests: list[str]) -> dict[str, object]:
        asked.append((tool, tests[0]))
        assert ("--kernel-name-exclude" in words) == (not flaw and tool != "initcheck")
        m = dict(zip(("tool", "tests", "errors", "processes", "exit_code"), (tool, tests, 0, 1, 0), strict=True))
        bad = tool == "racecheck" and tests == ["b.py::1"] and flaw
        return m | {"outcome": "1 passed", "errors": int(bad), "report": ["========= Race reported"] * bad}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "new", lambda *_: {**RESULT, "benchmark": "sanitize", "complete": False})
    monkeypatch.setattr(shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "collect", lambda paths: ["a.py::1", "b.py::1"])
    monkeypatch.setattr(sanitize, "watch", watch)
    words = ["sanitize", "--workers", "2", "--output", str(tmp_path / "x.json"), *(["--torch"] if flaw else [])]
    assert main(words) == int(flaw)
    assert sorted(asked) == sorted((tool, f"{name}.py::1") for tool in sanitize.TOOLS for name in "ab")
    found = "racecheck: 1 error; 1 passed  b.py::1\n    ========= Race reported\n"
    assert (found in capsys.readouterr().out) == flaw
    result = record.read(tmp_path / "x.json")
    assert result["complete"]
    assert len(result["measurements"]) == 6


def test_after_an_error_no_process_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def watch(words: list[str], tool: str, tests: list[str]) -> dict[str, object]:
        asked.append(tests[0])
        if len(asked) > 1:
            time.sleep(0.01)
        raise MinithinkError("the tool cannot be run")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "new", lambda *_: {**RESULT, "benchmark": "sanitize", "complete": False})
    monkeypatch.setattr(shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "collect", lambda paths: [f"{i}.py::1" for i in range(500)])
    monkeypatch.setattr(sanitize, "watch", watch)
    assert main(["sanitize", "--output", str(tmp_path / "x.json")]) == 1
    assert len(asked) < 100


def test_the_table(tmp_path: Path) -> None:
    m = {"tool": "memcheck", "errors": 0, "processes": 2, "tests": ["a", "b"], "outcome": "9 passed", "exit_code": 0}
    other = m | {"errors": 1, "tests": ["c"], "outcome": "1 failed, 3 passed"}
    ms = [m, other, m | {"tool": "racecheck"}]
    record.write(tmp_path / "sanitize.json", {**RESULT, "benchmark": "sanitize", "measurements": ms})
    lines = pages.fill("<!-- table:sanitize -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert lines[3] == "| memcheck | **1** | 4 | 12 passed, 1 failed |"
    assert lines[4] == "| racecheck | **0** | 2 | 9 passed |"
