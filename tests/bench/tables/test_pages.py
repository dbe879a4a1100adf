"""Tables in documents."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minithink.bench import methods
from minithink.bench.__main__ import main
from minithink.bench.methods import Table, collected, kernels
from minithink.bench.tables import pages
from minithink.bench.tables.markdown import cell
from minithink.errors import MinithinkError
from minithink.results import origin, record
from minithink.tasks import families

ABOUT: dict[str, Any] = {
    "benchmark": "decode",
    "complete": True,
    "command": "python -m minithink.bench decode",
    "date": "2031-02-03T04:05:06Z",
    "commit": "0123456789abcdef",
    "embedded_model": "00",
    "machine": {"cpu": "Some CPU", "cores": 2},
    "versions": {"torch": "2.9", "transformers": "5.1"},
}
CPU = ABOUT | {
    "settings": {"threads": 2},
    "measurements": [
        {
            "shape": "embedded",
            "dtype": "float32",
            "batch": 8,
            "prompt_tokens": 200,
            "new_tokens": 512,
            "ours": {"tokens_per_second": 1234.5},
            "peer": {"tokens_per_second": 600.0},
            "ratio": 2.0575,
            "ratios": [2.0575, 1.987, 2.25],
            "decode_ratio": 2.25,
        },
        {
            "shape": "embedded",
            "dtype": "float32",
            "batch": 1,
            "prompt_tokens": 200,
            "new_tokens": 512,
            "ours": {"tokens_per_second": 200.0},
        },
    ],
}
GPU = ABOUT | {
    "complete": False,
    "machine": {"cpu": "Some CPU", "cores": 2, "gpu": "Some GPU"},
    "measurements": [
        {
            "shape": "llama-8b",
            "dtype": "bfloat16",
            "batch": 1,
            "context": 2048,
            "ours": {"tokens_per_second": 100.0, "share_of_limit": 0.456},
            "peer": {"tokens_per_second": 50.0},
            "ratio": 2.0,
        },
    ],
}
APPEND = ABOUT | {
    "benchmark": "append",
    "measurements": [
        {
            "batch": 64,
            "length": 1024,
            "format": "nvfp4",
            "append_microseconds": 2.25,
            "buffer_microseconds": 0.0,
            "attention_microseconds": 53.04,
            "share": 0.0424,
        },
    ],
}
MARGINS = ABOUT | {
    "benchmark": "margins",
    "settings": {"batch_size": [1, 8], "dtype": "float32"},
    "measurements": [
        {
            "sequences": 8,
            "draws": 7901,
            "limit": 1e-5,
            "near": 1,
            "smallest_margin": 2.34e-6,
            "unexplained": 0,
            "parted": [{"number": 3, "batch_size": 8, "token": 5, "margin": 2.34e-6}],
        },
    ],
}
DOCUMENT = """# Title

`<!-- table:nonsense -->` within a line is no marker.

<!-- table:decode-cpu -->
old
<!-- end -->
between
<!-- table:append -->
<!-- end -->

after
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, result in {"decode-cpu": CPU, "decode-gpu": GPU, "append": APPEND}.items():
        record.write(tmp_path / origin.RESULTS / f"{name}.json", result)
    (tmp_path / "README.md").write_text(DOCUMENT)
    (tmp_path / "docs" / "speed.md").write_text("<!-- table:decode-gpu -->\n<!-- end -->")
    return tmp_path


