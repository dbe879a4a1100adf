"""Conformance vectors: the committed files are what the plain manager gives, and the page's reader finds faults.

To run it alone: pytest tests/test_vectors.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from minithink import vectors
from minithink.policies import POLICIES, parse
from minithink.results.origin import ROOT
from tests.own_policies import MINE, unloaded

FOLDER = ROOT / "docs" / "vectors"
MISSING = {"seal", "answer_oracle", "hindsight_oracle", "needs_oracle"}
LARGEST = 600_000  # bytes of all files
# Policies that keep all tokens, in fewer bits
WHOLE = {"full", "quant", "kivi", "tbq", "pm_kvq"}
torch.set_num_threads(1)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["minithink"])


def test_every_policy_has_a_file_or_a_reason() -> None:
    own = {name for name in POLICIES if ":" not in name}
    assert set(vectors.SETTINGS) == own - MISSING
    assert {path.stem for path in FOLDER.iterdir()} == {*vectors.SETTINGS, vectors.INPUTS}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < LARGEST
    assert all(type(parse(text)) is POLICIES[name] for name, text in vectors.SETTINGS.items())


@pytest.mark.parametrize("name", [vectors.INPUTS, *vectors.SETTINGS])
def test_files_are_what_is_computed(name: str) -> None:
    stored, about = read(FOLDER / f"{name}.safetensors")
    computed, said = vectors.inputs() if name == vectors.INPUTS else vectors.vectors(vectors.SETTINGS[name])
    assert about == json.loads(json.dumps(said))
    assert stored.keys() == computed.keys()
    for key, tensor in stored.items():
        if key.endswith(".scores"):  # another machine adds in another order
            torch.testing.assert_close(computed[key], tensor, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(computed[key], tensor), key


@pytest.mark.parametrize("name", vectors.SETTINGS)
def test_no_choice_is_near(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that differ by one in a million lead to the same choices, and to scores within 1e-5."""
    stored, _ = read(FOLDER / f"{name}.safetensors")
    exact = vectors.text_of
    for seed in range(3):

        def near(number: int, seed: int = seed) -> vectors.Text:
            text = exact(number)
            draw = torch.Generator().manual_seed(1000 * seed + number)
            for x in (text.q, text.k, text.v, text.hidden):
                x *= 1 + 1e-6 * (2 * torch.rand(x.shape, generator=draw) - 1)
            return text

        monkeypatch.setattr(vectors, "text_of", near)
        found, _ = vectors.vectors(vectors.SETTINGS[name])
        for key, tensor in stored.items():
            kind = key.rpartition(".")[2]
            if kind in ("kept", "formats", "bytes", "decided"):
                assert torch.equal(found[key], tensor), key
            elif kind == "scores":
                torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", vectors.SETTINGS)
def test_something_happens(name: str) -> None:
    tensors, _ = read(FOLDER / f"{name}.safetensors")
    policy = parse(vectors.SETTINGS[name])
    for i, prompt in enumerate(vectors.PROMPTS):
        kept = tensors[f"{i}.kept"]
        fed = prompt + torch.arange(len(kept))
        assert (kept.sum(-1).amax((1, 2)) <= fed).all()
        assert kept[-1].all() == (name in WHOLE or (name == "snapkv" and prompt <= 5))
        if policy.limit is not None and not policy.exempt_answer:
            assert kept.sum(-1).max() <= policy.limit + policy.slack
        if f"{i}.formats" in tensors:
            formats = tensors[f"{i}.formats"]
            assert len(formats.unique()) > 1
            assert ((formats == vectors.NOT_HELD) | kept).all()


@pytest.mark.parametrize("name", vectors.SETTINGS)
def test_what_a_policy_reads_is_there(name: str) -> None:
    tensors, _ = read(FOLDER / "inputs.safetensors")
    _, about = read(FOLDER / f"{name}.safetensors")
    reads = about["reads"]
    assert isinstance(reads, list)
    kinds = {part for key in tensors for part in key.split(".")}
    assert set(reads) <= kinds
    assert ("hidden" in reads, "predictor" in reads, "centers" in reads) == (
        name == "dynts",
        name == "dynts",
        name == "triattention",
    )


