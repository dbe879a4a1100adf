"""Result files: what they say, and that they are whole."""

from __future__ import annotations

import json
import subprocess

import pytest

from minithink.bench import record
from minithink.errors import MinithinkError


def test_a_result_says_how_it_came_to_be() -> None:
    result = record.new("decode", ["decode", "--output", "a file.json"])
    assert list(result) == [
        "benchmark", "complete", "command", "date", "commit", "embedded_model", "machine", "versions",
    ]  # fmt: skip
    assert result["command"] == "python -m minithink.bench decode --output 'a file.json'"
    assert result["date"].endswith("Z")
    assert len(result["embedded_model"]) == 16
    assert result["machine"]["cpu"]
    assert result["machine"]["cores"] >= 1
    assert "gpu" not in result["machine"]
    assert {"minithink", "python", "torch", "triton", "transformers"} <= result["versions"].keys()


def test_the_commit_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINITHINK_COMMIT", "abc123")
    assert record.commit() == "abc123"


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.delenv("MINITHINK_COMMIT", raising=False)
    monkeypatch.setattr(record, "ROOT", tmp_path.resolve())
    assert record.commit() == "unknown"
    git("init")
    assert record.commit() == "unknown", "there is no commit yet"
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert record.commit() == head
    record.write(tmp_path / record.RESULTS / "decode-cpu.json", {"measurements": []})
    assert record.commit() == head, "a result changes nothing that is measured"
    (tmp_path / "code.py").write_text("2\n")
    assert record.commit() == head + "-dirty"
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(record, "ROOT", (tmp_path / "inner").resolve())
    assert record.commit() == "unknown", "an installed package does not take the commit of the repository around it"


def test_writing_is_all_or_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "folder" / "x.json"
    record.write(path, {"measurements": [1]})
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(record.os, "fsync", fail)
    with pytest.raises(MinithinkError, match="disk full"):
        record.write(path, {"measurements": [2]})
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_a_result_comes_back_as_it_was(tmp_path) -> None:
    result = {
        "measurements": [{"a": 1.23456789, "b": [1, 2.5], "c": float("nan")}, {"d": [[1, "x ["], [2, 'y "']]}],
        "empty": {}, "none": [], "n": 123456789,
    }  # fmt: skip
    record.write(tmp_path / "x.json", result)
    text = (tmp_path / "x.json").read_text()
    assert '[1, "x ["],\n' in text, "a row takes one line"
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
