"""GGUF, the file format of llama.cpp: the header of a file, and where its tensors lie.

    "GGUF", version, number of tensors, number of fields
    for every field:   name, type, value
    for every tensor:  name, shape, type of its numbers, offset
    padding
    the tensors

The package `gguf` reads such files, too, and believes every number in them: an array that claims 2⁶⁰ items keeps it
busy for ever. So the header is read here. Nothing is looked at behind the end of the file, and the header can have
`MAX_HEADER` bytes. The package is used for what it knows best, the quantized types (`gguf_weights.py`).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minithink.errors import MinithinkError, named, quoted, reason
from minithink.results.files import open_regular

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 2**25  # bytes: three times that of a model with 250,000 tokens
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
ALIGNMENT = 32  # bytes, of a file that does not say it
TEXT = 8
ARRAY = 9
# The types of fields, without texts and arrays, as `struct` spells them.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Files that are one part of several: model-00001-of-00003.gguf.
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, and not of a folder."""
    path = Path(path)
    return path.suffix.lower() == SUFFIX and not os.path.isdir(path)  # Path.is_dir raises for long names


def beside(path: Path) -> Path:
    """The folder of a checkpoint, or that in which its GGUF file lies: there are its calibrations."""
    return path.parent if is_gguf(path) else path


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header describes it."""

    name: str
    path: Path  # of the file that it lies in
    kind: int  # the type of its numbers, which the package `gguf` names
    shape: tuple[int, ...]  # as in PyTorch: the last dimension is that of a row
    start: int  # its first byte in the file

    def __str__(self) -> str:
        return f"{self.path}: {named(self.name)}"


@dataclass(frozen=True)
class GGUF:
    """What the headers of a model's files hold."""

    path: Path  # the only file, or the first one
    fields: dict[str, Any]  # numbers, texts, and lists of them
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, path: str | Path) -> GGUF:
        """Read the header of a file, or those of all its parts.

        Raises:
            MinithinkError: a file is missing, damaged, truncated or of another version.
        """
        [first, *others] = parts_of(Path(path))
        model = _read_one(first)
        count = model.fields.get("split.count", 1)
        if count not in (0, 1 + len(others)):
            raise MinithinkError(
                f"{first} is one of {quoted(count)} parts, and its name does not say which: give the first one under "
                "its original name, such as model-00001-of-00003.gguf, with the others beside it."
            )
        for number, path in enumerate(others, 1):
            part = _read_one(path)
            if (part.fields.get("split.no"), part.fields.get("split.count")) != (number, count):
                raise MinithinkError(f"{path} is not part {number + 1} of {first}: download both again.")
            twice = model.tensors.keys() & part.tensors.keys()
            if twice:
                raise MinithinkError(f"{path} holds {named(min(twice))}, which an earlier part holds, too.")
            model.tensors.update(part.tensors)
        return model


def parts_of(path: Path) -> list[Path]:
    """The files that a model consists of, in order; it is named by its first one.

    Raises:
        MinithinkError: the file is another part, or a part is missing.
    """
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    names = [f"{found['stem']}-{number:05}-of-{found['count']}{path.suffix}" for number in range(1, count + 1)]
    if not names or path.name != names[0]:
        first = names[0] if names else "its first part"
        raise MinithinkError(f"{path} is a part of a model: give {named(first)}, and the others are read with it.")
    paths = [path.with_name(name) for name in names]
    for other in paths:
        if not other.is_file():
            raise MinithinkError(f"{other} is missing, and {path.name} is one of {count} parts: download it.")
    return paths


def bytes_at(tensor: StoredTensor, length: int) -> np.ndarray:
    """The bytes of a tensor, [length] uint8. They stay in the file until they are used.

    Raises:
        MinithinkError: the file ends before they do, or cannot be read.
    """
    try:
        with open_regular(tensor.path) as file:
            content = np.memmap(file, mode="r")
    except (OSError, ValueError) as error:
        raise MinithinkError(f"{tensor.path} cannot be read: {reason(error)}.") from None
    stop = tensor.start + length
    if stop > len(content):
        raise MinithinkError(
            f"{tensor.path} is truncated: it has {len(content)} bytes, and {named(tensor.name)} "
            f"{quoted(list(tensor.shape))} ends at byte {quoted(stop)}: download it again."
        )
    return content[tensor.start : stop]


class _Damaged(Exception):
    """What is wrong with a header, as part of a sentence."""


def _read_one(path: Path) -> GGUF:
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = _Header(content)
            fields, tensors = header.read(path)
    except FileNotFoundError:
        raise MinithinkError(f"{path} does not exist: no such file.") from None
    except OSError as error:
        raise MinithinkError(f"{path} cannot be read: {reason(error)}.") from None
    except (_Damaged, ValueError) as error:  # mmap's ValueError: the file is empty
        raise MinithinkError(f"{path} is no valid GGUF file ({reason(error)}): download it again.") from None
    return GGUF(path, fields, {tensor.name: tensor for tensor in tensors})


