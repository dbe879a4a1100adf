"""Byte-pair encoding of words equals that of the `tokenizers` package. Alone: pytest tests/text/test_bpe.py"""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from minithink.text.bpe import BytePairEncoding, Unsupported, bytes_of, spelled

Spec = dict[str, Any]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@given(text=st.text() | st.text("a é\U0010ffff\x00"))
def test_spelling_is_that_of_tokenizers(text: str) -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert spelled(text) == "".join(piece for piece, _ in level.pre_tokenize_str(text))
    assert bytes_of(spelled(text)) == text.encode()


@st.composite
def encodings(draw: st.DrawFn) -> Spec:
    """Merges of a, b and c in any order, some listed twice, and tokens that no merge makes. Symbols can lack."""
    tokens = ["a", "b", "c"]
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(0, 14))):
        pair = draw(st.tuples(st.sampled_from(tokens), st.sampled_from(tokens)))
        if len("".join(pair)) <= 8:
            merges.append(pair)
            tokens = sorted({*tokens, "".join(pair)})
    unmade = draw(st.lists(st.text("abcé", min_size=2, max_size=5), max_size=4))
    lacking = draw(st.sets(st.sampled_from("éü\u0101")))
    texts = {*ALPHABET, *tokens, *unmade, "<unk>"} - lacking
    ids = draw(st.permutations(range(len(texts))))
    return {
        "vocab": dict(zip(sorted(texts), ids, strict=True)),
        "merges": draw(st.permutations(merges)),
        "ignore_merges": draw(st.booleans()),
        "unk_token": draw(st.sampled_from([None, "<unk>", "a"])),
        "fuse_unk": draw(st.booleans()),
    }


@given(spec=encodings(), words=st.lists(st.text("abcéü\u0101", max_size=12), min_size=5, max_size=15))
def test_any_merges_equal_tokenizers(spec: Spec, words: list[str]) -> None:
    ours = BytePairEncoding.from_spec(spec | {"merges": [list(pair) for pair in spec["merges"]]})
    theirs = tokenizers.Tokenizer(models.BPE(**spec))
    for word in [*words, *spec["vocab"]]:
        assert ours.encode(word) == theirs.encode(word).ids


def with_merges(*merges: Any) -> Spec:
    vocab = {symbol: id for id, symbol in enumerate(ALPHABET)} | {"ab": 256, "abc": 257}
    return {"vocab": vocab, "merges": list(merges)}


def without(characters: str) -> Spec:
    spec = with_merges()
    for symbol in spelled(characters):
        del spec["vocab"][symbol]
    return spec


def test_merges_are_read_as_texts_or_pairs() -> None:
    as_pairs = BytePairEncoding.from_spec(with_merges(["a", "b"], ["ab", "c"]))
    as_texts = BytePairEncoding.from_spec(with_merges("#version: 0.2", "a b", "ab c"))
    assert as_pairs.encode("xabcab") == as_texts.encode("xabcab") == [as_pairs.vocab["x"], 257, 256]


def test_bytes_without_a_token_are_dropped() -> None:
    """As in SmolLM2's file, which has none for eight bytes. Their neighbours are merged."""
    spec = without("\x04\x06\x13\x14\x16\x1d") | {"merges": [["a", "b"]]}
    del spec["vocab"]["ñ"], spec["vocab"]["ò"]  # the bytes f1 and f2
    encoding = BytePairEncoding.from_spec(spec)
    assert encoding.encode(spelled("a\x04b")) == [256]
    assert encoding.encode(spelled("\x13\x1d")) == []


def test_half_characters_have_bytes_too() -> None:
    """Lone surrogates, which Python makes of bytes that are no text."""
    assert bytes_of(spelled("\udc80")) == b"\xed\xb2\x80"


def test_a_token_that_is_not_spelled_stands_for_its_own_utf8() -> None:
    assert bytes_of("\u2581a") == "\u2581a".encode()
    assert bytes_of("\u0120a") == b" a"


def test_bytes_that_no_text_has_are_not_missed() -> None:
    """UTF-8 begins no character with F5 or more; F4 is its largest byte."""
    spec = with_merges()
    for byte in (0xC0, 0xF4, 0xF5, 0xFF):
        [symbol] = [symbol for symbol in ALPHABET if bytes_of(symbol) == bytes([byte])]
        del spec["vocab"][symbol]
    assert BytePairEncoding.from_spec(spec).missing_bytes() == [0xF4]


def test_a_merge_that_is_listed_twice_is_made_where_it_stands_last() -> None:
    spec = with_merges("a b", "ab c", "a b")
    assert BytePairEncoding.from_spec(spec).made_in_order() == [257, 256]


