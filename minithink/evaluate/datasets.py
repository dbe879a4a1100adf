r"""Datasets: the embedded families, files, ready entries for the usual benchmarks, and other datasets of the hub.

Files are data: JSON, CSV and parquet are read. Scripts of datasets are neither fetched nor run.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from minithink.checkpoint.hub import download
from minithink.errors import (
    MinithinkError,
    UsageError,
    alternatives,
    counted,
    escaped,
    listed,
    quoted,
    reason,
)
from minithink.evaluate.grading import CHOICES, NONE, check, grade
from minithink.tasks import families, load_problems, search
from minithink.tasks.answers import seems_long, short_answer

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
CHOOSE = "The answer is one letter: A, B, C or D."
QUESTION = ("question", "problem", "prompt")  # names of fields, in the order in which they are looked for
# Fields whose text belongs in front of the question, and what stands between the two: OlympiadBench's context, joined
# as in its authors' code, and SVAMP's Body.
BEFORE = {"context": "\n", "body": " "}
ANSWER = ("answer", "expected_answer", "final_answer", "target", "solution")
# What --fields may name, and the names of fields that are looked for without it.
FIELDS = {"question": QUESTION, "answer": ANSWER, "id": ("id",), "group": ("group",), "grader": ("grader",)}
LONGEST_NAME = 255  # characters of a file's name that a message shows
FORMATS = (".jsonl", ".csv", ".json", ".parquet")
LEVELS = {f"{search.FAMILY}:{level}": level for level in range(len(search.WORDING))}  # search in one redundancy
SHARD = re.compile(r"-\d{5}-of-\d{5}")


@dataclass(frozen=True)
class Example:
    """One problem to put to a model."""

    id: str
    question: str  # the user's message, template applied
    answer: str
    grader: str  # a name in grading.CHOICES
    group: str = ""  # length bin, level or subject: for tables


def hash_of(examples: Sequence[Example]) -> str:
    """16 hexadecimal digits, a hash of all ids, questions, answers and graders."""
    content = [[e.id, e.question, e.answer, e.grader] for e in examples]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def load_dataset(
    name: str,
    split: str | None = None,
    limit: int | None = None,
    *,
    grader: str = "exact",
    fields: Mapping[str, str] | None = None,
) -> list[Example]:
    r"""The examples of a dataset, in its order.

    `name` is one of

    - an embedded family: `facts`, `ledger` or `search`. Splits: validation, test. `search:0`, `search:1` and
      `search:2` are the problems of `search`, all of them asking for this redundancy (0: little is repeated).
    - a ready entry of ENTRIES, in upper or lower case: `MATH-500`. Split: test; GSM8K has train, too.
    - a file in place of a ready entry: `MATH-500=problems.jsonl`. A copy of the entry's own file is read as from the
      hub. Any other is read as the next says, with INSTRUCTION put after the question, and graded as the entry.
    - a file: `problems.jsonl`, `.csv`, `.json` (a list) or `.parquet`. It has no splits. Of each row, the question is
      the first field there is of QUESTION, the answer the first of ANSWER, in upper or lower case; `id`, `group` and
      `grader` are optional. The question is the message as it is, behind the texts of BEFORE that the row has and the
      question does not hold already. Of an answer that is a solution, the short answer
      counts that it holds: in its last \boxed{}, behind `####`, or behind "the answer is" (`tasks/answers.py`). An
      answer may be a list of texts or numbers, as in OlympiadBench.
    - a dataset of the hub: `hub:owner/name`, or `hub:owner/name:config` where it has several. Its files are those
      whose path holds the split (and the config) as a word, `main/test-00000-of-00001.parquet`; their fields are
      those of a file, and INSTRUCTION is put after the question.

    Args:
        name: as above.
        split: None: test.
        limit: take only the first so many examples; None: all.
        grader: for rows of files that name none; a ready entry has its own. "none": they are not graded, and need
            no answer.
        fields: for files and datasets of the hub: a name in FIELDS → the field that is read for it, as in
            {"question": "problem", "answer": "solution"}; None or a name that is missing: as above.

    Raises:
        UsageError: there is no such dataset, split or grader, or the dataset has fields of its own.
        MinithinkError: a file is missing, damaged or empty, or a line lacks a field; the message names the line.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"A limit of {limit} examples leaves none: give 1 or more.")
    if grader not in CHOICES:
        raise UsageError(f"There is no grader {quoted(grader)}; {alternatives(grader, CHOICES)}.")
    check_name(name)
    check_fields(name, fields)
    key, file = _in_place(name)
    if (entry := _entry(key)) is not None:
        examples = _from_entry(entry, split, file, fields)
    elif name in (*families(), *LEVELS):
        problems = load_problems(split or "test", name.partition(":")[0])
        examples = [Example(p.id, p.question, p.answer, "exact", p.length_bin) for p in problems]
        if name in LEVELS:
            examples = [replace(e, question=search.reworded(e.question, LEVELS[name])) for e in examples]
    elif name.startswith("hub:"):
        examples = _from_hub(name, split or "test", grader, fields)
    else:
        if split is not None:
            raise UsageError(f"{escaped(name)} is a file, which has no split {quoted(split)}: drop the split.")
        path = Path(os.path.expanduser(name))  # Path's own raises for an unknown ~user
        examples = _from_rows(_rows([path], fields), path.stem, grader)
    return examples[:limit]


