"""Sentences of a token stream: the table and the automaton say what plain text processing says."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.engine import TINY
from minithink.ref.sentences import sentences
from minithink.text import openings
from minithink.text.added_tokens import TokenFiles
from minithink.text.sentences import BREAK, KEYWORDS, PARAGRAPH, STATE, automaton, table
from minithink.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import train

PARTS = [
    *KEYWORDS,
    *(f" {word}" for word in KEYWORDS),
    "Waiting",
    "Against",
    "again",
    "wait",
    "Wait2",
    "_again",
    "éagain",
    "again’s",
    "—Wait—",
    "“Wait”",
    "Wai",
    "t",
    "W",
    "Alternative",
    "ly",
    "a",
    "gain",
    "\n",
    "\n\n",
    ".\n",
    ")\n\n",
    "?\n\n",
    ":\n",
    "\r\n",
    " \n ",
    "。\n",
    " ",
    ".",
    ",",
    "👍🏽",
    "我们",
    "\x85",
    "</think>",
    "x" * 20,
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=25).map("".join)


@cache
def tokenizer(kind: str) -> Tokenizer:
    """The embedded one, or a small one that splits text as other models do."""
    if kind == "tiny":
        return Tokenizer.from_folder(TINY)
    return Tokenizer(Path(kind), train(kind), TokenFiles({}, {}, {}), None)


@cache
def vocabulary(kind: str) -> tuple[bytes, ...]:
    own = tokenizer(kind)
    return tuple(own.token_bytes(id) for id in range(own.vocab_size + 2))  # some ids have no token


def streamed(pieces: list[bytes]) -> tuple[list[tuple[int, int]], list[bool]]:
    """Ranges [b, e] of the ended sentences of a stream whose tokens have these bytes, and which contain a keyword."""
    words = tuple(dict.fromkeys(pieces))
    return read([words.index(piece) for piece in pieces], words)


def read(ids: list[int], words: tuple[bytes, ...]) -> tuple[list[tuple[int, int]], list[bool]]:
    own, state = table(words), torch.zeros(3, 3, dtype=torch.int32)
    at, active = torch.tensor([2]), torch.ones(1, dtype=torch.bool)
    ranges, found, begin = [], [], 0
    for i, token in enumerate(ids):
        before = int(state[2, 2])
        if sentences(torch.tensor([token]), at, active, own, state):
            ranges.append((begin, i))
            found.append(int(state[2, 2]) > before)
            begin = i + 1
    assert not state[:2].any(), "rows that were not read"
    return ranges, found


def plainly(pieces: list[bytes]) -> tuple[list[tuple[int, int]], list[bool]]:
    """The same from the text alone: where its line breaks are, and its keywords by a regular expression."""
    text, owner = b"".join(pieces), [i for i, piece in enumerate(pieces) for _ in piece]
    ends = sorted({owner[m.start()] for m in re.finditer(rb"\n", text)})
    # the byte behind a keyword says to which token it belongs
    words = rb"\b(?:%s)\b" % "|".join(KEYWORDS).encode()
    hits = {owner[m.end()] for m in re.finditer(words, text) if m.end() < len(text)}
    ranges = list(zip([0, *(e + 1 for e in ends)], ends, strict=False))
    return ranges, [any(b <= i <= e for i in hits) for b, e in ranges]


@pytest.mark.parametrize("kind", ["tiny", "gpt2", "llama3", "qwen"])
@given(text=TEXTS)
def test_the_stream_says_what_the_text_says(kind: str, text: str) -> None:
    own = tokenizer(kind)
    ids = own.encode(text)
    assert read(ids, vocabulary(kind)) == plainly([own.token_bytes(id) for id in ids])


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=30))
def test_tokens_may_be_cut_anywhere(text: str, cuts: list[int]) -> None:
    """Within a character, within a keyword, behind a line break; some tokens are empty."""
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert streamed(pieces) == plainly(pieces)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=30))
def test_a_blank_line_is_found_in_the_text_wherever_tokens_are_cut(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert paragraphs(pieces) == [b"\n\n" in data[max(a - 1, 0) : b] and b > a for a, b in pairwise(edges)]


def paragraphs(pieces: list[bytes]) -> list[bool]:
    """With which tokens of a stream a blank line ends, as the table says it."""
    words = tuple(dict.fromkeys(pieces))
    own = table(words)
    state = torch.zeros(1, 3, dtype=torch.int32)
    out = []
    for piece in pieces:
        token = words.index(piece)
        out.append(bool(own[state[0, 0], token] & PARAGRAPH))
        sentences(torch.tensor([token]), torch.tensor([0]), torch.tensor([True]), own, state)
    return out


@pytest.mark.parametrize("kind", ["tiny", "gpt2", "llama3", "qwen"])
def test_blank_lines_open_the_thoughts_that_calibration_finds(kind: str) -> None:
    """GPT-2's regex makes two tokens of a blank line in front of a word. A vector is added at the last token of each
    blank line, whose state is what calibration reads."""
    own = tokenizer(kind)
    text = "Alpha is left.\n\nWait, no.\nSo what?\n\nAgain:\n\n\nYes.\n \nNo.\n"
    ids = own.encode(text)
    ends = paragraphs([own.token_bytes(id) for id in ids])
    lines = openings.sentences([own.decode([id]) for id in ids])
    thoughts = [line for line in lines if line.opens]
    assert len(thoughts) == 3
    assert all(ends[thought.start - 1] for thought in thoughts)
    extra = [i for i, end in enumerate(ends) if end and i + 1 not in {line.start for line in thoughts}]
    assert len(extra) <= 1, "the second of three breaks in a row, if each of them is a token"


def test_worked_example_1() -> None:
    words = [
        "So",
        " x",
        "=2",
        ".\n",
        "Wait",
        ",",
        " again",
        "?\n\n",
        "Waiting",
        " (ok",
        ")\n",
        "\n",
        "Against",
        " it",
        ".",
        " 2",
        ":\n",
        "Alternatively",
        " y",
    ]
    ranges, found = streamed([word.encode() for word in words])
    assert ranges == [(0, 3), (4, 7), (8, 10), (11, 11), (12, 16)]
    assert found == [False, True, False, False, False], "Wait and again are one sentence; the open one does not count"
    ranges, found = streamed([word.encode() for word in (*words, "\n")])
    assert ranges[5:] == [(17, 19)]
    assert sum(found) == 2, "the open one counts when it closes"
    assert sum(word.strip() in KEYWORDS for word in words) == 3, "a counter of keywords says 3"
    whole = [i for i, word in enumerate(words) if word in ("\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n")]
    assert whole == [3, 10, 11], "D on whole tokens misses the ends of two sentences"


def test_what_a_token_does_by_itself() -> None:
    own = table((b"", b"\n", b"a\n\nb", b"\n \n", b"again"))
    assert [bool(x & BREAK) for x in own[0].tolist()] == [False, True, True, True, False]
    assert [bool(x & PARAGRAPH) for x in own[0].tolist()] == [False, False, True, False, False]
    assert own[:, 0].tolist() == list(range(len(own))), "an id without a token changes nothing"


def test_a_token_that_the_table_lacks_changes_nothing() -> None:
    state = torch.tensor([[5, 1, 2]], dtype=torch.int32)
    for token in (-1, 2):
        ends = sentences(torch.tensor([token]), torch.tensor([0]), torch.tensor([True]), table((b"x", b"\n")), state)
        assert not ends
        assert state.tolist() == [[5, 1, 2]]


def test_keywords_must_fit_into_a_byte_of_the_table() -> None:
    assert len(automaton(KEYWORDS)[0]) == 25
    assert len(automaton(["abcdefghijklmnopqrstuvwxyzabc"])[0]) == STATE + 1, "29 beginnings fit"
    with pytest.raises(ValueError, match="31 different beginnings"):
        automaton(["abcdefghijklmnopqrstuvwxyzabcde"])
    with pytest.raises(ValueError, match=f"32 different beginnings, and there is room for {STATE - 2}"):
        automaton(["abcdefghijklmnopqrstuvwxyzabcdef"])
