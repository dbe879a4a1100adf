"""What an index and a citation say of the package. To run it alone: pytest tests/test_init.py"""

from __future__ import annotations

import re

import minithink
from minithink.results.origin import ROOT


def test_the_version_has_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", minithink.__version__)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert 'attr = "minithink.__version__"' in project
    assert f"\nversion: {minithink.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_public_names() -> None:
    assert minithink.__all__ == ["Engine", "__version__", "load"]
    for name in minithink.__all__:
        assert getattr(minithink, name).__doc__
