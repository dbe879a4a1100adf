"""Benchmarks of kernels from end to end, without what a GPU would measure: every row is written and said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minithink import results
from minithink.bench import append, attention, counters, ops
from minithink.bench.__main__ import main
from tests.bench.result import RESULT

SHAPE = {"batch": 1, "length": 1024}
KERNEL = {"kernel": "_attend", "dram": 91.5, "issue": 40.0, "warps": 55.0, "waiting_for_memory": 7.25}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU has an answer."""
    monkeypatch.setattr(results.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(results, "new", lambda name, *_, **__: {**RESULT, "benchmark": name, "complete": False})
    monkeypatch.setattr(attention, "copy_speed", lambda: 4e12)


def appended(*_: Any) -> dict[str, float]:
    times = dict.fromkeys(("append_microseconds", "buffer_microseconds", "attention_microseconds"), 0.5)
    return times | {"share": 0.25}


def attended(names: list[str], batch: int, length: int, repeats: int) -> Iterator[dict[str, Any]]:
    for name in names:
        about = {"microseconds": 9.5, "bytes_per_second": 2e12}
        yield {"batch": batch, "length": length, "format": name, **about}


def chosen(*_: Any) -> Iterator[dict[str, Any]]:
    yield {"kernel": "kmeans", "case": "x", "microseconds": 2.0, "bytes": 4e6}


def counted(ncu: str) -> Iterator[dict[str, Any]]:
    yield {"case": "bf16", "microseconds": 1.5, **SHAPE, **KERNEL}


SHAPES = ["--batches", "1,4", "--lengths", "1024", "--formats", "bf16,fp8"]
CASES: list[tuple[str, Any, str, Any, list[str], str]] = [
    ("append", append, "measure", appended, ["--batches", "1", "4"],
     "   4 x   1024  int2, keys by token      append    0.50 us"),
    ("attention", attention, "shape", attended, SHAPES, "   4 x   1024  fp8                             9.5 us"),
    ("thoughts", ops, "measurements", chosen, [],
     "kmeans    x                                              2.0 us   50"),
    ("counters", counters, "counted", counted, [], "bf16                   _attend             1.5 us  memory  91.5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "module", "function", "stands_in", "words", "last"), CASES)
def test_rows_are_written_and_said(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str,
    module: Any, function: str, stands_in: Any, words: list[str], last: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, function, stands_in)
    monkeypatch.setattr("shutil.which", lambda program: program)
    monkeypatch.setattr(module, "check", lambda *_: 0.0, raising=False)
    monkeypatch.setattr(results.torch.cuda, "empty_cache", lambda: None)
    path = tmp_path / "x.json"
    assert main([name, *words, "--output", str(path)]) == 0
    result = results.read(path)
    assert result["complete"]
    said = [line for line in capsys.readouterr().out.splitlines() if " us" in line]
    assert len(said) == len(result["measurements"]) > 0
    assert said[-1].startswith(last)
