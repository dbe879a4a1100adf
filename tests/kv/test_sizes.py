"""Bits of a number over thought types. Alone: pytest tests/kv/test_sizes.py."""

from __future__ import annotations

import pytest

from minithink.kv.sizes import mean_bits
from minithink.policies import parse


@pytest.mark.parametrize(
    ("policy", "types", "bits"),
    [
        ("thinkv:budget=512", {"reasoning": 1, "execution": 1, "transition": 2}, 3),
        ("thinkv:budget=512", {"reasoning": 0.7, "transition": 0.3}, 3.4),
        ("tbq:precision=R8E8T2,v_precision=R4E4T4", {"reasoning": 1, "transition": 1}, (6 + 3) / 2),
        ("tbe:budget=512", {"reasoning": 1}, None),  # the model's own numbers
        ("thinkv:budget=512", {}, None),
    ],
)
def test_bits_follow_from_the_types(policy: str, types: dict[str, float], bits: float | None) -> None:
    assert mean_bits(parse(policy).storage, types) == (None if bits is None else pytest.approx(bits))


def test_a_type_that_is_not_stored_is_no_type_of_0_bits() -> None:
    with pytest.raises(KeyError, match="unknown"):
        mean_bits(parse("tbq").storage, {"unknown": 1, "reasoning": 1})