def check_name(name: str) -> None:
    """UsageError: the name is not that of any dataset, file or dataset of the hub."""
    key, file = _in_place(name)
    if file is not None and not is_file(file):
        kinds = ", ".join(f"*{suffix}" for suffix in FORMATS)
        raise UsageError(f"{escaped(name)} names no file in place of {key}: write {key}=FILE, one of {kinds}.")
    if _entry(key) or name in (*families(), *LEVELS) or name.startswith("hub:") or is_file(name):
        return
    known = [*families(), *LEVELS, *ENTRIES]
    raise UsageError(
        f"There is no dataset {quoted(name)}; {alternatives(name, known)}, files "
        f"({', '.join('*' + suffix for suffix in FORMATS)}) and hub:owner/name."
    )


def check_fields(name: str, fields: Mapping[str, str] | None) -> None:
    """UsageError: fields are named, and the dataset is neither a file nor another dataset of the hub."""
    if fields and not takes_fields(name):
        raise UsageError(
            f"--fields names the fields of a file or of hub:owner/name, and those of {escaped(name)} are known: "
            "leave it out."
        )


def takes_fields(name: str) -> bool:
    """Whether --fields may name the fields of a dataset's rows."""
    return name.startswith("hub:") or is_file(name)


def add_fields_argument(parser: argparse.ArgumentParser) -> None:
    """Add --fields."""
    parser.add_argument(
        "--fields",
        type=fields_of,
        metavar="WHAT=FIELD,…",
        help="of a file or hub:owner/name: the fields that hold the question, the answer, the id, the group and the "
        "grader, as in question=problem,answer=solution (default: usual names, which docs/appendix/evaluate.md "
        "lists)",
    )


def fields_of(text: str) -> dict[str, str]:
    """For argparse: "question=problem,answer=solution" → {"question": "problem", "answer": "solution"}."""
    found = dict[str, str]()
    for part in text.split(","):
        what, equals, name = part.partition("=")
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(
                f"{quoted(part)} names no field: write WHAT=FIELD, as in question=problem,answer=solution"
            )
        if what not in FIELDS:
            raise argparse.ArgumentTypeError(f"no field is read for {quoted(what)}; {alternatives(what, FIELDS)}")
        if what in found:
            raise argparse.ArgumentTypeError(f"{quoted(text)} names the field of {what} twice")
        found[what] = name
    return found


def is_file(name: str) -> bool:
    """Whether a dataset's name is a file's."""
    return not name.startswith("hub:") and name.lower().endswith(FORMATS)


def _in_place(name: str) -> tuple[str, str | None]:
    """Of ENTRY=FILE, the entry's name and the file; of any other name, the name and None."""
    key, equals, file = name.partition("=")
    if equals and _entry(key):
        return key, file
    return name, None


def _entry(name: str) -> str | None:
    """The key of a ready entry."""
    return next((key for key in ENTRIES if key.casefold() == name.casefold()), None)


