"""`bench hf` compares sides with the plain cache of the same environment, by policies of minithink or by kvpress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minithink.hf
from minithink.bench.__main__ import main
from minithink.bench.speed import inside
from tests.fixtures_checkpoint import write_checkpoint

pytest.importorskip("transformers", minversion="5.10")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", generation={}, shape={"head_dim": 16})


def measured(folder: Path, output: Path, *words: str) -> dict[str, Any]:
    """What a short run writes."""
    short = ["--prompt", "6", "--tokens", "32", "--batch", "2", "--turns", "2", "--budget", "28", "--interval", "4"]
    assert main(["hf", "--model", str(folder), "--output", str(output), *short, *words]) == 0
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def test_policies_beside_the_plain_cache(folder: Path, tmp_path: Path) -> None:
    result = measured(folder, tmp_path / "hf.json")
    rows = result["measurements"]
    assert [row["side"] for row in rows] == [
        "plain",
        "full",
        "keydiff:budget=28,schedule=interval:4",
        "knorm:budget=28,schedule=interval:4",
        "rkv:budget=28,buffer=4",
        "thinkv:types=1,budget=28",
    ]
    assert rows[0]["ratios"] == [1.0, 1.0]
    assert all(len(row["ratios"]) == 2 and row["tokens_per_second"] > 0 and row["batch"] == 2 for row in rows)
    assert all(row["peak_bytes"] is None for row in rows)
    assert result["complete"]
    assert result["settings"]["by"] == "minithink"


def test_each_policy_in_pages_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[str, bool]]()
    own = minithink.hf.cache

    def cache(model: Any, policy: str, *, max_length: int, pages: bool) -> Any:
        made.append((policy, pages))
        return own(model, policy, max_length=max_length, pages=pages)

    monkeypatch.setattr(minithink.hf, "cache", cache)
    result = measured(folder, tmp_path / "hf.json", "--policies", "rkv:budget=28", "full", "--pages")
    sides = [row["side"] for row in result["measurements"]]
    assert sides == ["plain", "rkv:budget=28", "rkv:budget=28, in pages", "full", "full, in pages"]
    assert made[:4] == [("rkv:budget=28", False), ("rkv:budget=28", True), ("full", False), ("full", True)]
    result = measured(folder, tmp_path / "pages.json", "--policies", "rkv:budget=28", "--pages", "only")
    assert [row["side"] for row in result["measurements"]] == ["plain", "rkv:budget=28, in pages"]


def test_scorers_of_kvpress_evict_around_generate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvpress itself needs an older transformers than the tests have."""
    inside_now = list[str]()
    generated = list[tuple[str, ...]]()

    class DecodingPress:
        def __init__(self, scorer: object, compression_interval: int, target_size: int) -> None:
            self.name = f"{scorer} each {compression_interval} to {target_size}"

        @contextmanager
        def __call__(self, model: object) -> Iterator[None]:
            inside_now.append(self.name)
            yield
            inside_now.remove(self.name)

    fake = SimpleNamespace(DecodingPress=DecodingPress, KnormPress=lambda: "norm", KeyDiffPress=lambda: "diff")
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2" if name == "kvpress" else "0")
    own = inside.Peer.generate

    def generate(self: Any, prompts: Any, tokens: int, *rest: Any, **options: Any) -> Any:
        generated.append(tuple(inside_now))
        return own(self, prompts, tokens, *rest, **options)

    monkeypatch.setattr(inside.Peer, "generate", generate)
    result = measured(folder, tmp_path / "hf.json", "--presses", "KnormPress", "KeyDiffPress")
    assert [row["side"] for row in result["measurements"]] == ["plain", "KnormPress", "KeyDiffPress"]
    assert result["settings"]["by"] == "kvpress 1.2"
    each = [(), ("norm each 4 to 28",), ("diff each 4 to 28",)]
    assert generated == [*each, *each, *reversed(each)]  # to warm up, then two turns


def test_what_kvpress_lacks_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(KnormPress=None, DecodingPress=None))
    assert main(["hf", "--model", str(folder), "--presses", "Knorm"]) == 1
    assert "kvpress has no 'Knorm'; did you mean KnormPress?" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "kvpress", None)
    assert main(["hf", "--model", str(folder), "--presses", "KnormPress"]) == 1
    assert "needs kvpress, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--policies", "rkv:budget=28"), ("--pages",)], ids=" ".join)
def test_presses_and_policies_are_measured_in_two_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: tuple[str, ...]
) -> None:
    fake = SimpleNamespace(KnormPress=None, DecodingPress=None)
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    assert main(["hf", "--model", str(folder), "--presses", "KnormPress", *words]) == 2
    assert f"without {words[0]}.\n" in capsys.readouterr().err


def test_a_ratio_is_of_turns_that_ran_side_by_side() -> None:
    row = inside.summary("x", 4, 100, [(1.0, 7), (2.0, 9), (8.0, 8)], [(2.0, None), (3.0, None), (4.0, None)])
    assert row["ratios"] == [2.0, 1.5, 0.5]
    assert row["ratio"] == 1.5
    assert row["tokens_per_second"] == 200.0
    assert row["peak_bytes"] == 9
    assert inside.line(row) == "x, batch 4: 200.0 tokens/s, 1.50 × plain (0.50 to 2.00), 0 MiB at most"
