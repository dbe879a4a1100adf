"""Tokenizer: text to token ids and back, from a Hugging Face `tokenizer.json`, on tiktoken's engine.

Byte-level BPE is read, with the pre-tokenizers of GPT-2, Llama 3 and Qwen 2/3; whatever would change the ids and is
not understood is an error that names it. `encode` gives the ids of the `tokenizers` package, with two exceptions:
added tokens keep the ids of the file (`tokenizers` renumbers them when they leave holes), and NFC is that of Python's
Unicode (`tokenizers` has Unicode 9's, which knows no order for combining marks added since).

Why tiktoken may be used. Hugging Face merges the pairs that the file lists, in its order. tiktoken merges any two
neighbours whose concatenation has a rank, lowest first, after looking the whole piece up. Give ranks to exactly the
tokens t whose own bytes Hugging Face merges to [t], in the order of the merges that complete them, and both agree on
every text: while no merge crosses the ends of a span, it goes through the states that it goes through alone, so two
neighbours that spell such a t are a listed pair, and two that spell another token are not.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import tiktoken
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from minithink.config import read_json
from minithink.errors import MinithinkError, reason

# How text is split into pieces, which merges never cross. Llama 3 keeps three digits together, Qwen one.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
WHOLE_TEXT = r"(?s:.+)"  # ByteLevel with use_regex=false and no Split before it
# Other patterns are taken if they use only what Hugging Face's regex engine and tiktoken's read alike.
_ESCAPE = r"\\(?:[pP]\{[LMNPSZ][a-z]?\}|[sSrnt]|[^\w\s])"
_PORTABLE = re.compile(
    rf"""(?:
        \(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)      # the contractions of Llama 3 and Qwen, the only flags
        | \\s\+\(\?!\\S\)                          # all spaces but the last, the only lookahead
        | \((?:\?:|(?!\?))                         # a group opens: no other kind than ( and (?:
        | \)
        | \|                                       # or
        | {_ESCAPE}                                # Unicode categories, white space, escaped punctuation
        | \[\^?(?:{_ESCAPE}|(?!--)[^\[\]\\&~])+\]  # a class, without set operations or classes in it
        | [^\\\[\](){{}}|?*+^$.]                   # a character that means itself
        | [?*+][?+]?(?![?*+])                      # a repetition: greedy, lazy or possessive
        | \{{\d+(?:,\d*)?\}}(?![?*+])              # a counted one, greedy
    )+""",
    re.VERBOSE,
)
# Unicode's White_Space; str.strip() without an argument takes four control characters more.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
# Byte-level files write each byte as one printable character: itself, or else the next one from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(b): b for b in _PRINTABLE}
_BYTE_OF |= {chr(0x100 + n): b for n, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_RENDERED = 10_000_000  # characters that a chat template may produce
_MAX_WIDTH = 10_000  # characters that it may pad or indent by


class Tokenizer:
    """Text to ids and back; `from_folder` makes one.

    `encoding` splits and merges: its values are merge ranks, not ids, and it knows no added tokens.
    """

    def __init__(self, file: Path, spec: dict[str, Any], config: dict[str, Any], template: str | None) -> None:
        """`spec`, `config`: tokenizer.json and tokenizer_config.json as parsed; `file` is what errors name."""
        self._pattern, self._prefix_space = _read_pre_tokenizer(spec.get("pre_tokenizer"), file)
        self._nfc = _read_normalizer(spec.get("normalizer"), file)
        self._before, self._after = _read_post_processor(spec.get("post_processor"), file)
        if (decoder := spec.get("decoder")) and decoder["type"] != "ByteLevel":
            raise MinithinkError(f"{file}: the decoder is {decoder['type']}, and only ByteLevel is supported.")
        self._model = model = _read_model(spec["model"], file)
        vocab: dict[str, int] = spec["model"]["vocab"]
        added = _read_added_tokens(spec.get("added_tokens") or [], vocab, file)
        self.encoding = _encoding(self._pattern, model.ranks)
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
        """Read tokenizer.json and, where they exist, the files beside it that name the special tokens and hold the
        chat template. MinithinkError: a file is missing or damaged, or of a kind that is not supported."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            hint = "download it, or write it with transformers' AutoTokenizer.save_pretrained"
            if file.with_suffix(".model").is_file():
                hint = "only the SentencePiece file tokenizer.model is there, which is not supported"
            raise MinithinkError(f"{file} does not exist: {hint}.")
        try:
            config: dict[str, Any] = {}
            for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second one counts
                config |= read_json(file.with_name(name)) if file.with_name(name).is_file() else {}
            return cls(file, read_json(file), config, _read_chat_template(file.parent, config))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            message = f"{file} or a file beside it is not shaped as Hugging Face writes it"
            raise MinithinkError(f"{message} ({type(error).__name__}: {error}): download it again.") from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`, in which added tokens are found. `add_special_tokens` puts the post-processor's ids
        around them, in most models BOS before them. MinithinkError: a lone surrogate in `text`."""
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
        # tiktoken does not tell where pieces end: have it encode only the first piece of what is left, to one rank
        # per byte. That is quadratic in the text, but only texts with doubtful tokens come here.
        while text:
            piece = bytes(self._first_piece.encode_ordinary(text))
            yield piece
            text = text[len(piece.decode()) :]

    @cached_property
    def _first_piece(self) -> tiktoken.Encoding:
        return _encoding(rf"\A(?:{self._pattern})")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(id) for id in ids if id not in skip).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of every token by itself, as `decode` gives it."""
        ids = list(ids)
        texts = {id: self.decode([id]) for id in set(ids)}  # a text has far more tokens than different ones
        return [texts[id] for id in ids]

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token, of an added token its UTF-8 text; b"" for an id without a token."""
        return self._bytes.get(id, b"")

    def id_of(self, token: str) -> int | None:
        """The id of the token with this text (" the", not "Ġthe"), of an added one before an ordinary one."""
        return self._ids.get(token.encode(errors="surrogatepass"))

    def stream(self, skip_special_tokens: bool = False) -> TextStream:
        """A decoder for ids that come one at a time."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages` ({"role": ..., "content": ...}) to the prompt that the model was trained on.

        `variables` reach the template by name, such as Qwen 3's `enable_thinking`. Special tokens are in the result
        as text, BOS among them where the template writes it. The template is a program by the model's author, and
        runs in Jinja's sandbox. Bounded are the size of the result, products and powers, and the widths to which text
        is padded or indented (but not those in `str.format`). Not bounded are its time and what it builds up on the
        way, as by `~` and `replace`. MinithinkError: there is no template, or it is malformed or fails.
        """
        variables = {"tools": None, "documents": None, **self._named, **variables}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        if self.chat_template is None:
            raise MinithinkError(f"{self._file.parent} has no chat template: pass --no-chat to send plain text.")
        text = ""
        try:
            for chunk in self._template.generate(variables):
                text += chunk
                if len(text) > _MAX_RENDERED:
                    raise SecurityError(f"the text has more than {_MAX_RENDERED} characters")
        except Exception as error:  # a template can raise anything
            reason = f"{type(error).__name__}: {str(error)[:300]!r}"
            message = f"the chat template of {self._file.parent} failed ({reason})"
            raise MinithinkError(f"{message}: change the messages or pass --no-chat.") from error
        return text

    @cached_property
    def _template(self) -> jinja2.Template:
        sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=_JINJA_EXTENSIONS)
        sandbox.filters |= {name: _of_bounded_width(sandbox.filters[name]) for name in _PADDING_FILTERS}
        sandbox.filters |= {"tojson": _to_json, "format": _format}
        sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        return sandbox.from_string(self.chat_template or "")


class TextStream:
    """Decodes ids one at a time and never shows part of a character.

    What `put` and the last `flush` return, joined, is `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, id: int) -> str:
        """The text that is certain now: "" while inside a character."""
        return "" if id in self._skip else self._decoder.decode(self._token_bytes(id))

    def flush(self) -> str:
        """What is left, U+FFFD for an unfinished character. The stream begins anew then."""
        return self._decoder.decode(b"", final=True)


# Byte-pair encoding ----------------------------------------------------------------------------------------------

_Merges = dict[tuple[bytes, bytes], int]  # neighbours -> the rank of their merge
_NEVER = 1 << 62


def _encoding(pattern: str, ranks: dict[bytes, int] | None = None) -> tiktoken.Encoding:
    ranks = ranks or {bytes([b]): b for b in range(256)}
    return tiktoken.Encoding("minithink", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def _merge(piece: bytes, merges: _Merges) -> tuple[list[bytes], int]:
    """Merge the neighbours of lowest rank, the leftmost of equal ones, until none are listed: Hugging Face's BPE to
    the letter. Also the rank of the last merge, -1 for none."""
    parts, last = [piece[i : i + 1] for i in range(len(piece))], -1
    while len(parts) > 1:
        ranks = [merges.get(pair, _NEVER) for pair in pairwise(parts)]
        if (best := min(ranks)) == _NEVER:
            break
        last, i = best, ranks.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts, last


class _Model:
    """Vocabulary and merges as tiktoken needs them, and an exact fallback for what tiktoken might do differently."""

    def __init__(self, vocab: dict[bytes, int], merges: _Merges, ignore_merges: bool) -> None:
        made = {left + right for left, right in merges}
        reached: list[tuple[int, bytes]] = []
        others: dict[bytes, int] = {}  # tokens that are no result of merges, but looked up as whole pieces
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
        # tiktoken comes to `others` inside a piece only when nothing else merges any more, so never if the bytes of
        # each merge to three parts or more. If those of one merge to a pair, all of them are doubtful.
        self._whole = others if pairs else {}
        self.doubtful = frozenset(self._whole.values())
        self._merges = merges
        self.encode_piece = lru_cache(maxsize=2**14)(self._encode_piece)

    def _encode_piece(self, piece: bytes) -> list[int]:
        parts = [piece] if piece in self._whole else _merge(piece, self._merges)[0]
        return [self.vocab[part] for part in parts]


def _byte_level(text: str) -> bytes | None:
    """The bytes of a token as byte-level files write it, None if they would not write it so."""
    try:
        return bytes([_BYTE_OF[c] for c in text])
    except KeyError:
        return None


def _read_model(model: dict[str, Any], file: Path) -> _Model:
    if (kind := model.get("type") or "BPE") != "BPE":
        raise MinithinkError(f"{file}: the model is {kind}, and only byte-level BPE is supported.")
    for field in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise MinithinkError(f"{file}: the model has {field} = {model[field]!r}, which is not supported.")
    vocab: dict[str, int] = model["vocab"]
    text_of: dict[int, str] = {}
    for text, id in vocab.items():
        if type(id) is not int or id < 0:
            raise MinithinkError(f"{file}: the token {text!r} has the id {id!r}, which is no token id.")
        if text_of.setdefault(id, text) != text:
            raise MinithinkError(f"{file}: {text_of[id]!r} and {text!r} both have the id {id}: remove one of them.")
    bytes_of = {text: token for text in vocab if (token := _byte_level(text))}
    lacking = {*range(256)} - _NEVER_IN_UTF8 - {token[0] for token in bytes_of.values() if len(token) == 1}
    if lacking:
        message = f"{file}: the vocabulary has no token for {len(lacking)} bytes, the first {min(lacking):#04x}"
        raise MinithinkError(f"{message}: it is not byte-level, or was trained without the byte alphabet.")
    merges: _Merges = {}
    for rank, entry in enumerate(model["merges"]):
        if isinstance(entry, str) and entry.startswith("#version"):
            continue
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if len(pair) != 2:
            raise MinithinkError(f"{file}: merge {rank} is {entry!r}, which is not a pair of tokens.")
        if missing := [text for text in (*pair, "".join(pair)) if text not in vocab]:
            raise MinithinkError(f"{file}: merge {rank} needs {missing[0]!r}, which is not in the vocabulary.")
        if pair[0] in bytes_of and pair[1] in bytes_of:  # others never come up
            merges[bytes_of[pair[0]], bytes_of[pair[1]]] = rank
    ids = {token: vocab[text] for text, token in bytes_of.items()}
    return _Model(ids, merges, bool(model.get("ignore_merges")))


# The steps around the model --------------------------------------------------------------------------------------


class _AddedToken(NamedTuple):
    id: int
    content: str
    special: bool
    lstrip: bool  # takes the white space before it along
    rstrip: bool  # and after it
    normalized: bool  # looked for in the normalised text, as its own normalised content


class _Finder:
    """Finds added tokens in a text: the leftmost first, the longest of those that begin there."""

    def __init__(self, tokens: list[_AddedToken], normalize: Callable[[str], str]) -> None:
        self._tokens = {normalize(t.content): t for t in reversed(tokens)}  # of equal ones the first counts
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


def _read_added_tokens(entries: list[dict[str, Any]], vocab: dict[str, int], file: Path) -> list[_AddedToken]:
    id_of, text_of = dict(vocab), {id: text for text, id in vocab.items()}
    tokens = []
    for entry in entries:
        id, text, special = entry["id"], entry["content"], entry.get("special", False)
        if type(id) is not int or id < 0:
            raise MinithinkError(f"{file}: the added token {text!r} has the id {id!r}, which is no token id.")
        if text_of.setdefault(id, text) != text:
            raise MinithinkError(f"{file}: {text_of[id]!r} and the added {text!r} both have the id {id}: remove one.")
        if id_of.setdefault(text, id) != id:
            raise MinithinkError(f"{file}: the added token {text!r} has the ids {id_of[text]} and {id}: remove one.")
        if entry.get("single_word"):
            raise MinithinkError(f"{file}: the added token {text!r} has single_word set, which is not supported.")
        if text:
            flags = [entry.get("lstrip", False), entry.get("rstrip", False), entry.get("normalized", not special)]
            tokens.append(_AddedToken(id, text, special, *flags))
    return tokens


def _read_normalizer(normalizer: dict[str, Any] | None, file: Path) -> bool:
    """Whether text is brought to NFC."""
    if normalizer and normalizer["type"] != "NFC":
        raise MinithinkError(f"{file}: the normalizer is {normalizer['type']}, and only NFC or none is supported.")
    return bool(normalizer)


def _read_pre_tokenizer(step: dict[str, Any] | None, file: Path) -> tuple[str, bool]:
    """The regex whose matches are the pieces, and whether text gets a space before it if it has none."""
    steps = [] if step is None else step["pretokenizers"] if step["type"] == "Sequence" else [step]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return GPT2_PATTERN if steps[0].get("use_regex", True) else WHOLE_TEXT, steps[0]["add_prefix_space"]
    if kinds != ["Split", "ByteLevel"]:
        message = f"{file}: the pre-tokenizer [{', '.join(kinds)}] is not supported"
        raise MinithinkError(f"{message}: it must be [ByteLevel] or [Split, ByteLevel].")
    split, level = steps
    pattern = split["pattern"].get("Regex")
    flags = (split["behavior"], split["invert"], level.get("use_regex", True), level["add_prefix_space"])
    if pattern is None or flags != ("Isolated", False, False, False):
        message = f"{file}: the pre-tokenizer {json.dumps(steps)[:500]} is not supported"
        raise MinithinkError(f"{message}: Split must isolate a regex, ByteLevel neither split nor add a space.")
    if pattern in (GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN):
        return pattern, False
    try:
        matches_nothing = _encoding(rf"\A-(?:{pattern})\z").encode_ordinary("-")
    except ValueError as error:
        raise MinithinkError(f"{file}: the Split regex {pattern!r} does not compile ({error}).") from error
    if matches_nothing or not _PORTABLE.fullmatch(pattern):
        message = f"{file}: the Split regex {pattern!r} is not supported"
        raise MinithinkError(f"{message}: tiktoken may not read it as Hugging Face does.")
    return rf"(?:{pattern})|(?:(?!{pattern})(?s:.))+", False  # what lies between its matches is a piece, too


def _read_post_processor(step: dict[str, Any] | None, file: Path) -> tuple[list[int], list[int]]:
    """The ids that are put before and after those of a text."""
    steps = [] if step is None else step["processors"] if step["type"] == "Sequence" else [step]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    if len(templates) > 1 or any(step["type"] not in ("TemplateProcessing", "ByteLevel") for step in steps):
        message = f"{file}: the post-processor [{', '.join(step['type'] for step in steps)}] is not supported"
        raise MinithinkError(f"{message}: it must be one TemplateProcessing, ByteLevel or both.")
    sides: tuple[list[int], list[int]] = [], []
    for template in templates:
        texts = 0
        for item in template["single"]:
            texts += "Sequence" in item
            if "SpecialToken" in item:
                sides[min(texts, 1)].extend(template["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        if texts != 1:
            raise MinithinkError(f"{file}: the post-processor's template holds the text {texts} times and not once.")
    return sides


# Chat templates --------------------------------------------------------------------------------------------------


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    for file in (folder / "chat_template.jinja", folder / "additional_chat_templates" / "default.jinja"):
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise MinithinkError(f"{file} is not readable text ({reason(error)}): download it again.") from error
    file = folder / "chat_template.json"
    found = (read_json(file) if file.is_file() else config).get("chat_template")
    return {entry["name"]: entry["template"] for entry in found}.get("default") if isinstance(found, list) else found


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without the products and widths that fill the memory at once."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _refuse_wide_format(left)
            return super().call_binop(context, operator, left, right)
        size, times = (len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right))
        if max(size, times) > 1000 if operator == "**" else size * times > _MAX_RENDERED:
            raise SecurityError(f"the operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), str) and obj.__name__ in _PADDING_METHODS:
            _refuse_wide(*args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)


_PADDING_FILTERS = ("center", "indent", "batch", "slice")
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")


def _refuse_wide(*widths: Any) -> None:
    if any(isinstance(width, int) and width > _MAX_WIDTH for width in widths):
        raise SecurityError(f"the width is more than {_MAX_WIDTH}")


def _refuse_wide_format(text: Any) -> None:
    """A width or precision of five digits or `*` in what `%` formats."""
    if isinstance(text, str) and re.search(r"%(\([^)]*\))?[^%a-zA-Z]*(\d{5}|\*)", text.replace("%%", "")):
        raise SecurityError(f"the width is not known to be less than {_MAX_WIDTH}")


def _of_bounded_width(pad: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(pad)  # also takes over how Jinja is to call it
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _refuse_wide(*args[1:], *kwargs.values())
        return pad(*args, **kwargs)

    return bounded


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    _refuse_wide_format(text)
    return do_format(text, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training: here it only encloses."""

    tags = {"generation"}  # noqa: RUF012 (so Jinja declares it)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


_JINJA_EXTENSIONS = (_GenerationTag, "jinja2.ext.loopcontrols")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    _refuse_wide(*layout.values())
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)  # Jinja's own escapes HTML
