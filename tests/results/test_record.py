"""Result files: what they say, and that they are whole."""

from __future__ import annotations

import json
import os

import pytest

from minithink.errors import MinithinkError
from minithink.results import record


def test_a_result_says_how_it_came_to_be() -> None:
    result = record.new("decode", ["decode", "--output", "a file.json"])
    assert list(result) == [
        "benchmark",
        "complete",
        "command",
        "date",
        "commit",
        "embedded_model",
        "machine",
        "versions",
    ]
    assert result["command"] == "python -m minithink.bench decode --output 'a file.json'"
    assert result["date"].endswith("Z")
    assert len(result["embedded_model"]) == 16
    assert result["machine"]["cpu"]
    assert result["machine"]["cores"] >= 1
    assert "gpu" not in result["machine"]
    assert {"minithink", "python", "torch", "triton", "transformers"} <= result["versions"].keys()


def test_writing_is_all_or_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "folder" / "x.json"
    record.write(path, {"measurements": [1]})
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MinithinkError, match="disk full"):
        record.write(path, {"measurements": [2]})
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_a_result_comes_back_as_it_was(tmp_path) -> None:
    result = {
        "measurements": [{"a": 1.23456789, "b": [1, 2.5], "c": float("nan")}, {"d": [[1, "x ["], [2, 'y "']]}],
        "empty": {},
        "none": [],
        "n": 123456789,
    }
    record.write(tmp_path / "x.json", result)
    text = (tmp_path / "x.json").read_text()
    assert text.count("\n") == 1, "what fits into one line takes one"
    want = json.loads(json.dumps(result).replace("1.23456789", "1.2346").replace("NaN", "null"))
    assert record.read(tmp_path / "x.json") == want
    assert list(record.read(tmp_path / "x.json")) == list(result)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"a": 1}'])
def test_what_is_no_result_is_refused(tmp_path, text: str | None) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(MinithinkError, match=r"x\.json"):
        record.read(path)


def test_the_recorded_command_names_no_folder() -> None:
    command = record.new("x", ["decode", "--output", "/some/where/decode.json", "--batch", "1"])["command"]
    assert command == "python -m minithink.bench decode --output decode.json --batch 1"
