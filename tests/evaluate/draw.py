"""What the tests of the evaluation draw: records, and lists of them in which each sequence occurs once."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from minithink.evaluate.journal import Record, text_hash
from minithink.kv.byte_size import ByteSize

# A newline, a line separator, quotes, non-ASCII and a lone surrogate: whatever a text may hold stays on its line.
TEXTS = st.text(st.sampled_from('ab \n\r\u2028"\\é漢\ud800\x00'), max_size=12)


def record(**changes: Any) -> Record:
    """A record with nothing special about it."""
    values: dict[str, Any] = {
        "policy": "full",
        "budget": None,
        "id": "p0",
        "sample": 0,
        "group": "g",
        "right": True,
        "found": "3",
        "finish_reason": "stop",
        "prompt_tokens": 50,
        "generated_tokens": 100,
        "thinking_tokens": 90,
        "kv_bytes_peak": 2048,
        "kv_bytes_mean": 1024.0,
        "tokens_peak": 150.0,
        "tokens_mean": 100.0,
        "steps": 100,
        "evicting_steps": 0,
        "seconds": 0.5,
        "text_sha": text_hash("text"),
    }
    return Record(**{**values, **changes})


@st.composite
def records(draw: st.DrawFn, **fixed: Any) -> Record:
    """Any record; a field that is named here is what was given."""
    number = st.integers(0, 10**6)
    real = st.floats(0, 1e9) | number
    steps = draw(number)
    drawn = {
        "policy": draw(st.sampled_from(["full", "rkv:buffer=0", "a+b", "é"])),
        "budget": draw(st.none() | st.integers(1, 4096) | st.floats(0.01, 0.99) | st.just(ByteSize("2MiB"))),
        "id": draw(TEXTS),
        "sample": draw(st.integers(0, 3)),
        "group": draw(st.sampled_from(["", "long", "short"])),
        "right": draw(st.booleans()),
        "found": draw(st.none() | TEXTS),
        "finish_reason": draw(st.sampled_from(["stop", "length", "context"])),
        **{name: draw(number) for name in ("prompt_tokens", "generated_tokens", "thinking_tokens", "kv_bytes_peak")},
        **{name: draw(real) for name in ("kv_bytes_mean", "tokens_peak", "tokens_mean", "seconds")},
        "steps": steps,
        "evicting_steps": draw(st.integers(0, steps)),
        "text_sha": "ab",
        "text": draw(st.none() | TEXTS),
    }
    return Record(**{**drawn, **fixed})


def runs(**fixed: Any) -> st.SearchStrategy[list[Record]]:
    """Records of different sequences, few policies and problems, so that there is something to compare."""
    policies = st.sampled_from([("full", None), ("a", 8), ("a", 16), ("b", None)])
    one = st.tuples(st.sampled_from("pqrs"), policies).flatmap(
        lambda at: records(id=at[0], policy=at[1][0], budget=at[1][1], **fixed)
    )
    return st.lists(one, min_size=1, max_size=20, unique_by=lambda r: r.key)
