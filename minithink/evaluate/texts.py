"""The texts whose loss is taken: a file, the files of a folder, source files of the Python that runs, or reference
traces of the embedded model's tasks."""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minithink.engine import Engine, check_text
from minithink.errors import UsageError, counted, escaped, quoted, reason
from minithink.evaluate.datasets import load_dataset
from minithink.evaluate.grading import NONE
from minithink.evaluate.journal import FULL, INSTRUMENT, read, text_hash
from minithink.results.files import read_bytes
from minithink.tasks.prepare import references
from minithink.text.tags import THINK, Tags
from minithink.text.thinking import before_answer

STDLIB = "stdlib"
REFERENCE = "reference"
NAMES = (STDLIB, REFERENCE)  # what --texts takes beside files and folders
SOURCES = 20  # files of the standard library, if the caller does not say how many
TRACES = 12  # reference traces, likewise
LENGTH = 1536  # tokens of a text, likewise; reference traces and texts with answers are read whole
BYTES = 8  # of a source file for each token that is wanted: few tokens of any tokenizer have as many
CHARACTERS = 32  # of any text, likewise: what lies beyond is not tokenized


@dataclass(frozen=True)
class Text:
    """One text, as it was found."""

    name: str  # its file's, seen from the folder; of a line in a .jsonl file also the line's number
    content: str
    question: str | None = None  # in front of it, as a user's message; None: the content is all that there is

    @property
    def digits(self) -> str:
        """A hash of all of it (`text_hash`)."""
        return text_hash(self.content if self.question is None else f"{self.question}\n{self.content}")


@dataclass(frozen=True)
class Given:
    """The tokens of a text, and what is done with them."""

    ids: list[int]
    prompt_tokens: int  # the first ones, which are read at once
    first: int  # the position of the first token whose loss counts


def read_texts(
    where: str,
    *,
    length: int = LENGTH,
    limit: int | None = None,
    seed: int = 0,
    tags: Tags = THINK,
) -> list[Text]:
    """The texts that `--texts` names.

    - `stdlib`: source files of the Python that runs, long enough, drawn by lot with the seed.
    - `reference`: reference traces of validation problems, drawn with the seed, each behind its question.
    - a folder: all files in it and in its folders, in the order of their names. Names that begin with a dot are
      passed over.
    - a `.jsonl` file: one object a line, with the field `text`.
    - any other file: one text.

    Args:
        length: tokens that are wanted of each text; only for `stdlib`.
        limit: only the first so many; of `stdlib` and `reference`, how many are drawn. None: all; SOURCES; TRACES.
        seed: of the draw.

    Raises:
        UsageError: there is nothing of that name, no text in it, or something that is no text.
    """
    if where == STDLIB:
        return _sources(length, SOURCES if limit is None else limit, seed)
    if where == REFERENCE:
        return _references(TRACES if limit is None else limit, seed, tags)
    if not where.strip():  # it would be the current folder, from an unset variable
        raise UsageError("--texts is empty: give a text file, a .jsonl file, a folder, stdlib or reference.")
    path = Path(where)
    if path.is_dir():
        texts = [Text(found.relative_to(path).as_posix(), _content(found)) for found in files_in(path)[:limit]]
        if not texts:
            raise UsageError(f"{escaped(path)} is a folder without texts: put some into it, or name another.")
        return texts
    if path.suffix.lower() == ".jsonl":
        return _lines(path)[:limit]
    return [Text(path.name, _content(path))]


def given_texts(engine: Engine, texts: Sequence[Text], *, prompt_tokens: int, length: int | None) -> list[Given]:
    """The first tokens of each text, or all that it has.

    Args:
        engine: has the tokenizer.
        texts: what is read.
        prompt_tokens: of a text without a question. Otherwise the question is the prompt.
        length: tokens at most, those of the prompt included; None: all.

    Raises:
        UsageError: a text has no token behind the prompt, or is longer than the context.
    """
    out = []
    for text in texts:
        name = escaped(text.name)
        if text.question is None:
            ids = _beginning(engine, text.content, name, length)
            prompt = prompt_tokens
        else:
            question = engine.prompt_ids(text.question)
            ids = question + _beginning(engine, text.content, name, length)
            prompt = len(question)
        ids = ids[:length]
        check_text(name, len(ids), prompt, engine.config.max_position)
        out.append(Given(ids, prompt, first=prompt))
    return out


def _beginning(engine: Engine, content: str, name: str, length: int | None) -> list[int]:
    """At least the first `length` tokens of a text, or all. A long text is tokenized only as far as it's needed."""
    beginning = content if length is None else content[: CHARACTERS * length]
    ids = engine.text_ids(beginning, name)
    if length is not None and len(ids) <= length and len(beginning) < len(content):
        ids = engine.text_ids(content, name)
    return ids


# -- answers


