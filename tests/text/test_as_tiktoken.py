"""A tiktoken encoding gives the ids of its tokenizer, or is refused. Alone: pytest tests/text/test_as_tiktoken.py"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

import minithink
from minithink.errors import MinithinkError
from minithink.tasks import load_problems
from minithink.text.added_tokens import TokenFiles
from minithink.text.bpe import spelled
from minithink.text.pieces import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN
from minithink.text.tokenizer import Tokenizer
from tests.text.test_pieces import HEADS, O200K, REGEXES, level, sequence, split
from tests.text.test_pieces import TEXTS as PIECES
from tests.text.test_tokenizer import (
    CORPUS,
    TEXTS,
    drop_merges,
    ignore_merges,
    list_all_splits,
    models,
    renumber,
    shuffle_merges,
    train,
)

Spec = dict[str, Any]
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
REFUSAL = r"^tiny/tokenizer\.json cannot become a tiktoken encoding: .*\.$"


def tokenizer_of(spec: Spec) -> Tokenizer:
    files = TokenFiles(config={}, special_map={}, added={})
    return Tokenizer(Path("tiny/tokenizer.json"), spec, files, None)


def exported(tokenizer: Tokenizer) -> tiktoken.Encoding | None:
    """The encoding; None: it is refused in one sentence."""
    try:
        return tokenizer.as_tiktoken()
    except MinithinkError as error:
        message = str(error)
        assert message.startswith("tiny/tokenizer.json cannot become a tiktoken encoding: ")
        assert message.endswith(".")
        assert message.isprintable()
        assert len(message) < 400
        return None


def assert_same_ids(tokenizer: Tokenizer, encoding: tiktoken.Encoding, text: str) -> None:
    ids = encoding.encode(text, allowed_special="all")
    assert ids == tokenizer.encode(text)
    assert encoding.decode(ids) == tokenizer.decode(ids)


def number_by_merges(model: Spec) -> None:
    """Give ids in the order of the merges, as training does."""
    made = ["".join(pair) for pair in model["merges"]]
    others = [token for token in model["vocab"] if token not in made]
    by_length = sorted(others, key=len)
    tokens = list(dict.fromkeys([*by_length, *made]))
    model["vocab"] = {token: id for id, token in enumerate(tokens)}


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Tokenizers over a, b and the space, most of them with ids in the order of the merges, and added tokens."""
    model = draw(models())
    if draw(st.sampled_from([True, True, True, False])):
        number_by_merges(model)
    contents = draw(st.lists(st.sampled_from(["<s>", "<|x|>", "<|x", "ab", "a b", "é"]), max_size=3, unique=True))
    added = []
    for n, content in enumerate(contents):
        flags = dict(FLAGS)
        if draw(st.integers(0, 9)) == 0:
            flags[draw(st.sampled_from([*FLAGS]))] = True
        id = model["vocab"].get(content, len(model["vocab"]) + n)
        added.append({"id": id, "content": content, **flags})
    patterns = st.sampled_from([GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, O200K]) | REGEXES
    isolated = patterns.map(lambda regex: sequence(split(regex), level()))
    head = draw(isolated | st.just(level(use_regex=True)) | HEADS)
    return {"model": model, "pre_tokenizer": head, "added_tokens": added, "decoder": level()}


SHORT = st.lists(st.sampled_from(["a", "b", " ", "ab", "<s>", "<|x|>", "é", "c", "1"]), max_size=14).map("".join)


@given(spec=specs(), texts=st.lists(SHORT | PIECES, min_size=5, max_size=10))
def test_any_tokenizer_is_refused_or_gives_the_same_ids(spec: Spec, texts: list[str]) -> None:
    tokenizer = tokenizer_of(spec)
    encoding = exported(tokenizer)
    if encoding is None:
        return
    for token in spec["model"]["vocab"]:
        if set(token) <= set("abĠ"):
            texts.append(token.replace("Ġ", " "))
    for text in texts:
        assert_same_ids(tokenizer, encoding, text)


@given(model=models(), by_merges=st.booleans(), texts=st.lists(st.text("ab ", max_size=12), min_size=10, max_size=20))
def test_any_merges_are_refused_or_give_the_same_ids(model: Spec, by_merges: bool, texts: list[str]) -> None:
    """Pieces are long here, so that many pairs of neighbours compete."""
    if by_merges:
        number_by_merges(model)
    tokenizer = tokenizer_of({"model": model, "pre_tokenizer": sequence(split("[ab ]+"), level())})
    encoding = exported(tokenizer)
    if encoding is None:
        return
    for text in texts:
        assert_same_ids(tokenizer, encoding, text)


