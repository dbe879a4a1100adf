"""`bench caches` times each cache in turns. Alone: pytest tests/bench/speed/test_caches.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minithink.bench.__main__ import main


def test_each_cache_has_a_time(tmp_path: Path) -> None:
    path = tmp_path / "caches.json"
    words = ["--policies", "none", "window:budget=160", "--batch", "1", "--steps", "16", "--output", str(path)]
    assert main(["caches", *words]) == 0
    result = json.loads(path.read_text())
    assert result["complete"]
    found = {m["policy"]: m["ms"] for m in result["measurements"]}
    assert {policy: set(ms) for policy, ms in found.items()} == {
        "none": {"auto", "plain", "paged"},
        "window:budget=160": {"plain", "paged"},
    }
    assert all(ms > 0 for of in found.values() for ms in of.values())


def test_fewer_steps_than_a_turn_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "caches.json"
    assert main(["caches", "--steps", "15", "--output", str(path)]) == 2
    assert "--steps 15 is less than a turn of 16 steps: give 16 or more." in capsys.readouterr().err
    assert not path.exists()
