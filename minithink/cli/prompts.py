"""Prompts that a user gives: files, standard input, and problems of the embedded model."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import NamedTuple, TextIO

from minithink.errors import UsageError, quoted, reason

LONGEST = 100_000_000  # characters of all prompts together
FIELDS = ("prompt", "question", "problem")  # of a line in a .jsonl file, in the order in which they are looked for


class Task(NamedTuple):
    """One prompt, and the answer if it is known."""

    prompt: str
    answer: str | None = None


def read_prompts(path: Path) -> list[Task]:
    """The prompts of a file, at least one.

    A .jsonl file holds one object a line, with `prompt`, `question` or `problem`, and `answer` if it is known. Any
    other file is one prompt, without the line breaks at its end.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    what = f"The prompt file {path}"
    try:
        with path.open(encoding="utf-8-sig") as file:  # with or without a byte order mark
            text = _bounded(file, what)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            what = f"The prompt file {quoted(path)}"
        raise UsageError(f"{what} cannot be read as text: {_why(error)}.") from None
    if path.suffix.lower() == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        tasks = [_task(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    else:
        tasks = [Task(text.rstrip("\n"))] if text.strip() else []
    if not tasks:
        raise UsageError(f"The prompt file {path} is empty: put at least one prompt into it.")
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}.") from None
    found = [row[name] for name in FIELDS if name in row] if isinstance(row, dict) else []
    if not found or not isinstance(found[0], str) or not found[0].strip():
        raise UsageError(f"{where} has no text in a field named {', '.join(FIELDS[:-1])} or {FIELDS[-1]}.")
    answer = row.get("answer")
    return Task(found[0], None if answer is None else str(answer))


def standard_input() -> str:
    """All of standard input, without the line breaks at its end; "" if it is closed. UsageError: it is no text."""
    if sys.stdin is None:
        return ""
    try:
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # with or without a byte order mark
        return _bounded(sys.stdin, "Standard input").rstrip("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"Standard input cannot be read as text: {_why(error)}.") from None


def _bounded(file: TextIO, what: str) -> str:
    """All text of a file. UsageError: it is longer than LONGEST; what is read may be endless, such as a device."""
    text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise UsageError(f"{what} has more than {LONGEST:,} characters: give less at once.")
    return text


def _why(error: Exception) -> str:
    """Why something is no text, and what to do."""
    if isinstance(error, UnicodeDecodeError):
        found = error.object[error.start]
        return f"there is the byte 0x{found:02x} where no UTF-8 has it; save it as UTF-8"
    return reason(error)


def embedded_problem(seed: int) -> Task:
    """A test problem of the embedded model. The families take turns: facts, ledger, search, facts, …"""
    from minithink.tasks import families, load_problems

    number, turn = divmod(seed, len(names := families()))
    problems = load_problems("test", names[turn])
    problem = problems[number % len(problems)]
    return Task(problem.question, problem.answer)


def nonsense_expected(prompts: list[str]) -> str:
    """A sentence for users whose prompts hold no problem of the embedded model; "": all of them hold one."""
    from minithink.tasks import families, holds_question
    from minithink.tasks.writing import listing

    if not (strange := sum(not holds_question(prompt) for prompt in prompts)):
        return ""
    which = "the prompt" if len(prompts) == 1 else f"{strange} of {len(prompts)} prompts"
    return (
        f"the embedded model knows its tasks only, {listing(families())}, and {which} "
        f"{'is' if strange == 1 else 'are'} of none of them: expect nonsense. Without a prompt, "
        "python -m minithink.generate shows an example (--seed 1, 2, …: of the other tasks); for other questions, "
        "name a model with --model."
    )
