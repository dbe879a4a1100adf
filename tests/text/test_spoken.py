"""What differs of how a model was spoken to. Alone: pytest tests/text/test_spoken.py"""

from __future__ import annotations

from typing import Any

import pytest

from minithink.text.spoken import differences
from minithink.text.tags import THINK, Tags

OTHER = Tags("[THINK]", "[/THINK]")


@pytest.mark.parametrize("recorded", [{}, None, {"template": {}}, {"think_tags": ["<think>", "</think>"]}])
def test_what_was_not_given_was_at_its_default(recorded: Any) -> None:
    assert differences(recorded, {}, THINK) == ""


def test_what_was_given_alike_does_not_differ() -> None:
    recorded = {"template": {"b": [1], "a": False}, "think_tags": ["[THINK]", "[/THINK]"]}
    assert differences(recorded, {"a": False, "b": (1,)}, OTHER) == ""
    assert differences(recorded, None, OTHER) == "", "the variables are not known now"


def test_what_differs_is_named_then_and_now() -> None:
    assert differences({}, {"a": 1}, OTHER) == (
        "the chat template's variables {} (now {'a': 1}) and the tags of the thinking <think>,</think> (now "
        "[THINK],[/THINK])"
    )
    assert differences({"think_tags": 7}, {}, THINK) == "the tags of the thinking 7 (now <think>,</think>)"
    assert differences({"template": "\x1b"}, {}, THINK).isprintable()
