"""Give unused tokens of a tokenizer the texts that the puzzles need, such as `<think>`.

A pretrained model has special tokens that it hardly met in training. An adapter that trains their embeddings can make
them its own, so the vocabulary stays as large as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minithink.config import read_json
from minithink.errors import UsageError, quoted
from minithink.tasks import prepare
from minithink.text.tokenizer import Tokenizer
from minithink.train.tokenizer import write_files

NEEDED = (*prepare.SPECIAL, *prepare.THINK)


def write_renamed(source: Path, names: Mapping[str, str], folder: Path) -> None:
    """Write a tokenizer in which some added tokens have other texts, with the chat template of the puzzles.

    Args:
        source: the folder of the tokenizer.
        names: an added token's text → its new text.
        folder: as of `write_files`.

    Raises:
        UsageError: there is no such token, or a new text is taken, or one that the puzzles need is missing.
        MinithinkError: the source cannot be read, or the folder not be written.
    """
    known = Tokenizer.from_folder(source)  # it checks the files
    raw = read_json(source / "tokenizer.json")
    _check(known, raw, names)
    for token in raw["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]
            token["special"] = token["content"] not in prepare.THINK
    vocab = raw["model"]["vocab"]
    raw["model"]["vocab"] = {names.get(text, text): id for text, id in vocab.items()}
    end = prepare.SPECIAL[0]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    write_files(folder, raw, config, prepare.CHAT_TEMPLATE)


def _check(known: Tokenizer, raw: dict[str, Any], names: Mapping[str, str]) -> None:
    """UsageError: these names cannot be given."""
    added = {token["content"] for token in raw["added_tokens"]}
    for old, new in names.items():
        if old not in added:
            some = ", ".join(sorted(added)[:20])
            raise UsageError(f"The tokenizer has no added token {quoted(old)} to rename; it has {some}.")
        if new not in names and known.id_of(new) is not None:
            raise UsageError(f"The tokenizer has a token {quoted(new)} already: leave it out of --rename-tokens.")
    if len(set(names.values())) < len(names):
        raise UsageError("--rename-tokens gives two tokens the same text: give each its own.")
    missing = [text for text in NEEDED if text not in names.values() and known.id_of(text) is None]
    if missing:
        raise UsageError(
            f"The puzzles need a token {quoted(missing[0])}: name it in --rename-tokens, OLD={missing[0]}."
        )
