"""Reads a text token by token, and remembers which tokens carry which content.

A `Reader` cuts the text into lines and finds the rule of each line. A family's reader (`needs.py`) has a method for
every rule. The method records the content that the line needs (`need`), the tokens that carry content (`say`,
`repeat`), and content that no later line needs (`over`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, NamedTuple

from minithink.tasks.needs_rules import NAME, NTH, PAIR

Key = tuple[str, ...]
ENDS = ("</think>", "<|end|>")  # tokens that end a line


class Statement(NamedTuple):
    """Tokens `start` to `end` (exclusive), counted from the beginning of the prompt, and the kind of line."""

    start: int
    end: int
    kind: str  # the name of the rule that read it


class Need(NamedTuple):
    """A content that a statement reads. Each token of `places` carries it, so one of them is enough."""

    statement: int
    key: Key
    places: tuple[int, ...]


@dataclass
class Reading:
    """The statements and needs of a text so far."""

    statements: list[Statement] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    skipped: list[Statement] = field(default_factory=list)  # lines that no rule reads
    unknown: int = 0  # needs of a content that occurs nowhere in the text: no eviction caused them

    @property
    def parsed(self) -> float:
        """Share of the complete lines that a rule read; NaN if no line is complete."""
        lines = len(self.statements) + len(self.skipped)
        return len(self.statements) / lines if lines else math.nan


class Memory(NamedTuple):
    """A content, as it is written, and the tokens that carry it, the newest last."""

    content: str
    places: list[int]


class Reader:
    """Reads a text token by token. `reading` is the result so far; `live()` gives what a continuation may read."""

    RULES: ClassVar[dict[str, re.Pattern[str]]] = {}

    def __init__(self, question: str, prompt: Sequence[str]) -> None:
        self.reading = Reading()
        self.memory: dict[Key, Memory] = {}
        self.count = len(prompt)  # tokens so far
        self.line = ""  # so far
        self.tokens = list[int]()  # of each character of the line
        self.wanted = list[tuple[Key, ...]]()
        self.said = list[tuple[Key, str | None, int, bool]]()
        start = "".join(prompt).rfind(question)
        if start >= 0:
            of_characters = list[int]()
            for i, piece in enumerate(prompt):
                of_characters += [i] * len(piece)
            self.tokens = of_characters[start : start + len(question)]
            self.question(question)
            self.commit()
        self.tokens = []

    def add(self, piece: str) -> None:
        """The next token's text."""
        if piece.strip() in ENDS:
            self.end(self.count)
        else:
            *ended, rest = piece.split("\n")
            for part in ended:
                self.more(part)
                self.end(self.count + 1)
            self.more(rest)
        self.count += 1

    def finish(self) -> None:
        """Call this after the last token: the last line counts if only its line end is missing."""
        if self.rule(self.line):
            self.end(self.count)

    def live(self) -> set[int]:
        """The tokens that a continuation may still read, one for each live content.

        For a definition, lock or step of the question and for a name that it asks for, this is the question's own
        token; for other contents the newest token that carries it. A continuation as the reference traces go on reads
        nothing else. After an error a text may do so: it may look back at a balance that no reference trace would.
        """
        return {self.memory[key].places[0 if given else -1] for key, given in self.keys() if key in self.memory}

    # How a line is read.

    def more(self, text: str) -> None:
        self.line += text
        self.tokens += [self.count] * len(text)

    def rule(self, line: str) -> str | None:
        return next((kind for kind, rule in self.RULES.items() if rule.fullmatch(line)), None)

    def end(self, stop: int) -> None:
        """The line ends before token `stop`."""
        line = self.line
        self.line = ""
        if line.strip():
            if (kind := self.rule(line)) is None:
                self.reading.skipped.append(Statement(self.tokens[0], stop, ""))
            else:
                self.reading.statements.append(Statement(self.tokens[0], stop, kind))
                getattr(self, kind)(line)
                self.commit()
        self.tokens = []

    def commit(self) -> None:
        """Look up what the line needs among the earlier lines; then remember what the line says."""
        for keys in dict.fromkeys(self.wanted):
            if keys[0] not in self.memory:
                self.reading.unknown += 1
                continue
            content = self.memory[keys[0]].content
            found = (self.memory[key] for key in keys if key in self.memory)
            same = [m.places for m in found if m.content == content]
            places = dict.fromkeys(chain.from_iterable(same))
            self.reading.needs.append(Need(len(self.reading.statements) - 1, keys[0], tuple(places)))
        for key, said, place, sets in self.said:
            if said is None:
                self.memory.pop(key, None)
            elif key in self.memory and self.memory[key].content == said:
                self.memory[key].places.append(place)
            elif sets or key not in self.memory:
                self.memory[key] = Memory(said, [place])
        self.wanted = []
        self.said = []

    # What a line can do.

    def need(self, *keys: Key) -> None:
        """The line needs the content of the first key. Tokens of other keys count too if their content is equal."""
        self.wanted.append(keys)

    def say(self, key: Key, content: str, at: int) -> None:
        """The character at `at` of the line carries the content. It supersedes an earlier content of this key."""
        self.said.append((key, content, self.tokens[at], True))

    def repeat(self, key: Key, content: str, at: int) -> None:
        """The character at `at` carries the content again. A content that differs is a mistake, and is ignored."""
        self.said.append((key, content, self.tokens[at], False))

    def over(self, *keys: Key) -> None:
        """No later line needs the contents of these keys."""
        self.said += [(key, None, 0, False) for key in keys]

    def words(self, key: str, line: str, start: int, end: int | None = None) -> Iterator[str]:
        """The names between two characters. Each name is recorded as the content of (key, name)."""
        for m in NAME.finditer(line, start, len(line) if end is None else end):
            self.repeat((key, m[0]), m[0], m.start())
            yield m[0]

    def pairs(self, line: str, start: int = 0) -> Iterator[str]:
        """Find every `name = value` of the line: the line needs the value, and repeats it. → the names"""
        for m in PAIR.finditer(line, start):
            self.need(("value", m[1]))
            self.repeat(("value", m[1]), m[2], m.start(2))
            yield m[1]

    def lead(self, line: str) -> re.Match[str]:
        """The line's first name. After `First,` it is a target of the question; after `Back to` or `Here` a goal."""
        m = NAME.search(line)
        assert m
        key = "target" if re.match(NTH, line) else "goal"
        self.need((key, m[0]))
        self.repeat((key, m[0]), m[0], m.start())
        return m

    def goals(self, line: str, *names: re.Match[str]) -> None:
        """Record the names as goals, and also the names after `so I need`."""
        for m in names:
            self.repeat(("goal", m[0]), m[0], m.start())
        if "so I need" in line:
            list(self.words("goal", line, line.index("so I need")))

    def question(self, question: str) -> None:
        """Record the contents of the question."""

    def targets(self, question: str) -> None:
        if "Find " in question:
            list(self.words("target", question, question.rindex("Find ")))

    def keys(self) -> Iterable[tuple[Key, bool]]:
        """The keys of all live contents, each with True if the question gives the content."""
        return ()

    def spoken(self, line: str) -> None:
        """A spoken line reads nothing."""

    def already(self, line: str) -> None:
        self.lead(line)
        list(self.pairs(line))

    def results(self, line: str) -> None:
        for name in self.pairs(line):
            account = name.partition("@")[0]
            self.need(("target", account))
            if account != name:
                self.need(("newest", account))

    answer = results
