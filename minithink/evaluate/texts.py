"""The texts whose loss is taken: a file, the files of a folder, or source files of the Python that runs."""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minithink.engine import Engine, check_text
from minithink.errors import UsageError, escaped, quoted, reason
from minithink.evaluate.journal import text_hash
from minithink.results.files import read_bytes

STDLIB = "stdlib"
SOURCES = 20  # files of the standard library, if the caller does not say how many
BYTES = 8  # of a source file for each token that is wanted: few tokens of any tokenizer have as many
CHARACTERS = 32  # of any text, likewise: what lies beyond is not tokenized


@dataclass(frozen=True)
class Text:
    """One text, as it was found."""

    name: str  # its file's, seen from the folder; of a line in a .jsonl file also the line's number
    content: str

    @property
    def digits(self) -> str:
        """A hash of the whole content (`text_hash`)."""
        return text_hash(self.content)


def read_texts(where: str, *, length: int, limit: int | None = None, seed: int = 0) -> list[Text]:
    """The texts that `--texts` names.

    - `stdlib`: source files of the Python that runs, long enough, drawn by lot with the seed.
    - a folder: all files in it and in its folders, in the order of their names. Names that begin with a dot are
      passed over.
    - a `.jsonl` file: one object a line, with the field `text`.
    - any other file: one text.

    Args:
        length: tokens that are wanted of each text; only for `stdlib`.
        limit: only the first so many; of `stdlib`, how many are drawn. None: all, and SOURCES.
        seed: of the draw.

    Raises:
        UsageError: there is nothing of that name, no text in it, or something that is no text.
    """
    if where == STDLIB:
        return _sources(length, SOURCES if limit is None else limit, seed)
    path = Path(where)
    if path.is_dir():
        texts = [Text(found.relative_to(path).as_posix(), _content(found)) for found in _files(path)[:limit]]
        if not texts:
            raise UsageError(f"{escaped(path)} is a folder without texts: put some into it, or name another.")
        return texts
    if path.suffix.lower() == ".jsonl":
        return _lines(path)[:limit]
    return [Text(path.name, _content(path))]


def text_ids(engine: Engine, texts: Sequence[Text], *, prompt_tokens: int, length: int) -> list[list[int]]:
    """The first `length` tokens of each text, or all that it has.

    Raises:
        UsageError: a text has no token behind the prompt.
    """
    out = []
    for text in texts:
        name = escaped(text.name)
        beginning = text.content[: CHARACTERS * length]
        ids = engine.text_ids(beginning, name)
        if len(ids) <= length and len(beginning) < len(text.content):
            ids = engine.text_ids(text.content, name)
        ids = ids[:length]
        check_text(name, len(ids), prompt_tokens, engine.config.max_position)
        out.append(ids)
    return out


def _files(folder: Path) -> list[Path]:
    """The files in a folder and in its folders, but for hidden ones, in the order of their names."""
    found = []
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _content(path: Path) -> str:
    """The text of a file. UsageError: it cannot be read, is empty or is no text."""
    name = escaped(path)
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UsageError(f"The text {name} cannot be read: {reason(error)}.") from None
    if 0 in data:
        raise UsageError(f"{name} is no text, but a binary file (byte {data.index(0)} is 0): leave it out.")
    try:
        content = data.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is no text (byte {error.start} is not UTF-8): convert it, or leave it out."
        ) from None
    if not content.strip():
        raise UsageError(f"The text {name} is empty: leave it out.")
    return content


def _lines(path: Path) -> list[Text]:
    """The texts of a .jsonl file."""
    texts = []
    for number, line in enumerate(_content(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{escaped(where)} is not valid JSON: {reason(error)}.") from None
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"{escaped(where)} has no text in a field named text: it is {quoted(row)}.")
        texts.append(Text(where, text))
    return texts


def _sources(length: int, count: int, seed: int) -> list[Text]:
    """Modules of the standard library that are one file, and long enough: as many as wanted, drawn by lot, in the
    order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    long = []
    for name in sorted(sys.stdlib_module_names):
        path = folder / f"{name}.py"
        if path.is_file() and path.stat().st_size >= BYTES * length:
            long.append(path)
    if len(long) < count:
        raise UsageError(
            f"The Python that runs has {len(long)} source files of {BYTES * length:,} bytes, and {count} texts are "
            "wanted: ask for fewer with --limit, or for a smaller --length."
        )
    drawn = random.Random(seed).sample(long, count)
    return [Text(path.name, _content(path)) for path in sorted(drawn)]