def check_graders(examples: Iterable[Example]) -> list[str]:
    r"""Check that every grader works here, and takes a correct reply for right: the short answer in a \boxed{}.

    Returns:
        A sentence for each grader that does not accept some of them, and one if answers look like whole solutions.

    Raises:
        UsageError: a grader accepts none of its answers.
        MinithinkError: a grader does not work here.
    """
    notes = []
    of = dict[str, list[Example]]()
    for example in examples:
        of.setdefault(example.grader, []).append(example)
    of.pop(NONE, None)
    for grader, asked in of.items():
        check(grader)
        bad = [e for e in asked if not grade(rf"\boxed{{{short_answer(e.answer)}}}", e.answer, grader).right]
        if not bad:
            continue
        said = (
            f"The grader {grader} would take no text for right in {len(bad):,} of {counted(len(asked), 'problem')}, "
            f"as in {escaped(bad[0].id)}, whose answer is {quoted(bad[0].answer)}"
        )
        if len(bad) == len(asked):
            raise UsageError(f"{said}: give another grader, or correct the answers.")
        notes.append(f"{said}.")
    everything = list(chain.from_iterable(of.values()))
    long = [example for example in everything if seems_long(example.answer)]
    if long:
        notes.append(
            f"The answers of {len(long):,} of {counted(len(everything), 'problem')} look like whole solutions, which "
            f"hardly any text equals, as in {escaped(long[0].id)}: {quoted(long[0].answer)}; give short answers."
        )
    return notes


# --- rows


@dataclass(frozen=True)
class _Row:
    """One row of a file."""

    fields: Mapping[str, Any]
    path: Path
    number: int
    unit: str  # what the number counts: line or row
    chosen: Mapping[str, str] = field(default_factory=dict)  # of --fields: a name in FIELDS → a field

    def error(self, what: str) -> MinithinkError:
        return MinithinkError(f"{self.path}, {self.unit} {self.number} {what}.")

    def names(self, what: str) -> tuple[str, ...]:
        """The fields that are looked for. what: a name in FIELDS."""
        return (self.chosen[what],) if what in self.chosen else FIELDS[what]

    def key(self, name: str) -> str | None:
        """A field's name as the row spells it, which may be in capitals; None: there is no such field."""
        if name in self.fields:
            return name
        others = (key for key in self.fields if isinstance(key, str) and key.casefold() == name.casefold())
        return next(others, None)

    def value(self, name: str) -> Any:
        """The value of a field; None: there is none."""
        key = self.key(name)
        return None if key is None else self.fields[key]

    def get(self, *names: str) -> str:
        """The text of the first of these fields that has one; "": none has. A whole float loses its ".0"."""
        for name in names:
            value = self.value(name)
            if value is not None and not (isinstance(value, str) and not value.strip()):
                return self._text(name, value)
        return ""

    def optional(self, what: str) -> str:
        """The text for a name in FIELDS; "": there is none. MinithinkError: there is no field that --fields names."""
        names = self.names(what)
        if what in self.chosen and self.key(names[0]) is None:
            raise self.lacks(*names)
        return self.get(*names)

    def question(self) -> str:
        """The question, behind the text that it refers to. MinithinkError: there is none."""
        question = self.need(*self.names("question"))
        for name, between in BEFORE.items():
            if not isinstance(self.value(name), str):  # none, or the passages of a data set for retrieval
                continue
            before = self.get(name).strip()
            if before and before not in question:
                question = before + between + question
        return question

    def answer(self) -> str:
        """The short answer; "": there is none. Several answers have commas between them."""
        for name in self.names("answer"):
            value = self.value(name)
            several = value if isinstance(value, list) else [value]
            texts = [self._text(name, one) for one in several if one is not None]
            short = [short_answer(text) for text in texts if text.strip()]
            if short:
                return ", ".join(short)
        return ""

    def _text(self, name: str, value: Any) -> str:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        unreal = isinstance(value, float) and not math.isfinite(value)
        if unreal or isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise self.error(f"has {quoted(value)} as its {name}, which is neither text nor a number")
        text = str(value)
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise self.error(f"has half a character (a lone surrogate) in its {name}")
        return text

    def need(self, *names: str) -> str:
        """As `get`, but MinithinkError if no field has a text."""
        text = self.get(*names)
        if not text:
            raise self.lacks(*names)
        return text

    def lacks(self, *names: str) -> MinithinkError:
        """What is raised if no field of these names has a text."""
        if len(names) == 1 and names[0] not in self.chosen.values():
            return self.error(f"has no {names[0]}")
        there = listed([quoted(name) for name in self.fields], 8)
        if len(names) == 1:
            return self.error(f"has nothing in its field {quoted(names[0])}, which --fields names; it has {there}")
        empty = [name for name in names if self.key(name) is not None]
        if empty:
            return self.error(
                f"has no {names[0]}, because its field {quoted(empty[0])} is empty: fill it in, or leave the "
                f"{self.unit} out"
            )
        return self.error(
            f"has no {names[0]} (no field {', '.join(names[:-1])} or {names[-1]}; it has {there}): name the field, "
            f"as in --fields {names[0]}=FIELD"
        )


