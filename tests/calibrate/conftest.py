"""What the tests of calibration share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calibrate.run import calibrate, write_questions, write_sharp_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests only read, without calibration."""
    return write_sharp_model(tmp_path_factory.mktemp("calibrated") / "model")


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("problems") / "p.jsonl")


@pytest.fixture(scope="session")
def calibrated(model: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished calibration."""
    folder = tmp_path_factory.mktemp("calibration")
    calibrate(model, problems, output=folder)
    return folder
