"""The file of a trace. It consists of chunks, which are never changed once they are written.

    magic    16 bytes
    HEAD     JSON: version, the shape of the cache, the policy, names
    PART     arrays of one sequence: what happened since its last part
    …
    DONE     JSON: how long recording took; the file of an interrupted run has none

A chunk has four parts: its kind (4 letters), the length of its content (uint32), the CRC-32 of the kind and the
content (uint32), and the content. The content of a PART is deflated (zlib). It holds the length of a JSON object
(uint32), the object, which names every array with its type and length, and the arrays' bytes. All numbers are little-
endian.

numpy's .npz does not fit: its directory stands at the end, so an interrupted run would leave nothing readable, and
the recorder would have to keep everything until then. A trace cannot hold code. Lengths and types are checked before
an array is read, and all numbers before anything is shown.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from minithink.errors import QUOTED, MinithinkError, escaped, quoted, reason, unwritable
from minithink.kv.ledger import Ledger
from minithink.results import files

Array = np.ndarray[Any, np.dtype[Any]]

PAGE = b"<title>minithink trace"  # stands near the beginning of a trace's page
MAGIC = b"\x89minithink\r\n\x1a\n\0\1"  # as PNG's: a transfer that changes line breaks changes it
VERSION = 1
CHUNK = struct.Struct("<4sII")
MAKE_ONE = "make one with `python -m minithink.generate --trace FILE`"
LENGTH = struct.Struct("<I")
MOST = 2**28  # bytes of a chunk, deflated or not
TOTAL = 2**30  # bytes of all parts of a file, inflated: a few kilobytes may inflate to gigabytes
TOKENS = 2**22  # of a sequence
LARGEST = 2**30  # bytes of a file
WHOLE = 18  # digits of a number in JSON
KINDS = tuple(f.name for f in fields(Ledger) if f.name != "reserve")  # columns of `bytes`
NEVER = 2**31 - 1  # in `Trace.gone`: the token was not evicted
GONE, WAITS = 254, 255  # in place of a format: the token is not held; it waits in the full-precision buffer

# Every array of a PART: type, and what an entry stands for. Arrays of one kind have equal lengths.
ARRAYS = {
    "ids": ("<i4", "token"),  # of the prompt, then of the generated tokens
    "pieces": ("<u4", "token"),  # bytes of its text
    "text": ("|u1", "byte"),  # UTF-8 of all tokens; a token that ends inside a character has the text ""
    "thinks": ("|u1", "step"),  # step 0: the prompt is read; step t: generated token t is in the cache
    "thought": ("|u1", "step"),  # thought type of the token that this step brought
    "bytes": ("<i8", "kind"),  # the ledger of the sequence after the step: KINDS
    "evict_step": ("<u4", "eviction"),
    "evict_unit": ("<u2", "eviction"),  # units are block tables, by number: l · Ht + h
    "evict_pos": ("<u4", "eviction"),
    "evict_by": ("|u1", "eviction"),  # index into HEAD's `policies`
    "evict_score": ("<f4", "eviction"),  # NaN: not known
    "move_step": ("<u4", "move"),  # to another format
    "move_unit": ("<u2", "move"),
    "move_pos": ("<u4", "move"),
    "move_to": ("|u1", "move"),  # index into HEAD's `formats`, or WAITS
    "budget_step": ("<u4", "budget"),
    "budget": ("<i4", "unit"),  # of every unit, at each change; −1: none
    "score_step": ("<u4", "snapshot"),
    "score_by": ("|u1", "snapshot"),
    "score_count": ("<u4", "snapshot"),
    "score_pos": ("<u4", "score"),
    "rank": ("|u1", "score"),  # share of its unit's tokens with a lower score, mean over units; 255 is all of them
}
Arrays = Mapping[str, Array]


class Writer:
    """Writes a file, chunk by chunk. A chunk is readable as soon as it is written."""

    def __init__(self, path: Path) -> None:
        """Open the file; an earlier trace of that name is replaced. MinithinkError: it cannot be written."""
        check_place(path)
        self.path = path
        self.size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise unwritable("The trace", path, error, "--trace") from None
        self._write(MAGIC)

    def chunk(self, kind: bytes, content: bytes) -> None:
        """Append a chunk. MinithinkError: it cannot be written."""
        crc = zlib.crc32(content, zlib.crc32(kind))
        self._write(CHUNK.pack(kind, len(content), crc) + content)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise unwritable("The trace", self.path, error, "--trace") from None
        self.size += len(data)


def check_place(path: Path) -> None:
    """MinithinkError: the path is a folder, or a file that is no trace and would be lost."""
    refuse_others(path, len(MAGIC), MAGIC.startswith, "trace", "--trace")


def refuse_others(path: Path, size: int, ours: Callable[[bytes], bool], what: str, option: str) -> None:
    """Refuse to replace a file that this program has not written. An empty file may be replaced.

    Args:
        path: where a file is to be written.
        size: bytes at the beginning of an existing file that are looked at.
        ours: whether a file that begins with these bytes is one of ours.
        what: the kind of file, for the message.
        option: the option that names another path, for the message.

    Raises:
        MinithinkError: the path is a folder, or another file.
    """
    try:
        if not path.exists() or not (path.is_file() or path.is_dir()):  # a pipe is not looked into
            return
        with path.open("rb") as file:
            begins = file.read(size)
    except OSError as error:
        raise unwritable(f"The {what}", path, error, option) from None
    if begins and not ours(begins):
        raise MinithinkError(
            f"The {what} cannot be written to {path}: there is a file that is no {what}; delete it, or give another "
            f"{option}."
        )


def as_json(value: Mapping[str, Any]) -> bytes:
    """The content of a HEAD or DONE. ValueError: a number is infinite or NaN, which no browser reads."""
    return json.dumps(value, allow_nan=False).encode()


def from_json(content: bytes) -> Any:
    """What `as_json` was given. ValueError: it is no JSON, or a number is infinite, NaN, or has too many digits."""
    return files.loads(content, parse_int=_whole)


def _whole(text: str) -> int:
    if len(text) > WHOLE:
        raise ValueError(f"{quoted(text)} is too large")
    return int(text)


def pack(about: Mapping[str, Any], arrays: Arrays) -> bytes:
    """The content of a PART. about: values, as JSON knows them; `unpack` returns them."""
    listed = [[name, array.dtype.str, array.size] for name, array in arrays.items()]
    head = as_json({**about, "arrays": listed})
    return zlib.compress(b"".join((LENGTH.pack(len(head)), head, *(a.tobytes() for a in arrays.values()))))


def inflate(content: bytes, most: int) -> bytes:
    """The bytes of a PART. ValueError: the content is damaged, or has more than `most` bytes."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(content, max(1, most))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflater.eof:
        raise ValueError("it is cut off, or too long")
    return data


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """What `pack` was given, from its result: about, arrays. ValueError: the content is damaged."""
    return _arrays(inflate(content, MOST))


