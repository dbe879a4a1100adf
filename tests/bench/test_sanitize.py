"""The tests under compute-sanitizer: what is said without a GPU, how its output is counted, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from minithink.bench import record, sanitize, tables
from tests.bench.result import RESULT, says_that_there_is_no_gpu


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    says_that_there_is_no_gpu("sanitize", tmp_path)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("........ [100%]\n312 passed, 3 skipped in 61.20s (0:01:01)\n========= ERROR SUMMARY: 0 errors\n",
         {"errors": 0, "processes": 1, "tests": "312 passed, 3 skipped"}),
        ("===== 1 failed, 7 passed in 5.01s =====\n===== ERROR SUMMARY: 3 errors\n===== ERROR SUMMARY: 1 error\n",
         {"errors": 4, "processes": 2, "tests": "1 failed, 7 passed"}),
        ("9 passed in 1.00s\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
         {"errors": 2, "processes": 1, "tests": "9 passed"}),
        ("========= Error: Target application not found\n", {"errors": 0, "processes": 0, "tests": "none"}),
    ],
)  # fmt: skip
def test_reports_are_counted(text: str, want: dict[str, object]) -> None:
    assert sanitize.count(text) == want


def test_the_table(tmp_path: Path) -> None:
    m = {"tool": "memcheck", "errors": 0, "processes": 2, "tests": "9 passed", "exit_code": 0, "seconds": 1.5}
    record.write(tmp_path / "sanitize.json", {**RESULT, "benchmark": "sanitize", "measurements": [m]})
    text = tables.fill("<!-- table:sanitize -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[3] == "| memcheck | **0** | 2 | 9 passed |"
