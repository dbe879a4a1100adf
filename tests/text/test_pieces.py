"""Pieces and normalized texts equal those of the `tokenizers` package. Alone: pytest tests/text/test_pieces.py"""

from __future__ import annotations

import json
import time
import unicodedata
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st

from minithink.errors import MinithinkError
from minithink.text import pieces
from minithink.text.bpe import Unsupported, spelled
from minithink.text.pieces import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, read_normalizer, read_pre_tokenizer

Spec = dict[str, Any]

# Pre-tokenizers of published models.
DIGITS = r"\p{N}{1,3}"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def level(use_regex: bool = False, prefix: bool = False) -> Spec:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def split(regex: str, behavior: str = "Isolated", invert: bool = False) -> Spec:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*steps: Spec) -> Spec:
    return {"type": "Sequence", "pretokenizers": list(steps)}


ONE_BY_ONE = {"type": "Digits", "individual_digits": True}
GROUPED = {"type": "Digits", "individual_digits": False}
PUNCTUATION = {"type": "Punctuation", "behavior": "Contiguous"}
PUBLISHED = {
    "GPT-2": level(use_regex=True),
    "Llama 3": sequence(split(LLAMA3_PATTERN), level()),
    "Midm 2": sequence(split(LLAMA3_PATTERN, "Removed", invert=True), level()),
    "Qwen 3": sequence(split(QWEN_PATTERN), level()),
    "SmolLM2": sequence(ONE_BY_ONE, level(use_regex=True)),
    "DeepSeek V3": sequence(split(DIGITS), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), level()),
    "MiniCPM5": sequence(split(DIGITS), split(QWEN_PATTERN.replace(r"\p{N}", r"\p{N}+")), level()),
    "o200k": sequence(split(O200K), level()),
    "Falcon": sequence(PUNCTUATION, level(use_regex=True), GROUPED, split("[0-9][0-9][0-9]")),
    "digits after bytes": sequence(level(use_regex=True), GROUPED, split("[0-9][0-9][0-9]")),
    "nested": sequence(sequence(split(LLAMA3_PATTERN)), sequence(), level()),
}

# Whatever else can be composed of the steps. A regex is an alternation of short sequences of atoms.
ATOMS = [
    "a",
    "b",
    " ",
    "\\n",
    "'",
    "é",
    r"\p{L}",
    r"\p{Lu}",
    r"\p{Ll}",
    r"\p{N}",
    r"\s",
    r"\S",
    r"[^\s\p{L}\p{N}]",
    "[a-c]",
    r"[\r\n]",
    r"\p{P}",
    r"\p{M}",
    r"\d",
    r"(?:ab)",
    r"(?:a|é)",
    "(1)",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
]
QUANTIFIERS = ["", "", "", "+", "*", "?", "+?", "*?", "++", "*+", "{1,3}", "{2}", "{2,}"]
TERMS = st.tuples(st.sampled_from(ATOMS), st.sampled_from(QUANTIFIERS)).map("".join) | st.just(r"\s+(?!\S)")
BRANCHES = st.lists(TERMS, min_size=1, max_size=4).map("".join)


def is_regex(source: str) -> bool:
    """Whether a regex compiles and does not match the empty text."""
    try:
        return not regex.fullmatch(source, "")
    except regex.error:
        return False


REGEXES = st.lists(BRANCHES, min_size=1, max_size=3).map("|".join).filter(is_regex)
BEHAVIORS = ["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"]
PATTERNS = (
    REGEXES.map(lambda source: {"Regex": source})
    | st.sampled_from([GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, O200K]).map(lambda source: {"Regex": source})
    | st.sampled_from(["a", " ", "ab", "(é"]).map(lambda text: {"String": text})
)
SPLITS = st.fixed_dictionaries(
    {
        "type": st.just("Split"),
        "pattern": PATTERNS,
        "behavior": st.sampled_from(BEHAVIORS),
        "invert": st.booleans(),
    }
)
LEVELS = st.builds(level, st.booleans(), st.booleans())
OTHERS = st.sampled_from(
    [
        *(ONE_BY_ONE, GROUPED, {"type": "Whitespace"}, {"type": "WhitespaceSplit"}),
        {"type": "CharDelimiterSplit", "delimiter": "a"},
        *({"type": "Punctuation", "behavior": behavior} for behavior in BEHAVIORS),
    ]
)
STEPS = st.recursive(
    SPLITS | LEVELS | OTHERS,
    lambda steps: st.lists(steps, max_size=3).map(lambda inner: sequence(*inner)),
    max_leaves=4,
)
HEADS = st.lists(STEPS, max_size=3).flatmap(
    lambda before: st.builds(lambda last: sequence(*before, last), LEVELS | st.builds(sequence, LEVELS, OTHERS))
)

