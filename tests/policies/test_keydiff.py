"""KeyDiff: the worked example, what is no key, and a running decoder.

To run it alone: pytest tests/policies/test_keydiff.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.policies.keydiff import KeyDiff
from tests.compare import assert_close
from tests.policies.by_rows import layer_scores, step_of
from tests.policies.drive import follow, held
from tests.policies.fixture import KEYS


def step(policy: KeyDiff, keys: Tensor, prompt: int = 1) -> Any:
    """The step of a lane that holds tokens with these keys, [S, D], and that saw no eviction before."""
    tokens = len(keys)
    shown = step_of(policy, prompt, tokens - prompt, range(tokens), [[0.0] * tokens])
    shown.keys = lambda layer, rows: keys[None, None]
    return shown


def kept(policy: KeyDiff, keys: Tensor, prompt: int = 1) -> list[int]:
    (edit,) = policy.decide(step(policy, keys, prompt))
    return [p for p, gone in enumerate(edit.drop.flatten().tolist()) if not gone]  # type: ignore[union-attr]


def test_worked_example() -> None:
    """The mean of the unit vectors is (0.225063, 0.431936)."""
    policy = KeyDiff(budget=4)
    score = layer_scores(policy, step(policy, KEYS))
    want = torch.tensor([-0.462090, -0.557198, -0.586555, -0.956801, 0.627039, -0.986720])
    assert_close("scores", score[0, 0], want, atol=1e-6)
    assert kept(policy, KEYS) == [0, 1, 2, 4]


def test_the_length_of_a_key_has_no_influence() -> None:
    lengths = torch.tensor([3.0, 0.1, 1.0, 20.0, 0.5, 2.0])
    policy = KeyDiff(budget=4)
    longer = layer_scores(policy, step(policy, KEYS * lengths[:, None]))
    assert_close("scores", longer, layer_scores(policy, step(policy, KEYS)), atol=1e-6)


def test_the_newest_tokens_stay_if_one_asks() -> None:
    assert kept(KeyDiff(budget=4, recent=1), KEYS) == [0, 1, 4, 5]


def test_a_protected_prompt_counts_in_the_mean() -> None:
    """The scores are those of the example; tokens 0 and 1 stay, and two of the others."""
    assert kept(KeyDiff(budget=4, protect_prompt=True), KEYS, prompt=2) == [0, 1, 2, 4]
    assert kept(KeyDiff(budget=4, protect_prompt=True), KEYS, prompt=4) == [0, 1, 2, 3]


def test_keys_of_zero_are_in_the_middle() -> None:
    """They have no direction, so their cosine is 0."""
    keys = torch.cat((KEYS[:5], torch.zeros(1, 2)))
    policy = KeyDiff(budget=4)
    score = layer_scores(policy, step(policy, keys))
    assert score[0, 0, 5] == 0
    assert score.isfinite().all()


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(UsageError, match="keydiff: recent is -1"):
        KeyDiff(budget=4, recent=-1)


def test_lanes_hold_as_many_tokens_as_they_may() -> None:
    for i, manager in enumerate(follow(KeyDiff(budget=9), [14, 3], 20)):
        for seq, prompt in ((0, 14), (1, 3)):
            assert {len(lane) for lane in held(manager, seq)} == {min(9, prompt + i)}
