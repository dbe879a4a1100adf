"""Added tokens: texts such as `<think>` that become one id before anything else reads the text.

transformers finds them in six places, and so does this module:

1. `added_tokens` in tokenizer.json, with ids and flags;
2. `added_tokens_decoder` in tokenizer_config.json, with ids and flags. If it is there, 3 and 4 are not read;
3. special_tokens_map.json, whose fields stand above those of tokenizer_config.json;
4. added_tokens.json, with ids;
5. the named tokens in tokenizer_config.json: `bos_token`, `eos_token` and every other field that ends with `_token`;
6. `extra_special_tokens` in it, or else `additional_special_tokens`: a list, or an object of names and tokens.

A token of 3, 5 and 6 that no file gives an id becomes a special token behind all others, as in transformers. If it is
declared with several sets of flags, the last new set counts, as in transformers 5 (version 4 took the first one). The
order is that of `NAMES`, then other names, then extra tokens. An id that a file gives is kept, where transformers
closes holes between ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import regex

from minithink.errors import quoted
from minithink.text.bpe import Unsupported, check_id
from minithink.text.pieces import WHITE, WORD, flag, text_in

# The named tokens that transformers has for every tokenizer.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = "extra_special_tokens"
_OLD_EXTRA = "additional_special_tokens"
_SPACES = regex.compile(f"[{WHITE}]*")
_WORD = regex.compile(WORD)
_SURROGATE = regex.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class AddedToken:
    """A text that is one token, and how it is found."""

    content: str
    special: bool = False  # left out when special tokens are skipped
    single_word: bool = False  # found only where no letter, digit or underscore is next to it
    lstrip: bool = False  # white space before it belongs to it
    rstrip: bool = False  # white space after it belongs to it
    normalized: bool = True  # its normalized content is looked for in the normalized text, else its content
    as_text: bool = False  # a file gives its content alone, which to transformers equals no object


@dataclass
class AddedTokens:
    """The added tokens of a tokenizer, and its named tokens; `read_added_tokens` makes it."""

    vocab: Mapping[str, int]
    taken: set[int]  # ids that have a token
    ids: dict[str, int] = field(default_factory=dict)  # content → id
    by_id: dict[int, AddedToken] = field(default_factory=dict)
    special: set[str] = field(default_factory=set)  # contents that were special in any place
    named: dict[str, str] = field(default_factory=dict)  # a name such as eos_token → content
    behind: set[int] = field(default_factory=set)  # ids that no file gives

    def id_of(self, content: str) -> int | None:
        """The id of an added token, or else of a token of the vocabulary."""
        return self.ids.get(content, self.vocab.get(content))

    def add(self, token: AddedToken, id: int | None = None) -> None:
        """Add a token, or change the flags of one.

        Args:
            id: of the token, if it has none yet and no other token has this one; else it gets the next one.
        """
        if not token.content:
            return
        if _SURROGATE.search(token.content):
            raise Unsupported(f"the added token {quoted(token.content)} holds half a character (a lone surrogate).")
        known = self.id_of(token.content)
        if known is not None:
            id = known
        elif id is None or id in self.taken:
            id = self._next_id()
            self.behind.add(id)
        self.ids[token.content] = id
        self.by_id[id] = token
        self.taken.add(id)
        if token.special:
            self.special.add(token.content)

    def _next_id(self) -> int:
        id = max(len(self.vocab), max(self.by_id, default=-1) + 1)
        while id in self.taken:
            id += 1
        return id


class Finder:
    """Finds added tokens in a text: the leftmost one first; of several that begin there, the longest."""

    def __init__(self, tokens: Mapping[int, AddedToken], normalize: Callable[[str], str]) -> None:
        """
        Args:
            tokens: by id.
            normalize: what is done to a content before it is looked for.
        """
        self._tokens: dict[str, tuple[int, AddedToken]] = {}
        for id, token in tokens.items():
            content = normalize(token.content)
            if not content:
                raise Unsupported(f"the normalizer leaves nothing of the added token {quoted(token.content)}.")
            self._tokens.setdefault(content, (id, token))
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._regex = regex.compile("|".join(map(regex.escape, longest_first)) or "(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The ids of the tokens found and the non-empty texts between them, in order."""
        done = 0
        for match in self._regex.finditer(text):
            id, token = self._tokens[match.group()]
            start, stop = match.span()
            if token.single_word and _is_inside_word(text, start, stop):
                continue
            if token.lstrip and done < start:
                start = done + len(text[done:start].rstrip(WHITE))
            if token.rstrip:
                stop = _SPACES.match(text, stop).end()
            if done < start:
                yield text[done:start]
            yield id
            done = stop
        if done < len(text):
            yield text[done:]


def _is_inside_word(text: str, start: int, stop: int) -> bool:
    before = text[start - 1 : start]
    return _WORD.match(before) is not None or _WORD.match(text, stop) is not None


# The files that hold them ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenFiles:
    """The contents of the files beside tokenizer.json; {}: there is no such file."""

    config: dict[str, Any]  # tokenizer_config.json
    special_map: dict[str, Any]  # special_tokens_map.json
    added: dict[str, Any]  # added_tokens.json