def test_tables_are_filled_in_and_then_up_to_date(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", "--check", "--root", str(root)]) == 1
    assert "README.md, docs/speed.md" in capsys.readouterr().err
    assert (root / "README.md").read_text() == DOCUMENT, "a check changes nothing"

    assert main(["tables", "--root", str(root)]) == 0
    assert (
        (root / "README.md").read_text()
        == """# Title

`<!-- table:nonsense -->` within a line is no marker.

<!-- table:decode-cpu -->
| model | batch | minithink | transformers | ratio | decoding alone |
| --- | ---: | ---: | ---: | ---: | ---: |
| embedded, float32, 200 + 512 tokens | 8 | 1,234 tok/s | 600 tok/s | **2.06 ×** (1.99 to 2.25) | 2.25 × |
| embedded, float32, 200 + 512 tokens | 1 | 200 tok/s | – | – | – |

*Some CPU, 2 threads; torch 2.9, transformers 5.1; measured at commit 0123456789 (2031-02-03): \
`python -m minithink.bench decode`.* [decode-cpu.json](docs/results/decode-cpu.json)
<!-- end -->
between
<!-- table:append -->
| sequences | tokens of each | format | append | buffer's share | attention | of attention's time |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| 64 | 1,024 | nvfp4 | 2.2 µs | 0.0 µs | 53.0 µs | **4.2%** |

*Some CPU; torch 2.9; measured at commit 0123456789 (2031-02-03): \
`python -m minithink.bench decode`.* [append.json](docs/results/append.json)
<!-- end -->

after
"""
    )
    speed = (root / "docs" / "speed.md").read_text()
    model = "llama-8b (random weights), bfloat16, 2,048 tokens held"
    assert f"| {model} | 1 | 100 tok/s | 50 tok/s | **2.00 ×** | 45.6% / – |" in speed
    assert "*Some GPU;" in speed
    assert "The run was not complete.* [decode-gpu.json](results/decode-gpu.json)" in speed
    assert main(["tables", "--check", "--root", str(root)]) == 0


def test_a_new_result_makes_a_document_stale(root: Path) -> None:
    assert main(["tables", "--root", str(root)]) == 0
    record.write(root / origin.RESULTS / "append.json", APPEND | {"commit": "unknown"})
    assert main(["tables", "--check", "--root", str(root)]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:speed -->\n<!-- end -->", "x.md:1 wants the table 'speed'"),
        ("\n<!-- table:append -->\n", "x.md:2 begins a table, and no line"),
        ("<!-- table:append -->\n<!-- table:append -->\n<!-- end -->", "x.md:1 .* the next begins"),
    ],
)
def test_wrong_markers_are_named(root: Path, text: str, message: str) -> None:
    with pytest.raises(MinithinkError, match=message):
        pages.fill(text, "x.md", root / origin.RESULTS)


def test_a_missing_result_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / origin.RESULTS / "append.json").unlink()
    assert main(["tables", "--root", str(root)]) == 1
    assert "append.json does not exist" in capsys.readouterr().err
    assert main(["tables", "--root", str(root / "nowhere")]) == 2


def test_every_family_has_its_tables(root: Path) -> None:
    """Under the names by which results are written; a table whose result is missing matters only to a document that
    names it."""
    assert {f"importance-{family}" for family in families()} <= pages.TABLES.keys()
    assert main(["tables", "--root", str(root)]) == 0
    assert not (root / origin.RESULTS / "importance-search.json").exists()


def test_the_embedded_model_is_held_against_the_bandwidth_of_the_same_run(root: Path) -> None:
    side = {"tokens_per_second": 90.0, "decode_tokens_per_second": 100.0}
    embedded = {
        "shape": "embedded",
        "dtype": "bfloat16",
        "batch": 2,
        "prompt_tokens": 100,
        "new_tokens": 200,
        "ours": side,
        "peer": side,
        "ratio": 1.0,
        "decode_ratio": 1.0,
    }
    # 8,279,296 weights of 2 bytes, and 2 sequences of 200 tokens on average at 8,192 bytes; a step takes 20 ms.
    bandwidth = (2 * 8_279_296 + 2 * 200 * 8192) / 0.020 / 0.25
    row = GPU["measurements"][0] | {"copy_bytes_per_second": bandwidth}
    record.write(root / origin.RESULTS / "decode-gpu.json", GPU | {"measurements": [embedded, row]})
    assert main(["tables", "--root", str(root)]) == 0
    assert "| 25.0% / 25.0% |" in (root / "docs" / "speed.md").read_text()


