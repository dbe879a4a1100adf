"""Tables of docs/backbone.md. Alone: pytest tests/bench/methods/test_backbone.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minithink.bench.methods.backbone import LAYERS, TABLES
from minithink.bench.tables.pages import fill, lines_of
from minithink.results import record


def head(benchmark: str, model: str, checkpoint: str) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "complete": True,
        "command": f"python -m minithink {benchmark} {model}",
        "date": "2026-11-27T00:00:00Z",
        "commit": "c" * 40,
        "machine": {"cpu": "Some CPU", "cores": 2},
        "versions": {"torch": "2.0"},
        "checkpoint": checkpoint,
        "settings": {"model": model},
    }


def attention(model: str, checkpoint: str, share: float) -> dict[str, Any]:
    """A model with two layers of two heads; the second layer has twice the first one's shares."""
    sinks = []
    sparsity = []
    for layer in (0, 1):
        own = share * (layer + 1)
        sinks.append({"layer": layer, "first_token": [own, own / 2], "first_four": [own] * 2, "next_four": [0.0] * 2})
        sparsity.append(
            {
                "layer": layer,
                "mean": 0.25 + layer / 2,
                "sd": 0.1,
                "modes": [1, 3][: layer + 1] * 2,
                "modes_by_chance": [1, 1, 3, 1],
            }
        )
    needs = {"family": "all", "needs": 30, "in_question": 10, "back": {"0.5": 5, "0.9": 60, "0.99": 1200}}
    overall = {"first_token": share, "first_four": share, "next_four": 0.0}
    return head("attention", model, checkpoint) | {
        "measurements": {
            "texts": [{}] * 4,
            "sinks": {"mean": overall, "chance": {**overall, "first_token": 0.002}, "layers": sinks},
            "sparsity": {
                "layers": sparsity,
                "kinds": [{"kind": "execution", "layer": 1, "mean": 0.5}],
                "separability": {"auc": [{"kinds": ["reasoning", "execution"], "layer": 1, "auc": 0.75}]},
            },
            "needs": [{**needs, "within": {"64": 0.9, "256": 0.95, "1024": 0.98}}],
        }
    }