def _arrays(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Arrays from the bytes of a PART, and what it says beside them."""
    (length,) = LENGTH.unpack_from(data.ljust(LENGTH.size, b"\0"))
    about = from_json(data[LENGTH.size : LENGTH.size + length])
    if not isinstance(about, dict) or not isinstance(listed := about.pop("arrays", None), list):
        raise ValueError("it lists no arrays")
    arrays = {}
    at = LENGTH.size + length
    for entry in listed:
        name, dtype, count = entry if isinstance(entry, list) and len(entry) == 3 else ("", "", -1)
        known = isinstance(name, str) and name in ARRAYS
        if not known or dtype != ARRAYS[name][0] or not isinstance(count, int) or count < 0:
            raise ValueError(f"{quoted(entry)} is no array of a trace")
        size = count * np.dtype(dtype).itemsize
        if at + size > len(data):
            raise ValueError(f"{name} is longer than what there is")
        arrays[name] = np.frombuffer(data, dtype, count, at)
        at += size
    if at != len(data) or set(arrays) != set(ARRAYS):
        raise ValueError("arrays are missing, or something is left over")
    return about, arrays


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


@dataclass(frozen=True)
class Head:
    """The shape of the cache and the names, which all sequences of a file share."""

    layers: int
    kv_heads: int
    scope: str  # which lanes share a block table: head | layer | sequence (`kv/contract.py`)
    policies: list[str]  # the policy, or the members of a stack
    formats: list[str]  # in which tokens are stored
    thoughts: list[int]  # the format that tokens of each thought type get
    thought_names: list[str]
    prompt_thought: int
    buffer: int  # tokens that wait in full precision until they are quantized; 0: none
    full_bytes: int  # of a token in a full cache
    about: dict[str, Any] = field(default_factory=dict)  # model, policy, …: shown with the trace

    @property
    def tables(self) -> tuple[int, int]:
        """(Lt, Ht): units are numbered layer by layer."""
        return 1 if self.scope == "sequence" else self.layers, self.kv_heads if self.scope == "head" else 1

    @property
    def units(self) -> int:
        """Lt · Ht."""
        return self.tables[0] * self.tables[1]

    @property
    def sharing(self) -> int:
        """Lanes, of one layer and KV head each, that share a table."""
        return self.layers * self.kv_heads // self.units

    def check(self) -> None:
        """ValueError: a field has the wrong type, or a value that is not possible."""
        if not all(type(x) is list for x in (self.policies, self.formats, self.thoughts, self.thought_names)):
            raise ValueError("what should be a list is none")
        names = [self.scope, *self.policies, *self.formats, *self.thought_names]
        counts = [self.layers, self.kv_heads, self.prompt_thought, self.buffer, self.full_bytes, *self.thoughts]
        if not all(map(_is_count, counts)) or not all(isinstance(name, str) for name in names):
            raise ValueError("a number or a name is none")
        if not (0 < self.layers * self.kv_heads < 2**16 and self.scope in ("head", "layer", "sequence")):
            raise ValueError(f"{self.layers} layers of {self.kv_heads} heads, scope {quoted(self.scope)}")
        if any(0xD800 <= ord(c) < 0xE000 for c in "".join(names)):
            raise ValueError("a name is no text")
        if not self.full_bytes:
            raise ValueError("a token of the full cache has no bytes")
        if not self.policies or not self.formats or not self.thoughts or max(self.thoughts) >= len(self.formats):
            raise ValueError("policies, formats or thought types are missing")
        if not isinstance(self.about, dict):
            raise ValueError("what it is about is missing")


@dataclass(frozen=True)
class Trace:
    """What happened to one sequence of n tokens, the first `prompt` of which are its prompt, in the steps 0, 1, …, T.
    ARRAYS says what the arrays mean."""

    head: Head
    sequence: int
    prompt: int
    arrays: Arrays

    def __getattr__(self, name: str) -> Array:
        """The arrays by name."""
        if name in ARRAYS and "arrays" in self.__dict__:
            return self.arrays[name]
        raise AttributeError(name)

    @property
    def tokens(self) -> int:
        """n."""
        return len(self.ids)

    @property
    def steps(self) -> int:
        """T, generated tokens that the cache has seen."""
        return len(self.thinks) - 1

    @cached_property
    def think_end(self) -> int:
        """The step that brought the last thinking token, `</think>` if thinking ends; −1: no token is thinking."""
        return int(np.flatnonzero(self.thinks[1:])[-1]) + 1 if self.thinks[1:].any() else -1

    @cached_property
    def texts(self) -> list[str]:
        """The text of every token."""
        data = self.text.tobytes()
        ends = self.pieces.cumsum().tolist()
        return [data[a:b].decode("utf-8", "replace") for a, b in zip([0, *ends], ends, strict=False)]

    @cached_property
    def ledger(self) -> Array:
        """Bytes after every step, by kind: int64 [T + 1, KINDS]."""
        return self.bytes.reshape(-1, len(KINDS))

    @cached_property
    def budgets(self) -> Array:
        """The budgets after each change, from the steps `budget_step` on: int32 [changes, units]; −1: no budget."""
        return self.budget.reshape(-1, self.head.units)

    @cached_property
    def born(self) -> Array:
        """The step that brought each token: int64 [n]."""
        return np.maximum(0, np.arange(self.tokens) - self.prompt + 1)

    @cached_property
    def gone(self) -> Array:
        """The step at which each token left each unit, or NEVER: int32 [units, n]."""
        gone = np.full((self.head.units, self.tokens), NEVER, dtype=np.int32)
        gone[self.evict_unit, self.evict_pos] = self.evict_step
        return gone

    def kept(self, step: int) -> Array:
        """Which tokens each unit holds after a step: bool [units, n]. Their sums are `holders` and `held`, which a
        file of a few bytes cannot make larger than memory."""
        return (self.born <= step) & (self.gone > step)

    def holders(self, step: int) -> Array:
        """The number of units that hold each token after a step: int64 [n]."""
        lost = np.bincount(self.evict_pos[self.evict_step <= step], minlength=self.tokens)
        return np.where(self.born <= step, self.head.units - lost, 0)

    def held(self, step: int) -> Array:
        """The number of tokens that each unit holds after a step: int64 [units]."""
        lost = np.bincount(self.evict_unit[self.evict_step <= step], minlength=self.head.units)
        return int((self.born <= step).sum()) - lost

    @cached_property
    def entered(self) -> Array:
        """Index into `formats` of every token when it came, or WAITS: uint8 [n]. Prompts come in full precision."""
        thoughts = np.array(self.head.thoughts, dtype=np.uint8)
        entered = np.full(self.tokens, 0, dtype=np.uint8)
        entered[self.prompt :] = WAITS if self.head.buffer else thoughts[self.thought[1:]]
        return entered

    def format(self, step: int) -> Array:
        """Index into `formats` of every token after a step, WAITS or GONE: uint8 [units, n]."""
        out = np.tile(self.entered, (self.head.units, 1))
        done = self.move_step <= step
        out[self.move_unit[done], self.move_pos[done]] = self.move_to[done]  # of equal indices the last one wins
        return np.where(self.kept(step), out, GONE).astype(np.uint8)

    @cached_property
    def sentences(self) -> Array:
        """The number of each token's sentence: int64 [n]. A token with a line break ends a sentence, as in SkipKV's
        code. Blank tokens directly behind it belong to the same sentence."""
        out = list[int]()
        number = -1
        open_ = False
        for text in self.texts:
            if text.strip() and not open_:
                number = number + 1
                open_ = True
            out.append(max(0, number))
            open_ = open_ and "\n" not in text
        return np.array(out, dtype=np.int64)

    def check(self) -> None:
        """ValueError: lengths, indices or steps do not fit together."""
        a = self.arrays
        units = self.head.units
        n = self.tokens
        most = max(self.steps, 0)
        kinds: dict[str, set[int]] = {}
        for name, (_, kind) in ARRAYS.items():
            kinds.setdefault(kind, set()).add(len(a[name]))
        if bad := [kind for kind, lengths in kinds.items() if len(lengths) > 1]:
            raise ValueError(f"arrays of {bad[0]}s differ in length")
        if n > TOKENS:
            raise ValueError(f"it has {n:,} tokens, and at most {TOKENS:,} are read")
        # a prompt that has not been read to its end has no step
        if n != self.prompt + self.steps if self.steps >= 0 else n > self.prompt:
            raise ValueError(f"{n} tokens and {self.steps} steps after a prompt of {self.prompt}")
        if len(self.bytes) != len(KINDS) * len(self.thinks) or len(self.budget) != units * len(self.budget_step):
            raise ValueError("bytes or budgets are missing")
        if self.pieces.sum(dtype=np.int64) != len(self.text) or self.score_count.sum(dtype=np.int64) != len(
            self.rank
        ):
            raise ValueError("texts or scores are missing")
        limits = {
            "evict_unit": units,
            "move_unit": units,
            "evict_pos": n,
            "move_pos": n,
            "score_pos": n,
            "evict_by": len(self.head.policies),
            "score_by": len(self.head.policies),
            "evict_step": most + 1,
            "move_step": most + 1,
            "budget_step": most + 1,
            "score_step": most + 1,
            "thought": len(self.head.thoughts),
            "thinks": 2,
        }
        for name, limit in limits.items():
            if len(a[name]) and int(a[name].max()) >= limit:
                raise ValueError(f"{name} reaches {int(a[name].max())}, and must stay below {limit}")
        for name in ("evict_step", "move_step", "budget_step", "score_step"):
            if (np.diff(a[name].astype(np.int64)) < 0).any():
                raise ValueError(f"{name} runs backwards")
        if ((self.move_to >= len(self.head.formats)) & (self.move_to != WAITS)).any():
            raise ValueError("a token moved to a format that is not named")
        where = self.evict_unit.astype(np.int64) * n + self.evict_pos
        if len(np.unique(where)) < len(where) or (self.evict_step < self.born[self.evict_pos]).any():
            raise ValueError("a token is evicted twice, or before it came")


@dataclass(frozen=True)
class File:
    """The content of a trace file. The end of an interrupted run may be missing."""

    head: Head
    traces: dict[int, Trace]  # by the number of the sequence
    done: dict[str, Any] | None  # what recording cost; None: the run was interrupted

    @property
    def cut(self) -> str:
        """The end of a sentence, which says that the trace is not whole; "": it is."""
        return "; the run was interrupted, or its file is cut off" if self.done is None else ""


def read(path: Path) -> File:
    """Read a trace file. The end of an interrupted run may be missing.

    Raises:
        MinithinkError: the file cannot be read, is no trace, is of another version, or is damaged.
    """
    try:
        data = files.read_bytes(path, LARGEST)
    except OSError as error:
        raise MinithinkError(
            f"The trace {path} cannot be read: {reason(error)}; give a file that --trace has written, or {MAKE_ONE}."
        ) from None
    if data[: len(MAGIC)] != MAGIC:
        if PAGE in data[:4096]:
            raise MinithinkError(f"{path} is the page of a trace: open it in a browser, or view the trace itself.")
        raise MinithinkError(f"{path} is no trace of minithink: {MAKE_ONE}.")
    head = None
    done = None
    parts = dict[int, tuple[int, list[dict[str, Array]]]]()
    at = len(MAGIC)
    left = TOTAL
    try:
        while at + CHUNK.size <= len(data):
            kind, length, crc = CHUNK.unpack_from(data, at)
            content = data[at + CHUNK.size : at + CHUNK.size + length]
            if len(content) < length:
                break  # the last chunk was not written to its end
            if length > MOST or zlib.crc32(content, zlib.crc32(kind)) != crc:
                raise ValueError("a checksum does not fit")
            if done is not None or (kind == b"HEAD") != (head is None):
                raise ValueError(f"a chunk {escaped(kind.decode('ascii', 'replace'))} stands where none may")
            if kind == b"HEAD":
                head = _head(path, from_json(content))
            elif kind == b"DONE":
                done = from_json(content)
            elif kind == b"PART":
                inflated = inflate(content, min(MOST, left))
                left -= len(inflated)
                about, arrays = _arrays(inflated)
                sequence = about.get("sequence")
                prompt = about.get("prompt")
                if type(sequence) is not int or type(prompt) is not int or prompt < 0:
                    raise ValueError("a part belongs to no sequence")
                known, collected = parts.setdefault(sequence, (prompt, []))
                if known != prompt:
                    raise ValueError(f"sequence {sequence} has prompts of {known} and of {prompt} tokens")
                collected.append(arrays)
            else:
                raise ValueError(f"a chunk {escaped(kind.decode('ascii', 'replace'))} is unknown")
            at += CHUNK.size + length
        if head is None:
            raise ValueError("it ends before anything is said")
        if done is not None and not (isinstance(done, dict) and at == len(data)):
            raise ValueError("something follows its end")
        traces = {}
        for sequence, (prompt, collected) in parts.items():
            joined = {name: np.concatenate([part[name] for part in collected]) for name in ARRAYS}
            traces[sequence] = Trace(head, sequence, prompt, joined)
            traces[sequence].check()
    except (ValueError, RecursionError) as error:
        raise MinithinkError(f"The trace {path} is damaged ({error}): record it again.") from None
    return File(head, traces, done)


def _head(path: Path, value: Any) -> Head:
    if not isinstance(value, dict) or value.get("version") != VERSION:
        version = value.get("version") if isinstance(value, dict) else None
        raise MinithinkError(
            f"The trace {path} has version {quoted(version)}, and this minithink reads {VERSION}: record it again."
        )
    try:
        head = Head(**{key: item for key, item in value.items() if key != "version"})
        head.check()
    except (TypeError, AttributeError) as error:
        raise ValueError(f"its head is none: {escaped(error)[:QUOTED]}") from None
    return head
