"""Sentences of a token stream: a table of the vocabulary says where they end, and which hold a keyword.

SkipKV cuts a text into sentences. A sentence ends with each token whose bytes contain a line break; that token
belongs to the sentence which it ends. A sentence that contains `Wait`, `Alternatively` or `again` as a whole word is
a non-execution thought (§4.2, A.1).

The stream is read by an automaton over bytes, which is turned into a table over (state, token). So a step needs one
look into the table, on the device and without the host (`ref/sentences.py`). The states:

    OUTSIDE    the last byte belongs to no word
    INSIDE     the last bytes belong to a word that is no beginning of a keyword
    2, 3, …    the last bytes are a whole word so far: the first 1, 2, … letters of a keyword
    the last   the last byte is a line break, which belongs to no word either

So a blank line is found in the text, two breaks in a row, and not in a token: GPT-2's regex makes two tokens of it
where a word follows (`openings.py` has the same rule).

Letters, digits and `_` of ASCII make words, as `\\b` of a regular expression with re.ASCII has it. The byte behind a
keyword confirms it, so a keyword belongs to the sentence of the token with that byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

KEYWORDS = ("Wait", "Alternatively", "again")  # N of A.1
OUTSIDE, INSIDE = 0, 1
# A byte of the table: the next state in the low bits, and what the token does.
STATE, KEYWORD, BREAK, PARAGRAPH = 31, 32, 64, 128


@lru_cache(maxsize=2)
def table(vocabulary: tuple[bytes, ...], keywords: tuple[str, ...] = KEYWORDS) -> Tensor:
    """What each token does in each state.

    Args:
        vocabulary: the bytes of every token; b"" if an id has none.
        keywords: words of ASCII letters, of at most 29 different beginnings.

    Returns:
        uint8 [states, V]: STATE, the next state; KEYWORD, the token confirms a keyword; BREAK, it contains a line
        break; PARAGRAPH, with it a blank line ends (two breaks in a row, of which the first may stand before it).

    Raises:
        ValueError: the keywords have more than 29 different beginnings.
    """
    step, found = automaton(keywords)
    behind_break = len(step) - 1
    order = sorted(range(len(vocabulary)), key=lambda token: len(vocabulary[token]))
    longest = len(vocabulary[order[-1]]) if order else 0
    state = torch.arange(len(step), dtype=torch.uint8)[:, None].repeat(1, len(order))  # columns: short tokens first
    hit = torch.zeros_like(state, dtype=torch.bool)
    blank = torch.zeros_like(hit)
    first = 0  # tokens before this one are read in full
    for i in range(longest):
        while len(vocabulary[order[first]]) <= i:
            first += 1
        byte = torch.tensor([vocabulary[token][i] for token in order[first:]])
        before = state[:, first:].long()
        hit[:, first:] |= found[before, byte]
        blank[:, first:] |= (before == behind_break) & (byte == ord("\n"))
        state[:, first:] = step[before, byte]
    breaks = [BREAK * (b"\n" in token) for token in vocabulary]
    out = torch.empty_like(state)
    out[:, torch.tensor(order, dtype=torch.long)] = (state + KEYWORD * hit + PARAGRAPH * blank).to(torch.uint8)
    return out + torch.tensor(breaks, dtype=torch.uint8)


def automaton(keywords: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The automaton over bytes: the next state, uint8 [states, 256]; whether the byte confirms a keyword, bool
    [states, 256]. ValueError: the keywords have more than 29 different beginnings."""
    beginnings = set[str]()
    for word in keywords:
        beginnings |= {word[: n + 1] for n in range(len(word))}
    heads = ["", *sorted(beginnings)]
    number = {head: 0 if not head else i + 1 for i, head in enumerate(heads)}  # 1 is INSIDE
    states = len(heads) + 2
    if states > STATE + 1:
        raise ValueError(f"the keywords have {states - 3} different beginnings, and there is room for {STATE - 2}")
    step = torch.zeros(states, 256, dtype=torch.uint8)
    found = torch.zeros(states, 256, dtype=torch.bool)
    for byte in range(256):
        if re.match(rb"\w", bytes([byte])):  # bytes are matched by ASCII
            step[:, byte] = INSIDE
            for head, state in number.items():
                step[state, byte] = number.get(head + chr(byte), INSIDE)
        else:
            found[[number[word] for word in keywords], byte] = True
    behind_break = states - 1
    step[:, ord("\n")] = behind_break
    step[behind_break] = step[OUTSIDE]
    return step, found