@given(model=models(), texts=st.lists(st.text("ab ", max_size=12), min_size=5, max_size=10))
def test_trained_numbers_are_exported(model: Spec, texts: list[str]) -> None:
    """Each token has one merge and the ids follow the merges, as after training. Then nothing is refused."""
    made: dict[str, list[str]] = {}
    for pair in model["merges"]:
        made.setdefault("".join(pair), pair)
    model |= {"merges": [*made.values()], "ignore_merges": False}
    number_by_merges(model)
    head = sequence(split(QWEN_PATTERN), level())
    tokenizer = tokenizer_of({"model": model, "pre_tokenizer": head})
    encoding = tokenizer.as_tiktoken()
    for text in texts:
        assert_same_ids(tokenizer, encoding, text)


# Trained tokenizers


@pytest.fixture(scope="module")
def trained() -> dict[str, Spec]:
    """GPT-2's, Llama 3's and Qwen's patterns, added tokens that tiktoken can have, and no normalizer."""
    made = {}
    for kind in ("gpt2", "llama3", "qwen"):
        spec = train(kind)
        spec["normalizer"] = None
        kept = []
        for token in spec["added_tokens"]:
            plain = not (token["lstrip"] or token["rstrip"] or token["normalized"])
            if plain and token["content"] != "<|im_":
                kept.append(token)
        spec["added_tokens"] = kept
        made[kind] = spec
    return made


def unmerged_words(spec: Spec) -> None:
    """Whole words that no merge makes, of three tokens or more."""
    ignore_merges(spec)
    spec["model"]["vocab"] |= {"qqqq": 5000, "Ġqzq": 5001}


VARIANTS: dict[str, tuple[str, list[Callable[[Spec], None]]]] = {
    "gpt2": ("gpt2", []),
    "llama3": ("llama3", []),
    "llama3 from tiktoken": ("llama3", [list_all_splits, ignore_merges]),
    "llama3, unmerged words": ("llama3", [unmerged_words]),
    "qwen": ("qwen", []),
}
Pair = tuple[Tokenizer, tiktoken.Encoding]


@pytest.fixture(scope="module")
def pairs(trained: dict[str, Spec]) -> dict[str, Pair]:
    made = {}
    for name, (kind, changes) in VARIANTS.items():
        spec = copy.deepcopy(trained[kind])
        for change in changes:
            change(spec)
        tokenizer = tokenizer_of(spec)
        made[name] = tokenizer, tokenizer.as_tiktoken()
    return made


@pytest.mark.parametrize("variant", VARIANTS)
@given(text=TEXTS)
def test_trained_tokenizers_give_the_same_ids(pairs: dict[str, Pair], variant: str, text: str) -> None:
    tokenizer, encoding = pairs[variant]
    for words in (text, f"qqqq {text} qzq qqqqq qzqzq"):
        assert_same_ids(tokenizer, encoding, words)


@pytest.mark.parametrize("variant", VARIANTS)
def test_long_texts_give_the_same_ids(pairs: dict[str, Pair], variant: str) -> None:
    tokenizer, encoding = pairs[variant]
    for text in (" ".join(CORPUS), "a" * 2000, " " * 2000 + "x", "ab" * 1000, "我" * 700):
        assert_same_ids(tokenizer, encoding, text)


def test_the_embedded_model_gives_the_same_ids_for_its_problems() -> None:
    tokenizer = minithink.load().tokenizer
    encoding = tokenizer.as_tiktoken()
    for problem in load_problems("validation"):
        messages = [{"role": "user", "content": problem.question}]
        assert_same_ids(tokenizer, encoding, tokenizer.apply_chat_template(messages))
        assert_same_ids(tokenizer, encoding, f"<think>\n{problem.question}</think>")


def test_added_tokens_are_special_tokens() -> None:
    encoding = minithink.load().tokenizer.as_tiktoken()
    assert "<think>" in encoding.special_tokens_set
    with pytest.raises(ValueError, match="<think>"):
        encoding.encode("<think>")


def test_loading_a_tokenizer_does_not_import_tiktoken() -> None:
    code = "import sys; from minithink.text.tokenizer import Tokenizer; sys.exit('tiktoken' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# Refusals


def with_merges(*merges: str, tokens: tuple[str, ...] = (), whole_words: bool = False) -> Spec:
    """A tokenizer with all bytes and then `tokens`, in the order of their ids."""
    vocab = {spelled_byte: id for id, spelled_byte in enumerate(BYTES)}
    vocab |= {token: 256 + n for n, token in enumerate(tokens)}
    model = {"vocab": vocab, "merges": list(merges), "ignore_merges": whole_words}
    return {"model": model, "pre_tokenizer": level(use_regex=True)}


BYTES = [symbol for symbol in train("unsplit")["model"]["vocab"] if len(symbol) == 1]


def without_proof(tokenizer: Tokenizer, spec: Spec) -> tiktoken.Encoding:
    """The encoding that takes all tokens and their ids as they are."""
    ranks = {tokenizer.token_bytes(id): id for id in spec["model"]["vocab"].values()}
    return tiktoken.Encoding("any", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})


