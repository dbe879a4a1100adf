"""Added tokens are those of transformers, wherever they stand. Alone: pytest tests/text/test_added_tokens.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minithink.text import tokenizer as minithink

Spec = dict[str, Any]

# Contents, some of which are parts of others, or tokens of the vocabulary ("ab" and "Ġc"). No two have one normal
# form: of those, tokenizers takes now this one, now that.
CONTENTS = ["<a>", "<a>b", "<B>", "word", "<eos>", "ab", "Ġc", " x", "é!"]
OTHERS = [*" a_.", "  ", "<", "<a", "words", "A word", "<b>", "\u0301", "<EOS>", "e\u0301!"]
TEXTS = st.lists(st.sampled_from([*CONTENTS, *OTHERS]), max_size=12).map("".join)
FLAGS = {name: st.booleans() for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
VOCAB = {symbol: id for id, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"ab": 256, "Ġc": 257}
BASE = len(VOCAB)
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPEC = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": LEVEL, "decoder": LEVEL}
SPEC["model"] |= {"vocab": VOCAB, "merges": [["a", "b"], ["Ġ", "c"]]}


def tokens(content: st.SearchStrategy[str]) -> st.SearchStrategy[Spec]:
    return st.fixed_dictionaries({"content": content, **FLAGS})


def some(*named: tuple[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Spec]:
    return st.fixed_dictionaries({}, optional=dict(named))


@st.composite
def folders(draw: st.DrawFn) -> dict[str, Spec]:
    """The files of a tokenizer, by name. Ids have no holes: there transformers gives others than the files."""
    contents = draw(st.permutations(CONTENTS))
    own = draw(st.integers(0, 3))
    beside = draw(st.integers(0, 3))
    ids: dict[str, int] = {}
    for content in contents[: own + beside]:
        ids[content] = VOCAB.get(content, BASE + sum(id >= BASE for id in ids.values()))
    files: dict[str, Spec] = {"tokenizer.json": {}}
    files["tokenizer.json"]["normalizer"] = draw(st.sampled_from([None, {"type": "Lowercase"}, {"type": "NFC"}]))
    files["tokenizer.json"]["added_tokens"] = [{"id": ids[c], **draw(tokens(st.just(c)))} for c in contents[:own]]
    named = st.none() | st.sampled_from(CONTENTS) | st.sampled_from(contents)
    values = st.sampled_from(CONTENTS)
    lists = st.lists(values, max_size=3)
    config = draw(
        some(
            ("bos_token", named),
            ("eos_token", named),
            ("pad_token", named),
            ("image_token", values),
            ("extra_special_tokens", lists | st.dictionaries(st.just("x_token"), values)),
            ("additional_special_tokens", lists),
        )
    )
    place = draw(st.sampled_from(["added_tokens_decoder", "added_tokens.json"]))
    if place == "added_tokens_decoder":
        kept = draw(st.booleans())
        listed = contents[0 if kept else own : own + beside]
        config["added_tokens_decoder"] = {str(ids[c]): draw(tokens(st.just(c))) for c in listed}
    elif beside:
        files["added_tokens.json"] = {c: ids[c] for c in contents[own : own + beside]}
    if draw(st.booleans()):
        objects = tokens(values) | values
        files["special_tokens_map.json"] = draw(
            some(
                ("bos_token", objects),
                ("eos_token", objects),
                ("unk_token", objects),
                ("additional_special_tokens", lists),
            )
        )
    files["tokenizer_config.json"] = config
    return files


def write(files: dict[str, Spec], folder: Path) -> None:
    """Write files by name. tokenizer.json: what is other than in SPEC."""
    files = files | {"tokenizer.json": SPEC | files.get("tokenizer.json", {})}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def declared(normalizer: Spec | None = None, **tokens: Spec | str | list[str]) -> dict[str, Spec]:
    """The files of a tokenizer whose special_tokens_map.json declares tokens, and no other file does."""
    own = {"normalizer": normalizer}
    return {"tokenizer.json": own, "special_tokens_map.json": tokens, "tokenizer_config.json": {}}


def listed(normalizer: Spec | None, token: Spec, **named: str) -> dict[str, Spec]:
    """The files of a tokenizer whose added_tokens_decoder holds one token, and whose config names some."""
    config = {"added_tokens_decoder": {str(BASE): token}, **named}
    return {"tokenizer.json": {"normalizer": normalizer}, "tokenizer_config.json": config}


LOWER = {"type": "Lowercase"}
PLAIN = {"content": "<B>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
WHOLE = PLAIN | {"single_word": True}


@given(files=folders(), texts=st.lists(TEXTS, min_size=4, max_size=4))
# Declarations of one content with different flags: the last one counts, unless it repeats one before it.
@example(files=declared(eos_token=WHOLE, unk_token=PLAIN), texts=["<a><B>a"])
@example(files=declared(eos_token=PLAIN, unk_token=WHOLE), texts=["<a><B>a"])
@example(files=declared(bos_token=PLAIN, eos_token=WHOLE, unk_token=PLAIN), texts=["<a><B>a"])
@example(files=declared(bos_token="<B>", eos_token=WHOLE, unk_token="<B>"), texts=["<a><B>a"])
# A content alone repeats no object, even if both mean the same.
@example(files=declared(bos_token="<B>", eos_token=WHOLE, unk_token=PLAIN), texts=["<a><B>a"])
@example(files=declared(bos_token=PLAIN, eos_token=WHOLE, unk_token="<B>"), texts=["<a><B>a"])
@example(files=declared(eos_token=WHOLE, additional_special_tokens=["<B>"]), texts=["<a><B>a"])
# A named token is special, whatever its object says, and is looked for in the text as it was before normalizing.
@example(files=declared(LOWER, eos_token={"content": "<B>", "special": False}), texts=["<b><B>"])
@example(files=listed(LOWER, {"content": "<B>"}, image_token="<B>"), texts=["<b><B>"])
def test_ids_and_special_flags_equal_transformers(
    files: dict[str, Spec], texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("added")
    write(files, folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = minithink.Tokenizer.from_folder(folder)
    assert {t.content: id for id, t in ours._added.by_id.items()} == theirs.get_added_vocab()
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_id == theirs.eos_token_id
    for text in [*texts, "".join(CONTENTS)]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        kept = [id for id in ids if id not in ours.special_ids]
        assert ours.decode(ids, skip_special_tokens=True) == ours.decode(kept)
        # tokenizers decodes an added token to its normalized content, which it never takes for a special one.
        if files["tokenizer.json"]["normalizer"] is None:
            assert theirs.decode(ids, skip_special_tokens=True) == theirs.decode(kept)


FLAGGED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
PLACES: dict[str, dict[str, Spec]] = {
    "added_tokens": {"tokenizer.json": {"added_tokens": [{"id": BASE, "content": "<eos>", **FLAGGED}]}},
    "added_tokens_decoder": {"tokenizer_config.json": {"added_tokens_decoder": {str(BASE): {"content": "<eos>"}}}},
    "added_tokens.json": {"added_tokens.json": {"<eos>": BASE}},
    "special_tokens_map.json": {"special_tokens_map.json": {"eos_token": {"content": "<eos>"}}},
    "a named token": {"tokenizer_config.json": {"eos_token": "<eos>"}},
    "an object": {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "<eos>"}}},
    "another name": {"tokenizer_config.json": {"turn_token": "<eos>"}},
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<eos>"]}},
    "extra_special_tokens, by name": {"tokenizer_config.json": {"extra_special_tokens": {"turn": "<eos>"}}},
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<eos>"]}},
    "additional_special_tokens, in the map": {"special_tokens_map.json": {"additional_special_tokens": ["<eos>"]}},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("named", [False, True])
def test_a_token_is_found_in_every_place(place: str, named: bool, tmp_path: Path) -> None:
    files = PLACES[place]
    config = files.get("tokenizer_config.json", {}) | ({"eos_token": "<eos>"} if named else {})
    write(files | {"tokenizer_config.json": config}, tmp_path)
    ours = minithink.Tokenizer.from_folder(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.encode("a<eos>b") == [VOCAB["a"], BASE, VOCAB["b"]] == theirs.encode("a<eos>b")
    assert ours.eos_id == theirs.eos_token_id
    assert ours.decode([BASE], skip_special_tokens=True) == theirs.decode([BASE], skip_special_tokens=True)


@pytest.mark.parametrize(
    "text", ["word", "a word", "aword", "words", "word.", "_word", "²word", "wordé", "word\u0301"]
)
def test_a_single_word_stands_alone(text: str, tmp_path: Path) -> None:
    token = {"id": BASE, "content": "word", **FLAGGED, "single_word": True}
    write({"tokenizer.json": {"added_tokens": [token]}}, tmp_path)
    ours = minithink.Tokenizer.from_folder(tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ours.encode(text) == theirs.encode(text).ids


def test_ids_of_the_files_are_kept(tmp_path: Path) -> None:
    """Where ids have holes, transformers closes them, so a model would read other tokens than it was trained with."""
    write({"tokenizer_config.json": {"added_tokens_decoder": {"300": {"content": "<eos>"}}}}, tmp_path)
    tokenizer = minithink.Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<eos>") == [300]
    assert tokenizer.vocab_size == 301
