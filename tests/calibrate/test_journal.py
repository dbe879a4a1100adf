"""The journal of a calibration: nothing that was written is lost, nothing that differs is mixed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.calibrate.__main__ import main
from minithink.calibrate.journal import TEXTS, Journal
from minithink.checkpoint.weights import checkpoint_hash, save_checkpoint
from minithink.engine import load
from minithink.errors import MinithinkError, UsageError
from tests.calibrate.run import POLICY
from tests.locks import before_the_lock, race

SETTINGS: dict[str, Any] = {"seed": 0, "policy": "p", "theta": None}


def write(path: Path, *lines: dict[str, Any]) -> None:
    with Journal(path, SETTINGS, resume=False) as journal:
        for line in lines:
            journal.append(line)


def test_lines_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "new" / "j.jsonl"
    lines: list[dict[str, Any]] = [{"x": 0.1 + 0.2, "n": [1, None]}, {"x": 1e-300}]
    write(path, *lines)
    with Journal(path, SETTINGS, resume=True) as journal:
        assert journal.lines == lines
        journal.append({"y": 1})
        assert journal.lines == [*lines, {"y": 1}]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [SETTINGS, *lines, {"y": 1}]


def test_a_line_that_is_cut_off_goes(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, {"x": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"x": 2')
    with Journal(path, SETTINGS, resume=True) as journal:
        assert journal.lines == [{"x": 1}]
    assert path.read_bytes() == whole


def test_a_journal_without_a_finished_prompt_is_as_good_as_none(tmp_path: Path) -> None:
    write(tmp_path / "j.jsonl")
    with Journal(tmp_path / "j.jsonl", {"seed": 1}, resume=False):
        pass
    assert json.loads((tmp_path / "j.jsonl").read_text()) == {"seed": 1}


def test_what_does_not_go_on_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with pytest.raises(UsageError, match="nothing to resume"):
        Journal(path, SETTINGS, resume=True)
    write(path, {"x": 1})
    before = path.read_bytes()
    with pytest.raises(UsageError, match="holds 1 line of an unfinished calibration: add --resume"):
        Journal(path, SETTINGS, resume=False)
    with pytest.raises(UsageError, match=r"seed 0 and 1"):
        Journal(path, {**SETTINGS, "seed": 1}, resume=True)
    assert path.read_bytes() == before
    path.write_bytes(before + b"[1]\n")
    with pytest.raises(MinithinkError, match="line 3, is damaged"):
        Journal(path, SETTINGS, resume=True)


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MinithinkError, match="give another --output"):
        Journal(tmp_path / "file" / "j.jsonl", SETTINGS, resume=False)
    path = tmp_path / "j.jsonl"
    with Journal(path, SETTINGS, resume=False) as journal:
        journal.append({"x": 1})
        before = path.read_bytes()

        class Full:
            """A disk that takes three bytes more."""

            def __init__(self, file: Any) -> None:
                self.fileno, self.truncate, self.close, self._file = file.fileno, file.truncate, file.close, file

            def write(self, data: bytes) -> int:
                return os.write(self._file.fileno(), data[:3])

        monkeypatch.setattr(journal, "_file", Full(journal._file))
        with pytest.raises(MinithinkError, match="add --resume"):
            journal.append({"x": 2})
        assert path.read_bytes() == before
        assert journal.lines == [{"x": 1}]


def test_it_goes_when_the_result_is_there(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl", SETTINGS, resume=False) as journal:
        journal.remove()
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_to_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, SETTINGS, resume=False) as journal:
        journal.append({"x": 1})
        for resume in (False, True):
            with pytest.raises(MinithinkError, match=rf"^Another process is writing to {tmp_path}: wait"):
                Journal(path, SETTINGS, resume=resume)
        journal.append({"x": 2})
    with Journal(path, SETTINGS, resume=True) as journal:
        assert journal.lines == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("begun", [False, True])
def test_a_calibration_that_is_quicker_keeps_its_lines(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another calibration begins, or goes on, after this one has looked and before it holds the journal."""
    path, quicker = tmp_path / "j.jsonl", list[Journal]()
    if begun:
        write(path)

    def start() -> None:
        quicker.append(Journal(path, SETTINGS, resume=begun))
        quicker[0].append({"x": 1})

    before_the_lock(monkeypatch, start)
    with pytest.raises(MinithinkError, match="Another process is writing"):
        Journal(path, SETTINGS, resume=False)
    quicker[0].append({"x": 2})
    quicker[0].close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [SETTINGS, {"x": 1}, {"x": 2}]