FRAGMENTS = [
    *" \n\t\r'aab1é",
    "  ",
    "\r\n",
    " \n \n",
    "ab",
    "aab",
    "'s",
    "'S",
    "'LL",
    "'ſ",
    "it's",
    "12",
    "1234567",
    "٣٤٥",
    "Ⅷ",
    "½",
    "²",
    "e\u0301",
    "\u0301",
    "İ",
    "Σς",
    "größer",
    "Быстрая",
    "我们",
    "カタカナ",
    "हिन्दी",
    "👍🏽",
    "ⓐ",
    "\u200d",
    "_",
    "-x",
    "\u061d",
    "\u166d",
    "፡",
    "!?",
    "$5",
    "«",
    "Ġ",
    "\x00",
    "\x85",
    "\xa0",
    "\u3000",
    "\x1c",
    "\U0010ffff",
    "A",
    "ǅ",
    "ʰ",
]
# Packages differ in the version of Unicode. They agree on what the oldest Python knows.
KNOWN = st.characters(exclude_categories=("Cs", "Cn"))
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(KNOWN, max_size=4), max_size=12).map("".join)


def theirs(spec: Spec, text: str) -> list[str]:
    step = {"type": "Sequence", "pretokenizers": [spec]}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    read = json.loads(tokenizer.to_str()) | {"pre_tokenizer": step}
    found = tokenizers.Tokenizer.from_str(json.dumps(read)).pre_tokenizer.pre_tokenize_str(text)
    return [piece for piece, _ in found]


def ours(spec: Spec, text: str) -> list[str]:
    tokenizer = read_pre_tokenizer(spec)
    return [tokenizer.word(piece) for piece in tokenizer.pieces(text)] if text else []


# Pieces


@pytest.mark.parametrize("model", PUBLISHED)
@given(text=TEXTS)
def test_pieces_of_published_models_equal_tokenizers(model: str, text: str) -> None:
    assert ours(PUBLISHED[model], text) == theirs(PUBLISHED[model], text)


@given(spec=HEADS, texts=st.lists(TEXTS, min_size=5, max_size=5))
def test_pieces_of_any_composition_equal_tokenizers(spec: Spec, texts: list[str]) -> None:
    try:
        read_pre_tokenizer(spec)
    except Unsupported:
        assume(False)
    for text in texts:
        assert ours(spec, text) == theirs(spec, text)


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("invert", [False, True])
def test_every_behavior_of_a_split_equals_tokenizers(behavior: str, invert: bool) -> None:
    spec = sequence(split("a", behavior, invert), level())
    for text in ("a", "b", "ab", "ba", "aab", "baa", "bbaabb", "aabbaabab", "babbab"):
        assert ours(spec, text) == theirs(spec, text)