def _rows(paths: Iterable[Path], chosen: Mapping[str, str] | None = None) -> list[_Row]:
    """The rows of files, at least one in each. chosen: as of _Row."""
    rows = []
    for path in paths:
        try:
            if path.exists() and not path.is_file() and not path.is_dir():
                raise OSError("it is a pipe or a device")  # which may have no end
            found = list(_read(path))
        except FileNotFoundError:
            raise MinithinkError(f"{path} does not exist: give an existing file.") from None
        except UnicodeDecodeError as error:
            raise MinithinkError(
                f"{path} is not in UTF-8 ({error.reason}, byte {error.start}): convert it."
            ) from None
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            name = escaped(path) if len(path.name) <= LONGEST_NAME else quoted(path.name)
            raise MinithinkError(f"{name} cannot be read as {path.suffix.lower()[1:]}: {reason(error)}.") from None
        if not found:
            raise MinithinkError(f"{path} holds no examples.")
        rows += [replace(row, chosen=chosen or {}) for row in found]
    return rows


def _read(path: Path) -> Iterator[_Row]:
    """The rows of one file, by its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from (_Row(fields, path, n, "row") for n, fields in enumerate(_parquet(path), 1))
    elif suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:  # Excel begins its files with a byte-order mark
            reader = csv.DictReader(file, strict=True)
            width = len(reader.fieldnames or ())
            before = reader.line_num  # a row may span several lines: it is named by its first
            for fields in reader:
                row = _Row(fields, path, before + 1, "line")
                if None in fields:
                    raise row.error(f"has more fields than the {width} of the header")
                yield row
                before = reader.line_num
    elif suffix == ".json" and (rows := _json_list(path)) is not None:
        for n, fields in enumerate(rows, 1):
            yield _row(fields, path, n, "row")
    else:
        with path.open(encoding="utf-8-sig") as lines:
            for n, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise MinithinkError(f"{path}, line {n} is no JSON: {error}.") from None
                yield _row(fields, path, n, "line")


def _row(fields: Any, path: Path, number: int, unit: str) -> _Row:
    row = _Row(fields, path, number, unit)
    if not isinstance(fields, dict):
        raise row.error("is no JSON object")
    return row


def _json_list(path: Path) -> list[Any] | None:
    """The list that a JSON file holds; None: it holds no list, but perhaps JSON lines."""
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        return None
    rows = json.loads(text)
    assert isinstance(rows, list)
    return rows


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # here: an extra
    except ImportError:
        raise MinithinkError(
            f"{path} needs pyarrow to be read, which is not installed: pip install 'pyarrow>=17'."
        ) from None
    try:
        rows: list[dict[str, Any]] = parquet.ParquetFile(path).read().to_pylist()
    except ArrowException as error:
        raise ValueError(str(error).rstrip(".")) from None
    return rows


def _from_rows(rows: Iterable[_Row], name: str, grader: str, instruction: str = "") -> list[Example]:
    """Examples from files of a dataset that is no ready entry."""
    examples = []
    for n, row in enumerate(rows, 1):
        question = row.question()
        named = row.optional("grader") or grader
        if named not in CHOICES:
            raise row.error(f"names the grader {quoted(named)}; {alternatives(named, CHOICES)}")
        answer = "" if named == NONE else row.answer()
        if not answer and named != NONE:
            raise row.lacks(*row.names("answer"))
        message = f"{question}\n\n{instruction}" if instruction else question
        id = row.optional("id") or f"{name}-{n}"
        examples.append(Example(id, message, answer, named, row.optional("group")))
    return _distinct(examples, rows)


def _distinct(examples: list[Example], rows: Iterable[_Row]) -> list[Example]:
    """The examples. MinithinkError: two have the same id."""
    seen: dict[str, _Row] = {}
    for example, row in zip(examples, rows, strict=True):
        before = seen.setdefault(example.id, row)
        if before is not row:
            raise row.error(f"has the id {quoted(example.id)} of {before.unit} {before.number}")
    return examples


# --- ready entries


@dataclass(frozen=True)
class Entry:
    """A benchmark whose format is known."""

    repo: str  # a dataset of the hub
    files: Mapping[
        str, str
    ]  # split → file, or where its name is not known the word that its path has, as in "*train*"
    read: Callable[[_Row], tuple[str, str]]  # of a row: the message, the answer
    grader: str
    id: str = "id"  # the field of an example's id; if a row lacks it, examples are numbered
    group: Callable[[_Row], str] = lambda row: ""


def _asks(question: str, answer: str) -> Callable[[_Row], tuple[str, str]]:
    """A reader of rows whose question and answer are in these fields."""
    return lambda row: (f"{row.need(question)}\n\n{INSTRUCTION}", row.need(answer))


def _gsm8k(row: _Row) -> tuple[str, str]:
    """The answer stands behind the solution: … #### 18."""
    _, mark, answer = row.need("answer").rpartition("####")
    if not mark or not answer.strip():
        raise row.error('has no "#### " and number at the end of its answer')
    return f"{row.need('question')}\n\n{INSTRUCTION}", answer.strip()


