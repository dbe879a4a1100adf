"""Counts of policies are added up by name, and said in words."""

from __future__ import annotations

from minithink.evaluate import counts


def test_sums_keep_zeros_and_every_name() -> None:
    assert counts.total([{"case_1": 0}, None, {"case_1": 0, "moved": 3}, {"moved": 4}]) == {"case_1": 0, "moved": 7}
    assert counts.total([None, {}]) is None


def test_words() -> None:
    assert counts.said({"case_1": 7, "sentences_evicted": 1200}) == "case 1: 7, sentences evicted: 1,200"
    assert counts.said(None) == counts.said({}) == "–"
