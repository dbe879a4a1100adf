"""`calibrate centers`: the worked example, the whole command against a pass of its own, and the file.

To run it alone: pytest tests/calibrate/test_centers.py
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minithink.calibrate.__main__ import main
from minithink.calibrate.centers import Sums, concentration
from minithink.calibrate.journal import Journal
from minithink.checkpoint import calibration
from minithink.checkpoint.calibration import CENTERS, METADATA
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import Engine, load
from minithink.errors import MinithinkError, counted
from minithink.evaluate.datasets import load_dataset
from minithink.kv.full import FullCache
from minithink.model import Rope, rope_frequencies
from minithink.ref.rope import rope
from tests.calibrate.run import QUESTIONS, content_of, words_of
from tests.compare import assert_close
from tests.strategies import example_config

torch.set_num_threads(1)

# Queries of two heads at positions 4, 5 and 6, before RoPE; bands turn by 1 and 0.01 radians a token.
HEAD_A = torch.tensor([(1.0, 2, 0, 1), (2, 1, 1, 1), (1.5, 0, 0.5, -1)])
HEAD_B = torch.tensor([(-1.0, 0.5, 0.5, 0), (-0.5, 1, 1, 0.5), (-1.5, 1.5, 0, -0.5)])
ROTATED_A = torch.tensor(
    [
        (-0.653644, 1.958411, -0.756802, 1.079179),
        (1.526249, 0.948771, -1.634186, 1.048729),
        (1.579963, 0.059964, 0.060962, -0.998201),
    ]
)


words = partial(words_of, "centers")
content = partial(content_of, CENTERS)


# The worked example -----------------------------------------------------------------------------------------------


def test_worked_example() -> None:
    """Queries come in two passes; the sums are of both."""
    sums = Sums(layers=1, heads=2, dim=4)
    q = torch.stack((HEAD_A, HEAD_B), 1)  # [3, Hq, D]
    sums.add(0, q[:2])
    sums.add(0, q[2:])
    found = sums.tensors()
    center = torch.tensor([[(1.5, 1, 0.5, 0.333333), (-1, 1, 0.5, 0)]])
    norm = torch.tensor([[(1.605736, 1.550094), (1.245356, 1.066391)]])
    assert_close("center", found["center"], center, atol=1e-6)
    assert_close("norm", found["norm"], norm, atol=1e-6)
    # R, of band 0 and 1; band 0 is the strongest of both heads.
    share = torch.hypot(*found["center"].chunk(2, dim=-1)) / found["norm"]
    assert_close("R", share, torch.tensor([[(0.984682, 0.680019), (0.897763, 0.937742)]]), atol=1e-6)
    about = concentration(found)
    assert about["median"] == pytest.approx([0.897763], abs=1e-6)  # of four the lower one
    assert about["median_of_strongest"] == pytest.approx([0.897763], abs=1e-6)
    assert about["close"] == 1 / 4
    assert about["close_of_strongest"] == 1 / 2


def test_queries_of_a_cache_can_be_turned_back() -> None:
    """Rotated queries of the example, and the queries before RoPE that follow from them."""
    config = example_config(head_dim=4)
    position = torch.tensor([4, 5, 6])
    rotated = rope(HEAD_A[:, None], *Rope(config).at(position))[:, 0]
    assert_close("rotated", rotated, ROTATED_A, atol=1e-6)
    assert_close("turned back", turned_back(rotated, position, rope_frequencies(config)[0]), HEAD_A, atol=1e-6)


def turned_back(rotated: Tensor, position: Tensor, omega: Tensor) -> Tensor:
    """q_f = q_rot,f·e^(−iω_f p), with complex numbers: [n, …, D]."""
    real, imaginary = rotated.double().chunk(2, dim=-1)
    angle = position.double().view(-1, *[1] * (rotated.ndim - 1)) * omega.double()
    q = torch.complex(real, imaginary) * torch.exp(-1j * angle)
    return torch.cat((q.real, q.imag), dim=-1).float()


def test_one_query_again_and_again_lies_at_its_centre() -> None:
    sums = Sums(layers=2, heads=1, dim=6)
    query = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    for layer in range(2):
        sums.add(layer, query.expand(7, 1, 6).bfloat16())
    assert concentration(sums.tensors())["median"] == pytest.approx([1, 1], abs=1e-6)


# From end to end --------------------------------------------------------------------------------------------------


class Watched(FullCache):
    """A full cache that remembers the rotated queries that pass, token by token."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.config, engine.rope, device="cpu", dtype=engine.dtype)
        self.heads = engine.config.num_heads
        self.passed: list[list[Tensor]] = [[] for _ in range(engine.config.num_layers)]

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        at = torch.tensor([len(self.passed[layer])])
        self.passed[layer].append(rope(qk, *self.rope.at(at))[0, : self.heads])
        return super().attend(layer, qk, v)


