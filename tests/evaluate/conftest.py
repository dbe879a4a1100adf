"""What the tests of a run share."""

from __future__ import annotations

from pathlib import Path

import pytest

from minithink.evaluate import plots
from tests.evaluate.run import write_model, write_problems


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read."""
    return write_model(tmp_path_factory.mktemp("evaluated") / "model")


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("problems") / "p.jsonl")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no pictures, which takes a second."""
    monkeypatch.setattr(plots, "draw", lambda rows, folder, title: [])
