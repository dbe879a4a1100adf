"""CI's script says what it needs. Alone: pytest tests/test_ci.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("git") is None, reason="there is no bash, or no git"
)


def test_a_sparse_checkout_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """A repository that holds CI's script and one page. Without the check, the copy of its files fails."""

    def git(*words: str) -> None:
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / ".ci").mkdir()
    shutil.copyfile(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("a page")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("sparse-checkout", "set", "--no-cone", "/*", "!/docs/")
    assert not (tmp_path / "docs").exists()
    run = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout == "this is a sparse checkout, and CI needs all files: run `git sparse-checkout disable`\n"
    assert not run.stderr


def test_tracked_files_of_56_mib_are_too_large(tmp_path: Path) -> None:
    """A repository that holds CI's script and one large file, which is a hole and takes no space."""
    (tmp_path / ".ci").mkdir()
    shutil.copyfile(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(56 << 20)
    for name in ("chromium", "chromedriver"):  # so that nothing is installed if the check lets the file pass
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    subprocess.run([*GIT, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*GIT, "add", ".ci", "large"], cwd=tmp_path, check=True)
    paths = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path,
        env=os.environ | {"PATH": paths},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert run.stdout == "tracked files: 56 MiB, and they must stay below 56\nmake them smaller before this lands\n"
