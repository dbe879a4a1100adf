"""A policy of a user's own with a wrong score. To run it alone: pytest tests/policies/test_scored.py"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from minithink.errors import UsageError
from minithink.policies.scored import Scored
from tests.policies.drive import follow


@dataclass
class Wrong(Scored):
    budget: int | None = 4
    name = "wrong"
    scope = "head"


SHAPE = r"it must give a float tensor of the shape \[B, Hkv, S\], here \[1, 2, \d+\]\."


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda pos: None, f"The policy wrong gives None in `score`: {SHAPE}"),
        (lambda pos: pos, rf"The policy wrong gives a int32 tensor of the shape \[1, 2, \d+\] in `score`: {SHAPE}"),
        (lambda pos: pos[0].float(), rf"gives a float32 tensor of the shape \[2, \d+\] in `score`: {SHAPE}"),
        (lambda pos: pos[..., :1].float(), rf"gives a float32 tensor of the shape \[1, 2, 1\] in `score`: {SHAPE}"),
    ],
)
def test_a_wrong_score_is_one_sentence(score: Any, said: str) -> None:
    class Given(Wrong):
        def score(self, step: Any, layer: int, choice: Any) -> Any:
            return score(step.pos(layer))

    with pytest.raises(UsageError, match=said):
        list(follow(Given(), [9], 3))


def test_wrong_scores_of_all_layers_are_one_sentence() -> None:
    class Given(Wrong):
        def scores(self, step: Any, choice: Any) -> Any:
            return torch.zeros(3)

    said = r"gives a float32 tensor of the shape \[3\] in `scores`: .* \[Lt, B, Ht, S\], here \[\d+, 1, 2, \d+\]\."
    with pytest.raises(UsageError, match=said):
        list(follow(Given(), [9], 3))


def test_a_missing_score_is_one_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"The policy wrong has no method `score\(self, step, layer, choice\)`: write"
    ):
        list(follow(Wrong(), [9], 3))