@pytest.mark.parametrize(("fuses", "unknown"), [(False, [9, 9]), (True, [9])])
def test_unknown_neighbours_become_one_token_if_they_are_fused(fuses: bool, unknown: list[int]) -> None:
    """Those that stand apart become one each, and at the start of the next word it begins anew."""
    vocab = {symbol: 256 + n for n, symbol in enumerate(ALPHABET) if symbol not in spelled("\x04\x06")}
    spec = {"vocab": vocab | {"<unk>": 9}, "merges": [], "unk_token": "<unk>", "fuse_unk": fuses}
    encoding = BytePairEncoding.from_spec(spec)
    a, b = vocab["a"], vocab["b"]
    assert encoding.encode(spelled("a\x04\x06b")) == [a, *unknown, b]
    assert encoding.encode(spelled("\x04a\x04b\x06\x06")) == [9, a, 9, b, *unknown]
    assert encoding.encode(spelled("\x06")) == [9]


def test_work_grows_as_n_log_n() -> None:
    """Counted in look-ups of pairs. A token of 2^16 letters is made by doubling."""
    vocab = {symbol: id for id, symbol in enumerate(ALPHABET)}
    merges = [["a" * 2**n, "a" * 2**n] for n in range(16)]
    vocab |= {"a" * 2 ** (n + 1): 256 + n for n in range(16)}
    encoding = BytePairEncoding.from_spec({"vocab": vocab, "merges": merges})

    class Counted(dict[Any, Any]):
        looked_up = 0

        def get(self, *key: Any) -> Any:
            self.looked_up += 1
            return super().get(*key)

    counted = Counted(encoding._merges)
    encoding._merges = counted
    assert encoding.encode("a" * 2**16) == [271]
    assert counted.looked_up < 6 * 2**16


REFUSED = {
    "WordPiece": ({"type": "WordPiece", "vocab": {}}, "model is 'WordPiece', and only byte-level BPE"),
    "Unigram": ({"type": "Unigram", "vocab": []}, "model is 'Unigram'"),
    "a type of 10,000 letters": ({"type": "x" * 10_000}, "xxx…"),
    "byte fallback": (with_merges() | {"byte_fallback": True}, "byte_fallback = True"),
    "dropout": (with_merges() | {"dropout": 0.1}, "dropout = 0.1"),
    "prefix": (with_merges() | {"continuing_subword_prefix": "##"}, "continuing_subword_prefix = '##'"),
    "suffix": (with_merges() | {"end_of_word_suffix": "</w>"}, "end_of_word_suffix = '</w>'"),
    "no bytes": ({"vocab": {"a": 0}, "merges": []}, "94 of the 95 printable ASCII characters, the first ' '"),
    "unknown is unknown": (without("\x04") | {"unk_token": "<unk>"}, "unk_token is '<unk>'"),
    "unknown is a list": (without("\x04") | {"unk_token": [1]}, "unk_token is [1]"),
    "type is a number": (with_merges() | {"type": 5}, "model is 5"),
    "one id twice": ({"vocab": {"a": 3, "b": 3}, "merges": []}, "'a' and 'b' both have the id 3"),
    "id is text": ({"vocab": {"a": "3"}, "merges": []}, "'a' has the id '3'"),
    "id is true": ({"vocab": {"a": True}, "merges": []}, "'a' has the id True"),
    "id is a fraction": ({"vocab": {"a": 1.5}, "merges": []}, "'a' has the id 1.5"),
    "id is negative": ({"vocab": {"a": -1}, "merges": []}, "'a' has the id -1"),
    "id is a list": ({"vocab": {"a": [1]}, "merges": []}, "'a' has the id [1]"),
    "id is huge": ({"vocab": {"a": 10**400}, "merges": []}, "'a' has the id 1000"),
    "vocab is a list": ({"vocab": ["a"], "merges": []}, "vocab is ['a']"),
    "no vocab": ({"merges": []}, "vocab is None"),
    "no merges": (with_merges() | {"merges": None}, "merges are None"),
    "merge of unknown": (with_merges(["a", "b"], ["qq", "a"]), "merge 1 needs 'qq'"),
    "merge to unknown": (with_merges(["q", "#"]), "merge 0 needs 'q#'"),
    "merge of three": (with_merges("a b c"), "merge 0 is 'a b c'"),
    "merge of one": (with_merges(["a"]), "merge 0 is ['a']"),
    "merge of numbers": (with_merges([1, 2]), "merge 0 is [1, 2]"),
    "merge of lists": (with_merges([["a"], ["b"]]), "merge 0 is [['a'], ['b']]"),
    "merge is an object": (with_merges({"a": 1, "b": 2}), "merge 0 is {'a': 1, 'b': 2}"),
    "merge is null": (with_merges(None), "merge 0 is None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(name: str) -> None:
    spec, part = REFUSED[name]
    with pytest.raises(Unsupported) as error:
        BytePairEncoding.from_spec(spec)
    message = str(error.value)
    assert part in message
    assert message.endswith(".")
    assert len(message) < 300
