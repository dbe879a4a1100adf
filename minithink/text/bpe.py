"""Byte-pair encoding as Hugging Face defines it: merge the listed pair of neighbours that stands first in the list.

The files that are read here are *byte-level*. They spell every byte of a text's UTF-8 as one printable character, its
symbol: the space is "Ġ", for example. So a word is a text of symbols, and so is a token.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

from minithink.errors import quoted

# A printable byte is its own symbol. The symbols of the others are the characters from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}
_SYMBOL_OF = {byte: symbol for symbol, byte in _BYTE_OF.items()}
_IN_UTF8 = {_SYMBOL_OF[byte] for byte in range(0x100) if byte not in (0xC0, 0xC1, *range(0xF5, 0x100))}

LARGEST_ID = 2**31 - 1
_TAKEN = -1  # in place of a token that was merged into the one before it


class Unsupported(Exception):
    """Why a tokenizer cannot be used. `Tokenizer.from_folder` puts the file's name in front."""


def spelled(text: str) -> str:
    """A text as byte-level files spell it: the symbols of its bytes."""
    one_character_a_byte = text.encode("utf-8", "surrogatepass").decode("latin-1")
    return one_character_a_byte.translate(_SYMBOL_OF)


def bytes_of(token: str) -> bytes:
    """The bytes that a token of the vocabulary stands for; if it is not all symbols, its own UTF-8."""
    try:
        return bytes([_BYTE_OF[symbol] for symbol in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def is_spelled(token: str) -> bool:
    """Whether a token is all symbols, so that it can stand for bytes of a text."""
    return all(symbol in _BYTE_OF for symbol in token)


class BytePairEncoding:
    """Encodes words, which are texts of symbols; `from_spec` makes one.

    A symbol without a token becomes the `unknown` token. If there is none, the symbol is dropped: SmolLM2's file has
    no tokens for eight bytes.
    """

    def __init__(self, vocab: dict[str, int], merges: dict[tuple[int, int], int], results: list[int]) -> None:
        """
        Args:
            vocab: token → id.
            merges: the ids of two neighbours → the rank of their merge. The lowest rank is merged first.
            results: rank → id of the merged token.
        """
        self.vocab = vocab
        self._merges = merges
        self._results = results
        self.whole_words = False  # whether a word that is a token is not merged, but looked up
        self.unknown: int | None = None
        self.fuses_unknown = False  # whether unknown neighbours become one token

    @classmethod
    def from_spec(cls, model: dict[str, Any]) -> BytePairEncoding:
        """Read the field `model` of a tokenizer.json. Raises Unsupported: it cannot be encoded exactly."""
        kind = model.get("type") or "BPE"
        if kind != "BPE":
            raise Unsupported(f"the model is {quoted(kind)}, and only byte-level BPE is supported.")
        for field in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(field):
                raise Unsupported(f"the model has {field} = {quoted(model[field])}, which is not supported.")
        vocab = _read_vocab(model.get("vocab"))
        merges, results = _read_merges(model.get("merges"), vocab)
        encoding = cls(vocab, merges, results)
        encoding.whole_words = bool(model.get("ignore_merges"))
        encoding.fuses_unknown = bool(model.get("fuse_unk"))
        unknown = model.get("unk_token")
        if unknown is not None:
            encoding.unknown = vocab.get(unknown) if isinstance(unknown, str) else None
            if encoding.unknown is None and not vocab.keys() >= _IN_UTF8:
                raise Unsupported(f"the model's unk_token is {quoted(unknown)}, which is not in the vocabulary.")
        return encoding

    def encode(self, word: str) -> list[int]:
        """The ids of a word."""
        if self.whole_words and word in self.vocab:
            return [self.vocab[word]]
        return self.merged(word)

    def merged(self, word: str) -> list[int]:
        """The ids that merging gives for a word, even if `encode` would look it up."""
        return self._merge(self._symbols(word))

    def made_in_order(self) -> list[int]:
        """The ids of the tokens that merges make, in the order of the merges. A token that several merges make is
        there several times."""
        ranks = sorted(self._merges.values())
        return [self._results[rank] for rank in ranks]

    def missing_bytes(self) -> list[int]:
        """The bytes that texts can have and that have no token."""
        return sorted(_BYTE_OF[symbol] for symbol in _IN_UTF8 if symbol not in self.vocab)

    def _symbols(self, word: str) -> list[int]:
        """The ids of a word's symbols."""
        ids: list[int] = []
        after_unknown = False
        for symbol in word:
            id = self.vocab.get(symbol)
            if id is not None:
                ids.append(id)
            elif self.unknown is not None and not (after_unknown and self.fuses_unknown):
                ids.append(self.unknown)
            after_unknown = id is None
        return ids

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge the listed pair of neighbours with the lowest rank, the leftmost of equal ones, until none is left.

        A queue holds the pairs, and a merge adds the two pairs that it makes. So the time grows as n·log n. A token
        is known by the place of its first symbol, and `before` and `after` give the places of its neighbours.
        """
        rank_of = self._merges.get
        end = len(ids)
        before = list(range(-1, end - 1))
        after = list(range(1, end + 1))
        queue: list[int] = []  # rank · end + place, so that the lowest number is the pair to be merged first
        for place, pair in enumerate(pairwise(ids)):
            rank = rank_of(pair)
            if rank is not None:
                queue.append(rank * end + place)
        heapify(queue)
        while queue:
            rank, left = divmod(heappop(queue), end)
            right = after[left]
            # An earlier merge may have taken one of the two.
            if right == end or rank_of((ids[left], ids[right])) != rank:
                continue
            token = self._results[rank]
            ids[left] = token
            ids[right] = _TAKEN
            leader = before[left]
            follower = after[right]
            after[left] = follower
            if follower < end:
                before[follower] = left
                rank = rank_of((token, ids[follower]))
                if rank is not None:
                    heappush(queue, rank * end + left)
            if leader >= 0:
                rank = rank_of((ids[leader], token))
                if rank is not None:
                    heappush(queue, rank * end + leader)
        return [id for id in ids if id != _TAKEN]


def _read_vocab(vocab: Any) -> dict[str, int]:
    if not isinstance(vocab, dict):
        raise Unsupported(f"the model's vocab is {quoted(vocab)}, and must be an object of tokens and ids.")
    text_of: dict[int, str] = {}
    for text, id in vocab.items():
        check_id(id, "the token", text)
        other = text_of.setdefault(id, text)
        if other is not text:
            raise Unsupported(f"{quoted(other)} and {quoted(text)} both have the id {id}: remove one of them.")
    lacking = [byte for byte in range(0x20, 0x7F) if _SYMBOL_OF[byte] not in vocab]
    if lacking:
        raise Unsupported(
            f"the vocabulary has no token for {len(lacking)} of the 95 printable ASCII characters, the first "
            f"{chr(lacking[0])!r}: it is not byte-level, or was trained without the byte alphabet."
        )
    return vocab


def _read_merges(entries: Any, vocab: dict[str, int]) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Merges are texts such as "Ġ t", or pairs of tokens."""
    if not isinstance(entries, list):
        raise Unsupported(f"the model's merges are {quoted(entries)}, and must be a list of pairs of tokens.")
    merges: dict[tuple[int, int], int] = {}
    results: list[int] = []
    for entry in entries:
        pair = entry
        if isinstance(entry, str):
            if entry.startswith("#version"):
                continue
            pair = entry.split(" ")
        rank = len(results)
        try:
            left, right = pair
            if isinstance(pair, dict):
                raise TypeError
            merges[vocab[left], vocab[right]] = rank
            results.append(vocab[left + right])
        except (KeyError, TypeError, ValueError):
            raise _bad_merge(rank, entry, pair, vocab) from None
    return merges, results


def _bad_merge(rank: int, entry: Any, pair: Any, vocab: dict[str, int]) -> Unsupported:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        return Unsupported(f"merge {rank} is {quoted(entry)}, which is not a pair of tokens.")
    missing = [text for text in (*pair, "".join(pair)) if text not in vocab]
    return Unsupported(f"merge {rank} needs {quoted(missing[0])}, which is not in the vocabulary.")


def check_id(id: Any, what: str, text: str) -> None:
    """Raises Unsupported: the value that a file gives as an id is none."""
    if type(id) is not int or not 0 <= id <= LARGEST_ID:
        raise Unsupported(f"{what} {quoted(text)} has the id {quoted(id)}, which is no token id.")
