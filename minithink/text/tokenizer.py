"""Tokenizer: text to token ids and back, from a Hugging Face `tokenizer.json` and the files beside it, or from a GGUF
file, which holds the same (`gguf_tokenizer.py`).

Byte-level BPE is read: GPT-2's, Llama 3's, Qwen's, SmolLM2's and DeepSeek's files, and other compositions of splits
(`pieces.py`). What would change the ids and is not understood is an error that names it. `encode` gives the ids of
the packages `tokenizers` and `transformers`, with two exceptions:
- added tokens keep the ids of the files. `tokenizers` renumbers them when they leave holes;
- what a letter, a digit or a normal form is, Unicode decides, and every package has its own version of Unicode.
  `tokenizers` has Unicode 16 for letters and Unicode 9 for normal forms. `regex` and Python can have newer ones.

A text becomes ids in four steps: added tokens are found (`added_tokens.py`), the rest is normalized and split into
pieces (`pieces.py`), and the bytes of every piece are merged (`bpe.py`).
"""

from __future__ import annotations

import codecs
import gc
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minithink.checkpoint.gguf_file import GGUF, is_gguf
from minithink.config import read_json
from minithink.errors import MinithinkError, quoted
from minithink.text import as_tiktoken
from minithink.text.added_tokens import Finder, TokenFiles, read_added_tokens
from minithink.text.bpe import BytePairEncoding, Unsupported, bytes_of, check_id, is_spelled, spelled
from minithink.text.chat import TemplateFailed, checked_template, read_template, render
from minithink.text.gguf_tokenizer import tokenizer_files
from minithink.text.pieces import flattened, read_normalizer, read_pre_tokenizer
from minithink.text.tags import THINK

if TYPE_CHECKING:
    import tiktoken

# What to do without a usable chat template. Commands other than `generate` send plain text if there is none at all.
PLAIN = "send plain text (in Python with chat=False, on the command line with minithink.generate --no-chat)"
CACHED_WORDS = 2**16  # words whose ids are remembered
LONGEST_CACHED = 256  # characters of such a word