def test_ids_against_the_order_of_merges_are_refused() -> None:
    spec = with_merges("b c", "a b", tokens=("ab", "bc"))
    tokenizer = tokenizer_of(spec)
    assert tokenizer.encode("abc") == [spec["model"]["vocab"]["a"], 257]
    assert without_proof(tokenizer, spec).encode("abc") == [256, spec["model"]["vocab"]["c"]]
    with pytest.raises(MinithinkError, match=REFUSAL) as error:
        tokenizer.as_tiktoken()
    assert "'bc' (id 257) before 'ab' (id 256)" in str(error.value)


def test_whole_words_that_tiktoken_would_merge_are_refused() -> None:
    spec = with_merges("a b", tokens=("ab", "abc"), whole_words=True)
    tokenizer = tokenizer_of(spec)
    assert tokenizer.encode("abc") == [257]
    assert 257 not in tokenizer.encode("xabc")
    assert 257 in without_proof(tokenizer, spec).encode("xabc")
    with pytest.raises(MinithinkError, match=REFUSAL) as error:
        tokenizer.as_tiktoken()
    assert "'abc'" in str(error.value)


def test_tokens_that_no_merge_makes_are_left_out() -> None:
    """Whole words are not looked up here, so no text becomes these tokens."""
    spec = with_merges("a b", tokens=("ab", "abc", "cd"))
    tokenizer = tokenizer_of(spec)
    encoding = tokenizer.as_tiktoken()
    assert 258 in without_proof(tokenizer, spec).encode("cd")
    for text in ("abc", "cd", "xabcd"):
        assert_same_ids(tokenizer, encoding, text)


def test_merges_that_never_happen_may_stand_anywhere() -> None:
    """ "abc" becomes "ab" and "c", since that pair stands first; so "bc" and "abcd" by way of "bc" change nothing."""
    spec = with_merges("a b", "a bcd", "b c", tokens=("ab", "bc", "bcd", "abcd"))
    tokenizer = tokenizer_of(spec)
    encoding = tokenizer.as_tiktoken()
    for text in ("abcd", "bcd", "bc", "xabcdbc"):
        assert_same_ids(tokenizer, encoding, text)


def add(content: str, id: int = 900, **flags: bool) -> Callable[[Spec], None]:
    def apply(spec: Spec) -> None:
        spec["added_tokens"].append({"id": id, "content": content, **FLAGS, **flags})

    return apply


def head(spec: Any) -> Callable[[Spec], None]:
    return lambda changed: changed.update(pre_tokenizer=spec)


def without_a_byte(spec: Spec) -> None:
    del spec["model"]["vocab"][spelled("\x04")]


REFUSED: dict[str, tuple[Callable[[Spec], None], str]] = {
    "normalizer": (lambda spec: spec.update(normalizer={"type": "NFC"}), "it normalizes texts (['NFC'])"),
    "prefix space": (head(level(use_regex=True, prefix=True)), "puts a space before a text"),
    "two splits": (head(sequence(split("a"), split("b"), level())), "splits in 2 steps"),
    "no split": (head(level()), "splits in 0 steps"),
    "bytes twice": (head(sequence(level(use_regex=True), level())), "spells bytes twice"),
    "removed": (head(sequence(split("a", "Removed"), level())), "splits by 'Removed'"),
    "words' ends": (head(sequence(split(r"\<+"), level())), r"the regex '\\<+'"),
    "regex": (head(sequence(split(r"[a-\s]x"), level())), "tiktoken does not take the regex"),
    "lstrip": (add("<x>", lstrip=True), "'<x>' has lstrip set"),
    "rstrip": (add("<x>", rstrip=True), "'<x>' has rstrip set"),
    "normalized": (add("<x>", normalized=True), "'<x>' has normalized set"),
    "single word": (add("<x>", single_word=True), "'<x>' has single_word set"),
    "prefix of a token": (add("<thi"), "'<think>' begins with '<thi'"),
    "byte": (without_a_byte, "no token for 1 byte, the first 0x04"),
    "shuffled": (shuffle_merges, "tiktoken merges to the lower id first"),
    "renumbered": (renumber, "tiktoken merges to the lower id first"),
    "merges dropped": (lambda spec: [drop_merges(spec), ignore_merges(spec)], "no merge makes its token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tiktoken_cannot_do_is_refused_by_name(trained: dict[str, Spec], name: str) -> None:
    change, part = REFUSED[name]
    spec = copy.deepcopy(trained["llama3"])
    change(spec)
    with pytest.raises(MinithinkError, match=REFUSAL) as error:
        tokenizer_of(spec).as_tiktoken()
    assert part in str(error.value)


def test_an_id_of_two_texts_is_refused(trained: dict[str, Spec]) -> None:
    """The added token "é" has the id of the byte that a byte-level file spells as "é"."""
    spec = copy.deepcopy(trained["llama3"])
    add("é", id=spec["model"]["vocab"]["é"])(spec)
    with pytest.raises(MinithinkError, match="'é', another text") as error:
        tokenizer_of(spec).as_tiktoken()
    assert f"the id {spec['model']['vocab']['é']}" in str(error.value)