@torch.inference_mode()
def queries_of(engine: Engine, text: list[int]) -> Tensor:
    """Queries of a text before RoPE, from a cache that is fed token by token: [n, L, Hq, D]."""
    cache = Watched(engine)
    cache.join(0, len(text))
    for token in text:
        cache.begin_step([0], [1])
        engine.decoder(torch.tensor([token]), cache)
        cache.end_step()
    rotated = torch.stack([torch.stack(of_layer) for of_layer in cache.passed], 1)
    return turned_back(rotated, torch.arange(len(text)), rope_frequencies(engine.config)[0])


@pytest.mark.parametrize("limit", [10**6, 1])
def test_the_tensors_are_means_over_all_queries(
    model: Path, problems: Path, tmp_path: Path, limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a generation and passes of their own; with --tokens 1 the first text alone."""
    assert main(words(model, problems, output=tmp_path, tokens=limit)) == 0
    tensors, about = content(tmp_path)
    engine = load(model, device="cpu")
    assert engine.config.qk_norm, "queries are those behind Qwen3's norm"
    texts = []
    for example in load_dataset(str(problems)):
        prompt = engine.prompt_ids(example.question)
        [alone] = engine.generate([prompt], temperature=0, max_new_tokens=16)
        texts.append([*prompt, *alone.token_ids])
    texts = texts if limit > 1 else texts[:1]
    q = torch.cat([queries_of(engine, text) for text in texts]).double()
    real, imaginary = q.chunk(2, dim=-1)
    assert_close("center", tensors["center"], q.mean(0).float(), atol=1e-4)
    assert_close("norm", tensors["norm"], torch.hypot(real, imaginary).mean(0).float(), atol=1e-4)
    assert torch.equal(tensors["omega"], rope_frequencies(engine.config)[0].double())
    m = about["measurements"]
    assert m["prompts"] == len(texts)
    assert m["tokens"] == sum(map(len, texts))
    assert about["checkpoint"] == checkpoint_hash(model)
    assert about["complete"]
    assert capsys.readouterr().out.startswith(f"{counted(len(texts), 'prompt')}, ")
    assert [p.name for p in tmp_path.iterdir()] == [CENTERS], "the journal is gone"
    values = calibration.read(tmp_path, CENTERS, model)
    assert torch.equal(values["norm"], tensors["norm"])
    assert main(words(model, problems, output=tmp_path)) == 2, "it is there already"


def test_an_interrupted_run_goes_on(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, problems, output=tmp_path / "whole")) == 0
    append = Journal.append

    def stop(self: Journal, line: dict[str, Any]) -> None:
        if len(self.lines) >= 2:
            raise KeyboardInterrupt
        append(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        assert main(words(model, problems, output=tmp_path / "parts")) == 130
    assert f"holds 2 of {QUESTIONS} prompts; " in capsys.readouterr().err
    assert main(words(model, problems, output=tmp_path / "parts", resume=True)) == 0
    tensors, about = content(tmp_path / "whole")
    own, said = content(tmp_path / "parts")
    assert said["measurements"] == about["measurements"]
    assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items())


# The file ---------------------------------------------------------------------------------------------------------

GOOD: dict[str, Tensor] = {
    "center": torch.full((2, 3, 4), 0.5),
    "norm": torch.ones(2, 3, 2),
    "omega": torch.tensor([1.0, 0.01], dtype=torch.float64),
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"center": None}, "lacks one of center, norm, omega"),
        ({"norm": torch.ones(2, 3, 4)}, "have the shapes"),
        ({"omega": torch.ones(2, 1, dtype=torch.float64)}, "have the shapes"),
        ({"omega": torch.tensor([1.0, 0.01])}, "are float32, float32, float32, and"),
        ({"norm": torch.full((2, 3, 2), torch.nan)}, "not finite"),
        ({"norm": torch.full((2, 3, 2), 0.5)}, "center is longer than its norm"),
        ({"omega": torch.tensor([0.01, 1.0], dtype=torch.float64)}, "fall from band to band"),
        ({"omega": torch.tensor([1.0, 0.0], dtype=torch.float64)}, "must be positive"),
        ({}, "the model's are"),
    ],
)
def test_other_files_are_refused(changed: dict[str, Any], said: str, tmp_path: Path, model: Path) -> None:
    tensors = {name: tensor for name, tensor in (GOOD | changed).items() if tensor is not None}
    save_file(tensors, tmp_path / CENTERS, {METADATA: json.dumps({"checkpoint": "x"})})
    with pytest.raises(MinithinkError, match=f"{said}.*calibrate centers.*--replace` makes it"):
        calibration.read(tmp_path, CENTERS, model)


def test_what_decides_is_a_hash_of_the_tensors() -> None:
    found = calibration.identity(CENTERS, GOOD)
    assert found == calibration.identity(CENTERS, GOOD | {"measurements": {}})
    for name in GOOD:
        assert calibration.identity(CENTERS, GOOD | {name: GOOD[name] * 2}) != found


def test_texts_that_are_not_graded_are_read_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Who sits?"}\n{"question": "a"}\n')
    assert main(words(model, path, output=tmp_path / "out", num_prompts=2, grader="none")) == 0
    assert "2 prompts, not graded" in capsys.readouterr().out