def test_a_calibration_is_read_beside_the_model(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agree = {"segments": 1200, "agree": 0.4, "kappa": -0.05, "majority": 0.5}
    shares = {"transition": 0.3, "execution": 0.36, "reasoning": 0.34}
    look = {"mean": 0.5, "sd": 0.125, "keywords": agree}
    result = ABOUT | {
        "benchmark": "thoughts",
        "layers": [1],
        "thresholds": [0.6111, 0.7],
        "chosen": "fallback",
        "settings": {"policy": "thinkv", "budget": 1024},
        "measurements": {
            "prompts": 60,
            "right": 0.9,
            "tokens": 61000,
            "shares_of_types": shares,
            "keywords": agree,
            "shares_of_keywords": {"transition": 0, "execution": 0.5, "reasoning": 0.5},
            "correlation_with_position": 0.617,
            "layers": [look | {"layer": 0}, look | {"layer": 1}],
            "share_by_rows": {"1": [0.1, 0], "16": [0.5, 1]},
            "eviction": {"prompts": 4, "shares_of_types": shares, **agree, "agree": 0.8},
        },
    }
    record.write(tmp_path / "thoughts.json", result)
    for name in ("thoughts", "thresholds"):
        table = replace(pages.TABLES[name], shipped=(tmp_path / "thoughts.json",))
        monkeypatch.setitem(pages.TABLES, name, table)
    text = "".join(f"<!-- table:{name} -->\n<!-- end -->\n" for name in ("thoughts", "thresholds"))
    lines = pages.fill(text, "x.md", root / origin.RESULTS).split("\n")
    assert "| layer | sparsity | 3 modes, 1 row | 3 modes, 16 rows | agrees with keywords | κ |" in lines
    assert "| 0 | 0.50 ± 0.12 | 10% | 50% | 40% | -0.05 |" in lines
    assert "| **1** | 0.50 ± 0.12 | 0% | 100% | 40% | -0.05 |" in lines
    same = "36% / 34% / 30% | 1,200 |"
    assert f"| **the file (fallback)** | keywords | 0.611, 0.700 | {same} 40% | -0.05 | 50% |" in lines
    assert not any("layers 1 (" in line for line in lines), "the file's own"
    assert f"| the full cache, 4 texts | `thinkv` at 1,024 | 0.611, 0.700 | {same} 80% | -0.05 | 50% |" in lines
    assert (
        "60 problems, 90% right, 61,000 tokens. By keywords, segments are 50% / 50% / 0% (E / R / T). A segment's "
        "sparsity and its number correlate: 0.62." in lines
    )


def test_an_appendix_is_filled_in_and_links_its_result(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may have the name of its page. Other folders of docs/ have no tables."""
    appendix = root / "docs" / "appendix" / "speed.md"
    tutorial = root / "docs" / "tutorials" / "speed.md"
    marker = "<!-- table:decode-gpu -->\n<!-- end -->"
    for page in (appendix, tutorial):
        page.parent.mkdir()
        page.write_text(marker)
    assert main(["tables", "--root", str(root)]) == 0
    assert "[decode-gpu.json](../results/decode-gpu.json)" in appendix.read_text()
    assert "[decode-gpu.json](results/decode-gpu.json)" in (root / "docs" / "speed.md").read_text()
    assert tutorial.read_text() == marker
    appendix.write_text("<!-- table:decode-gpu -->")
    assert main(["tables", "--check", "--root", str(root)]) == 1
    assert "docs/appendix/speed.md:1 begins a table" in capsys.readouterr().err


def test_near_ties_are_said() -> None:
    lines = pages.lines_of(pages.TABLES["margins"], MARGINS)
    assert lines[0] == (
        "8 sequences of the full cache in batches of 1 and 8 (float32): of 7,901 draws 1 had a margin below 1e-05 "
        "(smallest: 2.3e-06); 1 sequence differs, 0 of them at a larger margin."
    )


ROWS = [{"name": "a", "of": {"x": 1234.5}, "share": 0.05}, {"name": "b", "of": {}, "share": None, "low": 0.5}]


@pytest.mark.parametrize(
    ("field", "fmt", "cells"),
    [
        ("of.x", "{:,.0f} tok/s", ["1,234 tok/s", "–"]),
        ("share", "{:pct}", ["5.0%", "–"]),
        (("name", "low"), "`{}`[ ({:.0%})]", ["`a`", "`b` (50%)"]),
        (("low", "name"), "[{:.0%} ]{}", ["a", "50% b"]),
        (lambda m: m["of"].get("x"), "{:us}", ["1,234 µs", "–"]),
        (lambda m: (m["name"], m.get("low")), "{}[/{}]", ["a", "b/0.5"]),
        ("nothing.there", "{}", ["–", "–"]),
    ],
)
def test_a_cell_is_a_field_and_a_format(field: Any, fmt: str, cells: list[str]) -> None:
    """What is in brackets is dropped without its value; elsewhere a missing value makes a dash."""
    assert [cell(row, field, fmt) for row in ROWS] == cells


def test_columns_without_a_figure_are_left_out_where_they_may_be() -> None:
    columns = ("name", "name", "{}"), ("share?", "share", "{:.0%}"), ("gone?", "gone", "{}"), ("low", "no", "{}")
    table = Table(columns)
    assert pages.cells(table, ROWS) == [("name", "share", "low"), ("a", "5%", "–"), ("b", "–", "–")]


def test_answers_that_are_read_anew_have_columns_if_they_were_measured() -> None:
    rows = [{"way": way, "percent": 30, "right": 0.98, "right_anew": 0.4} for way in ("top", "random")]
    result = ABOUT | {"settings": {"limit": 64, "family": "facts", "pareto": 5}, "measurements": {"pareto": rows}}
    found = pages.lines_of(pages.TABLES["pareto-facts"], result)
    first = "thinking tokens that stay"
    assert found[0] == f"| {first} | top: right | top: read anew | random: right | random: read anew |"
    assert found[2] == "| 30 % | 98% | 40% | 98% | 40% |"
    assert "Read anew: the tokens that stay are a new prompt." in found[4]
    old = [{name: value for name, value in m.items() if name != "right_anew"} for m in rows]
    found = pages.lines_of(pages.TABLES["pareto-facts"], result | {"measurements": {"pareto": old}})
    assert found[:3:2] == [f"| {first} | top: right | random: right |", "| 30 % | 98% | 98% |"]
    assert found[4] == "64 problems of `facts`, each answered 5 times."


def test_values_across_have_columns_of_their_own() -> None:
    """In the order in which they come; the last columns stand behind them, and what is not there is a dash."""
    rows = [{"n": n, "at": at, "x": n * 10 + at, "sum": 7} for n, at in ((1, 2), (2, 2), (2, 5))]
    table = Table(
        (("n", "n", "{}"),),
        across="at",
        cells=(("{}", "x", "{}"), ("twice", lambda m: 2 * m["x"], "{}")),
        titles={2: "two"},
        last=(("sum", "sum", "{}"),),
    )
    assert pages.cells(table, rows) == [
        ("n", "two", "twice", "5", "twice", "sum"),
        ("1", "12", "24", "–", "–", "7"),
        ("2", "22", "44", "25", "50", "7"),
    ]


def test_budgets_have_their_columns_in_order() -> None:
    rows = [{"n": 1, "budget": 0.25, "x": 1}, {"n": 2, "budget": 0.125, "x": 2}, {"n": 2, "budget": 0.5, "x": 3}]
    table = Table((("n", "n", "{}"),), across="budget", cells=(("{:share}", "x", "{}"),))
    assert pages.cells(table, rows) == [
        ("n", "12.5 %", "25 %", "50 %"),
        ("1", "–", "1", "–"),
        ("2", "2", "–", "3"),
    ]


def test_every_table_has_an_engine_and_no_name_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {f"sweep-{name}" for name, one in collected("SWEEPS").items() if not one.losses}
    assert answers <= pages.TABLES.keys()
    assert "sweep-transfer-losses" not in pages.TABLES
    monkeypatch.setattr(methods, "modules", lambda: [kernels, kernels])
    with pytest.raises(ValueError, match="TABLES has attention twice"):
        collected("TABLES")


def test_speeds_that_sentences_repeat_stand_in_a_table() -> None:
    """Ratios in the README and in docs/speed.md, which has the tables."""
    readme = (origin.ROOT / "README.md").read_text("utf-8")
    parts = re.split(r"<!-- (?:table:\S+|end) -->", (origin.ROOT / "docs" / "speed.md").read_text("utf-8"))
    said = "\n".join([readme, *parts[::2]])
    shown = "\n".join(parts[1::2])
    for text in (readme, said):
        ratios = re.findall(r"(\d+\.\d+) ×", text)
        assert len(ratios) >= 4
        for ratio in ratios:
            assert f"{ratio} ×" in shown, ratio