def code_of_the_page() -> str:
    page = (ROOT / "docs" / "vectors.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return str(code)


def test_the_reader_of_the_page(tmp_path: Path) -> None:
    script = tmp_path / "reader.py"
    script.write_text(code_of_the_page(), encoding="utf-8")
    assert len(code_of_the_page().splitlines()) <= 50
    shutil.copy(FOLDER / "inputs.safetensors", tmp_path)
    good = FOLDER / "tova.safetensors"
    run = subprocess.run([sys.executable, script, good], capture_output=True, text=True)
    assert run.stdout == "equal: tova:budget=14\n", run.stderr
    # A token that is said to be kept, and is not
    tensors, about = read(good)
    tensors["1.kept"][20, 1, 0] = tensors["1.kept"][20, 1, 0].roll(1)
    bad = tmp_path / "bad.safetensors"
    save_file(tensors, bad, metadata={"minithink": json.dumps(about)})
    run = subprocess.run([sys.executable, script, bad], capture_output=True, text=True)
    assert run.returncode == 1
    assert "AssertionError: sequence 1, step 20, layer 1" in run.stderr


def test_inputs_are_drawn_from_the_seeds_in_their_metadata() -> None:
    tensors, about = read(FOLDER / "inputs.safetensors")
    seeds: Any = about["seeds"]
    assert set(seeds) == {"sequences", "predictor", "centers"}
    assert len(seeds["sequences"]) == len(vectors.PROMPTS)
    for number, seed in enumerate(seeds["sequences"]):
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(2, len(vectors.VOCABULARY), tensors[f"{number}.tokens"].shape, generator=draw)
        tags = tensors[f"{number}.tokens"] < 2
        assert torch.equal(tokens[~tags], tensors[f"{number}.tokens"][~tags])
        q = tensors[f"{number}.q"]
        assert torch.equal(2 * vectors.drawn(tuple(q.shape), draw), q)
    for name, tensor in (("predictor", "predictor.0"), ("centers", "centers.center")):
        draw = torch.Generator().manual_seed(seeds[name])
        shape = tuple(tensors[tensor].shape)
        size = shape[0] ** 0.5 if name == "predictor" else 1
        assert torch.equal(vectors.drawn(shape, draw) / size, tensors[tensor])


def test_lots_are_scores() -> None:
    tensors, _ = read(FOLDER / "random.safetensors")
    scores, decided, kept = tensors["0.scores"], tensors["0.decided"].tolist(), tensors["0.kept"]
    before = torch.cat((kept[:1], kept[:-1]))
    for at, score in zip(decided, scores, strict=True):
        newest = vectors.PROMPTS[0] + at - 1
        there = before[at].clone()
        there[..., newest] = False  # the newest token stays, and draws no lot
        assert torch.equal(~score.isnan(), there)
        lowest = score.nan_to_num(torch.inf).argmin(-1, keepdim=True)
        assert not kept[at].gather(-1, lowest).any()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vectors.main(["window,rkv:budget=20,buffer=4,alpha=4", "--output", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["inputs.safetensors", "rkv-budget=20-buffer=4-alpha=4.safetensors", "window.safetensors"]
    stored = FOLDER / "window.safetensors"
    assert (tmp_path / "new" / "window.safetensors").read_bytes() == stored.read_bytes()


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ("windows", "window"),
        ("seal", "Vectors have no file of seal, which only steers, or foresees texts: name one of full, window"),
        ("seal+rkv:budget=14", "Vectors have no file of seal"),
        ("window,seal", "Vectors have no file of seal"),
        ("skipkv:budget=14", "calibration"),
        ("thinkv:budget=22,tau=4,retention=2/1,g=4", "calibration"),
        ("thinkv:tau=4", "thinkv needs a budget in tokens: give its name alone, or thinkv:budget="),
        ("answer_oracle:budget=24", "Vectors have no file of answer_oracle"),
        ("needs_oracle:budget=24", "needs_oracle"),
        ("kivi:group=8", "16, 32"),
        ("window:budget=0", "budget"),
    ],
)
def test_what_cannot_be_written(policies: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vectors.main([policies, "--output", str(tmp_path / "new")]) in (1, 2)
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "new").exists()


def test_a_policy_of_ones_own_is_not_told_to_be_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    with unloaded():
        assert vectors.main(["mine.py:Mine", "--output", "new"]) == 2
    assert "mine.py:Mine needs a budget in tokens: write mine.py:Mine:budget=…." in capsys.readouterr().err


@pytest.mark.parametrize("policies", ["", "nosuch", "window,nosuch", "window+nosuch", "needs_orcle"])
def test_an_unknown_policy_is_told_those_that_have_vectors(
    policies: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vectors.main([policies, "--output", str(tmp_path / "new")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    listed = line.partition("there are: ")[2].rstrip(".").split(", ")
    assert listed == list(vectors.SETTINGS)
