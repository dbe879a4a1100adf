"""`models tiny-control` unpacks the control beside the embedded model's files, checks its hash, and leaves a whole
folder or none.

    python -m pytest tests/checkpoint/test_tiny_control.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from minithink import models
from minithink.checkpoint import tiny_control
from minithink.checkpoint.tiny_control import COMPRESSED, CONTROL, HASHES, OF_TINY, TINY
from minithink.engine import load
from tests.fixtures_checkpoint import write_json

pytestmark = pytest.mark.skipif(not CONTROL.is_dir(), reason="the control is in a checkout alone")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the control's files, which a test may damage."""
    folder = tmp_path / "control"
    shutil.copytree(CONTROL, folder)
    monkeypatch.setattr(tiny_control, "CONTROL", folder)
    return folder


def refused(capsys: pytest.CaptureFixture[str], output: Path) -> str:
    """What the command says. It has left nothing."""
    assert models.main(["tiny-control", "--output", str(output)]) == 1
    assert not output.exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_the_control_differs_in_its_weights_and_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the shape, the tokenizer and the defaults of the embedded model, and began with the same weights."""
    output = tmp_path / "models" / "control"
    assert models.main(["tiny-control", "--output", str(output)]) == 0
    assert f"--model {output}" in capsys.readouterr().out
    assert list(output.parent.iterdir()) == [output]
    control, embedded = load(output, device="cpu"), load(None, device="cpu")
    assert control.config == embedded.config
    assert control.generation_config == embedded.generation_config
    assert control.loaded.home is not None
    assert embedded.loaded.home is not None
    due = json.loads((CONTROL / HASHES).read_text())["weights"]
    assert control.loaded.home.checkpoint == due != embedded.loaded.home.checkpoint
    question = "a = 3\nb = a + 4\nb?"
    prompt = control.prompt_ids(question)
    assert prompt == embedded.prompt_ids(question)
    recipes = [json.loads((folder / "training.json").read_text()) for folder in (output, TINY)]
    assert [recipe["recipe"]["evict_share"] for recipe in recipes] == [0.0, 0.75]
    assert recipes[0]["init"] == recipes[1]["init"]
    assert recipes[0]["step"] == recipes[1]["step"]


def test_its_folder_holds_all_files_but_those_that_make_it(tmp_path: Path) -> None:
    output = tmp_path / "control"
    assert models.main(["tiny-control", "--output", str(output)]) == 0
    own = {path.name for path in CONTROL.iterdir()} - {COMPRESSED, HASHES}
    assert {path.name for path in output.iterdir()} == {*own, *OF_TINY, "model.safetensors"}


def test_damaged_weights_are_one_sentence(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (copy / COMPRESSED).read_bytes()
    for data in (b"", b"no xz", whole[:5000]):
        (copy / COMPRESSED).write_bytes(data)
        assert "is damaged (" in refused(capsys, tmp_path / "new")


def test_other_weights_are_refused_by_their_hash(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    due = json.loads((copy / HASHES).read_text())["weights"]
    write_json(copy / HASHES, {"weights": "0" * 16})
    said = refused(capsys, tmp_path / "new")
    assert f"The weights have the hash {due}, and {'0' * 16} is due: get all files of" in said


def test_without_a_checkout_it_says_where_the_control_is(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / COMPRESSED).unlink()
    assert "is missing: the control is in a checkout of the project" in refused(capsys, tmp_path / "new")
