"""Prompts that a user gives: files, standard input, and problems of the embedded model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from minithink.errors import UsageError, reason

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
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except (OSError, ValueError) as error:
        raise UsageError(f"The prompt file {path} cannot be read as text: {reason(error)}.") from None
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
    try:
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # with or without a byte order mark
        return sys.stdin.read().rstrip("\n") if sys.stdin is not None else ""
    except (OSError, ValueError) as error:
        raise UsageError(f"Standard input cannot be read as text: {reason(error)}.") from None


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