CLASSES = {
    "letters": split(r"\p{L}"),
    "numbers": ONE_BY_ONE,
    "white space": split(r"\s"),
    "words": {"type": "Whitespace"},
    "punctuation": {"type": "Punctuation", "behavior": "Isolated"},
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_character_is_of_the_same_kind_as_for_tokenizers(name: str) -> None:
    """Of those that the oldest Python knows; packages differ in the version of Unicode. Of long blocks every 16th."""
    known: list[str] = []
    for character in map(chr, range(0x110000)):
        category = unicodedata.category(character)
        in_long_block = category in ("Lo", "Co") and ord(character) % 16 > 0
        if category not in ("Cs", "Cn") and not in_long_block:
            known.append(character)
    text = " ".join(f"a{character}a" for character in known)
    spec = sequence(CLASSES[name], level())
    assert ours(spec, text) == theirs(spec, text)


def test_patterns_are_those_of_the_published_files() -> None:
    common = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    assert common + r"\p{N}{1,3}" + rest == LLAMA3_PATTERN
    assert common + r"\p{N}" + rest == QWEN_PATTERN


@pytest.mark.parametrize("text", [" " * 1_000_000, " " * 1_000_000 + "x", "\n " * 500_000, "a" * 1_000_000])
def test_long_runs_are_split(text: str) -> None:
    for model in ("GPT-2", "Llama 3", "SmolLM2"):
        assert "".join(ours(PUBLISHED[model], text)) == spelled(text)


def test_a_regex_that_backtracks_without_end_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SECONDS", 0.2)
    tokenizer = read_pre_tokenizer(sequence(split("(?:a|aa)+b++"), level()))
    with pytest.raises(MinithinkError, match=r"^the tokenizer's regex .* 40 characters .*\.$"):
        tokenizer.pieces("a" * 40)
    normalize = read_normalizer({"type": "Replace", "pattern": {"Regex": "(?:a|aa)+b++"}, "content": ""})
    with pytest.raises(MinithinkError, match=r"^the tokenizer's normalizer .* 40 characters .*\.$"):
        normalize("a" * 40)


def test_a_long_text_may_take_longer() -> None:
    seen: list[float] = []

    class Recorder:
        def pieces(self, text: str, deadline: float) -> list[str]:
            seen.append(deadline - time.monotonic())
            return [text]

    for text in ("a", "a" * 3 * pieces.CHARACTERS_A_SECOND):
        pieces.PreTokenizer([Recorder()], False).pieces(text)
    assert seen == pytest.approx([pieces.SECONDS, pieces.SECONDS + 3], abs=1)


def test_groups_of_a_regex_are_no_pieces() -> None:
    spec = sequence(split("(a)(b)?"), level())
    for text in ("xabay", "ab", "a"):
        assert ours(spec, text) == theirs(spec, text)


def test_flags_that_are_missing_have_the_values_of_tokenizers() -> None:
    spec = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}  # use_regex
    assert ours(spec, "one two 34") == theirs(spec, "one two 34") == ["one", "Ġtwo", "Ġ34"]
    without = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Removed"}  # invert
    assert ours(sequence(without, level()), "xax") == ["x", "x"]


REFUSED = {
    "no step": (None, ["pre-tokenizer []", "ByteLevel must be among"]),
    "no bytes": (ONE_BY_ONE, ["['Digits']", "ByteLevel must be among"]),
    "Metaspace": (sequence({"type": "Metaspace"}, level()), ["'Metaspace'", "the steps that are read are ByteLevel"]),
    "scripts": (sequence({"type": "UnicodeScripts"}, level()), ["'UnicodeScripts'"]),
    "behavior": (sequence(split("a", "Kept"), level()), ["'Kept'", "MergedWithNext"]),
    "invert": (sequence(split("a", invert=None), level()), ["invert is None", "true or false"]),
    "digits": (sequence({"type": "Digits"}, level()), ["individual_digits is None"]),
    "prefix": ({"type": "ByteLevel", "add_prefix_space": "yes"}, ["add_prefix_space is 'yes'"]),
    "pattern": (sequence({"type": "Split", "behavior": "Removed", "pattern": "a"}, level()), ["pattern 'a'"]),
    "a text": ("ByteLevel", ["the step 'ByteLevel'"]),
    "nothing in a sequence": (sequence(None, level()), ["the step None"]),  # type: ignore[arg-type]
    "steps": ({"type": "Sequence", "pretokenizers": level()}, ["is a Sequence whose pretokenizers are"]),
    "empty text": (sequence({"type": "Split", "behavior": "Removed", "pattern": {"String": ""}}, level()), ["empty"]),
    "does not compile": (sequence(split("(a"), level()), ["'(a'", "does not compile"]),
    "matches nothing": (sequence(split("a*"), level()), ["'a*'", "not supported"]),
    "lines": (sequence(split(r"^\s+"), level()), ["not supported"]),
    "dot": (sequence(split(r"\s+|."), level()), ["not supported"]),
    "word": (sequence(split(r"\w+"), level()), ["not supported"]),
    "looks ahead": (sequence(split(r"a(?=b)"), level()), ["not supported"]),
    "looks back": (sequence(split(r"(?<=a)b"), level()), ["not supported"]),
    "flags": (sequence(split(r"(?i:strasse)"), level()), ["not supported"]),
    "set operation": (sequence(split(r"[\p{L}&&[a-z]]+"), level()), ["not supported"]),
    "class in a class": (sequence(split(r"[a[bc]]+"), level()), ["not supported"]),
    "long regex": (sequence(split("(?=a)" * 1000), level()), ["'(?=a)(?=a)"]),
}


def deep(depth: int) -> Spec:
    spec = level()
    for _ in range(depth):
        spec = sequence(spec)
    return spec


