"""Find what each statement of a text reads: the earlier tokens that a cache must still hold when it is written.

A statement is a line of the thinking, or the sentence of the answer. The families' texts are so simple that rules can
read them, without any attention weights. The rules find the content that a statement needs, and the tokens that carry
this content:

    search   "So duv = 8."                                  needs which name is searched, the last trial, its verdict
             "Now try 5: 5 * 8 = 40, 40 + 7 = 47, no."      needs factor 8, added 7, the result 79, and the last trial
             "Back to gon. gon * duv + 7 = 79, …"           needs the goal gon, its lock, and the value of duv
    facts    "Now led = lit - 13 = 31 - 13 = 18."           needs the goal led, its definition, and the value of lit
    ledger   "Now lim@2 = 21, 21 * 3 = 63, so lim@5 = 63."  needs step 5, that it reads lim@2, and the value of lim@2

A `Need` has a key, which names the content, and places, the tokens that carry it. One held place meets the need. A
token is a place if its own statement shows the content: the question's definition, a plan, a goal that is stated
again, a recap, a re-check. An earlier trial of the same search has places of the lock's numbers, too. Tokens of the
needing statement are no places. Superseded content does not count: an older balance is no place of the newest
balance, an earlier trial is no place of the last trial, and the numbers of a misread lock are no places of the lock.
A free choice of the trace, such as the name that it doubts, is no need. If a number or name has several tokens, its
place is the first token.

A value is the number that the text wrote for a name, right or wrong. A statement that no rule matches is skipped and
counted. No text raises an error.

`reader` gives a `Reader` that takes the text token by token and knows at any moment what a continuation may still
read (`live`), if it goes on as the reference traces do. `read` reads a whole text.

In `ledger` a doubt may read superseded balances. It goes over the last three of a run of calculations, or looks back
at one of the last five balances before the run. So `live` holds the last balances, at most ten, and what their steps
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from minithink.tasks.ledger import RECENT
from minithink.tasks.needs_reader import Key, Need, Reader, Reading, Statement
from minithink.tasks.needs_rules import FACTS, LEDGER, NAME, OPERAND, PAIR, SEARCH, STEP, N

__all__ = ["Key", "Need", "Reader", "Reading", "Statement", "read", "reader"]


def read(question: str, pieces: Sequence[str], prompt_pieces: int) -> Reading:
    """Read a whole text.

    Args:
        question: the user's message; the prompt holds it.
        pieces: the texts of all tokens, first of the prompt, then of the generated text.
        prompt_pieces: number of the prompt's tokens.

    Returns:
        The statements and their needs.
    """
    text = reader(question, pieces[:prompt_pieces])
    for piece in pieces[prompt_pieces:]:
        text.add(piece)
    text.finish()
    return text.reading


def reader(question: str, prompt: Sequence[str]) -> Reader:
    """A reader of the text after a prompt, by the rules of the question's family. prompt: the texts of its tokens.

    If the question is of no family, the reader skips every line.
    """
    families = {"Numbers": _Search, "Facts": _Facts, "Balances": _Ledger}
    return families.get(question.partition(" ")[0], Reader)(question, prompt)


# --- What the lines of the families need.

# Parts of the rules with groups, to search in a line that a rule has accepted.
_VERSION = re.compile(rf"({N})@(\d+)")
_LOCK = re.compile(rf"({N}) \* ({OPERAND}) \+ ({OPERAND}) = (\d+)")
_WHY = re.compile(rf"{_LOCK.pattern}, (\d+) \* (\d+) = \d+, \d+ \+ (\d+) = \d+")
_VERDICT = re.compile(r", (yes|no|not|that is)(?: \d+)?\.$")
_SIDE = re.compile(r"from (\d+) (up|down)")
_PRODUCT = re.compile(r"(\d+) \* (\d+) = \d+")
_SUM = re.compile(r"(\d+) \+ (\d+) = \d+")
_FACT = re.compile(rf"({N}) = ({OPERAND})(?: ([-+*]) ({OPERAND}))?")
_DERIVED = re.compile(rf"({N}) = ({OPERAND}) ([-+*]) ({OPERAND}) = (\d+) [-+*] (\d+) = (\d+)")
_BACKWARDS = re.compile(rf"({N}) [-+] ({OPERAND}) = (\d+) [-+] (\d+) = \d+, and ({N}) = (\d+)")
_NUMBERS = re.compile(r"\b(\d+) [-+*] (\d+) = ")
_STEP = re.compile(rf"(\d+): ({STEP})")
_WORD = re.compile(rf"\b{N}\b|\d+|[-+*]")
_LAST_PAIR = re.compile(rf".*\b({N}(?:@\d+)?) = (\d+)", re.DOTALL)
PARTS = ("factor", "added", "result")  # of a lock
SEARCHING = ("goal", "trial", "verdict", "before", "side", "from", *PARTS)  # not needed after the search of a name


class _Search(Reader):
    RULES = SEARCH
    now = ""  # the name that is searched
    again = False  # True after a search in which no number fitted

    def question(self, question: str) -> None:
        for m in _LOCK.finditer(question):
            self.lock(m)
        self.wanted = []
        self.targets(question)

    def keys(self) -> Iterable[tuple[Key, bool]]:
        return ((key, key[0].startswith(("lock", "target"))) for key in self.memory if key[0] != "before")

    def lock(self, m: re.Match[str]) -> None:
        """The line states a lock as the question gives it: it needs the lock's parts, and carries them again."""
        for part, operand, at in zip(PARTS, m.groups()[1:4], (m.start(2), m.start(3), m.start(4)), strict=True):
            self.need((f"lock {part}", m[1]))
            self.repeat((f"lock {part}", m[1]), operand, at)

    def numbers(self, *parts: str) -> None:
        """The line needs numbers of the searched lock. A goal statement or a trial carries them, or the lock,
        if it has numbers."""
        for part in parts:
            self.need((part, self.now), (f"lock {part}", self.now))

    def plan(self, line: str) -> None:
        m = _LOCK.search(line)
        assert m
        self.lock(m)
        self.goals(line, self.lead(line), NAME.match(line, m.start()) or m)
        list(self.pairs(line, m.end()))

    def goal(self, line: str, say: Callable[[Key, str, int], None]) -> None:
        """`gon with gon * 8 + 7 = 79, from 1 up`. say: `self.say` for a new goal, else `self.repeat`."""
        m = _LOCK.search(line)
        side = _SIDE.search(line)
        assert m
        assert side
        self.need(("goal", m[1]))
        # A model may write two names, `gon with duv * 8 + 7 = 79`: the name in the lock counts.
        for at in (line.rfind(m[1], 0, m.start()), m.start()):
            if at >= 0:
                self.repeat(("goal", m[1]), m[1], at)
        for k, part in enumerate(PARTS, 2):
            say((part, m[1]), m[k], m.start(k))
        say(("from", m[1]), side[1], side.start(1))
        say(("side", m[1]), side[2], side.start(2))

    def want(self, line: str) -> None:
        name = line.split(" ")[2]
        for part in PARTS:
            self.need((f"lock {part}", name))
            operand = self.memory.get((f"lock {part}", name))
            if operand and operand.content.isalpha():
                self.need(("value", operand.content))
        if self.again and self.now == name:  # now from the other side
            self.need(("side", name), ("before", name))
        elif self.now != name:
            self.over(*((key, self.now) for key in SEARCHING if key != "goal"))
        self.over(("trial", name), ("verdict", name), ("before", name))
        self.now = name
        self.again = False
        self.goal(line, self.say)

    def turn(self, line: str) -> None:
        self.need(("verdict", self.now))
        self.need(("side", self.now), ("before", self.now))
        self.numbers(*PARTS)
        self.over(("trial", self.now), ("verdict", self.now), ("before", self.now))
        self.goal(line, self.say)

    def still(self, line: str) -> None:
        self.numbers(*PARTS)
        self.need(("from", self.now))
        self.need(("side", self.now), ("before", self.now))
        self.goal(line, self.repeat)

    def none(self, line: str) -> None:
        self.need(("goal", self.now))
        self.need(("trial", self.now))
        self.need(("verdict", self.now))
        self.need(("side", self.now), ("before", self.now))
        for m in _LOCK.finditer(line):
            self.lock(m)
            self.repeat(("goal", m[1]), m[1], m.start(1))
            list(self.pairs(line, m.end()))
        self.again = True

    def trial(self, line: str) -> None:
        name = self.now
        m = re.search(r"(\d+):", line)
        assert m
        last = self.memory.get(("trial", name))
        side = self.memory.get(("side", name))
        if last:
            self.need(("trial", name))
            self.need(("verdict", name))
            self.need(("side", name), ("before", name))
        else:
            self.need(("from", name))
        self.numbers(*PARTS)
        self.calculation(line, m)
        # The trial before the last one also shows the side. So does the first trial: it is the smallest or largest.
        if side:
            places = last.places if last else [place for key, x, place, _ in self.said if key[0] == "trial" and x]
            self.over(("before", name))
            self.said += [(("before", name), side.content, place, True) for place in places]

    def calculation(self, line: str, x: re.Match[str], new: bool = True) -> None:
        """The numbers of a trial: x, factor, added, and the verdict, which says if x fits."""
        name = self.now
        verdict = _VERDICT.search(line)
        if new:
            self.over(("trial", name), ("verdict", name))
        if verdict:
            fits = "yes" if verdict[1] in ("yes", "that is") else "no"
            self.repeat(("verdict", name), fits, verdict.start(1))
        self.repeat(("trial", name), x[1], x.start(1))
        for m in _PRODUCT.finditer(line):
            self.repeat(("trial", name), m[1], m.start(1))
            self.repeat(("factor", name), m[2], m.start(2))
        for m in _SUM.finditer(line):
            self.repeat(("added", name), m[2], m.start(2))

    def retry(self, line: str) -> None:
        x = re.search(r"(\d+) again", line)
        result = re.search(r"(\d+)\.$", line)
        assert x
        assert result
        self.need(("trial", self.now))
        self.numbers(*PARTS)
        self.calculation(line, x, new=False)
        self.repeat(("result", self.now), result[1], result.start(1))

    def found(self, line: str) -> None:
        m = PAIR.search(line)
        assert m
        self.need(("goal", m[1]))
        self.need(("trial", m[1]))
        self.need(("verdict", m[1]))
        self.over(*((key, m[1]) for key in SEARCHING))
        self.say(("value", m[1]), m[2], m.start(2))
        self.now = ""

    def recap(self, line: str) -> None:
        list(self.pairs(line))

    def check(self, line: str) -> None:
        for m in _WHY.finditer(line):
            self.lock(m)
            for name, k in ((m[1], 5), (m[2], 6), (m[3], 7)):
                if name.isalpha():
                    self.need(("value", name))
                    self.repeat(("value", name), m[k], m.start(k))
        if "Yes, " in line:
            list(self.pairs(line, line.index("Yes, ")))

    def reread(self, line: str) -> None:
        for m in _LOCK.finditer(line):
            self.lock(m)


