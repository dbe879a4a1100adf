"""Expressions are compared by math-verify, and numbers in exact arithmetic. Alone:
pytest tests/evaluate/test_mathematics.py."""

from __future__ import annotations

import pytest

from minithink.evaluate import mathematics

pytest.importorskip("math_verify", reason="needs the extra math")


def test_the_right_answer_is_handed_over_first(monkeypatch):
    calls = []
    monkeypatch.setattr(mathematics, "_math_verify", lambda: (str, lambda gold, target: calls.append((gold, target))))
    mathematics.equal("8", "7")
    assert calls == [(r"\boxed{7}", r"\boxed{8}")]


def test_math_verify_compares_numbers_by_this_module(monkeypatch):
    """Its function is replaced; if a new version has another, this fails."""
    seen = []
    monkeypatch.setattr(mathematics, "_equal_numbers", lambda a, b: seen.append((a, b)))
    mathematics.equal("5+8", "7")
    assert seen


def test_a_reading_with_eulers_number_is_tried_as_well():
    assert mathematics.equal("2e-1", "-1+2e")
    assert mathematics.equal("2e-1", "0.2")
    assert not mathematics.equal("2e-1", "0.3")
