"""The benchmarks of the paged store: what they count, and that they run end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minithink.bench import memory
from minithink.bench.__main__ import main
from minithink.bench.memory import KINDS, draw, text
from minithink.engine import load
from minithink.policies import POLICIES


def test_bytes_of_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bytes.json"
    names = ["full", "window:protect_prompt=true", "quant:fmt=int8", "window:schedule=sawtooth:40/10+quant:fmt=int8"]
    argv = ["--policies", ",".join(names), "--tokens", "60", "--prompt-tokens", "20"]
    assert main(["memory", *argv, "--budget", "30", "--output", str(out)]) == 0
    result = json.loads(out.read_text())
    full, window, quant, sawtooth = result["measurements"]
    assert result["complete"]
    assert [m["policy"] for m in result["measurements"]] == names
    assert [m["budget"] for m in result["measurements"]] == [None, 30, None, 40]
    assert [m["tokens_held"] for m in (full, window, quant)] == [60, 30, 60]
    assert full["peak"] == full["held"] < full["pool"]
    assert sawtooth["peak"] > sawtooth["held"], "it has just shrunk"
    assert full["kinds"]["payload"] == full["full"] == 2 * window["kinds"]["payload"] == 4 * quant["kinds"]["payload"]
    for m in result["measurements"]:
        assert sum(m["kinds"][kind] for kind in KINDS) == m["held"] <= m["peak"] <= m["pool"]
        assert m["share"] == pytest.approx(m["held"] / m["full"], rel=1e-3)
    said = capsys.readouterr().out
    assert "window:protect_prompt=true" in said
    assert f"{quant['share']:.1%} of full" in said


def test_every_policy_is_measured() -> None:
    """But for oracles, which are no methods."""
    methods = {name for name in POLICIES if not name.endswith("_oracle")}
    assert {name.partition(":")[0] for name in memory.POLICIES} == methods


def test_the_picture_names_every_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes").Axes
    barh, bars = axes.barh, []
    monkeypatch.setattr(axes, "barh", lambda *a, **k: bars.append((*a[1:], k["left"], k["label"])) or barh(*a, **k))
    row = {"kinds": dict.fromkeys(KINDS, 2**20)}
    result = {"measurements": [{"policy": name, **row} for name in ("one", "other")], "settings": {"tokens": 9}}
    draw(result, tmp_path / "bytes.svg")
    assert bars == [(["other", "one"], [1.0, 1.0], [i, i], kind) for i, kind in enumerate(KINDS)], "in MiB, stacked"
    first = (tmp_path / "bytes.svg").read_bytes()
    draw(result, tmp_path / "bytes.svg")
    assert (tmp_path / "bytes.svg").read_bytes() == first
    assert first.startswith(b"<?xml")


def test_the_text_is_the_same_every_time() -> None:
    engine = load(None)
    assert text(engine, 300) == text(engine, 300)
    assert len(text(engine, 300)) == 300


def test_both_caches_generate_the_same(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    argv = ["--batch", "2", "--prompt-tokens", "30", "--new-tokens", "12", "--repeats", "2", "--threads", "1"]
    assert main(["paged", *argv, "--output", str(out)]) == 0
    result = json.loads(out.read_text())
    [m] = result["measurements"]
    assert result["complete"]
    assert m["same_tokens"]
    assert len(m["ratios"]) == 2
    assert min(m["ratios"]) <= m["ratio"] <= max(m["ratios"])


def test_a_policy_is_told_what_was_calibrated(tmp_path: Path) -> None:
    out = tmp_path / "bytes.json"
    argv = ["--policies", "tbq:tau=16", "--tokens", "60", "--prompt-tokens", "20", "--output", str(out)]
    assert main(["memory", *argv]) == 0
    (m,) = json.loads(out.read_text())["measurements"]
    assert m["tokens_held"] == 60
    assert 0 < m["kinds"]["scales"] < m["held"] < m["full"]


@pytest.mark.parametrize("name", ["window:budget=30", "window:schedule=sawtooth:40/30"])
def test_a_policy_may_name_its_own_budget(name: str, tmp_path: Path) -> None:
    """The default --budget is for those that name none."""
    out = tmp_path / "bytes.json"
    argv = ["--policies", name, "--tokens", "60", "--prompt-tokens", "20", "--output", str(out)]
    assert main(["memory", *argv]) == 0
    (m,) = json.loads(out.read_text())["measurements"]
    assert m["budget"] in (30, 40)
    assert m["tokens_held"] < 41
