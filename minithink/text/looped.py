"""Texts that end in a loop: a piece written over and over. A larger limit of tokens would not have helped."""

from __future__ import annotations

from collections.abc import Sequence

TIMES = 3  # pieces in a row
LEAST = 48  # tokens of all pieces together: three short lines may be equal by chance
LONGEST = 512  # tokens of a piece


def looped(tokens: Sequence[int]) -> bool:
    """Whether a text ends in a piece of 1 to 512 tokens that it writes at least three times in a row, and in at least
    48 tokens. The last of them may be unfinished. Pieces that differ in one number are no loop.

    Args:
        tokens: all tokens of a text that did not end by itself.
    """
    for piece in range(1, min(LONGEST, len(tokens) // TIMES) + 1):
        length = max(TIMES * piece, LEAST)
        if length <= len(tokens) and tokens[-length + piece :] == tokens[-length:-piece]:
            return True
    return False