def _gpqa(row: _Row) -> tuple[str, str]:
    """Four choices, in an order that the question decides: the file has the right one first."""
    question = row.need("Question").strip()
    choices = [row.need(f) for f in ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))]
    # By hashes rather than `random`: the same for every version of Python.
    order = sorted(range(4), key=lambda i: hashlib.sha256(f"{question}\n{i}".encode()).digest())
    listed = "\n".join(f"({letter}) {choices[i].strip()}" for letter, i in zip("ABCD", order, strict=True))
    return f"{question}\n\n{listed}\n\n{INSTRUCTION} {CHOOSE}", "ABCD"[order.index(0)]


# Ids, files and fields were looked up in copies of the hub's pages from 2025 and in code of 2026 that pins these
# files, at the commits below; the data themselves were not downloaded. AIME24 and GPQA are a split "train" on the
# hub, and benchmarks all the same: test.
ENTRIES: Mapping[str, Entry] = {
    # 6e4ed1a2: problem, solution, answer, subject, level, unique_id
    "MATH-500": Entry(
        "HuggingFaceH4/MATH-500",
        {"test": "test.jsonl"},
        _asks("problem", "answer"),
        "math",
        "unique_id",
        lambda row: f"level {row.need('level')}",
    ),
    # 2fe88a2f: id, problem, solution, answer, url, year
    "AIME24": Entry(
        "HuggingFaceH4/aime_2024",
        {"test": "data/train-00000-of-00001.parquet"},
        _asks("problem", "answer"),
        "math",
    ),
    # 563bb840: problem, answer, id (as a copy of the dataset lists them)
    "AIME25": Entry("math-ai/aime25", {"test": "test.jsonl"}, _asks("problem", "answer"), "math"),
    # 80815d3: id, question, answer (as code that reads them has it; the dataset's own list was not found, nor whether
    # an answer is 27 or 27.0, which are equal to the grader)
    "AMC23": Entry("math-ai/amc23", {"test": "test-00000-of-00001.parquet"}, _asks("question", "answer"), "math"),
    # 740312ad: question, answer
    "GSM8K": Entry(
        "openai/gsm8k",
        {split: f"main/{split}-00000-of-00001.parquet" for split in ("train", "test")},
        _gsm8k,
        "number",
    ),
    # question, answer, and more; a split "train" alone (as code that reads them has it; the name of the file was not
    # found)
    "GK23EN": Entry(
        "MARIO-Math-Reasoning/Gaokao2023-Math-En",
        {"test": "*train*"},
        _asks("question", "answer"),
        "math",
    ),
    # 90b8e5b: Question, Correct Answer, Incorrect Answer 1 to 3, Record ID, High-level domain, and many more. Gated:
    # its terms ask that no example be shown online.
    "GPQA-Diamond": Entry(
        "Idavidrein/gpqa",
        {"test": "gpqa_diamond.csv"},
        _gpqa,
        "choice",
        "Record ID",
        lambda row: row.get("High-level domain"),
    ),
}