def read_answers(where: str, limit: int | None = None, seed: int = 0, tags: Tags = THINK) -> list[Text]:
    """Questions with a thinking text and an answer.

    - `reference`: as of `read_texts`.
    - the folder of an evaluation with `--keep-text`: what the full cache generated, or else the first policy at
      its first budget, and came to an end.
    - a `.jsonl` file: one object a line, with `prompt`, `thinking` and `answer`.

    Args:
        where: as above.
        limit: take only the first so many texts; None: all, and of `reference` TRACES.
        seed: of the draw of `reference`.
        tags: between which the model thinks.

    Raises:
        UsageError: there is none, or something else.
    """
    if where == STDLIB:
        raise UsageError(
            "--answers needs texts with answers: give --texts the folder of an evaluation with --keep-text, a .jsonl "
            "file, or reference."
        )
    if where == REFERENCE:
        return _references(TRACES if limit is None else limit, seed, tags)
    path = Path(where)
    texts = _kept_texts(path, tags) if path.is_dir() else _thinking_lines(path, tags)
    if not texts:
        raise UsageError(f"{escaped(path)} holds no text that has an answer behind its thinking: give another.")
    return texts[:limit]


def given_answers(engine: Engine, texts: Sequence[Text]) -> list[Given]:
    """The tokens of each text, of which those behind the thinking count. UsageError: a text has no such tokens, or is
    longer than the context."""
    out = []
    for text in texts:
        name = escaped(text.name)
        prompt = engine.prompt_ids(text.question or "")
        rest = engine.text_ids(text.content, name)
        before = before_answer(engine.tokenizer, prompt, rest)
        if before == len(rest):
            raise UsageError(f"{name} has no answer behind its thinking: leave it out.")
        check_text(name, len(prompt) + len(rest), len(prompt), engine.config.max_position)
        out.append(Given([*prompt, *rest], len(prompt), first=len(prompt) + before))
    return out


def _kept_texts(folder: Path, tags: Tags) -> list[Text]:
    """Of an evaluation, see `read_answers`."""
    run = read(folder)
    cells = [(record.policy, record.budget) for record in run.records]
    full = (FULL, None)
    chosen = full if full in cells or not cells else cells[0]
    settings = run.settings
    if settings.get(INSTRUMENT) is not None or not settings.get("dataset"):
        raise UsageError(f"{escaped(folder)} holds no generated texts: give the folder of an evaluation.")
    examples = load_dataset(
        settings["dataset"],
        settings.get("split"),
        settings.get("limit"),
        grader=NONE,
        fields=settings.get("fields"),
    )
    questions = {example.id: example.question for example in examples}
    texts = []
    for record in run.records:
        is_chosen = (record.policy, record.budget) == chosen
        if not is_chosen or record.finish_reason != "stop" or record.sample:
            continue
        if record.text is None:
            raise UsageError(f"{escaped(folder)} does not hold the texts themselves: evaluate with --keep-text.")
        if record.id not in questions:
            raise UsageError(
                f"{escaped(settings['dataset'])} has no problem {quoted(record.id)} now, which {escaped(folder)} has "
                "a text of: restore the dataset, or evaluate again."
            )
        _, closed, answer = record.text.rpartition(tags.close)
        thinks_again = tags.open in answer
        if closed and answer.strip() and not thinks_again:
            texts.append(Text(record.id, record.text, questions[record.id]))
    return sorted(texts, key=lambda text: text.name)


def _thinking_lines(path: Path, tags: Tags) -> list[Text]:
    """The texts of a .jsonl file with `prompt`, `thinking` and `answer`."""
    texts = []
    for where, row in _objects(path):
        parts = [row.get(name) for name in ("prompt", "thinking", "answer")]
        if not all(isinstance(part, str) and part.strip() for part in parts):
            raise UsageError(f"{escaped(where)} lacks a text in prompt, thinking or answer: it is {quoted(row)}.")
        prompt, thinking, answer = parts
        texts.append(Text(where, f"{thinking}{tags.close}{answer}", prompt))
    return texts


def files_in(folder: Path) -> list[Path]:
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
        raise UsageError(
            f"The text {name} cannot be read: {reason(error)}; --texts takes a text file, a .jsonl file, a folder, "
            "stdlib or reference."
        ) from None
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
    for where, row in _objects(path):
        text = row.get("text")
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"{escaped(where)} has no text in a field named text: it is {quoted(row)}.")
        texts.append(Text(where, text))
    return texts


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a .jsonl file, each with its name. UsageError: one is no object."""
    for number, line in enumerate(_content(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{escaped(where)} is not valid JSON: {reason(error)}.") from None
        if not isinstance(row, dict):
            raise UsageError(f"{escaped(where)} is no object: it is {quoted(row)}.")
        yield where, row


def _references(count: int, seed: int, tags: Tags) -> list[Text]:
    """Reference traces of `count` validation problems, on which no model was trained, of the families in turn."""
    found = references(count, seed)
    return [Text(one.id, f"{one.thinking}{tags.close}{one.answer}", one.question) for one in found]


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
            f"The Python that runs has {counted(len(long), 'source file')} of {BYTES * length:,} bytes, and wanted "
            f"are {counted(count, 'text')}: ask for fewer with --limit, or for a smaller --length."
        )
    drawn = random.Random(seed).sample(long, count)
    return [Text(path.name, _content(path)) for path in sorted(drawn)]
