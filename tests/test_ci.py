"""CI's script says what it needs. Alone: pytest tests/test_ci.py."""

from __future__ import annotations

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
