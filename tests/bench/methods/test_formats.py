"""Tables of number formats and of bits, of constructed results (pytest tests/bench/methods/test_formats.py)."""

from __future__ import annotations

from typing import Any

from minithink.bench.methods.formats import TABLES
from minithink.bench.tables.pages import lines_of


def head(benchmark: str) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "complete": True,
        "command": f"python -m minithink.analysis {benchmark}",
        "commit": "0" * 40,
        "date": "2026-01-02T00:00:00Z",
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"torch": "2.0"},
        "checkpoint": "abc",
    }


def errors(name: str, scale: str | None, error: float, by_token: bool) -> dict[str, Any]:
    """Attention's output has twice the error."""
    both = {"error": error, "output": 2 * error, "layers": {"error": [error] * 3}}
    row = {"format": name, "scale": scale, "bits": 2.5, "keys": both, "values": both}
    row["both"] = {"output": 2 * error}
    if by_token:
        row |= {"keys by token": {"error": error / 2, "output": error}, "both, keys by token": {"output": 4 * error}}
    return row


def test_the_least_error_comes_first() -> None:
    result = head("formats") | {
        "settings": {"model": "tiny", "queries": 7},
        "measurements": {
            "texts": [{"tokens": 600}, {"tokens": 500}],
            "formats": [
                errors("ternary:group=16", "largest", 0.25, by_token=True),
                errors("tq2", None, 0.125, by_token=False),
            ],
        },
    }
    lines = lines_of(TABLES["embedded-formats"], result)
    assert lines[2] == "| `tq2` | – | 2.5 | 12.50% | – | 12.50% | 25.00% | – | 25.00% | 25.00% | – |"
    assert lines[3].startswith("| `ternary` | largest | 2.5 | 25.00% | 12.50% | 25.00% | 50.00% | 25.00% | 50.00% |")
    assert lines[3].endswith("| 50.00% | 100.00% |")
    said = "\n".join(lines)
    assert "tiny `abc`: 2 reference traces of 1,100 tokens together, mean over 3 layers." in said
    assert "what attention gives 7 queries of a trace" in said


def test_the_papers_bits_stand_below_those_measured() -> None:
    segments = {"reasoning": 1, "execution": 2, "transition": 1}
    row = {"policy": "tbq", "right": 1, "tokens": 1234.4, "held": 99.0, "codes": 3.75, "scales": 0.5}
    result = head("bits") | {
        "settings": {"model": "tiny"},
        "measurements": [row | {"written": 3.5, "segments": segments, "texts": [{"codes": 4.0}, {"codes": 3.5}]}],
    }
    lines = lines_of(TABLES["embedded-bits"], result)
    assert lines[2] == "| `tbq` | – | 1 | 1,234 | 99 | 50% / 25% / 25% | **3.50** | **3.75** | 3.50 to 4.00 | 4.25 |"
    assert lines[3].startswith("| the paper, §6.2, figure 8: ")
    assert "| **3.4** | – | – |" in lines[3]
    assert "tiny `abc`, 2 validation problems" in "\n".join(lines)


def test_bits_follow_from_a_calibration() -> None:
    def calibration(checkpoint: str, transition: float, under: float) -> dict[str, Any]:
        def shares(share: float) -> dict[str, float]:
            return {"transition": share, "execution": 0.25, "reasoning": 0.75 - share}

        return head("thoughts") | {
            "settings": {"checkpoint": checkpoint, "policy": "thinkv", "budget": 1512},
            "measurements": {
                "prompts": 60,
                "shares_of_types": shares(transition),
                "eviction": {"prompts": 4, "shares_of_types": shares(under)},
            },
        }

    each = [calibration("abc", 0.25, 0.0), calibration("def", 0.5, 0.25)]
    lines = lines_of(TABLES["thinkv-types-bits"], {"each": each})
    assert lines[2:6] == [
        "| tiny `abc` | full, 60 texts | 25% / 50% / 25% | **3.50** |",
        "|  | `thinkv` at 1,512, 4 texts | 25% / 75% / 0% | **4.00** |",
        "| smollm2-think `def` | full, 60 texts | 25% / 25% / 50% | **3.00** |",
        "|  | `thinkv` at 1,512, 4 texts | 25% / 50% / 25% | **3.50** |",
    ]
