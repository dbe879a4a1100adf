"""A tokenizer as an encoding of the package `tiktoken`, which gives the same ids.

Both Hugging Face and tiktoken start from the bytes of a piece and merge two neighbours at a time. Their rules differ:

- Hugging Face merges a pair that the file lists. The pair that stands first in the list goes first.
- tiktoken merges any two neighbours that together are a token. The pair that makes the lowest id goes first.

The rules agree for every text if three things hold. Call a token *reached* if Hugging Face merges its own bytes to
this one token.

1. tiktoken is given the reached tokens only. Take two neighbours in the middle of Hugging Face's work. No merge has
   crossed the ends of the bytes that the two cover, so these bytes went through the same states as they would alone.
   Alone they end as one token if and only if the two neighbours are a listed pair. So both rules allow the same
   merges.
2. The merges that make reached tokens are listed in the order of the tokens' ids. So both rules choose the same one.
   (All pairs in a text that make the same token are the same pair, again because the bytes alone have one way.)
3. With `ignore_merges`, Hugging Face looks a whole piece up before it merges. So tiktoken must have the tokens that
   are not reached, too, and must never make one by a merge. It makes none if the bytes of the token, alone, end as
   three parts or more: then they are never two neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from minithink.errors import counted, quoted
from minithink.text.added_tokens import AddedToken
from minithink.text.bpe import BytePairEncoding, Unsupported, bytes_of, is_spelled
from minithink.text.pieces import GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, ByteLevel, PreTokenizer, Split

if TYPE_CHECKING:
    import tiktoken

_MATCH_EVERYTHING = (GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN)
_READ_DIFFERENTLY = re.compile(r"\\[<>0-9]")  # tiktoken takes these for ends of words and references to groups


def new_encoding(
    name: str, model: BytePairEncoding, pre_tokenizer: PreTokenizer, added: Mapping[int, AddedToken]
) -> tiktoken.Encoding:
    """The encoding of a tokenizer that does not normalize texts.

    Args:
        name: of the encoding.
        added: the added tokens by id.

    Raises:
        Unsupported: no encoding gives the same ids for every text.
    """
    import tiktoken  # only this function needs it, and importing it takes time

    pattern = _pattern(pre_tokenizer)
    special = _special_tokens(added)
    ranks = _ranks(model, special)
    try:
        return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as error:
        raise Unsupported(
            f"tiktoken does not take the regex {quoted(pattern)} of its pre-tokenizer ({quoted(str(error))})."
        ) from None


def _pattern(pre_tokenizer: PreTokenizer) -> str:
    """The regex whose matches are the pieces."""
    if any(isinstance(step, ByteLevel) and step.prefix_space for step in pre_tokenizer.steps):
        raise Unsupported("its pre-tokenizer puts a space before a text, which tiktoken does not.")
    if len(pre_tokenizer.steps) != 1:
        number = len(pre_tokenizer.steps)
        raise Unsupported(f"its pre-tokenizer splits in {number} steps, and tiktoken splits in one, by a regex.")
    [step] = pre_tokenizer.steps
    if isinstance(step, ByteLevel) and step.split is not None and not step.spells:
        step = step.split
    if not isinstance(step, Split):
        raise Unsupported("its pre-tokenizer spells bytes twice, which tiktoken does not.")
    if step.behavior != "Isolated":
        raise Unsupported(f"its pre-tokenizer splits by {quoted(step.behavior)}, and tiktoken only by 'Isolated'.")
    source = step.pattern.source
    if source in _MATCH_EVERYTHING:
        return source
    if _READ_DIFFERENTLY.search(source):
        raise Unsupported(f"tiktoken may read the regex {quoted(source)} of its pre-tokenizer in another way.")
    # tiktoken drops what the regex does not match. To Hugging Face, the text between two matches is a piece, too.
    return rf"(?:{source})|(?:(?!{source})(?s:.))++"


def _special_tokens(added: Mapping[int, AddedToken]) -> dict[str, int]:
    """The ids of the added tokens, by content."""
    special: dict[str, int] = {}
    for id, token in added.items():
        for flag in ("single_word", "lstrip", "rstrip", "normalized"):
            if getattr(token, flag):
                raise Unsupported(f"its added token {quoted(token.content)} has {flag} set, which tiktoken lacks.")
        special[token.content] = id
    # If one content begins with another, the two stand next to each other in the order of the alphabet, or a third
    # stands between them that begins with the shorter one as well.
    for first, second in pairwise(sorted(special)):
        if second.startswith(first):
            raise Unsupported(
                f"its added token {quoted(second)} begins with {quoted(first)}, another one, and tiktoken may find "
                "either."
            )
    return special


def _ranks(model: BytePairEncoding, special: Mapping[str, int]) -> dict[bytes, int]:
    """The ids of the tokens that pieces become, by their bytes. tiktoken takes them for ranks of merges, too."""
    missing = model.missing_bytes()
    if missing:
        raise Unsupported(
            f"its vocabulary has no token for {counted(len(missing), 'byte')}, the first {missing[0]:#04x}, and "
            "tiktoken needs all of them."
        )
    added = {content.encode(): id for content, id in special.items()}
    added_ids = set(special.values())
    ranks: dict[bytes, int] = {}
    reached: dict[int, str] = {}
    for token, id in model.vocab.items():
        if not token or not is_spelled(token):
            continue  # no piece becomes this token
        content = bytes_of(token)
        if content in added:
            continue  # found before the text is split, so that no piece has these bytes
        if id in added_ids:
            raise Unsupported(f"the id {id} is that of an added token and of {quoted(token)}, another text.")
        parts = model.merged(token)
        if parts == [id]:
            reached[id] = token
            ranks[content] = id
        elif model.whole_words:
            if len(parts) == 2:
                raise Unsupported(
                    f"no merge makes its token {quoted(token)}, and tiktoken would merge two tokens that spell it."
                )
            ranks[content] = id
    _check_order(model.made_in_order(), reached)
    return ranks


def _check_order(made: list[int], reached: Mapping[int, str]) -> None:
    """Raises Unsupported: merges are not in the order of the ids that they make.

    Args:
        made: the ids in the order of the merges.
        reached: the tokens whose merges count, by id.
    """
    last = -1
    for id in made:
        if id not in reached:
            continue
        if id < last:
            raise Unsupported(
                f"it merges to {quoted(reached[last])} (id {last}) before {quoted(reached[id])} (id {id}), and "
                "tiktoken merges to the lower id first."
            )
        last = id
