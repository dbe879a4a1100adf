"""Tokenizer: text to token ids and back, from a Hugging Face `tokenizer.json`, on tiktoken's engine.

Byte-level BPE is read, with the pre-tokenizers of GPT-2, Llama 3 and Qwen 2/3. What would change the ids and is not
understood is an error that names it. `encode` gives the ids of the `tokenizers` package, with two exceptions:
- added tokens keep the ids of the file. `tokenizers` renumbers them when they leave holes;
- NFC is that of Python's Unicode. `tokenizers` has Unicode 9's, which knows no order for combining marks added since.

Why tiktoken gives the same ids. Hugging Face merges the pairs that the file lists, in the file's order. tiktoken
looks up the whole piece, then merges any two neighbours whose concatenation has a rank, lowest rank first. Call a
token *reached* if Hugging Face merges its own bytes to this one token. Give ranks to exactly the reached tokens, in
the order of the merges that complete them. Then both agree on every text: as long as no merge crosses the ends of a
span, the span goes through the same states as it does alone. So two neighbours that spell a reached token are a
listed pair, and two neighbours that spell another token are not.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken

from minithink.chat import TemplateFailed, read_template, render
from minithink.config import read_json
from minithink.errors import MinithinkError
from minithink.pieces import Unsupported, new_encoding, read_pre_tokenizer

# Unicode's White_Space; str.strip() without an argument takes four control characters more.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
# Byte-level files write each byte as one printable character: itself, or else the next one from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(b): b for b in _PRINTABLE}
_BYTE_OF |= {chr(0x100 + n): b for n, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# Names in tokenizer_config.json; templates know special tokens by them.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back; `from_folder` makes one.

    `encoding` splits text into pieces and merges their bytes. Its values are merge ranks, not ids, and it knows no
    added tokens.
    """

    def __init__(self, file: Path, spec: dict[str, Any], config: dict[str, Any], template: str | None) -> None:
        """
        Args:
            file: tokenizer.json, for error messages.
            spec: its content.
            config: the content of tokenizer_config.json.
            template: the chat template; None: there is none.
        """
        self._pattern, self._prefix_space = read_pre_tokenizer(spec.get("pre_tokenizer"))
        self._nfc = _read_normalizer(spec.get("normalizer"))
        self._before, self._after = _read_post_processor(spec.get("post_processor"))
        if (decoder := spec.get("decoder")) and decoder["type"] != "ByteLevel":
            raise Unsupported(f"the decoder is {decoder['type']}, and only ByteLevel is supported.")
        self._model = model = _read_model(spec["model"])
        vocab: dict[str, int] = spec["model"]["vocab"]
        added = _read_added_tokens(spec.get("added_tokens") or [], vocab)
        self.encoding = new_encoding(self._pattern, model.ranks)
        self._raw = _Finder([t for t in added if not t.normalized], str)
        self._normalized = _Finder([t for t in added if t.normalized], self._normalize)
        self._bytes = {id: text.encode() for text, id in vocab.items()}
        self._bytes |= {id: token for token, id in model.vocab.items()}
        self._bytes |= {t.id: t.content.encode() for t in added}
        self._ids = {token: id for id, token in self._bytes.items()} | model.vocab
        self._ids |= {t.content.encode(): t.id for t in added}
        self.vocab_size = 1 + max(self._bytes)
        self.special_ids = frozenset(t.id for t in added if t.special)
        named = {name: config.get(name) for name in _NAMED_TOKENS}
        named = {name: t["content"] if isinstance(t, dict) else t for name, t in named.items()}
        self._named: dict[str, str] = {name: str(t) for name, t in named.items() if t is not None}
        self.bos_id = self.id_of(self._named.get("bos_token", ""))
        self.eos_id = self.id_of(self._named.get("eos_token", ""))
        self.chat_template = template
        self._file = file

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, and the files beside it that name the special tokens and hold the chat template.

        Raises:
            MinithinkError: tokenizer.json is missing, or a file is damaged or of a kind that is not supported.
        """
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            hint = "download it, or write it with transformers' AutoTokenizer.save_pretrained"
            if file.with_suffix(".model").is_file():
                hint = "only the SentencePiece file tokenizer.model is there, which is not supported"
            raise MinithinkError(f"{file} does not exist: {hint}.")
        try:
            config: dict[str, Any] = {}
            for name in ("special_tokens_map.json", "tokenizer_config.json"):  # fields of the second file win
                config |= read_json(file.with_name(name)) if file.with_name(name).is_file() else {}
            return cls(file, read_json(file), config, read_template(file.parent, config))
        except Unsupported as error:
            raise MinithinkError(f"{file}: {error}") from error.__cause__
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            message = f"{file} or a file beside it is not shaped as Hugging Face writes it"
            raise MinithinkError(f"{message} ({type(error).__name__}: {error}): download it again.") from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. Added tokens that are written in it become their ids.

        Args:
            text: without lone surrogates, which have no bytes.
            add_special_tokens: put the post-processor's ids around the text's, in most models BOS before them.

        Raises:
            MinithinkError: a lone surrogate is in the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"{text[error.start]!r} at position {error.start}"
            raise MinithinkError(f"the text holds the lone surrogate {found}: remove it.") from error
        ids: list[int] = []
        for part in self._raw.split(text):
            parts = [part] if isinstance(part, int) else self._normalized.split(self._normalize(part))
            for part in parts:
                ids += [part] if isinstance(part, int) else self._encode_ordinary(part)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _normalize(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._nfc else text

    def _encode_ordinary(self, text: str) -> list[int]:
        if self._prefix_space and not text.startswith(" "):
            text = " " + text
        ids = [self._model.ids[rank] for rank in self.encoding.encode_ordinary(text)]
        if self._model.doubtful.isdisjoint(ids):
            return ids
        return [id for piece in self._pieces(text) for id in self._model.encode_piece(piece)]

    def _pieces(self, text: str) -> Iterator[bytes]:
        # tiktoken does not tell where pieces end. So it encodes only the first piece of the remaining text, to one
        # rank per byte. The time is quadratic in the text's length, but only texts with doubtful tokens come here.
        while text:
            piece = bytes(self._first_piece.encode_ordinary(text))
            yield piece
            text = text[len(piece.decode()) :]

    @cached_property
    def _first_piece(self) -> tiktoken.Encoding:
        return new_encoding(rf"\A(?:{self._pattern})")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD, and ids without a token become nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(id) for id in ids if id not in skip).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of every token by itself, as `decode` gives it."""
        ids = list(ids)
        texts = {id: self.decode([id]) for id in set(ids)}  # a text has far more tokens than different ones
        return [texts[id] for id in ids]

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token, of an added token those of its text in UTF-8; b"": the id has no token."""
        return self._bytes.get(id, b"")

    def id_of(self, token: str) -> int | None:
        """The id of the token with this text (" the", not "Ġthe"); None: there is no such token. An added token
        comes before an ordinary one."""
        return self._ids.get(token.encode(errors="surrogatepass"))

    def stream(self, skip_special_tokens: bool = False) -> TextStream:
        """A decoder for ids that come one at a time."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages` to the prompt that the model was trained on (`chat.py`).

        Args:
            messages: {"role": ..., "content": ...} each.
            add_generation_prompt: end with what opens the assistant's turn.
            variables: reach the template by name, such as Qwen 3's `enable_thinking`.

        Returns:
            The text. Special tokens are in it as text, BOS among them where the template writes it.

        Raises:
            MinithinkError: there is no template, or it is malformed or fails.
        """
        if self.chat_template is None:
            raise MinithinkError(f"{self._file.parent} has no chat template: pass --no-chat to send plain text.")
        variables = {"tools": None, "documents": None, **self._named, **variables}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return render(self.chat_template, variables)
        except TemplateFailed as error:
            raise MinithinkError(
                f"the chat template of {self._file.parent} failed ({error}): change the messages or pass --no-chat."
            ) from error


class TextStream:
    """Decodes ids one at a time and never shows part of a character.

    The texts of all `put` and of `flush`, joined, are `Tokenizer.decode` of the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, id: int) -> str:
        """The text that this id completes: "" inside a character."""
        return "" if id in self._skip else self._decoder.decode(self._token_bytes(id))

    def flush(self) -> str:
        """The end of the text: U+FFFD for an unfinished character, else "". After it the stream begins anew."""
        return self._decoder.decode(b"", final=True)


