"""What an index and a citation say of the package. To run it alone: pytest tests/test_init.py"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import minithink
from minithink.results.origin import ROOT


def test_the_version_has_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", minithink.__version__)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert 'attr = "minithink.__version__"' in project
    assert f"\nversion: {minithink.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_newest_version_heads_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [newest, *_] = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert re.match(rf"{re.escape(minithink.__version__)}(, |$)", newest)


def test_an_address_has_one_place() -> None:
    """[project.urls] of pyproject.toml, which is not set yet. No page, badge or citation has another one."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^(?:repository-code|url): *(\S+)", citation, re.MULTILINE) == ([address] if address else [])
    for page in (ROOT / "README.md", *(ROOT / "tutorials").glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for found in re.findall(r"https?://\S*(?:shields\.io|colab\.research|readthedocs|minithink)\S*", text):
            assert address, f"{page.name} has the address {found}"
            assert address.rpartition("//")[2] in found


def test_a_wheel_has_every_package_but_bench() -> None:
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "minithink").rglob("__init__.py")]
    names = {".".join(folder.parts) for folder in folders}
    wanted = {name for name in names if not name.startswith("minithink.bench")} | {"minithink.kernels"}
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["packages"]) == wanted


def test_the_public_names() -> None:
    assert minithink.__all__ == ["Engine", "__version__", "hf", "load"]
    for name in minithink.__all__:
        assert getattr(minithink, name).__doc__
    with pytest.raises(AttributeError, match="module 'minithink' has no attribute 'nonsense'"):
        _ = minithink.nonsense


PROGRAM = """
import minithink

reveal_type(minithink.hf.cache)
reveal_type(minithink.load)
reveal_type(minithink.Engine.generate)
reveal_type(minithink.__version__)
minithink.nonsense
"""


def test_a_users_type_checker_sees_the_public_names(tmp_path: Path) -> None:
    """And no others. Other modules are skipped, because reading those of torch takes long."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    modules = [ROOT / "minithink" / name for name in ("__init__.py", "engine.py", "hf/__init__.py")]
    options = ("--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=skip", "--ignore-missing-imports")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, program, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    said = [line for line in done.stdout.splitlines() if "program.py:" in line]
    revealed = [line.partition("Revealed type is ")[2] for line in said if "Revealed type" in line]
    assert len(revealed) == 4, done.stdout + done.stderr
    for text in revealed:
        assert text != '"Any"'
    assert "max_length: " in revealed[0]
    assert "-> minithink.engine.Engine" in revealed[1]
    [error] = [line for line in said if "error: " in line]
    assert 'Module has no attribute "nonsense"' in error