def read_added_tokens(spec: Any, vocab: dict[str, int], files: TokenFiles) -> AddedTokens:
    """Find the added tokens of a tokenizer.

    Args:
        spec: the field `added_tokens` of tokenizer.json.
        vocab: the model's.

    Raises:
        Unsupported: a file is not shaped as it should be, or an id has two tokens.
    """
    tokens = AddedTokens(vocab, set(vocab.values()))
    own = _read_own(spec, tokens)
    has_list = "added_tokens_decoder" in files.config
    named, extra, listed_extra = _read_special_tokens(files.config, {} if has_list else files.special_map)
    names = {token.content for token in named.values()}
    if has_list:
        listed = _read_listed(files.config["added_tokens_decoder"], names)
    else:
        special = {token.content for name, token in named.items() if name in NAMES}
        special |= {token.content for token in listed_extra}
        listed = _read_added(files.added, special) | own
    known = {*tokens.ids, *(token.content for token in listed.values())}
    for id, token in sorted(listed.items()):
        is_special = token.special or token.content in names
        tokens.add(replace(token, special=is_special), id)
    declared: list[AddedToken] = []  # none twice: to declare a token again as it was declared before changes nothing
    for token in (*named.values(), *extra):
        if token.content not in known and token not in declared:
            declared.append(token)
    for token in declared:
        tokens.add(token)
    tokens.named = {name: token.content for name, token in named.items()}
    return tokens


def _read_own(entries: Any, tokens: AddedTokens) -> dict[int, AddedToken]:
    """The tokens of tokenizer.json, by id. They are also added to `tokens`."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise Unsupported(f"added_tokens is {quoted(entries)}, and must be a list.")
    text_of = {id: text for text, id in tokens.vocab.items()}
    own: dict[int, AddedToken] = {}
    for entry in entries:
        token = _read_token(entry, "added_tokens")
        content = quoted(token.content)
        id = entry.get("id")
        check_id(id, "the added token", token.content)
        other = text_of.setdefault(id, token.content)
        if other != token.content:
            raise Unsupported(f"{quoted(other)} and the added {content} both have the id {id}: remove one.")
        known = tokens.id_of(token.content)
        if known is not None and known != id:
            raise Unsupported(f"the added token {content} has the ids {known} and {id}: remove one.")
        tokens.add(token, id)
        own[id] = token
    return own


def _read_listed(entries: Any, names: set[str]) -> dict[int, AddedToken]:
    """The tokens of added_tokens_decoder, by id. names: contents of named tokens, which are special."""
    if not isinstance(entries, dict):
        raise Unsupported(f"added_tokens_decoder is {quoted(entries)}, and must be an object of ids and tokens.")
    listed: dict[int, AddedToken] = {}
    for id, entry in entries.items():
        token = _read_token(entry, "added_tokens_decoder")
        if token.content in names:
            token = _read_token(entry, "added_tokens_decoder", special=True)
        if not id.isdecimal() or len(id) > 10:
            raise Unsupported(f"added_tokens_decoder has the id {quoted(id)}, which is no token id.")
        check_id(int(id), "the added token", token.content)
        listed[int(id)] = token
    return listed


def _read_added(entries: dict[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json, by id. special: contents of special tokens."""
    added: dict[int, AddedToken] = {}
    for content, id in entries.items():
        check_id(id, "the added token", content)
        is_special = content in special
        added[id] = AddedToken(content, special=is_special, normalized=not is_special)
    return added


def _read_special_tokens(
    config: dict[str, Any], special_map: dict[str, Any]
) -> tuple[dict[str, AddedToken], list[AddedToken], list[AddedToken]]:
    """Three things: the named tokens, the extra tokens without names, and a list of extra tokens like the second one.
    A token of the third list is special if added_tokens.json holds it.

    All are in the order of transformers, because tokens without an id get the next free ids in this order.
    """
    fields = config | special_map
    named = {name: fields.get(name) for name in NAMES}
    for source in (special_map, config):
        for name, value in source.items():
            if name.endswith("_token") and name not in NAMES and isinstance(value, str | dict):
                named[name] = value
    extra = config.get(_EXTRA)
    old_extra = config.get(_OLD_EXTRA)
    if old_extra is not None and not extra:
        extra = old_extra
        old_extra = None
    more = special_map.get(_EXTRA)
    for names in (extra, more):
        if isinstance(names, dict):
            named |= names
            extra = None
    if more is not None and not isinstance(more, dict):
        extra = [*_as_list(extra, _EXTRA), *_as_list(more, _EXTRA)]
    listed = _read_extra(extra)
    if extra is None:
        extra = special_map.get(_OLD_EXTRA, old_extra)
    tokens = {name: _read_special(value, name) for name, value in named.items() if value is not None}
    return tokens, _read_extra(extra), listed


def _read_extra(values: Any) -> list[AddedToken]:
    return [_read_special(value, _EXTRA) for value in _as_list(values, _EXTRA)]


def _as_list(values: Any, what: str) -> list[Any]:
    if values is None:
        return []
    if not isinstance(values, list):
        raise Unsupported(f"{what} is {quoted(values)}, and must be a list of tokens.")
    return values


def _read_special(value: Any, what: str) -> AddedToken:
    """A special token that is given as its text, or as an object."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False, as_text=True)
    return _read_token(value, what, special=True)


def _read_token(value: Any, what: str, special: bool = False) -> AddedToken:
    """A token that is given as an object. special: it is special, whatever the object says."""
    if not isinstance(value, dict):
        raise Unsupported(f"{what} holds the token {quoted(value)}, which is not an object with a content.")
    is_special = special or flag(value, "special", False)
    return AddedToken(
        content=text_in(value, "content"),
        special=is_special,
        single_word=flag(value, "single_word", False),
        lstrip=flag(value, "lstrip", False),
        rstrip=flag(value, "rstrip", False),
        normalized=flag(value, "normalized", not is_special),
    )
