"""What --list-policies says of options comes from the comments beside the fields. Alone: pytest
tests/policies/test_options.py"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import pytest

from minithink.policies import POLICIES
from minithink.policies.options import LONG, SHARED, meanings


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_is_explained_in_a_line(name: str) -> None:
    said = meanings(POLICIES[name])
    for field in fields(POLICIES[name]):  # type: ignore[arg-type]
        if field.init:
            meaning = said.get(field.name, "")
            assert 0 < len(meaning) <= 1.5 * LONG, (field.name, meaning)
            assert "type: ignore" not in meaning
            assert not meaning.startswith(("-", "#"))


@pytest.mark.parametrize("name", POLICIES)
def test_no_internal_name_explains_an_option(name: str) -> None:
    said = meanings(POLICIES[name])
    options = {field.name for field in fields(POLICIES[name]) if field.init}  # type: ignore[arg-type]
    for option in options:
        meaning = said[option]
        assert set(re.findall("`(.*?)`", meaning)) <= options, (option, meaning)
        assert not re.search(r"\.py|\bkv/|minithink|\bNone\b|\bself\b", meaning), (option, meaning)


@dataclass
class First:
    # -- options

    budget: int = 3  # tokens, and more
    alpha: float = 0.5
    # How a token is scored. This second sentence explains it at such a length that no line would hold it,
    # and goes on in the next line.
    score: str = "mean"
    seed: int = 0  # type: ignore[assignment]  # of a lot


@dataclass
class Second(First):
    """Its docstring has a line with a colon.

    alpha: is no field there
    """

    budget: int = 4  # tokens


def test_comments_beside_or_above_a_field_explain_it() -> None:
    first = meanings(First)
    assert first["budget"] == "tokens, and more"
    assert first["score"] == "How a token is scored"
    assert first["seed"] == "of a lot"
    assert "alpha" not in first
    assert first["schedule"] == SHARED["schedule"]
    assert meanings(Second) == {**first, "budget": "tokens"}


def test_a_class_without_a_source_explains_nothing() -> None:
    assert meanings(type("Third", (), {"__annotations__": {"budget": int}})) == SHARED