# Byte-pair encoding ----------------------------------------------------------------------------------------------

_Merges = dict[tuple[bytes, bytes], int]  # neighbours -> the rank of their merge
_NEVER = 1 << 62


def _merge(piece: bytes, merges: _Merges) -> tuple[list[bytes], int]:
    """Hugging Face's BPE: merge the listed pair of neighbours with the lowest rank, the leftmost of equal ones, until
    no listed pair is left.

    Returns:
        The parts, and the rank of the last merge; -1: nothing was merged.
    """
    parts, last = [piece[i : i + 1] for i in range(len(piece))], -1
    while len(parts) > 1:
        ranks = [merges.get(pair, _NEVER) for pair in pairwise(parts)]
        if (best := min(ranks)) == _NEVER:
            break
        last, i = best, ranks.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts, last


class _Model:
    """Vocabulary and merges as tiktoken needs them, and an exact fallback for tokens that tiktoken might merge
    differently."""

    def __init__(self, vocab: dict[bytes, int], merges: _Merges, ignore_merges: bool) -> None:
        made = {left + right for left, right in merges}
        reached: list[tuple[int, bytes]] = []
        others: dict[bytes, int] = {}  # tokens that no merges make, but that are looked up as whole pieces
        pairs = False
        for token, id in vocab.items():
            if len(token) > 1 and (ignore_merges or token in made):
                parts, rank = _merge(token, merges)
                if len(parts) == 1:
                    reached.append((rank, token))
                elif ignore_merges:
                    others[token] = id
                    pairs |= len(parts) == 2
        order = [*(t for t in vocab if len(t) == 1), *(t for _, t in sorted(reached)), *others]
        self.vocab = vocab
        self.ranks = {token: rank for rank, token in enumerate(order)}
        self.ids = [vocab[token] for token in order]  # by rank
        # Inside a piece tiktoken makes a token of `others` only if it is the concatenation of two neighbours that no
        # merge joins. So none is made if the bytes of each merge to three parts or more. If the bytes of one merge to
        # a pair, all of them are doubtful.
        self._whole = others if pairs else {}
        self.doubtful = frozenset(self._whole.values())
        self._merges = merges
        self.encode_piece = lru_cache(maxsize=2**14)(self._encode_piece)

    def _encode_piece(self, piece: bytes) -> list[int]:
        parts = [piece] if piece in self._whole else _merge(piece, self._merges)[0]
        return [self.vocab[part] for part in parts]


