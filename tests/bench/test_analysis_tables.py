"""Tables of analyses: every group has its row, and what was not measured is a dash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minithink import results
from minithink.bench import tables
from tests.bench.result import RESULT


def rows_of(folder: Path, name: str, settings: dict[str, Any], measurements: Any) -> list[str]:
    """The table, made of such a result."""
    result = {**RESULT, "benchmark": name, "settings": settings, "measurements": measurements}
    results.write(folder / f"{name}-facts.json", result)
    text = f"<!-- table:{name}-facts -->\n<!-- end -->"
    return [line for line in tables.fill(text, "x.md", folder).splitlines() if not line.startswith("<!--")]


def test_curves(tmp_path: Path) -> None:
    thinkv = {"thoughts": {"reasoning": 36, "transition": 1400}, "counts": {"case_1": 19, "case_2": 2610}}
    about = {"right": 0.25, "generated": 1174.8, "most_held": 2503, "evicting_steps": 0.028754}
    measured = [{"policy": "full", **about}, {"policy": "thinkv", **about, **thinkv}]
    rows = rows_of(tmp_path, "curve", {"limit": 8, "budget": 2048}, measured)
    assert rows[2] == "| `full` | 25% | 1,175 | 2,503 | 2.88% | – | – |"
    counted = "36 / 0 / 1,400 (3% / 0% / 97%) | case 1: 19, case 2: 2,610 |"
    assert rows[3] == f"| `thinkv` | 25% | 1,175 | 2,503 | 2.88% | {counted}"
    assert rows[5] == "8 validation problems, a budget of 2,048 tokens a lane."


def test_importance(tmp_path: Path) -> None:
    about = {"segments": 1200, "share": 0.5, "mean": 1.23456, "median": 0.5, "lower_quartile": 0.1}
    group = about | {"upper_quartile": 2.0, "largest": 31.25}
    groups = {"sparsity": [{"type": "reasoning", **group}], "keywords": [{"type": "transition", **group}]}
    measured = {"unanswered": 2, "texts": [{}, {}, {}], "by_type": {"suppressed": groups}}
    rows = rows_of(tmp_path, "importance", {"tau": 128}, measured)
    assert rows[2] == "| sparsity | reasoning | 1,200 | **1.23** | 0.5 | 0.1 to 2 | 31.2 |"
    assert rows[3].startswith("| keywords | transition |")
    assert rows[5] == "3 validation problems, 2 more came to no answer; segments of 128 tokens."


def test_association(tmp_path: Path) -> None:
    types = [{"earlier": "reasoning", "later": "transition", "pairs": 3, "mean": 0.01234}]
    since = [{"transitions": n, "pairs": 3, "mean": 0.5 / (n + 1)} for n in range(9)]
    measured = {"texts": [{}], "types": {"sparsity": types}, "transitions": {"sparsity": since}}
    rows = rows_of(tmp_path, "association", {"tau": 64}, measured)
    names = " | ".join(f"without an earlier {name}" for name in ("reasoning", "execution", "transition"))
    assert rows[0] == f"| types by | later segment | {names} |"
    assert rows[2:5] == [
        "| sparsity | reasoning | – | – | – |", "| sparsity | execution | – | – | – |",
        "| sparsity | transition | 0.0123 | – | – |",
    ]  # fmt: skip
    assert rows[6].endswith("by sparsity 0.5 with 0 in between, 0.25 with 1 in between, 0.167 with 2 in between, "
                            "0.125 with 3 in between.")  # fmt: skip
    assert rows[8] == "1 validation problems; segments of 64 tokens."