class Tokenizer:
    """Text to ids and back; `from_folder` makes one."""

    def __init__(self, file: Path, spec: dict[str, Any], files: TokenFiles, template: str | None) -> None:
        """
        Args:
            file: tokenizer.json or a GGUF file, for error messages.
            spec: the content of tokenizer.json.
            files: what is beside it.
            template: the chat template; None: there is none.
        """
        model = spec.get("model")
        if not isinstance(model, dict):
            raise Unsupported(f"the model is {quoted(model)}, and must be an object.")
        self._file = file
        self._model = BytePairEncoding.from_spec(model)
        self._pre_tokenizer = read_pre_tokenizer(spec.get("pre_tokenizer"))
        self._normalize = read_normalizer(spec.get("normalizer"))
        normalizers = flattened(spec.get("normalizer"), "normalizers", "normalizer")
        self._normalizers = [step["type"] for step in normalizers]
        _check_decoder(spec.get("decoder"))
        vocab = self._model.vocab
        self._added = added = read_added_tokens(spec.get("added_tokens"), vocab, files)
        self._before, self._after = _read_post_processor(spec.get("post_processor"), added.taken)
        raw = {id: token for id, token in added.by_id.items() if not token.normalized}
        normalized = {id: token for id, token in added.by_id.items() if token.normalized}
        self._raw = Finder(raw, str)
        self._normalized = Finder(normalized, self._normalize)
        self._texts = dict(zip(vocab.values(), vocab, strict=True))
        self._cached = lru_cache(maxsize=CACHED_WORDS)(self._encode_piece)
        self.vocab_size = 1 + max(added.taken - added.behind)
        self.special_ids = frozenset(added.ids[content] for content in added.special)
        self.bos_id = added.id_of(added.named.get("bos_token", ""))
        self.eos_id = added.id_of(added.named.get("eos_token", ""))
        self.chat_template = template
        self.tags = THINK  # no file says between which tags a model thinks

    @property
    def think_ids(self) -> tuple[int | None, int | None]:
        """The tokens that open and close the thinking; None: the tag is no token."""
        return self.id_of(self.tags.open), self.id_of(self.tags.close)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, and the files beside it that name the special tokens and hold the chat template.

        Args:
            folder: of a checkpoint; or a GGUF file, which holds all of this.

        Raises:
            MinithinkError: tokenizer.json is missing, or a file is damaged or of a kind that is not supported.
        """
        if is_gguf(folder):
            return cls._from_gguf(Path(folder))
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            hint = "download it, or write it with transformers' AutoTokenizer.save_pretrained"
            if file.with_suffix(".model").is_file():
                hint = "only the SentencePiece file tokenizer.model is there, which is not supported"
            raise MinithinkError(f"{file} does not exist: {hint}.")
        try:
            with _without_collections():
                files = TokenFiles(
                    config=_read_beside(file, "tokenizer_config.json"),
                    special_map=_read_beside(file, "special_tokens_map.json"),
                    added=_read_beside(file, "added_tokens.json"),
                )
                return cls(file, read_json(file), files, read_template(file.parent, files.config))
        except Unsupported as error:
            raise MinithinkError(f"{file}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            message = f"{file} or a file beside it is not shaped as Hugging Face writes it"
            raise MinithinkError(
                f"{message} ({type(error).__name__}: {quoted(str(error))}): download it again."
            ) from error

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        with _without_collections():
            fields = GGUF.read(path).fields
            try:
                spec, config = tokenizer_files(fields)
                template = checked_template(config.get("chat_template"), path)
                return cls(path, spec, TokenFiles(config=config, special_map={}, added={}), template)
            except Unsupported as error:
                raise MinithinkError(f"{path}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. Added tokens that are written in it become their ids.

        Args:
            text: without lone surrogates, which have no bytes.
            add_special_tokens: put the post-processor's ids around the text's, in most models BOS before them.

        Raises:
            MinithinkError: a lone surrogate is in the text, or a regex of the file takes too long for it.
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
                if isinstance(part, int):
                    ids.append(part)
                else:
                    self._encode_ordinary(part, ids)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _encode_ordinary(self, text: str, ids: list[int]) -> None:
        """Append the ids of a text without added tokens."""
        for piece in self._pre_tokenizer.pieces(text):
            encode = self._cached if len(piece) <= LONGEST_CACHED else self._encode_piece
            ids += encode(piece)

    def _encode_piece(self, piece: str) -> list[int]:
        return self._model.encode(self._pre_tokenizer.word(piece))

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
        added = self._added.by_id.get(id)
        if added is not None:
            return added.content.encode()
        text = self._texts.get(id)
        return b"" if text is None else bytes_of(text)

    def id_of(self, token: str) -> int | None:
        """The id of the token with this text (" the", not "Ġthe"); None: there is no such token. An added token
        comes before an ordinary one."""
        if token in self._added.ids:
            return self._added.ids[token]
        id = self._model.vocab.get(spelled(token))
        if id is None and not is_spelled(token):
            id = self._model.vocab.get(token)
        return id

    def as_tiktoken(self) -> tiktoken.Encoding:
        """This tokenizer as an encoding of the package tiktoken, for tools that take one.

        `as_tiktoken().encode(text, allowed_special="all")` gives the ids of `encode(text)`. The added tokens are the
        encoding's special tokens. Without `allowed_special`, tiktoken raises an error for a text that holds one.

        tiktoken differs in three ways: it puts no BOS before a text, it reads a lone surrogate as U+FFFD, and it
        raises an error for some long texts, such as a million spaces.

        Raises:
            MinithinkError: no encoding would give the same ids; the message says why.
        """
        try:
            if self._normalizers:
                raise Unsupported(f"it normalizes texts ({quoted(self._normalizers)}), which tiktoken does not.")
            name = self._file.parent.name
            return as_tiktoken.new_encoding(name, self._model, self._pre_tokenizer, self._added.by_id)
        except Unsupported as error:
            raise MinithinkError(f"{self._file} cannot become a tiktoken encoding: {error}") from None

    def stream(self, skip_special_tokens: bool = False) -> TextStream:
        """A decoder for ids that come one at a time."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
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
            raise MinithinkError(f"{self._file.parent} has no chat template: {PLAIN}.")
        variables = {"tools": None, "documents": None, **self._added.named, **variables}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return render(self.chat_template, variables)
        except TemplateFailed as error:
            raise MinithinkError(
                f"the chat template of {self._file.parent} failed ({error}): change the messages, correct the "
                f"template, or {PLAIN}."
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


def _read_beside(file: Path, name: str) -> dict[str, Any]:
    """The content of a file beside tokenizer.json; {}: there is no such file."""
    path = file.with_name(name)
    return read_json(path) if path.is_file() else {}


# The steps around the model --------------------------------------------------------------------------------------


def _check_decoder(spec: Any) -> None:
    """Raises Unsupported: the file decodes in another way than by bytes."""
    kinds = [step["type"] for step in flattened(spec, "decoders", "decoder")]
    if spec is not None and [kind for kind in kinds if kind != "Fuse"] != ["ByteLevel"]:
        raise Unsupported(f"the decoder is {quoted(kinds)}, and only ByteLevel is supported.")


def _read_post_processor(spec: Any, has_token: Container[int]) -> tuple[list[int], list[int]]:
    """The ids that `add_special_tokens` puts before and after those of a text."""
    steps = list(flattened(spec, "processors", "post-processor"))
    kinds = [step["type"] for step in steps]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    if len(templates) > 1 or not {*kinds} <= {"TemplateProcessing", "ByteLevel"}:
        raise Unsupported(
            f"the post-processor {quoted(kinds)} is not supported: it must be one TemplateProcessing, ByteLevel or "
            "both."
        )
    if not templates:
        return [], []
    return _read_template(templates[0], has_token)


def _read_template(template: dict[str, Any], has_token: Container[int]) -> tuple[list[int], list[int]]:
    items = template.get("single")
    if not isinstance(items, list):
        raise Unsupported(f"the post-processor's template is {quoted(items)}, and must be a list.")
    before: list[int] = []
    after: list[int] = []
    texts = 0
    for item in items:
        if item_is(item, "Sequence"):
            texts += 1
        elif item_is(item, "SpecialToken"):
            side = after if texts else before
            side += _template_ids(template, item["SpecialToken"].get("id"), has_token)
        else:
            raise Unsupported(f"the post-processor's template holds {quoted(item)}, which is no token and no text.")
    if texts != 1:
        raise Unsupported(f"the post-processor's template holds the text {texts} times and not once.")
    return before, after


def item_is(item: Any, kind: str) -> bool:
    return isinstance(item, dict) and isinstance(item.get(kind), dict)


def _template_ids(template: dict[str, Any], name: Any, has_token: Container[int]) -> list[int]:
    """The ids of a special token of the post-processor's template."""
    tokens = template.get("special_tokens")
    token = tokens.get(name) if isinstance(tokens, dict) and isinstance(name, str) else None
    if not isinstance(token, dict):
        raise Unsupported(f"the post-processor's template has the token {quoted(name)}, which it gives no ids.")
    ids = token.get("ids")
    if not isinstance(ids, list):
        raise Unsupported(
            f"the post-processor's token {quoted(name)} has the ids {quoted(ids)}, and must have a list."
        )
    for id in ids:
        check_id(id, "the post-processor's token", name)
        if id not in has_token:
            raise Unsupported(f"the post-processor's token {quoted(name)} has the id {id}, which is no token.")
    return ids


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps Python's garbage collector from looking at a file's million of small objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