class _Header:
    """Reads a header from its first byte to its last."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.place = 0
        self.end = min(len(content), MAX_HEADER)

    def read(self, path: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
        """The fields and the tensors. _Damaged: they are not what they should be."""
        self._check_beginning()
        tensor_count = self.number("Q")
        field_count = self.number("Q")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self.text("the name of a field")
            if name in fields:
                raise _Damaged(f"the field {named(name)} is there twice")
            fields[name] = self.value(name, self.number("I"))
        tensors = list(self._tensors(path, tensor_count))
        alignment = fields.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
            raise _Damaged(f"general.alignment is {quoted(alignment)}")
        data = -(-self.place // alignment) * alignment
        placed = [replace(tensor, start=data + tensor.start) for tensor in tensors]
        return fields, placed

    def _check_beginning(self) -> None:
        magic = self.content[: len(MAGIC)]
        if magic != MAGIC:
            raise _Damaged(f"it begins with {quoted(magic)}, not with {MAGIC.decode()}")
        self.place = len(MAGIC)
        version = self.number("I")
        if version in VERSIONS:
            return
        if version & 0xFFFF == 0:
            raise _Damaged("its numbers are big-endian, which is not supported")
        raise _Damaged(f"its version is {version}, and minithink reads 2 and 3")

    def _tensors(self, path: Path, count: int) -> Iterator[StoredTensor]:
        """The tensors, whose start is counted from where the header ends."""
        known: set[str] = set()
        for _ in range(count):
            name = self.text("the name of a tensor")
            if name in known:
                raise _Damaged(f"the tensor {named(name)} is there twice")
            known.add(name)
            dimensions = self.number("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise _Damaged(f"the tensor {named(name)} has {dimensions} dimensions")
            sizes = [self.number("Q") for _ in range(dimensions)]
            kind = self.number("I")
            start = self.number("Q")
            yield StoredTensor(
                name=name,
                path=path,
                kind=kind,
                shape=tuple(reversed(sizes)),
                start=start,
            )

    def value(self, name: str, kind: int) -> Any:
        """The value of a field."""
        if kind == TEXT:
            return self.text(name)
        if kind == ARRAY:
            return self._array(name)
        if kind not in NUMBERS:
            raise _Damaged(f"the field {named(name)} has the unknown type {kind}")
        return self.number(NUMBERS[kind])

    def _array(self, name: str) -> list[Any]:
        kind = self.number("I")
        count = self.number("Q")
        if kind == TEXT:
            return self._texts(name, count)
        if kind not in NUMBERS:
            raise _Damaged(f"the array {named(name)} holds values of type {kind}, which is not supported")
        form = NUMBERS[kind]
        values = struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize(form)))
        return [_shortest(value) for value in values] if form == "f" else list(values)

    def _texts(self, name: str, count: int) -> list[str]:
        """As many texts: `text` without its calls, because a tokenizer has half a million of them. Each takes 8 bytes
        at least, so a wrong count ends at the end of the file."""
        content = self.content
        length_at = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = self.place + 8
            if start > self.end:
                raise self._truncated()
            [length] = length_at(content, self.place)
            self.place = start + length
            if self.place > self.end:
                raise self._truncated()
            try:
                texts.append(content[start : self.place].decode())
            except UnicodeDecodeError:
                raise _no_text(name) from None
        return texts

    def number(self, form: str) -> Any:
        """The next number. form: as `struct` spells it."""
        raw = self.take(struct.calcsize(form))
        [value] = struct.unpack(f"<{form}", raw)
        return _shortest(value) if form == "f" else value

    def text(self, what: str) -> str:
        """The next text. what: it is, for errors."""
        length = self.number("Q")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise _no_text(what) from None

    def take(self, length: int) -> bytes:
        """The next bytes."""
        stop = self.place + length
        if stop > self.end:
            raise self._truncated()
        taken = self.content[self.place : stop]
        self.place = stop
        return taken

    def _truncated(self) -> _Damaged:
        if len(self.content) > MAX_HEADER:
            return _Damaged(f"its header is longer than {MAX_HEADER:,} bytes")
        return _Damaged(f"it is truncated: it ends at byte {self.end:,}, inside of its header")


def _no_text(what: str) -> _Damaged:
    return _Damaged(f"{named(what)} holds bytes that are no UTF-8")


def _shortest(value: float) -> float:
    """The shortest decimal fraction that is this number of 32 bits: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
