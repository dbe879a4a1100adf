"""DynTS's windows along a text: worked by hand, and the command from end to end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minithink import results
from minithink.analysis import __main__, selections
from minithink.analysis.selections import selected


class Nothing:
    """A text of which no token is needed, but the first."""

    def add(self, token: int) -> None:
        pass

    def live(self) -> tuple[list[int], list[int]]:
        return [3], []


def test_windows_by_hand() -> None:
    """10 tokens beside a prompt of 3: a local window of 4, of 6 others 1 stays, so triggers are 5 apart."""
    scores = {"some": [5, 9, 1, 2, 9, 0, 1, 10, 3, 3, 3, 3, 3, 3, 3], "window": range(15), "needs_oracle": range(15)}
    found = selected(scores, Nothing(), 3, range(15), 10)
    assert found["some"] == [([1], 6, 9), ([7], 11, 14)], "of equal scores the older"
    assert found["window"] == [([5], 6, 9), ([10], 11, 14)]
    assert found["needs_oracle"] == [([0], 6, 9), ([0], 11, 14)], "position 3 is the first token behind the prompt"


def test_measures_of_what_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two triggers at tokens 9 and 14: their selections' places, what stays, digits, lines."""
    after = [([0, 3], 6, 9), ([3, 7], 11, 14)]
    pieces = ["1", "b", "c\n", "4", "d", "e\n", "f", "g", *"hijklmno"]
    engine = SimpleNamespace(
        calibration=lambda name: {"weights": []}, tokenizer=SimpleNamespace(pieces=lambda tokens: pieces)
    )
    scores = {"answer": torch.zeros(15), "hindsight": torch.zeros(15)}
    monkeypatch.setattr(selections, "importance", lambda *args: (torch.zeros(15, 4), scores))
    monkeypatch.setattr(selections, "predict", lambda hidden, weights: torch.zeros(15))
    monkeypatch.setattr(selections, "followers", lambda engine: lambda prompt: None)
    monkeypatch.setattr(selections, "selected", lambda scores, *rest: dict.fromkeys(scores, after))
    found = selections.measured(engine, [1], list(range(16)), 10)  # type: ignore[arg-type]
    assert set(found) == {"answer", "hindsight", "true hindsight", "lots", "needs_oracle", "window"}
    places = (0 / 9 + 3 / 9 + 3 / 14 + 7 / 14) / 4
    want = {"place": places, "stays": 1 / 2, "numbers": 3 / 4, "lines": 2.0}
    assert {name: pytest.approx(x) for name, x in want.items()} == found["lots"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    monkeypatch.setattr(selections, "families", lambda: ("facts",))
    assert __main__.main(["selections", "--limit", "1", "--output", str(path)]) == 0
    rows = {m["score"]: m for m in results.read(path)["measurements"]}
    assert rows["window"]["place"] > rows["lots"]["place"] > rows["hindsight"]["place"]
    assert rows["window"]["lines"] < rows["lots"]["lines"]
