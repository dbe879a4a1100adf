"""How text is split into pieces, which merges never cross: the normalizers and pre-tokenizers of tokenizer.json.

A pre-tokenizer is a sequence of steps. Each takes every piece by itself and splits it further, so that no step sees
across the pieces of the step before. ByteLevel, one of the steps, spells bytes as symbols (`bpe.py`).

Regular expressions are matched with the package `regex`. Hugging Face uses Oniguruma, so a regex is taken only if
both engines read it alike.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import regex

from minithink.errors import MinithinkError, quoted
from minithink.text.bpe import Unsupported, spelled

# Llama 3 keeps three digits together, Qwen one.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")

# Unicode's White_Space; str.strip() without an argument takes four control characters more.
WHITE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
# A character of a word, as Hugging Face means it with \w where it does not use Oniguruma.
WORD = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]"

# What counts as punctuation to Hugging Face: ASCII's, and that of Unicode 8. These characters came later.
_NEWER_PUNCTUATION = (
    "\u061d\u09fd\u0a76\u0c77\u0c84\u1b4e-\u1b4f\u1b7d-\u1b7f\u2e43-\u2e4f\u2e52-\u2e5d\u2e60-\u2e63"
    "\U00010d6e\U00010ead\U00010ed0\U00010f55-\U00010f59\U00010f86-\U00010f89\U000113d4-\U000113d5"
    "\U000113d7-\U000113d8\U0001144b-\U0001144f\U0001145a-\U0001145b\U0001145d\U00011660-\U0001166c"
    "\U000116b9\U0001183b\U00011944-\U00011946\U000119e2\U00011a3f-\U00011a46\U00011a9a-\U00011a9c"
    "\U00011a9e-\U00011aa2\U00011b00-\U00011b09\U00011be1\U00011c41-\U00011c45\U00011c70-\U00011c71"
    "\U00011ef7-\U00011ef8\U00011f43-\U00011f4f\U00011fff\U00012ff1-\U00012ff2\U00016d6d-\U00016d6f"
    "\U00016e97-\U00016e9a\U00016fe2\U0001e5ff\U0001e95e-\U0001e95f"
)
PUNCTUATION = rf"(?![{_NEWER_PUNCTUATION}])[\p{{P}}$+<=>^`|~\u166d\U000111c9]"

# A text may take this long to be split. A regex that backtracks without end ends here.
SECONDS = 10.0
CHARACTERS_A_SECOND = 100_000  # and a second more for so many characters

# The parts of a regex that both engines read alike.
_ESCAPE = r"\\(?:[pP]\{[LMNPSZ][a-z]?\}|[sSrntdD]|[^\w\s])"
_PORTABLE = regex.compile(
    rf"""
        \(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)      # the contractions of Llama 3 and Qwen, the only flags
        | \\s\+\(\?!\\S\)                          # all spaces but the last, the only lookahead
        | \((?:\?:|(?!\?))                         # a group opens: no other kind than ( and (?:
        | \)
        | \|                                       # or
        | {_ESCAPE}                                # Unicode categories, white space, escaped punctuation
        | \[\^?(?:{_ESCAPE}|(?!--|&&|\|\||~~)[^\[\]\\])+\]  # a class, without set operations or classes in it
        | [^\\\[\](){{}}|?*+^$.]                   # a character that means itself
        | [?*+][?+]?(?![?*+])                      # a repetition: greedy, lazy or possessive
        | \{{\d+(?:,\d*)?\}}(?![?*+])              # a counted one, greedy
    """,
    regex.VERBOSE,
)
_BEHAVIORS = ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")
_NESTING = 32  # sequences inside of sequences


# Regular expressions ---------------------------------------------------------------------------------------------


class Pattern:
    """A regex that tells the parts of a text that it matches from those between them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._regex = regex.compile(f"({source})")

    def parts(self, text: str, deadline: float) -> list[str]:
        """The parts of a text in order, in turn not matched and matched; those not matched can be empty.

        Raises:
            TimeoutError: it takes until `deadline`, a time of `time.monotonic`.
        """
        seconds = max(deadline - time.monotonic(), 0.001)
        return self._regex.split(text, timeout=seconds)


def read_pattern(pattern: Any) -> Pattern:
    """A pattern as tokenizer.json gives it: {"Regex": …} or {"String": …}."""
    if not isinstance(pattern, dict) or len(pattern) != 1:
        raise Unsupported(f"the pattern {quoted(pattern)} is neither a Regex nor a String.")
    [(kind, source)] = pattern.items()
    if kind not in ("Regex", "String") or not isinstance(source, str):
        raise Unsupported(f"the pattern {quoted(pattern)} is neither a Regex nor a String.")
    if kind == "String":
        if not source:
            raise Unsupported("a pattern is the empty text, which is found everywhere.")
        return Pattern(regex.escape(source))
    if source in (GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN):
        return Pattern(source)
    return Pattern(_translated(source))


