"""Where results come from."""

from __future__ import annotations

import subprocess

import pytest

from minithink.results import files, origin


def test_the_commit_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINITHINK_COMMIT", "abc123")
    assert origin.commit() == "abc123"


def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.delenv("MINITHINK_COMMIT", raising=False)
    monkeypatch.setattr(origin, "ROOT", tmp_path.resolve())
    assert origin.commit() == "unknown"
    git("init")
    assert origin.commit() == "unknown", "there is no commit yet"
    (tmp_path / "code.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert origin.commit() == head
    files.replace(tmp_path / origin.RESULTS / "decode-cpu.json", "{}")
    assert origin.commit() == head, "a result changes nothing that is measured"
    (tmp_path / "code.py").write_text("2\n")
    assert origin.commit() == head + "-dirty"
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(origin, "ROOT", (tmp_path / "inner").resolve())
    assert origin.commit() == "unknown", "an installed package does not take the commit of the repository around it"