def _byte_level(text: str) -> bytes | None:
    """The bytes of a token that a byte-level file writes as this text; None: no such file would write it."""
    try:
        return bytes([_BYTE_OF[c] for c in text])
    except KeyError:
        return None


def _check_id(token: str, id: Any) -> None:
    if type(id) is not int or id < 0:
        raise Unsupported(f"{token} has the id {id!r}, which is no token id.")


def _read_model(model: dict[str, Any]) -> _Model:
    if (kind := model.get("type") or "BPE") != "BPE":
        raise Unsupported(f"the model is {kind}, and only byte-level BPE is supported.")
    for field in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise Unsupported(f"the model has {field} = {model[field]!r}, which is not supported.")
    vocab: dict[str, int] = model["vocab"]
    text_of: dict[int, str] = {}
    for text, id in vocab.items():
        _check_id(f"the token {text!r}", id)
        if text_of.setdefault(id, text) != text:
            raise Unsupported(f"{text_of[id]!r} and {text!r} both have the id {id}: remove one of them.")
    bytes_of = {text: token for text in vocab if (token := _byte_level(text))}
    lacking = {*range(256)} - _NEVER_IN_UTF8 - {token[0] for token in bytes_of.values() if len(token) == 1}
    if lacking:
        raise Unsupported(
            f"the vocabulary has no token for {len(lacking)} bytes, the first {min(lacking):#04x}: it is not "
            "byte-level, or was trained without the byte alphabet."
        )
    merges: _Merges = {}
    for rank, entry in enumerate(model["merges"]):
        if isinstance(entry, str) and entry.startswith("#version"):
            continue
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if len(pair) != 2:
            raise Unsupported(f"merge {rank} is {entry!r}, which is not a pair of tokens.")
        if missing := [text for text in (*pair, "".join(pair)) if text not in vocab]:
            raise Unsupported(f"merge {rank} needs {missing[0]!r}, which is not in the vocabulary.")
        if pair[0] in bytes_of and pair[1] in bytes_of:  # no text has the bytes of other pairs
            merges[bytes_of[pair[0]], bytes_of[pair[1]]] = rank
    ids = {token: vocab[text] for text, token in bytes_of.items()}
    return _Model(ids, merges, bool(model.get("ignore_merges")))


