"""DynTS's windows along a text: worked by hand, and the command from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    monkeypatch.setattr(selections, "families", lambda: ("facts",))
    assert __main__.main(["selections", "--limit", "1", "--output", str(path)]) == 0
    rows = {m["score"]: m for m in results.read(path)["measurements"]}
    assert rows["window"]["place"] > rows["lots"]["place"] > rows["hindsight"]["place"]
    assert rows["window"]["lines"] < rows["lots"]["lines"]