def _translated(source: str) -> str:
    """A regex of Hugging Face for the package `regex`, with groups that capture nothing."""
    try:
        matches_nothing = regex.fullmatch(source, "")
    except (regex.error, RecursionError, OverflowError) as error:
        raise Unsupported(f"the Split regex {quoted(source)} does not compile ({quoted(str(error))}).") from None
    tokens: list[str] = []
    done = 0
    while match := _PORTABLE.match(source, done):
        tokens.append("(?:" if match[0] == "(" else match[0])
        done = match.end()
    if matches_nothing or done < len(source):
        raise Unsupported(
            f"the Split regex {quoted(source)} is not supported: Hugging Face may read it in another way."
        )
    return "".join(tokens)


# Steps -----------------------------------------------------------------------------------------------------------


class Step(Protocol):
    """A step of a pre-tokenizer."""

    def pieces(self, text: str, deadline: float) -> list[str]:
        """The pieces of one piece, in order; none is empty. TimeoutError: it takes until `deadline`."""


@dataclass(frozen=True)
class Split:
    """Split where a pattern matches."""

    pattern: Pattern
    behavior: str = "Isolated"
    invert: bool = False  # whether "matched" means what the pattern does not match

    def pieces(self, text: str, deadline: float) -> list[str]:
        parts = self.pattern.parts(text, deadline)
        if self.behavior == "Isolated":
            return [part for part in parts if part]
        if self.behavior == "Removed":
            kept = parts[1::2] if self.invert else parts[::2]
            return [part for part in kept if part]
        flagged: list[tuple[str, bool]] = []
        for n, part in enumerate(parts):
            if part:
                flagged.append((part, (n % 2 == 1) != self.invert))
        if self.behavior == "Contiguous":
            runs = groupby(flagged, key=itemgetter(1))
            return ["".join(part for part, _ in run) for _, run in runs]
        if self.behavior == "MergedWithPrevious":
            return ["".join(group) for group in _groups(flagged)]
        backwards = _groups(reversed(flagged))
        return ["".join(reversed(group)) for group in reversed(backwards)]


def _groups(parts: Iterable[tuple[str, bool]]) -> list[list[str]]:
    """Put every matched part into the group of the part before it, unless that part is matched, too."""
    groups: list[list[str]] = []
    after_match = False
    for part, matched in parts:
        if matched and not after_match and groups:
            groups[-1].append(part)
        else:
            groups.append([part])
        after_match = matched
    return groups


@dataclass(frozen=True)
class ByteLevel:
    """Put a space before a piece that begins with none, split by GPT-2's pattern, and spell bytes as symbols."""

    prefix_space: bool
    split: Split | None
    spells: bool

    def pieces(self, text: str, deadline: float) -> list[str]:
        if self.prefix_space and not text.startswith(" "):
            text = " " + text
        pieces = [text]
        if self.split is not None:
            pieces = self.split.pieces(text, deadline)
        if self.spells:
            pieces = [spelled(piece) for piece in pieces]
        return pieces