# The steps around the model --------------------------------------------------------------------------------------


class _AddedToken(NamedTuple):
    id: int
    content: str
    special: bool
    lstrip: bool  # white space before it belongs to it
    rstrip: bool  # white space after it belongs to it
    normalized: bool  # its normalized content is looked for in the normalized text, else its content in the raw text


class _Finder:
    """Finds added tokens in a text: the leftmost one first; of several that begin there, the longest."""

    def __init__(self, tokens: list[_AddedToken], normalize: Callable[[str], str]) -> None:
        self._tokens = {normalize(t.content): t for t in reversed(tokens)}  # of equal contents the first wins
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._regex = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The ids of the tokens found and the non-empty texts between them, in order."""
        done = 0
        for match in self._regex.finditer(text):
            token, (start, stop) = self._tokens[match.group()], match.span()
            if token.lstrip:
                start = len(text[:start].rstrip(_WHITE))
            if token.rstrip:
                stop = len(text) - len(text[stop:].lstrip(_WHITE))
            if done < start:
                yield text[done:start]
            yield token.id
            done = stop
        if done < len(text):
            yield text[done:]


def _read_added_tokens(entries: list[dict[str, Any]], vocab: dict[str, int]) -> list[_AddedToken]:
    id_of, text_of = dict(vocab), {id: text for text, id in vocab.items()}
    tokens = []
    for entry in entries:
        id, text, special = entry["id"], entry["content"], entry.get("special", False)
        _check_id(f"the added token {text!r}", id)
        if text_of.setdefault(id, text) != text:
            raise Unsupported(f"{text_of[id]!r} and the added {text!r} both have the id {id}: remove one.")
        if id_of.setdefault(text, id) != id:
            raise Unsupported(f"the added token {text!r} has the ids {id_of[text]} and {id}: remove one.")
        if entry.get("single_word"):
            raise Unsupported(f"the added token {text!r} has single_word set, which is not supported.")
        if text:
            flags = [entry.get("lstrip", False), entry.get("rstrip", False), entry.get("normalized", not special)]
            tokens.append(_AddedToken(id, text, special, *flags))
    return tokens


def _read_normalizer(normalizer: dict[str, Any] | None) -> bool:
    """Whether the file asks for NFC, a Unicode normal form."""
    if normalizer and normalizer["type"] != "NFC":
        raise Unsupported(f"the normalizer is {normalizer['type']}, and only NFC or none is supported.")
    return bool(normalizer)


def _read_post_processor(step: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """The ids that `add_special_tokens` puts before and after those of a text."""
    steps = [] if step is None else step["processors"] if step["type"] == "Sequence" else [step]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    if len(templates) > 1 or any(step["type"] not in ("TemplateProcessing", "ByteLevel") for step in steps):
        kinds = ", ".join(step["type"] for step in steps)
        raise Unsupported(
            f"the post-processor [{kinds}] is not supported: it must be one TemplateProcessing, ByteLevel or both."
        )
    sides: tuple[list[int], list[int]] = [], []
    for template in templates:
        texts = 0
        for item in template["single"]:
            texts += "Sequence" in item
            if "SpecialToken" in item:
                sides[min(texts, 1)].extend(template["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        if texts != 1:
            raise Unsupported(f"the post-processor's template holds the text {texts} times and not once.")
    return sides
