"""Unused tokens get the texts of the puzzles. To run it alone: pytest tests/train/test_rename.py"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from minithink.engine import TINY
from minithink.errors import MinithinkError, UsageError
from minithink.tasks import prepare
from minithink.text.tokenizer import Tokenizer
from minithink.train.__main__ import main
from minithink.train.rename import NEEDED, write_renamed

OLD = [f"<unused{i}>" for i in range(len(NEEDED))]
NAMES = dict(zip(OLD, NEEDED, strict=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's tokenizer, whose special tokens have other texts."""
    folder = tmp_path_factory.mktemp("source")
    text = (Path(prepare.__file__).parents[1] / "assets" / "tiny" / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in NAMES.items():
        text = text.replace(json.dumps(new), json.dumps(old))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": OLD[0]}))
    return folder


def test_puzzles_are_read_as_by_the_embedded_model(source: Path, tmp_path: Path) -> None:
    """Its tokenizer comes back: the ids of prompts and responses, what is special, the end, the chat template."""
    write_renamed(source, NAMES, tmp_path / "new")
    tiny = Tokenizer.from_folder(Path(prepare.__file__).parents[1] / "assets" / "tiny")
    got = Tokenizer.from_folder(tmp_path / "new")
    for family in prepare.FAMILIES.values():
        problem = family.draw_problem(random.Random(0), 4)
        for text in prepare.document(problem, random.Random(0)):
            assert got.encode(text) == tiny.encode(text)
    messages = [{"role": "user", "content": "How far?"}]
    assert got.apply_chat_template(messages) == tiny.apply_chat_template(messages)
    ids = [tiny.id_of(text) for text in NEEDED]
    assert [got.id_of(text) for text in NEEDED] == ids
    assert got.decode(ids, skip_special_tokens=True) == "<think></think>"
    assert [got.id_of(text) for text in OLD] == [None] * len(OLD)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"<unused9>": "<b>"}, "The tokenizer has no added token '<unused9>' to rename; it has <unused0>"),
        ({OLD[0]: " the"}, "The tokenizer has a token ' the' already: leave it out of --rename-tokens."),
        ({OLD[0]: "<think>"}, "--rename-tokens gives two tokens the same text: give each its own."),
        ({OLD[4]: "<b>"}, "The puzzles need a token '<think>': name it in --rename-tokens, OLD=<think>."),
    ],
)
def test_what_cannot_be_renamed(source: Path, change: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        write_renamed(source, NAMES | change, tmp_path)
    assert said in str(error.value)


def test_a_folder_that_cannot_be_written_is_said(source: Path, tmp_path: Path) -> None:
    """It is a temporary one, so another --output would not help."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MinithinkError) as error:
        write_renamed(source, NAMES, tmp_path / "file" / "renamed")
    said = str(error.value)
    assert said.startswith(f"The tokenizer cannot be written to {tmp_path / 'file' / 'renamed'}: ")
    assert said.endswith("; give another folder for temporary files (TMPDIR).")


def test_nothing_is_written_before_the_run_begins(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So a start that is refused leaves an interrupted run as it was."""
    renamed = ",".join(f"{old}={new}" for old, new in NAMES.items())
    out = tmp_path / "out"
    out.mkdir()
    (out / "progress.safetensors").write_bytes(b"")
    (out / "tokenizer.json").write_text("mine")
    words = ["--init", str(TINY), "--tokenizer", str(source), "--lora-rank", "2", "--rename-tokens", renamed]
    assert main(["--output", str(out), "--device", "cpu", *words]) == 2
    assert "holds an interrupted run; give --resume" in capsys.readouterr().err
    assert (out / "tokenizer.json").read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == ["progress.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--rename-tokens", "<a>=<b>"],
            "--rename-tokens is for an adapter: give --lora-rank, too, or leave it out.",
        ),
        (["--adapter", "x"], "--adapter is for an adapter: give --lora-rank, too, or leave it out."),
        (["--rename-tokens", "<a>"], "is not of the form OLD=NEW,OLD=NEW"),
        (["--rename-tokens", "<a>=<b>,<a>=<c>"], "renames a token twice"),
    ],
)
def test_options_that_make_no_sense(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err
