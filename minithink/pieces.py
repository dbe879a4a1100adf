"""How text is split into pieces, which merges never cross: the pre-tokenizers of tokenizer.json.

GPT-2's, Llama 3's and Qwen's patterns are taken as they are. Another regex is taken if it uses only what the regex
engines of Hugging Face and tiktoken read alike.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tiktoken

# Llama 3 keeps three digits together, Qwen one.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
WHOLE_TEXT = r"(?s:.+)"  # ByteLevel with use_regex=false and no Split before it
# A regex that both engines read alike.
_ESCAPE = r"\\(?:[pP]\{[LMNPSZ][a-z]?\}|[sSrnt]|[^\w\s])"
_PORTABLE = re.compile(
    rf"""(?:
        \(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)      # the contractions of Llama 3 and Qwen, the only flags
        | \\s\+\(\?!\\S\)                          # all spaces but the last, the only lookahead
        | \((?:\?:|(?!\?))                         # a group opens: no other kind than ( and (?:
        | \)
        | \|                                       # or
        | {_ESCAPE}                                # Unicode categories, white space, escaped punctuation
        | \[\^?(?:{_ESCAPE}|(?!--)[^\[\]\\&~])+\]  # a class, without set operations or classes in it
        | [^\\\[\](){{}}|?*+^$.]                   # a character that means itself
        | [?*+][?+]?(?![?*+])                      # a repetition: greedy, lazy or possessive
        | \{{\d+(?:,\d*)?\}}(?![?*+])              # a counted one, greedy
    )+""",
    re.VERBOSE,
)


class Unsupported(Exception):
    """Why a tokenizer.json cannot be used; `from_folder` puts the file's name in front."""


def new_encoding(pattern: str, ranks: dict[bytes, int] | None = None) -> tiktoken.Encoding:
    """tiktoken's encoder of pieces that match a pattern. ranks: token → rank; None: one per byte."""
    ranks = ranks or {bytes([b]): b for b in range(256)}
    return tiktoken.Encoding("minithink", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def read_pre_tokenizer(step: dict[str, Any] | None) -> tuple[str, bool]:
    """The regex whose matches are the pieces, and whether a text that begins without a space gets one.

    Args:
        step: the field `pre_tokenizer` of a tokenizer.json.

    Raises:
        Unsupported: pieces would differ from those of Hugging Face.
    """
    steps = [] if step is None else step["pretokenizers"] if step["type"] == "Sequence" else [step]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return GPT2_PATTERN if steps[0].get("use_regex", True) else WHOLE_TEXT, steps[0]["add_prefix_space"]
    if kinds != ["Split", "ByteLevel"]:
        raise Unsupported(
            f"the pre-tokenizer [{', '.join(kinds)}] is not supported: it must be [ByteLevel] or [Split, ByteLevel]."
        )
    split, level = steps
    pattern = split["pattern"].get("Regex")
    flags = (split["behavior"], split["invert"], level.get("use_regex", True), level["add_prefix_space"])
    if pattern is None or flags != ("Isolated", False, False, False):
        raise Unsupported(
            f"the pre-tokenizer {json.dumps(steps)[:500]} is not supported: Split must isolate a regex, ByteLevel "
            "neither split nor add a space."
        )
    if pattern in (GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN):
        return pattern, False
    try:
        matches_nothing = new_encoding(rf"\A-(?:{pattern})\z").encode_ordinary("-")
    except ValueError as error:
        raise Unsupported(f"the Split regex {pattern!r} does not compile ({error}).") from error
    if matches_nothing or not _PORTABLE.fullmatch(pattern):
        raise Unsupported(
            f"the Split regex {pattern!r} is not supported: tiktoken may not read it as Hugging Face does."
        )
    return rf"(?:{pattern})|(?:(?!{pattern})(?s:.))+", False  # text between two matches is a piece, too
