"""Where heads are averaged before ThinKV's 1 % rule (pytest tests/calibrate/test_averaging.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.calibrate.__main__ import main
from minithink.calibrate.averaging import RULES, concluded, correlations, sparsities
from minithink.engine import load
from minithink.ref.sparsity import sparsity as of_rows
from minithink.reread.attention import sparsity
from tests.calibrate.run import calibrate, words_of

torch.set_num_threads(1)


def counted(name: str, logits: Tensor, seen: Tensor) -> Tensor:
    """The sparsity of n queries by one rule. logits: [n, Hkv, g, S]; seen: bool [n, 1, S]."""
    return of_rows(RULES[name](logits, seen), seen)


def test_the_three_rules_by_hand() -> None:
    """One head looks at token 0 alone; the other looks at all tokens alike, but hardly at the last."""
    sharp = torch.tensor([0.0, -9.0, -9.0, -9.0])
    flat = torch.tensor([0.0, 0.0, 0.0, -5.0])
    logits = torch.stack((sharp, flat))[None, :, None]  # [1, 2, 1, 4]
    seen = torch.ones(1, 1, 4, dtype=torch.bool)
    # shares: three of four below 1 % in the first head, one in the second (e⁻⁵ < 0.01)
    assert counted("shares", logits, seen).tolist() == pytest.approx([(3 / 4 + 1 / 4) / 2])
    # weights: the mean row is about .67, .17, .17, .001, so one of four is below .0067
    assert counted("weights", logits, seen).tolist() == [1 / 4]
    # scores: the mean logits are 0, −4.5, −4.5, −7, and e⁻⁴·⁵ = .011, e⁻⁷ = .0009
    assert counted("scores", logits, seen).tolist() == [1 / 4]
    # With a flatter second head and a sharper first one, the last two rules part.
    logits[0, 1, 0] = torch.tensor([0.0, 0.0, 0.0, 0.0])
    logits[0, 0, 0] = torch.tensor([0.0, -9.0, -9.0, -18.0])
    assert counted("weights", logits, seen).tolist() == [0]
    assert counted("scores", logits, seen).tolist() == [1 / 4]
    assert counted("shares", logits, seen).tolist() == [3 / 8]


@given(seed=st.integers(0, 2**31), group=st.integers(1, 4), width=st.integers(1, 30))
def test_with_one_kv_head_the_rules_are_one(seed: int, group: int, width: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = 6 * torch.randn(3, 1, group, width, generator=draw)
    seen = torch.rand(3, 1, width, generator=draw) < 0.7
    want = counted("shares", logits, seen)
    for name in RULES:
        assert torch.equal(counted(name, logits, seen), want), name


@given(seed=st.integers(0, 2**31))
def test_what_is_not_seen_changes_nothing(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = 6 * torch.randn(2, 3, 2, 12, generator=draw)
    seen = torch.arange(12) < torch.tensor([[[5]], [[12]]])
    other = torch.where(seen[:, :, None], logits, 99.0)
    for name in RULES:
        assert torch.equal(counted(name, logits, seen), counted(name, other, seen)), name


def test_a_text_is_read_once_for_all_rules(model: Path) -> None:
    """`weights` is what policies measure, and each rule has a row for every query and a column for every layer."""
    engine = load(model, device="cpu")
    ids = engine.prompt_ids("What is 3 + 4?") * 3
    found = sparsities(engine.loaded, ids, 5)
    assert torch.equal(found["weights"], sparsity(engine.loaded, ids, 5))
    shape = (len(ids) - 5, engine.config.num_layers)
    for name, u in found.items():
        assert u.shape == shape, name
    assert not torch.equal(found["weights"], found["shares"])
    assert not torch.equal(found["scores"], found["weights"])


@pytest.fixture(scope="module")
def measured(model: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the command."""
    path = tmp_path_factory.mktemp("averaging") / "out.json"
    assert main(words_of("averaging", model, problems, num_layers=2, tau=4, output=path)) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_the_rule_that_is_here_calibrates_as_calibrate_thoughts_does(
    measured: dict[str, Any], model: Path, problems: Path, tmp_path: Path
) -> None:
    want = calibrate(model, problems, output=tmp_path, temperature=0, compare=0)
    found = measured["measurements"]["rules"]["weights"]
    for name in ("layers", "thresholds", "chosen", "fallback"):
        assert found[name] == want[name], name
    del want["measurements"]["eviction"]
    assert found["measurements"] == want["measurements"]


def test_the_other_rules_are_compared_with_it(measured: dict[str, Any]) -> None:
    assert measured["complete"]
    assert measured["command"].startswith("python -m minithink.calibrate averaging --model model")
    m = measured["measurements"]
    segments = m["rules"]["weights"]["measurements"]["keywords"]["segments"]
    assert list(m["types_beside_weights"]) == ["shares", "scores"]
    for of in m["types_beside_weights"].values():
        assert {of[how]["segments"] for how in ("own", "layers", "same")} == {segments}
        assert len(of["correlation_by_layer"]) == len(m["rules"]["weights"]["measurements"]["layers"])


def line(prompt: int, values: list[list[float]]) -> dict[str, Any]:
    """A text with these values at its refreshes, by segment and layer."""
    layers = [{"mean": 0.5, "sd": 0.1, "modes": [0.5], "valleys": [], "depths": []} for _ in values[0]]
    modes = {"1": [1 for _ in values[0]]}
    return {
        "prompt": prompt,
        "right": True,
        "tokens": [1] * len(values),
        "refresh": values,
        "labels": [0] * len(values),
        "layers": layers,
        "modes_by_rows": modes,
        "modes_of_noise": modes,
    }


def test_a_change_of_rule_is_told_from_a_change_of_scale() -> None:
    """Values that are half as large are in the same order: only with old thresholds do types change."""
    values = [[0.1 * i, 0.1 * i] for i in range(10)]
    halves = [[0.05 * i, 0.05 * i] for i in range(10)]
    found = concluded({"weights": [line(0, values)], "shares": [line(0, halves)]}, 2)["types_beside_weights"]
    assert found["shares"]["own"]["agree"] == 1
    assert found["shares"]["layers"]["agree"] == 1
    assert found["shares"]["same"]["agree"] < 0.7
    assert found["shares"]["correlation_by_layer"] == pytest.approx([1, 1])


def test_layers_that_another_rule_chooses_are_told_apart() -> None:
    """The second layer turns the order round; a rule that measures it types otherwise, and with the layers of
    `weights` it does not."""
    values = [[0.1 * i, 0.9 - 0.1 * i] for i in range(10)]
    usual = [line(0, values)]
    other = [line(0, values)]
    for one, layer in ((usual, 0), (other, 1)):
        one[0]["layers"][layer] |= {"modes": [0.1, 0.5, 0.9], "valleys": [0.3, 0.7], "depths": [0.5, 0.5]}
    found = concluded({"weights": usual, "shares": other}, 1)
    assert [found["rules"][name]["layers"] for name in ("weights", "shares")] == [[0], [1]]
    beside = found["types_beside_weights"]["shares"]
    assert beside["own"]["agree"] < 0.5
    assert beside["layers"]["agree"] > 0.7, "its thresholds are quantiles, and those of `weights` are valleys"
    assert beside["same"]["agree"] == 1


def test_layers_without_variation_correlate_with_nothing() -> None:
    rising = torch.linspace(0, 1, 5)
    level = torch.full((5,), 0.5)
    found = correlations(torch.stack((rising, level), 1), torch.stack((-rising, rising), 1))
    assert found == [pytest.approx(-1), None]