class _Derives(Reader):
    """Facts and ledger: a line computes a value, and the next line may correct a slip in it."""

    last: tuple[str, list[Key]] = ("", [])  # the name that was computed last, and the keys that its numbers come from

    def computed(self, name: str, value: str, name_at: int, value_at: int, numbers: list[Key]) -> None:
        self.say(("value", name), value, value_at)
        self.over(("last", self.last[0]), ("last step", self.last[0]), ("goal", name))
        self.say(("last", name), name, name_at)
        account, _, step = name.partition("@")
        if step:
            self.say(("last step", name), step, name_at + len(account) + 1)
        self.last = name, numbers

    def correct(self, line: str) -> None:
        m = _LAST_PAIR.match(line)
        assert m
        for key in self.last[1] if self.last[0] == m[1] else ():
            self.need(key)
        self.need(("value", m[1]))
        self.need(("last", m[1]))
        if "@" in m[1]:
            self.need(("last step", m[1]))
        self.say(("value", m[1]), m[2], m.start(2))


class _Facts(_Derives):
    RULES = FACTS

    def question(self, question: str) -> None:
        for m in _FACT.finditer(question):
            if m[3]:
                self.define(m)
            else:
                self.say(("value", m[1]), m[2], m.start(2))
        self.wanted = []
        self.targets(question)

    def keys(self) -> Iterable[tuple[Key, bool]]:
        return ((key, key[0] in ("left", "op", "right", "target")) for key in self.memory)

    def define(self, m: re.Match[str]) -> None:
        """A definition is read, as in the question."""
        for k, part in enumerate(("left", "op", "right"), 2):
            self.need((part, m[1]))
            self.repeat((part, m[1]), m[k], m.start(k))

    def plan(self, line: str) -> None:
        m = _FACT.search(line)
        assert m
        self.define(m)
        self.goals(line, self.lead(line), NAME.match(line, m.start()) or m)
        list(self.pairs(line, m.end()))

    def derived(self, line: str) -> re.Match[str]:
        m = _DERIVED.search(line)
        assert m
        self.define(m)
        for operand, k in ((m[2], 5), (m[4], 6)):
            if operand.isalpha():
                self.need(("value", operand))
                self.repeat(("value", operand), m[k], m.start(k))
        return m

    def compute(self, line: str) -> None:
        m = self.derived(line)
        self.need(("goal", m[1]))
        numbers = [("value", x) if x.isalpha() else (part, m[1]) for x, part in ((m[2], "left"), (m[4], "right"))]
        self.computed(m[1], m[7], m.start(1), m.start(7), [*numbers, ("op", m[1])])

    def check(self, line: str) -> None:
        m = self.derived(line)
        self.need(("value", m[1]))
        self.repeat(("value", m[1]), m[7], m.start(7))
        if "Yes, " in line:
            list(self.pairs(line, line.index("Yes, ")))

    def backwards(self, line: str) -> None:
        m = _BACKWARDS.search(line)
        if not m:  # not from the calculation of a fact
            return
        for part in ("left", "op", "right"):
            self.need((part, m[1]))
        self.repeat(("left", m[1]), m[5], m.start(5))
        self.repeat(("right", m[1]), m[2], m.start(2))
        for name, k in ((m[1], 3), (m[2], 4), (m[5], 6)):
            if name.isalpha():
                self.need(("value", name))
                self.repeat(("value", name), m[k], m.start(k))

    def reread(self, line: str) -> None:
        if m := _FACT.search(line):
            self.define(m)