def _from_entry(
    name: str, split: str | None, file: str | None = None, fields: Mapping[str, str] | None = None
) -> list[Example]:
    """The examples of a ready entry. file: in place of the hub's; None: the hub's. fields: of that file."""
    entry = ENTRIES[name]
    split = split or "test"
    if split not in entry.files:
        raise UsageError(f"{name} has no split {quoted(split)}; there is {' and '.join(entry.files)}.")
    if file is not None:
        path = Path(os.path.expanduser(file))
        rows = _rows([path], fields)
        if fields or not _fits(entry, rows[0]):
            return _from_rows(rows, path.stem, entry.grader, INSTRUCTION)
    elif "*" in entry.files[split]:
        rows = _rows(_files(entry.repo, "", entry.files[split].strip("*")))
    else:
        rows = _rows([_downloaded(entry, split)])
    examples = []
    for n, row in enumerate(rows, 1):
        question, answer = entry.read(row)
        id = row.get(entry.id) or f"{name}-{split}-{n}"
        examples.append(Example(id, question, answer, entry.grader, entry.group(row)))
    return _distinct(examples, rows)


def _fits(entry: Entry, row: _Row) -> bool:
    """Whether a row has the fields of the entry's own file."""
    try:
        entry.read(row)
        entry.group(row)
    except MinithinkError:
        return False
    return True


def _downloaded(entry: Entry, split: str) -> Path:
    """The file of a split, fetched from the hub. MinithinkError: it is not there."""
    name = entry.files[split]
    path = download(entry.repo, [name], kind="dataset") / name
    if not path.is_file():
        raise MinithinkError(f"The dataset {entry.repo} has no file {name} any more: update minithink.")
    return path


# --- other datasets of the hub


def _from_hub(name: str, split: str, grader: str, fields: Mapping[str, str] | None) -> list[Example]:
    repo, _, config = name.removeprefix("hub:").partition(":")
    if repo.count("/") != 1:
        raise UsageError(
            f"{quoted(name)} names no dataset of the hub: write hub:owner/name or hub:owner/name:config."
        )
    rows = _rows(_files(repo, config, split), fields)
    return _from_rows(rows, f"{repo.partition('/')[2]}-{split}", grader, INSTRUCTION)


def _files(repo: str, config: str, split: str) -> list[Path]:
    """The files of a dataset of the hub whose paths have these words, fetched. config: "": none."""
    words = [word for word in (config, split) if word]
    if any(not re.fullmatch(r"[\w.+-]+", word) for word in words):  # they become patterns of paths
        raise UsageError(
            f"hub:{repo} with the config {quoted(config)} and the split {quoted(split)}: both are words of a file's "
            "path."
        )
    patterns = []
    for order in (words, words[::-1]):
        begin = f"*{'*'.join(order)}*"
        patterns += [begin + suffix for suffix in FORMATS]
    folder = download(repo, patterns, kind="dataset")
    # Patterns know no words (test is in latest, too), and the cache may hold files of other calls.
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.suffix in FORMATS]
    files = [file for file in files if all(_has_word(file, word) for word in words)]
    of = f"the split {quoted(split)}" + (f" and the config {quoted(config)}" if config else "")
    if not files:
        raise MinithinkError(
            f"The dataset {repo} has no file {' or '.join(FORMATS)} of {of} (a word of its path): give another split "
            "or hub:owner/name:config, or download the file and name it."
        )
    wholes = sorted({SHARD.sub("", file) for file in files})
    if len(wholes) > 1:
        raise UsageError(
            f"The dataset {repo} has several files of {of}: {', '.join(wholes)}; choose by hub:{repo}:config, or "
            "download one and name it."
        )
    return [folder / file for file in files]


def _has_word(path: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", path) is not None
