"""How the families word their lines: every kind of line as one pattern.

A `Reader` matches a line with these rules. The reader's method with the rule's name then records which contents the
line needs and which it carries (`needs.py`).
"""

from __future__ import annotations

import re
from itertools import chain

from minithink.tasks.search import MOODS
from minithink.tasks.writing import MANNERS

N, V = "[a-z]{3}", r"[a-z]{3}@\d+"  # a name; a balance
OPERAND = rf"(?:{N}|\d+)"
EXPRESSION = rf"{OPERAND} [-+*] {OPERAND}"
NUMBERS = r"\d+ [-+*] \d+"
LOCK = rf"{N} \* {OPERAND} \+ {OPERAND} = \d+"
GOAL = rf"{N} with {LOCK}, from \d+ (?:up|down)"
PRODUCT, SUM = r"\d+ \* \d+ = \d+", r"\d+ \+ \d+ = \d+"
DERIVED = rf"{N} = {EXPRESSION} = {NUMBERS} = \d+"
STEP = rf"(?:{N} = {OPERAND}(?: [-+*] {OPERAND})?|move \d+ from {N} to {N})"
BALANCES = rf"{V} = \d+(?: and {V} = \d+)?"
BALANCE = rf"{BALANCES}(?:, {NUMBERS} = \d+)?, so {V} = \d+"
NTH, BACK, HERE = "(?:First|Next|Last),", "(?:Back to|Now back to|That leaves me at)", "(?:Here|And here|Well,)"
_LEADING = [*chain.from_iterable(manner.compute for manner in MANNERS)]
LED = "(?:" + "|".join(map(re.escape, _LEADING)) + "|Then|And)"
DOUBT = r"(?:Wait, was {0} right\?|Alternatively, look at {0} once more\.)"
SLIP = r"Wait, (?:that is wrong|no, I made a slip)\."
_OPENINGS = [*chain.from_iterable(manner.opening for manner in (*MANNERS, *MOODS))]
_LINES = (
    *dict.fromkeys(_OPENINGS),
    "That is all I need.",
    "Now I can answer.",
    "That settles it.",
    "Wait, let me check that again.",
    "Wait, let me go over this again.",
    "Before I answer, let me look over it all again.",
)
SPOKEN = "|".join(map(re.escape, _LINES))


def _rules(valued: str, **lines: str) -> dict[str, re.Pattern[str]]:
    """The rules of a family. valued: the pattern of the names that have a value: N or V."""
    found = rf"{valued} = \d+(?:, {valued} = \d+)*(?: and {valued} = \d+)?"
    lines |= {
        "results": rf"So the results are {found}\.",
        "answer": rf"I find {found}, so the answer is \\boxed\{{[\d, ]*\}}\.",
        "spoken": SPOKEN,
    }
    return {kind: re.compile(pattern) for kind, pattern in lines.items()}


SEARCH = _rules(
    N,
    trial=rf"(?:Try|Now try|Carefully try) \d+: (?:{PRODUCT}, no, )?{PRODUCT}, {SUM}, (?:yes|no)\.",
    plan=rf"(?:{NTH} {N}\.|{BACK} {N}\.|Here) {LOCK}(?:, I have {N} = \d+)*(?:, so I need {N}(?: and {N})? first)?\.",
    want=rf"I want {GOAL}\. (?:Quick now|Step by step|Carefully now)\.",
    turn=rf"Wait, this takes too long\. I want {GOAL}\.",
    none=rf"None fits\. Let me look at it again\. {LOCK}(?:, I have {N} = \d+)*\.",
    still=rf"(?:Still|Wait, what do I want\?) {GOAL}\.",
    found=rf"So {N} = \d+\.",
    recap=rf"I know {N} = \d+(?:, {N} = \d+)*(?: and {N} = \d+)?\.",
    already=rf"{NTH} {N}\. I already have {N} = \d+\.",
    retry=rf"Wait, let me check \d+ again\. {PRODUCT}, {SUM}, (?:not|that is) \d+\.",
    check=rf"Wait, was {N} right\? {LOCK}, {PRODUCT}, {SUM}\. Yes, {N} = \d+\."
    rf"|Wait, let me look over what I have\.(?: {LOCK}, {PRODUCT}, {SUM}, fine\.)+",
    reread=rf"Wait, let me look at that again\. {LOCK}(?:; {LOCK})?\. I have that\.",
)
FACTS = _rules(
    N,
    plan=rf"(?:{NTH} {N}\.|{BACK} {N}\.|{HERE}) {N} = {EXPRESSION}(?:, I have {N} = \d+|, {N} = \d+ is given)*"
    rf"(?:, so I need {N}(?: and {N})?(?: first)?)?\.",
    already=rf"{NTH} {N}\. (?:I already have {N} = \d+|{N} = \d+ is given)\.",
    compute=rf"{LED} {DERIVED}\.",
    check=rf"Again {DERIVED}, (?:that matches|fine)\.|{DOUBT.format(N)} Again {DERIVED}\. Yes, {N} = \d+ stands\.",
    backwards=rf"Alternatively, work backwards: {EXPRESSION} = {NUMBERS} = \d+, and {N} = \d+\. Good, that agrees\.",
    correct=rf"{SLIP} {NUMBERS} = \d+, not \d+\. So {N} = \d+\.",
    reread=rf"Wait, let me look at {N} again: {N} = {EXPRESSION}\. Yes, I have that\.",
)
LEDGER = _rules(
    V,
    plan=rf"(?:{NTH}|{HERE}) step \d+: {STEP}\. I need {V}(?: and {V})? to find {V}(?: and {V})?\.",
    compute=rf"{LED} {BALANCE}\.",
    check=rf"Again {BALANCE}, (?:that matches|fine)\.|{DOUBT.format(V)} Again {BALANCE}\. Yes, {V} = \d+ stands\.",
    backwards=rf"Alternatively, work backwards: {BALANCES}, {NUMBERS} = \d+, and {V} = \d+\. Good, that agrees\.",
    correct=rf"{SLIP} {NUMBERS} = \d+, not \d+\. So {V} = \d+\.",
    newest=rf"Again {N} is {V} = \d+, fine\.",
    reread=rf"Wait, let me look at step \d+ again: {STEP}\. Yes, I have that\.",
)

# Patterns with groups, to search in a line that a rule has accepted.
NAME = re.compile(rf"\b(?!and\b){N}\b")
PAIR = re.compile(rf"({N}(?:@\d+)?) = (\d+)")