def loss(model: str, checkpoint: str, above: float) -> dict[str, Any]:
    result = head("loss", model, checkpoint)
    result["settings"] |= {"texts": {"a": "1", "b": "2"}, "length": 960}
    spread = {"texts": 2, "loss": 0.05 + above, "mean": above, "low": above / 2, "high": 2 * above}
    full = {"policy": "full", "budget": None, "loss": 0.05, "above": None}
    return result | {
        "measurements": [full, {"policy": "window", "budget": 0.25, "loss": 0.05 + above, "above": spread}]
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results = {
        "backbone-attention": attention("think", "abc", 0.4),
        "embedded-attention": attention("tiny", "def", 0.003),
        "backbone-loss": loss("think", "abc", 0.5),
        "embedded-loss": loss("tiny", "def", 0.25),
    }
    for name, result in results.items():
        record.write(tmp_path / f"{name}.json", result)
    return tmp_path


def test_two_models_stand_side_by_side_with_their_hashes(folder: Path) -> None:
    page = fill("<!-- table:backbone -->\n<!-- end -->", "backbone.md", folder)
    for line in (
        "|  | think `abc` | tiny `def` |",
        "| layers × query heads | 2 × 2 | 2 × 2 |",
        "| attention on the first token | **40.0%** | **0.3%** |",
        "| heads that give the first token more than half | **1** of 4 | **0** of 4 |",
        "| sparsity, least and most of a layer | 0.25, 0.75 | 0.25, 0.75 |",
        "| traces with three modes of sparsity, in the best layer | **2 of 4 (layer 1)** | **2 of 4 (layer 1)** |",
        "| likewise of noise, in the best layer | 1 of 4 (layer 0) | 1 of 4 (layer 0) |",
        "| reasoning or execution: AUC | 0.75 (layer 1) | 0.75 (layer 1) |",
        "| loss with the full cache, nats a token | 0.0500 | 0.0500 |",
        "| loss above that, `window` at 25 % | **+0.5000 (+0.2500 to +1.0000)** | **+0.2500 (+0.1250 to +0.5000)** |",
    ):
        assert line in page.splitlines(), line


def test_every_result_that_a_table_shows_is_named_below_it(folder: Path) -> None:
    page = fill("<!-- table:backbone -->\nold\n<!-- end -->\nrest", "backbone.md", folder, folder.parent)
    assert "old" not in page
    sources = [line for line in page.splitlines() if line.startswith("*Some CPU")]
    names = ["backbone-attention", "embedded-attention", "backbone-loss", "embedded-loss"]
    assert [line.rpartition(" ")[2] for line in sources] == [f"[{n}.json]({folder.name}/{n}.json)" for n in names]
    assert "`python -m minithink loss tiny`" in sources[-1]
    assert page.endswith(f"{sources[-1]}\n<!-- end -->\nrest")
    assert fill(page, "backbone.md", folder, folder.parent) == page


def test_needs_and_layers(folder: Path) -> None:
    page = fill("<!-- table:backbone-needs -->\n<!-- end -->", "backbone.md", folder)
    assert "| think `abc` | all | 30 | 5, 60, 1,200 | 90%, 95%, 98% | 25% of all |" in page.splitlines()
    lines = lines_of(LAYERS, attention("think", "abc", 0.4))
    assert lines[2] == "| 0 | **30.0%** | 20.0% to 40.0% | 40.0% | 0.0% | 0.25 ± 0.10 | – | – | – | 0 | 1 |"
    assert lines[3] == "| 1 | **60.0%** | 40.0% to 80.0% | 80.0% | 0.0% | 0.75 ± 0.10 | – | 0.50 | – | 2 | 1 |"


def test_the_tables_are_there() -> None:
    assert set(TABLES) == {
        "backbone",
        "backbone-needs",
        "backbone-centers",
        "backbone-thoughts",
        "backbone-predictor",
        "loss-speed",
        "backbone-answers",
        "backbone-attention",
        "embedded-attention",
    }


def test_centers_of_queries_a_row_for_each_model() -> None:
    def of(checkpoint: str, close: float) -> dict[str, Any]:
        result = head("centers", "x", checkpoint)
        medians = {"median": [0.5, 0.25], "median_of_strongest": [0.75, 1.0]}
        return result | {"measurements": {"tokens": 1234, **medians, "close": close, "close_of_strongest": 2 * close}}

    lines = lines_of(TABLES["backbone-centers"], {"each": [of("abc", 0.25), of("def", 0.125), of("ghi", 0.5)]})
    assert lines[2:5] == [
        "| smollm2-think `abc` | 0.25 to 0.50 | 25.0% | 0.75 to 1.00 | **50.0%** |",
        "| tiny `def` | 0.25 to 0.50 | 12.5% | 0.75 to 1.00 | **25.0%** |",
        "| tiny-control `ghi` | 0.25 to 0.50 | 50.0% | 0.75 to 1.00 | **100.0%** |",
    ]
    assert sum("python -m minithink centers" in line for line in lines) == 3


def test_thoughts_a_row_for_each_model() -> None:
    def of(checkpoint: str, kappa: float) -> dict[str, Any]:
        table = [[15, 5, 0], [5, 15, 0], [0, 0, 0]]  # V: 0.5
        keywords = {"segments": 1234, "agree": 0.25, "kappa": kappa, "majority": 0.5, "confusion": table}
        modes = {"share_by_rows": {"1": [0.25, 0.5], "4": [1.0]}, "share_of_noise": {"1": [0.125, 0.0], "4": [1.0]}}
        return head("thoughts", "x", checkpoint) | {"measurements": {"prompts": 7, "keywords": keywords, **modes}}

    lines = lines_of(TABLES["backbone-thoughts"], {"each": [of("abc", -0.25), of("def", 0.5), of("ghi", 0)]})
    assert lines[2:5] == [
        "| smollm2-think `abc` | 2 | **50%** | 12% | 1,234 | 25% | **-0.25** | 0.50 | 50% |",
        "| tiny `def` | 2 | **50%** | 12% | 1,234 | 25% | **0.50** | 0.50 | 50% |",
        "| tiny-control `ghi` | 2 | **50%** | 12% | 1,234 | 25% | **0.00** | 0.50 | 50% |",
    ]


def test_the_predictor_by_texts_that_it_has_learned_from_and_then_by_family() -> None:
    def row(learned: int, dataset: str, top: float) -> dict[str, Any]:
        position = {"tau": 0.25, "top_30": 0.5}
        return {
            "trained_traces": learned,
            "dataset": dataset,
            "traces": 8,
            "tau": 0.5,
            "top_30": top,
            "position": position,
        }

    rows = [row(90, "all", 0.75), row(90, "facts", 0.25), row(40, "all", 0.5), row(40, "facts", 0.0)]
    lines = lines_of(TABLES["backbone-predictor"], head("predictor", "x", "abc") | {"measurements": rows})
    assert lines[2:5] == [
        "| 40 texts | all: 8 texts | 0.50 | 0.25 | **50%** | 50% |",
        "| 90 texts | all: 8 texts | 0.50 | 0.25 | **75%** | 50% |",
        "| 90 texts | facts: 8 texts | 0.50 | 0.25 | **25%** | 50% |",
    ]
    assert lines[5] == ""


def test_loss_speed_compares_seconds_with_the_full_cache() -> None:
    above = {"texts": 2, "loss": 3.5, "mean": 0.5, "low": 0.25, "high": 0.75}
    row = {"texts": 2, "tokens": 3000, "kv_bytes_mean": 1e6}
    rows = [
        {**row, "policy": "full", "budget": None, "above": None, "tokens_per_second": 600.0},
        {**row, "policy": "thinkv", "budget": 0.25, "above": above, "tokens_per_second": 200.0},
    ]
    result = head("loss", "backbone", "b" * 16) | {"measurements": rows}
    result["settings"]["length"] = 1536
    lines = lines_of(TABLES["loss-speed"], result)
    assert "| `full` | – | **5.0** | 1.0 × | 1,000,000 | – |" in lines
    assert "| `thinkv` | 25 % | **15.0** | 3.0 × | 1,000,000 | +0.5000 (+0.2500 to +0.7500) |" in lines
    assert any(line.startswith("backbone, 2 texts of 1,536 tokens, read together") for line in lines)


def test_losses_of_answers_are_those_above_the_full_cache() -> None:
    above = {"texts": 2, "loss": 0.75, "mean": 0.5, "low": 0.25, "high": 0.75}
    rows = [
        {"policy": "full", "budget": None, "above": None, "texts": 2, "tokens": 30, "loss": 0.25},
        {"policy": "h2o", "budget": 0.25, "above": above, "tokens_mean": 400.4, "kv_bytes_mean": 1e6},
    ]
    result = head("loss", "backbone", "b" * 16) | {"measurements": rows}
    lines = lines_of(TABLES["backbone-answers"], result)
    assert lines[2] == "| `h2o` | 25 % | **+0.5000 (+0.2500 to +0.7500)** | 400 | 1,000,000 |"
    assert any(line.startswith("2 reference traces, 30 tokens of answers. With the full cache") for line in lines)
