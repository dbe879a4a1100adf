"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json say it.

The file has tokens, merges and the name of a pre-tokenizer. What such a name stands for is what the published
tokenizer.json of that model family says, the normal form of its texts included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minithink.errors import alternatives, quoted
from minithink.text.bpe import Unsupported
from minithink.text.pieces import LLAMA3_PATTERN, QWEN_PATTERN

# Types of tokens.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# Names of tokens in tokenizer_config.json, and how the fields with their ids are called.
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_NFC = {"type": "NFC"}
_DIGITS = {"type": "Digits", "individual_digits": True}
# What is published under each name: the fields of tokenizer.json.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama-bpe": {"pre_tokenizer": _split(LLAMA3_PATTERN)},
    "qwen2": {"normalizer": _NFC, "pre_tokenizer": _split(QWEN_PATTERN)},
    "deepseek-r1-qwen": {"normalizer": _NFC, "pre_tokenizer": _split(QWEN_PATTERN)},
    "smollm": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(use_regex=True)]}},
    "gpt-2": {"pre_tokenizer": _byte_level(use_regex=True)},
}
WHOLE_WORDS = ("llama-bpe",)  # those that look a word up before they merge
BEGINS_WITH_BOS = ("llama-bpe",)  # … and that put BOS before a text, if the file does not say whether


def tokenizer_files(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and of tokenizer_config.json.

    Args:
        fields: of the GGUF file.

    Raises:
        Unsupported: the tokenizer is of another kind, or a field is not what it should be.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise Unsupported(f"the tokenizer is {quoted(kind)}, and only byte-level BPE, which is called gpt2, is read.")
    pre = fields.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise Unsupported(f"the pre-tokenizer {quoted(pre)} is not supported; {alternatives(pre, PRE_TOKENIZERS)}.")
    if fields.get("tokenizer.ggml.add_space_prefix"):
        raise Unsupported("tokenizer.ggml.add_space_prefix is true, which is not supported.")
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    merges = _texts(fields, "tokenizer.ggml.merges")
    kinds = _kinds(fields, len(tokens))
    vocab, added = _vocabulary(tokens, kinds, merges)
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": PRE_TOKENIZERS[pre].get("normalizer"),
        "pre_tokenizer": PRE_TOKENIZERS[pre]["pre_tokenizer"],
        "post_processor": _post_processor(fields, tokens, pre),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in WHOLE_WORDS,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return spec, _config(fields, tokens)


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    """A field that is a list of texts."""
    values = fields.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise Unsupported(f"{name} is {quoted(values)}, and must be a list of texts.")
    return values


def _kinds(fields: Mapping[str, Any], count: int) -> list[int]:
    """The type of every token."""
    kinds = fields.get("tokenizer.ggml.token_type")
    if kinds is None:
        return [NORMAL] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise Unsupported(f"tokenizer.ggml.token_type is {quoted(kinds)}, and must have one type for each token.")
    return kinds


def _vocabulary(
    tokens: list[str], kinds: list[int], merges: list[str]
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The vocabulary, and the added tokens. An added token is in the vocabulary, too, if a merge needs it, or if it
    stands before other tokens: else the package `tokenizers`, which may read this, would number it anew."""
    merged = set[str]()
    for merge in merges:
        left, _, right = merge.partition(" ")
        merged |= {left, right, left + right}
    vocab: dict[str, int] = {}
    added: list[dict[str, Any]] = []
    known: dict[str, int] = {}
    special = (CONTROL, USER_DEFINED, UNUSED)
    last = max((id for id, kind in enumerate(kinds) if kind not in special), default=-1)
    for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == UNUSED:
            continue
        other = known.setdefault(token, id)
        if other != id:
            raise Unsupported(f"the token {quoted(token)} has the ids {other} and {id}, and may have one.")
        is_added = kind in (CONTROL, USER_DEFINED)
        if is_added:
            added.append(_added(token, id, special=kind == CONTROL))
        if not is_added or token in merged or id < last:
            vocab[token] = id
    return vocab, added


def _added(token: str, id: int, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": id, "content": token, **flags}


def _post_processor(fields: Mapping[str, Any], tokens: list[str], pre: str) -> dict[str, Any] | None:
    """What puts tokens before and behind a text; None: nothing."""
    has_bos = fields.get("tokenizer.ggml.add_bos_token", pre in BEGINS_WITH_BOS)
    has_eos = fields.get("tokenizer.ggml.add_eos_token", False)
    names = ["bos"] * bool(has_bos) + ["A"] + ["eos"] * bool(has_eos)
    if names == ["A"]:
        return None
    items: list[dict[str, Any]] = []
    special: dict[str, Any] = {}
    for name in names:
        if name == "A":
            items.append({"Sequence": {"id": "A", "type_id": 0}})
            continue
        found = _named(fields, tokens, name)
        if found is None:
            raise Unsupported(f"tokenizer.ggml.add_{name}_token is true, and there is no {name}_token_id.")
        token, id = found
        items.append({"SpecialToken": {"id": token, "type_id": 0}})
        special[token] = {"id": token, "ids": [id], "tokens": [token]}
    return {"type": "TemplateProcessing", "single": items, "pair": items, "special_tokens": special}


def _named(fields: Mapping[str, Any], tokens: list[str], name: str) -> tuple[str, int] | None:
    """A named token and its id; None: the file does not name it."""
    id = fields.get(f"tokenizer.ggml.{name}_token_id")
    if id is None:
        return None
    if type(id) is not int or not 0 <= id < len(tokens):
        raise Unsupported(f"tokenizer.ggml.{name}_token_id is {quoted(id)}, and there are {len(tokens):,} tokens.")
    return tokens[id], id


def _config(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in NAMED.items():
        found = _named(fields, tokens, theirs)
        if found is not None:
            config[ours] = found[0]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