def test_lines_are_read_when_the_journal_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process appends a last line and ends before this one holds the journal: the line is not cut off."""
    path = tmp_path / "j.jsonl"
    write(path, {"x": 1})
    last = Journal(path, SETTINGS, resume=True)

    def end() -> None:
        last.append({"x": 2})
        last.close()

    before_the_lock(monkeypatch, end)
    with Journal(path, SETTINGS, resume=True) as journal:
        assert journal.lines == [{"x": 1}, {"x": 2}]
    assert len(path.read_text().splitlines()) == 3


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to resume"):
        Journal(tmp_path / "j.jsonl", SETTINGS, resume=True)
    assert not list(tmp_path.iterdir())


STARTED = """
from minithink.calibrate.journal import Journal

def start(path):
    journal = Journal(path / "j.jsonl", {}, resume=False)
    journal.append({"x": 1})
    return journal
"""


def test_of_two_calibrations_that_start_at_once_one_is_refused(tmp_path: Path) -> None:
    for i, said in enumerate(race(STARTED, tmp_path, rounds=150)):
        refused, won = sorted(said)
        assert won == "won", (i, said)
        assert refused.startswith(f"MinithinkError: Another process is writing to {tmp_path / str(i)}: wait until"), i
        assert (tmp_path / str(i) / "j.jsonl").read_text() == '{}\n{"x": 1}\n', i


# Where it lies ---------------------------------------------------------------------------------------------------

COMMANDS = {
    "thoughts": f"thoughts --num-layers 2 --policy {POLICY} --budget 60 --compare 0 --num-prompts 3",
    "steering": "steering --num-prompts 3",
    "centers": "centers --num-prompts 3",
    "foresight": "foresight --limit 3",
}


def words_of(command: str, model: Path, problems: Path) -> list[str]:
    options = f"--max-new-tokens 8 --batch-size 1 --temperature 0 --device cpu --model {model} --dataset {problems}"
    return [*COMMANDS[command].split(), *options.split()]


def fail_after_one(patch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Writing the second line of a journal fails."""
    append = Journal.append

    def fail(self: Journal, line: dict[str, Any]) -> None:
        if self.lines:
            raise error
        append(self, line)

    patch.setattr(Journal, "append", fail)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (MinithinkError("It failed."), 1)])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_failure_leaves_nothing_in_the_checkpoints_folder(
    command: str,
    error: BaseException,
    code: int,
    model: Path,
    problems: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(model, "model"))
    before = names_in(folder)
    words = words_of(command, folder, problems)
    with monkeypatch.context() as patch:
        fail_after_one(patch, error)
        assert main(words) == code
    assert names_in(folder) == before
    journal = TEXTS / checkpoint_hash(folder) / f"{command}.jsonl"
    assert len(journal.read_text().splitlines()) == 2, "the settings and one text"
    if command != "steering":  # a random model has no thoughts to steer
        assert main([*words, "--resume"]) == 0
        written = "centers.safetensors" if command == "centers" else f"{command}.json"
        assert names_in(folder) == sorted([*before, written])
        assert not journal.exists()


def test_each_checkpoint_has_a_folder_for_its_texts(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an unfinished calibration of one model keeps no other from being calibrated."""
    monkeypatch.chdir(tmp_path)
    one = Path(shutil.copytree(model, "one"))
    other = Path(shutil.copytree(model, "other"))
    decoder = load(other, device="cpu").decoder
    with torch.no_grad():
        next(decoder.parameters()).mul_(2)
    save_checkpoint(decoder, other)
    with monkeypatch.context() as patch:
        fail_after_one(patch, KeyboardInterrupt())
        assert main(words_of("foresight", one, problems)) == 130
    assert main(words_of("foresight", other, problems)) == 0
    assert (other / "foresight.json").exists()
    assert (TEXTS / checkpoint_hash(one) / "foresight.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_generated(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda *given: False)
    monkeypatch.setattr(Journal, "append", lambda *given: pytest.fail("a text was generated"))
    for command in COMMANDS:
        assert main(words_of(command, model, problems)) == 1
        assert "its folder may not be written to" in capsys.readouterr().err
