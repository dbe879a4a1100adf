"""What the options of a policy mean, for --list-policies: the comments beside the fields of its class.

    budget: int | None = None  # tokens that a lane keeps
    # A longer comment stands in the lines above its field.
    alpha: int = 8

So a policy of your own explains its options in the same way. Options that many policies have mean the same in all.
"""

from __future__ import annotations

import inspect
import io
import re
import textwrap
import tokenize

SHARED = {
    "budget": "tokens that each KV head may keep, those of the prompt included",
    "schedule": "when to evict, and down to what: every, interval:N, sawtooth:GROW/KEEP, share:R/L",
    "protect_prompt": "never evict a token of the prompt",
    "exempt_answer": "evict only while the model thinks; the answer is kept beside the budget",
    "seed": "of the draws",
    "pooling": "what neighbouring scores become along the sequence: the largest of them, or their mean",
    "scope": "which lanes keep the same tokens: those of a head, a layer or a whole sequence",
}
LONG = 100  # characters: of a longer comment the first sentence is shown
_IGNORE = re.compile(r"type: ignore\[[^]]*\]\s*#?\s*")  # what a comment may tell a type checker
_FIELD = re.compile(r"    (\w+)\s*:")


def meanings(cls: type) -> dict[str, str]:
    """What the fields of a class and its parents mean, by name. A field without a comment has the meaning of
    `SHARED`; one that is not there either is left out."""
    found = dict(SHARED)
    for parent in reversed(cls.__mro__):
        if parent.__module__ != "builtins":
            found |= _comments(parent)
    return found


def _comments(cls: type) -> dict[str, str]:
    """The comments beside or above the fields that a class itself defines. None, if its source is not there."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return {}
    comments = {}  # number of a line → its comment
    for token in tokens:
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = _IGNORE.sub("", token.string.lstrip("# ")).strip()
    found = {}
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        field = _FIELD.match(line)
        if field is None:
            continue
        said = comments.get(number) or _above(number, lines, comments)
        if said:
            found[field[1]] = _first_sentence(said)
    return found


def _above(number: int, lines: list[str], comments: dict[int, str]) -> str:
    """The lines of comment directly above a line. A heading, such as "-- what others see", is none."""
    parts: list[str] = []
    above = number - 1
    while above in comments and lines[above - 1].lstrip().startswith("#") and not comments[above].startswith("--"):
        parts.insert(0, comments[above])
        above -= 1
    return " ".join(parts)


def _first_sentence(text: str) -> str:
    """What fits into a line of a list."""
    return text if len(text) <= LONG else text.partition(". ")[0]