class _Ledger(_Derives):
    RULES = LEDGER

    def question(self, question: str) -> None:
        self.steps: dict[str, int] = {}  # where the question numbers each step
        self.computed_last: dict[str, str] = {}  # account → its newest balance that was computed
        self.run: list[str] = []  # balances that were computed since the last plan
        self.before: list[str] = []  # the last RECENT balances that were computed before the run
        start = question.find("Steps: ")
        for m in PAIR.finditer(question, 0, start):
            account, _, version = m[1].partition("@")
            self.say(("value", m[1]), m[2], m.start(2))
            self.say(("newest", account), version, m.start(1) + len(account) + 1)
            self.computed_last[account] = m[1]
        for m in _STEP.finditer(question, start):
            self.steps[m[1]] = self.tokens[m.start(1)]
            self.step(m[1], question, *m.span(2))
        self.wanted = []
        self.targets(question)

    def keys(self) -> Iterable[tuple[Key, bool]]:
        waiting = {key[1].partition("@")[2] for key in self.memory if key[0] == "goal"}
        for key in self.memory:
            if key[0] not in ("value", "reads") or (key[0] == "reads" and key[1] in waiting):
                yield key, key[0] in ("step", "target")
        yield from ((("value", name), False) for name in self.computed_last.values())
        yield from ((key, False) for key in self.last[1] if key[0] == "value")  # for a correction
        for name in (*self.before, *self.run[-RECENT:]):  # for a doubt
            yield ("value", name), False
            yield from ((key, False) for key in self.read_by(name.partition("@")[2]))

    def read_by(self, step: str) -> Iterable[Key]:
        """What tells the balances that a step reads, and their values."""
        for key, memory in self.memory.items():
            if key[:2] == ("reads", step):
                yield key
                yield "value", f"{key[2]}@{memory.content}"

    def step(self, number: str, line: str, start: int, end: int) -> None:
        """A step is read, word by word as in the question."""
        for k, m in enumerate(_WORD.finditer(line, start, end)):
            self.need(("step", number, str(k)))
            self.repeat(("step", number, str(k)), m[0], m.start())

    def plan(self, line: str) -> None:
        m = re.search(rf"step (\d+): ({STEP})", line)
        assert m
        number = m[1]
        reads = m.end()
        sets = line.index(" to find ", reads)
        if self.run:
            self.before = [*self.before, *self.run][-RECENT:]
            self.run = []
        if ("at",) in self.memory:
            self.need(("at",))
        self.step(number, line, *m.span(2))
        for v in _VERSION.finditer(line, reads, sets):
            self.need(("newest", v[1]))
            self.repeat(("newest", v[1]), v[2], v.start(2))
            self.say(("reads", number, v[1]), v[2], v.start(2))
        self.say(("at",), number, m.start(1))
        for v in _VERSION.finditer(line, sets):
            if number in self.steps:
                self.said.append((("newest", v[1]), number, self.steps[number], True))
            self.say(("newest", v[1]), number, m.start(1))
            self.say(("newest", v[1]), v[2], v.start(2))
            self.say(("goal", v[0]), v[0], v.start(2))
            self.repeat(("at",), v[2], v.start(2))

    def balances(self, line: str, number: str, end: int) -> list[Key]:
        """Balances that step `number` reads, before `end`: `lim@2 = 21 and tup@1 = 76` → the keys of their values."""
        keys = list[Key]()
        for m in PAIR.finditer(line, 0, end):
            account, _, version = m[1].partition("@")
            self.need(("reads", number, account))
            self.need(("value", m[1]))
            for key in (("reads", number, account), ("newest", account)):
                self.repeat(key, version, m.start(1) + len(account) + 1)
            self.repeat(("value", m[1]), m[2], m.start(2))
            keys.append(("value", m[1]))
        if numbers := _NUMBERS.search(line):
            for k, value in enumerate(keys[:2], 1):
                self.repeat(value, numbers[k], numbers.start(k))
        return keys

    def derived(self, line: str) -> tuple[re.Match[str], list[Key]]:
        start = line.index(", so ")
        m = PAIR.match(line, start + 5)
        assert m
        account, _, number = m[1].partition("@")
        words = [key for key in self.memory if key[:2] == ("step", number)]
        for key in words:
            self.need(key)
        keys = self.balances(line, number, start)
        self.repeat(("newest", account), number, m.start(1) + len(account) + 1)
        return m, keys + words

    def compute(self, line: str) -> None:
        m, numbers = self.derived(line)
        self.need(("goal", m[1]))
        self.computed(m[1], m[2], m.start(1), m.start(2), numbers)
        self.run.append(m[1])
        self.computed_last[m[1].partition("@")[0]] = m[1]

    def check(self, line: str) -> None:
        m, _ = self.derived(line)
        self.need(("value", m[1]))
        self.repeat(("value", m[1]), m[2], m.start(2))
        if "Yes, " in line:
            list(self.pairs(line, line.index("Yes, ")))

    def backwards(self, line: str) -> None:
        first = PAIR.search(line)
        assert first
        number = first[1].partition("@")[2]
        for key in self.memory:
            if key[:2] == ("step", number):
                self.need(key)
        self.need(("value", first[1]))
        self.repeat(("value", first[1]), first[2], first.start(2))
        for m in PAIR.finditer(line, first.end()):
            account, _, version = m[1].partition("@")
            self.need(("reads", number, account))
            self.repeat(("reads", number, account), version, m.start(1) + len(account) + 1)
            self.need(("value", m[1]))
            self.repeat(("value", m[1]), m[2], m.start(2))

    def newest(self, line: str) -> None:
        m = _VERSION.search(line)
        assert m
        list(self.pairs(line))
        self.need(("newest", m[1]))
        self.repeat(("newest", m[1]), m[2], m.start(2))

    def reread(self, line: str) -> None:
        if m := re.search(rf"step (\d+) again: ({STEP})", line):
            self.step(m[1], line, *m.span(2))