@pytest.mark.parametrize("name", [*REFUSED, "deep"])
def test_other_pre_tokenizers_are_refused_by_name(name: str) -> None:
    spec, parts = REFUSED.get(name, (deep(100), ["sequences in sequences, more than 32 deep"]))
    with pytest.raises(Unsupported) as error:
        read_pre_tokenizer(spec)
    message = str(error.value)
    assert [part for part in parts if part not in message] == []
    assert message.endswith(".")
    assert len(message) < 300


def test_sequences_may_be_nested_deeply() -> None:
    assert read_pre_tokenizer(deep(32)).pieces("a b") == ["a b"]


# Normalizers

REPLACES = st.fixed_dictionaries(
    {"type": st.just("Replace"), "pattern": PATTERNS, "content": st.sampled_from(["", " ", "b", "▁", "\\1"])}
)
NORMALIZERS = st.recursive(
    REPLACES
    | st.sampled_from(["NFC", "NFD", "NFKC", "NFKD", "Lowercase"]).map(lambda kind: {"type": kind})
    | st.sampled_from(["", " ", "▁a"]).map(lambda text: {"type": "Prepend", "prepend": text})
    | st.builds(lambda a, b: {"type": "Strip", "strip_left": a, "strip_right": b}, st.booleans(), st.booleans()),
    lambda steps: st.lists(steps, max_size=3).map(lambda inner: {"type": "Sequence", "normalizers": inner}),
    max_leaves=4,
)
# Normal forms of characters that were in Unicode 3.2 are fixed since.
OLD = st.characters(exclude_categories=("Cs",)).filter(lambda c: unicodedata.ucd_3_2_0.category(c) != "Cn")


STRIP_RIGHT = {"type": "Strip", "strip_left": False, "strip_right": True}


@given(spec=NORMALIZERS, texts=st.lists(st.text(OLD) | TEXTS, min_size=5, max_size=5))
@example(spec={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": ""}, STRIP_RIGHT]}, texts=[" "])
def test_normalized_texts_equal_tokenizers(spec: Spec, texts: list[str]) -> None:
    try:
        normalize = read_normalizer(spec)
    except Unsupported:
        assume(False)
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    reference = tokenizers.Tokenizer.from_str(json.dumps(empty | {"normalizer": spec})).normalizer
    for text in texts:
        assume(all(unicodedata.ucd_3_2_0.category(c) != "Cn" for c in text))
        assert normalize(text) == by_reference(reference, text)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"type": "Lowercase"}, "ΟΔΟΣ İ"),  # Python writes the last Σ as ς
        # Python strips four control characters more
        ({"type": "Strip", "strip_left": True, "strip_right": False}, "\u3000\x1c a \x1f\u2028"),
        ({"type": "Strip", "strip_left": False, "strip_right": True}, "\u3000\x1c a \x1f\u2028"),
    ],
)
def test_where_python_would_normalize_otherwise(spec: Spec, text: str) -> None:
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    reference = tokenizers.Tokenizer.from_str(json.dumps(empty | {"normalizer": spec})).normalizer
    assert read_normalizer(spec)(text) == by_reference(reference, text)


def by_reference(normalizer: Any, text: str) -> str:
    """The text that `tokenizers` makes. It panics on some texts, which then say nothing."""
    try:
        return str(normalizer.normalize_str(text))
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        assume(False)
        raise AssertionError from error


def test_nothing_is_normalized_without_a_normalizer() -> None:
    for spec in (None, {"type": "Sequence", "normalizers": []}):
        assert read_normalizer(spec)("A\u0301 ") == "A\u0301 "


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"type": "Precompiled", "precompiled_charsmap": "a" * 9999}, "'Precompiled' is not supported"),
        ({"type": "BertNormalizer"}, "'BertNormalizer'"),
        ({"type": "Prepend", "prepend": 5}, "prepend is 5"),
        ({"type": "Prepend", "prepend": ""}, "prepend is the empty text"),
        ({"type": "Strip"}, "strip_left is None"),
        ({"type": "Replace", "pattern": {"String": "a"}}, "content is None"),
        ({"type": "Replace", "pattern": {"Regex": "a|"}, "content": ""}, "'a|' is not supported"),
        ({"type": "Sequence", "normalizers": None}, "normalizers are None"),
        ([], "the step []"),
    ],
)
def test_other_normalizers_are_refused_by_name(spec: Any, part: str) -> None:
    with pytest.raises(Unsupported) as error:
        read_normalizer(spec)
    assert part in str(error.value)
    assert str(error.value).endswith(".")
