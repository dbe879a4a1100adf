"""The README's table of policies. Alone: pytest tests/bench/tables/test_policies.py."""

from __future__ import annotations

import inspect
import re

import pytest

from minithink.bench.tables import policies
from minithink.policies import POLICIES, summary_of
from minithink.results import origin

OURS = [name for name, cls in POLICIES.items() if cls.__module__.startswith("minithink.")]
SUMMARIES = [policies.without_brackets(summary_of(POLICIES[name])) for name in OURS]


def test_every_policy_has_its_line_in_the_readme() -> None:
    """What `bench tables` writes between the two marks, in the order of `POLICIES`."""
    text = (origin.ROOT / "README.md").read_text("utf-8")
    _, _, rest = text.partition("<!-- table:policies -->\n")
    table, _, _ = rest.partition("\n<!-- end -->")
    assert table.split("\n") == policies.lines()
    assert re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE) == OURS


@pytest.mark.parametrize("name", OURS)
def test_a_line_has_at_most_ten_words(name: str) -> None:
    assert len(policies.words_of(name).split()) <= 10, "give the summary a shorter text in SHORTER"


def test_shorter_texts_stand_for_summaries_that_policies_have() -> None:
    for summary, text in policies.SHORTER.items():
        assert summary in SUMMARIES, "the summary has changed: change its shorter text, too"
        assert len(text.split()) < len(summary.split())


@pytest.mark.parametrize("name", OURS)
def test_the_paper_is_the_one_that_the_file_names(name: str) -> None:
    """A policy's module names its paper by its number at arXiv, or not at all."""
    said = re.search(r"arXiv (\d{4}\.\d{5})", inspect.getmodule(POLICIES[name]).__doc__ or "")
    if said is not None:
        assert policies.ORIGINS[name].paper == said[1]


def test_names_in_brackets_are_left_out() -> None:
    assert policies.without_brackets("keep all (of it) in 2 bits (KIVI)") == "keep all (of it) in 2 bits"
    assert policies.without_brackets("keep the last tokens") == "keep the last tokens"