class PreTokenizer:
    """Splits text into pieces; `read_pre_tokenizer` makes one."""

    def __init__(self, steps: list[Step], ends_spelled: bool) -> None:
        self.steps = steps
        self._ends_spelled = ends_spelled

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text, which `word` makes words of.

        Raises:
            MinithinkError: a regex takes too long.
        """
        limit = SECONDS + len(text) / CHARACTERS_A_SECOND
        deadline = time.monotonic() + limit
        pieces = [text]
        try:
            for step in self.steps:
                coarse = pieces
                pieces = []
                for piece in coarse:
                    pieces += step.pieces(piece, deadline)
        except TimeoutError:
            raise MinithinkError(
                f"the tokenizer's regex did not split a text of {len(text):,} characters within {limit:.0f} seconds: "
                "its time grows too fast with this text, so shorten it or use another tokenizer.json."
            ) from None
        return pieces

    def word(self, piece: str) -> str:
        """A piece as symbols. Words are spelled last, so that a cache of words spares most of the work."""
        return piece if self._ends_spelled else spelled(piece)


def read_pre_tokenizer(spec: Any) -> PreTokenizer:
    """Read the field `pre_tokenizer` of a tokenizer.json.

    Raises:
        Unsupported: pieces would differ from those of Hugging Face.
    """
    specs = list(flattened(spec, "pretokenizers", "pre-tokenizer"))
    kinds = [spec["type"] for spec in specs]
    if "ByteLevel" not in kinds:
        listed = quoted(kinds)
        raise Unsupported(f"the pre-tokenizer {listed} is not supported: ByteLevel must be among its steps.")
    ends_spelled = kinds[-1] != "ByteLevel"
    steps: list[Step] = []
    for n, spec in enumerate(specs):
        is_last = n == len(specs) - 1
        step = _read_step(spec, spells=not is_last)
        if step != ByteLevel(False, None, False):  # which would leave the piece as it is
            steps.append(step)
    return PreTokenizer(steps, ends_spelled)


def _read_step(spec: dict[str, Any], spells: bool) -> Step:
    kind = spec["type"]
    if kind == "ByteLevel":
        split = Split(Pattern(GPT2_PATTERN)) if flag(spec, "use_regex", True) else None
        return ByteLevel(flag(spec, "add_prefix_space"), split, spells)
    if kind == "Digits":
        one_by_one = flag(spec, "individual_digits")
        return Split(Pattern(r"\p{N}" if one_by_one else r"\p{N}+"))
    if kind == "Whitespace":
        return Split(Pattern(rf"{WORD}+|[^\s{WORD[1:]}+"), "Removed", invert=True)
    if kind == "WhitespaceSplit":
        return Split(Pattern(r"\s+"), "Removed")
    if kind == "CharDelimiterSplit":
        return Split(read_pattern({"String": spec.get("delimiter")}), "Removed")
    if kind == "Punctuation":
        return Split(Pattern(PUNCTUATION), _read_behavior(spec.get("behavior", "Isolated")))
    if kind == "Split":
        behavior = _read_behavior(spec.get("behavior"))
        return Split(read_pattern(spec.get("pattern")), behavior, flag(spec, "invert", False))
    raise Unsupported(
        f"the pre-tokenizer {quoted(kind)} is not supported: the steps that are read are ByteLevel, Split, Digits, "
        "Punctuation, Whitespace, WhitespaceSplit, CharDelimiterSplit and sequences of them."
    )


def _read_behavior(behavior: Any) -> str:
    if behavior not in _BEHAVIORS:
        raise Unsupported(f"the behavior of a split is {quoted(behavior)}: it must be {', '.join(_BEHAVIORS)}.")
    return behavior


# What is done to a text before it is split -----------------------------------------------------------------------

Normalizer = Callable[[str], str]


def read_normalizer(spec: Any) -> Normalizer:
    """Read the field `normalizer` of a tokenizer.json. Raises Unsupported: it cannot be done exactly."""
    steps = [_read_normalizer_step(step) for step in flattened(spec, "normalizers", "normalizer")]
    if len(steps) == 1:
        return steps[0]

    def normalize(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return normalize


def _read_normalizer_step(spec: dict[str, Any]) -> Normalizer:
    kind = spec["type"]
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return lambda text: unicodedata.normalize(kind, text)
    if kind == "Lowercase":
        return lambda text: "".join(map(str.lower, text))  # one by one: Σ becomes σ at the end of a word, too
    if kind == "Prepend":
        prefix = text_in(spec, "prepend")
        if not prefix:
            # tokenizers then loses count of the characters: a later step repeats one of them, or panics.
            raise Unsupported("prepend is the empty text, with which Hugging Face damages texts: remove this step.")
        return lambda text: text and prefix + text
    if kind == "Strip":
        return _strip(flag(spec, "strip_left"), flag(spec, "strip_right"))
    if kind == "Replace":
        return _replace(read_pattern(spec.get("pattern")), text_in(spec, "content"))
    raise Unsupported(
        f"the normalizer {quoted(kind)} is not supported: those that are read are NFC, NFD, NFKC, NFKD, Lowercase, "
        "Prepend, Strip, Replace and sequences of them."
    )


def _strip(left: bool, right: bool) -> Normalizer:
    def strip(text: str) -> str:
        if left:
            text = text.lstrip(WHITE)
        if right:
            text = text.rstrip(WHITE)
        return text

    return strip


def _replace(pattern: Pattern, content: str) -> Normalizer:
    def replace(text: str) -> str:
        limit = SECONDS + len(text) / CHARACTERS_A_SECOND
        try:
            parts = pattern.parts(text, time.monotonic() + limit)
        except TimeoutError:
            raise MinithinkError(
                f"the tokenizer's normalizer did not read a text of {len(text):,} characters within {limit:.0f} "
                "seconds: shorten the text or use another tokenizer.json."
            ) from None
        return content.join(parts[::2])

    return replace


# Fields ----------------------------------------------------------------------------------------------------------


def flattened(spec: Any, field: str, what: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The steps of a field that holds nothing, one step, or a Sequence of steps, which may be sequences, too.

    Args:
        spec: the value of the field.
        field: the name under which a Sequence holds its steps.
        what: of the field, for messages.
    """
    if spec is None and depth == 0:
        return
    if not isinstance(spec, dict) or not isinstance(spec.get("type"), str):
        raise Unsupported(f"the {what} has the step {quoted(spec)}, which is not an object with a type.")
    if spec["type"] != "Sequence":
        yield spec
        return
    steps = spec.get(field)
    if not isinstance(steps, list):
        raise Unsupported(f"the {what} is a Sequence whose {field} are {quoted(steps)} and not a list.")
    if depth == _NESTING:
        raise Unsupported(f"the {what} has sequences in sequences, more than {_NESTING} deep.")
    for step in steps:
        yield from flattened(step, field, what, depth + 1)


def flag(spec: dict[str, Any], name: str, default: bool | None = None) -> bool:
    """A field that is true or false. default: what it is if it is missing; None: it must be there."""
    value = spec.get(name, default)
    if not isinstance(value, bool):
        raise Unsupported(f"{name} is {quoted(value)}, and must be true or false.")
    return value


def text_in(spec: dict[str, Any], name: str) -> str:
    """A field that is a text."""
    value = spec.get(name)
    if not isinstance(value, str):
        raise Unsupported(f"{name} is {quoted(value)}, and must be a text.")
    return value
