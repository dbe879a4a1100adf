"""The table of `bench hf` shows both libraries, each beside the plain cache of its own environment."""

from __future__ import annotations

from typing import Any

from minithink.bench.methods.inside import TABLES
from minithink.bench.tables.pages import lines_of


def test_both_libraries_have_rows() -> None:
    def result(by: str, version: str, *rows: dict[str, Any]) -> dict[str, Any]:
        settings = {"model": "m", "dtype": "bfloat16", "prompt": 256, "tokens": 1280, "turns": 2, "budget": 320}
        versions = {"torch": "2.11.0", "transformers": version}
        about = {
            "benchmark": "hf",
            "complete": True,
            "command": f"python {by}",
            "date": "2026-01-02",
            "commit": "c" * 40,
        }
        about |= {"machine": {"gpu": "A GPU"}, "versions": versions}
        return about | {"settings": settings | {"by": by, "interval": 32}, "measurements": [*rows]}

    plain = {"side": "plain", "batch": 8, "ratio": 1.0, "ratios": [1.0, 1.0]}
    policy = {"side": "rkv", "batch": 8, "ratio": 0.75, "ratios": [1.0, 0.5]}
    press = {"side": "KnormPress", "batch": 8, "ratio": 0.5, "ratios": [0.25, 0.75]}
    ours = result("minithink", "5.17.0", plain, policy)
    theirs = result("kvpress 0.5.5", "5.2.0", plain, press)
    lines = lines_of(TABLES["hf-cpu"], {"each": [ours, theirs]})
    assert lines[2:4] == [
        "| minithink | `rkv` | 8 | **0.75 ×** (0.50 to 1.00) |",
        "| kvpress 0.5.5 | `KnormPress` | 8 | **0.50 ×** (0.25 to 0.75) |",
    ]
    ours["measurements"][1]["peak_bytes"] = 3 * 2**20
    theirs["measurements"][1]["peak_bytes"] = 5 * 2**20
    lines = lines_of(TABLES["hf-cuda"], {"each": [ours, theirs]})
    assert lines[2] == "| minithink | `rkv` | 8 | **0.75 ×** (0.50 to 1.00) | 3 |"
    assert any("1,280 new ones, 2 turns" in line and "transformers 5.2.0 (kvpress 0.5.5)." in line for line in lines)
