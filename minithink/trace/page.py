"""The page of one trace, or of several side by side: one HTML file that needs no network.

`page.html` is the frame; `page.css`, `page.js` and the data of each trace are put into it. The data are base64 of a
deflated block: a JSON object behind its length, then the bytes of the arrays that it lists, as in the trace file. A
content security policy allows this one script and style sheet and nothing else. The text of a trace reaches the page
only as text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from minithink.errors import CONTROL, UsageError
from minithink.quant import Format, parse_pair
from minithink.tasks import question_in
from minithink.tasks.needs import read
from minithink.trace.format import KINDS, WAITS, Array, File, Trace, pack

RANKS = 2**20  # ranks of scores that a page holds for a trace: a longer trace has fewer snapshots
SNAPSHOTS = 256  # at most: steps with scores
LONGEST = 200  # characters of an answer that are shown
FLOAT_MASK = 0xFFFFF000  # the 11 bits of a score that are shown; what is 0 deflates


@dataclass(frozen=True)
class Outcome:
    """What became of a text."""

    right: bool | None  # None: it is not graded
    found: str | None  # its answer; None: it has none
    answer: str  # the right answer; "": nobody knows it
    ended: str  # how it was cut off, as the end of a sentence; "": it ended by itself

    @property
    def word(self) -> str:
        """In one word: right, wrong, or that it is not graded."""
        if self.right is None:
            return "not graded"
        return "right" if self.right else "wrong"

    def shown(self) -> dict[str, Any]:
        """What the page is told; answers of a model may be long, and are cut off."""
        found = None if self.found is None else _short(self.found)
        return {"word": self.word, "found": found, "answer": _short(self.answer), "ended": self.ended}


@dataclass(frozen=True)
class Column:
    """A trace on a page, and what is known of its text beside the trace."""

    file: File
    sequence: int
    name: str = ""  # what stands above it; "": the policies and the sequence
    outcome: Outcome | None = None  # None: not known

    @property
    def trace(self) -> Trace:
        """The trace that is shown."""
        return self.file.traces[self.sequence]

    @property
    def title(self) -> str:
        """What stands above it, without characters that turn the direction of writing."""
        name = self.name or f"{' + '.join(self.trace.head.policies)}, sequence {self.sequence}"
        return CONTROL.sub("\ufffd", name)


def render(file: File, sequence: int, others: Sequence[tuple[File, int]] = ()) -> str:
    """The HTML of a page.

    Args:
        file, sequence: the trace that is shown, or the first one.
        others: further traces, beside it in this order.
    """
    return side_by_side([Column(file, sequence), *(Column(*other) for other in others)])


def side_by_side(columns: Sequence[Column]) -> str:
    """The HTML of a page with these columns, at least one. The texts of the others are compared with the first."""
    names = [html.escape(column.title) for column in columns]
    parts = {name: (files("minithink.trace") / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    blocks = []
    for column in columns:
        about, arrays = data(column.trace, column.file.done)
        about["name"] = column.title
        about["outcome"] = column.outcome.shown() if column.outcome else None
        about["holds"] = holds(column.trace)
        about["departs"] = departure(columns[0], column)
        blocks.append(base64.b64encode(pack(about, arrays)).decode())
    return _fill(
        parts["html"],
        {
            "title": f"minithink trace: {' | '.join(names)}",
            "heading": f"minithink trace: {' | '.join(f'<bdi>{name}</bdi>' for name in names)}",
            "policy": f"default-src 'none'; script-src '{_hash(parts['js'])}'; style-src '{_hash(parts['css'])}'; "
            "img-src data:",
            "css": parts["css"],
            "js": parts["js"],
            "data": "\n".join(f'<script type="application/octet-stream" class="data">{b}</script>' for b in blocks),
        },
    )


def departure(first: Column, other: Column) -> int | None:
    """The step at which a text first departs from another text: the number of the first generated token that differs.

    The shorter of two whole texts departs where the other one goes on. A trace lacks the last token that was drawn,
    because the model never read it. So this is the step after the last one of the shorter trace. If one of the traces
    was interrupted, nobody knows how its text went on.

    Args:
        first: the text that the other one is compared with.
        other: a text with the same prompt.

    Returns:
        A step from 1 on; 0: the texts are the same, as far as both are there; None: the prompts differ.
    """
    one = first.trace
    two = other.trace
    if not np.array_equal(one.ids[: one.prompt], two.ids[: two.prompt]):
        return None
    steps = max(0, min(one.steps, two.steps))
    differs = np.flatnonzero(one.ids[one.prompt :][:steps] != two.ids[two.prompt :][:steps])
    if len(differs):
        return int(differs[0]) + 1
    whole = first.file.done is not None and other.file.done is not None
    return steps + 1 if whole and one.steps != two.steps else 0


def holds(trace: Trace) -> str:
    """What a trace holds at its end, in words: its bytes, and their share of a full cache's. "": it has no step."""
    if trace.steps < 0:
        return ""
    held = int(trace.ledger[-1].sum())
    share = held / (trace.tokens * trace.head.full_bytes)
    size = f"{held / 2**20:,.2f} MiB" if held > 0.1 * 2**20 else f"{held / 2**10:.1f} KiB"
    return f"holds {size} at the end, {100 * share:.1f} % of a full cache's"


def data(trace: Trace, done: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Array]]:
    """What the page knows of a trace: a JSON object, and arrays by their names. done: the end of the file, if the
    run was not interrupted."""
    head = trace.head
    thoughts = list(head.thought_names[: len(head.thoughts)])
    for i, f in enumerate(head.thoughts[len(thoughts) :], len(thoughts)):
        thoughts.append(f"type {i} ({head.formats[f]})")
    kinds = [i for i, kind in enumerate(KINDS) if trace.ledger[:, i].any()]
    snapshots = _thinned(len(trace.score_step), min(SNAPSHOTS, max(8, RANKS // max(1, trace.tokens))))
    about = {
        "sequence": trace.sequence,
        "prompt": trace.prompt,
        "steps": max(0, trace.steps),
        "thinkEnd": trace.think_end,
        "layers": head.layers,
        "heads": head.kv_heads,
        "tables": head.tables,
        "policies": head.policies,
        "thoughts": thoughts if len(thoughts) > 1 else [],
        "formats": [stored(name) for name in head.formats],
        "waits": WAITS,
        "kinds": [KINDS[i] for i in kinds],
        "fullBytes": head.full_bytes,
        "about": {str(key): str(value) for key, value in head.about.items()},
        "done": done,
        "texts": trace.texts,
    }
    about["needs"], needs = _needs(trace)
    order = np.argsort(trace.evict_pos, kind="stable")  # of one token together, in the order of their steps
    moves = np.argsort(trace.move_pos, kind="stable")  # likewise
    arrays = {
        "ids": trace.ids,
        "stage": np.concatenate([np.zeros(min(trace.prompt, trace.tokens)), 2 - trace.thinks[1:]]).astype("u1"),
        "thought": np.concatenate(
            [np.full(min(trace.prompt, trace.tokens), head.prompt_thought), trace.thought[1:]]
        ).astype("u1"),
        "sentence": trace.sentences.astype("<u4"),
        "start": np.searchsorted(trace.evict_pos[order], np.arange(trace.tokens + 1)).astype("<u4"),
        "step": trace.evict_step[order].astype("<u4"),
        "unit": trace.evict_unit[order].astype("<u2"),
        "by": trace.evict_by[order].astype("u1"),
        "score": (trace.evict_score[order].view("<u4") & FLOAT_MASK).view("<f4"),
        "entered": trace.entered,
        "moveStart": np.searchsorted(trace.move_pos[moves], np.arange(trace.tokens + 1)).astype("<u4"),
        "moveStep": trace.move_step[moves].astype("<u4"),
        "moveUnit": trace.move_unit[moves].astype("<u2"),
        "moveTo": trace.move_to[moves].astype("u1"),
        "bytes": np.diff(trace.ledger[:, kinds], axis=0, prepend=0).astype("<f8").T.ravel(),  # differences, by kind
        "budgetStep": trace.budget_step.astype("<u4"),
        "budget": trace.budget.astype("<i4"),
        "snapshotStep": trace.score_step[snapshots].astype("<u4"),
        "rank": _ranks(trace, snapshots),
        **needs,
    }
    return about, arrays


def stored(name: str) -> str:
    """How a format stores a token, in words. name: of a trace, whose format may be unknown here; it is given back."""
    if name == "plain":
        return "full precision"
    try:
        keys, values = parse_pair(name)
    except UsageError:
        return name
    if keys == values:
        return _bits(keys)
    return f"keys {_bits(keys)}, values {_bits(values)}"


def _bits(format: Format) -> str:
    """The bits of a number, without and with its share of a group's scales."""
    words = f"{format.name}, {format.bits} bits"
    if not format.group:
        return words
    return f"{words} ({format.bits + 8 * format.param_bytes / format.group:g} with scales)"


def _needs(trace: Trace) -> tuple[list[str], dict[str, Array]]:
    """Which tokens the statements of a text need (`tasks/needs.py`): needs in the order of their tokens, those of one
    token in the order of their statements. There are none if the prompt holds no question of the embedded families.

    Returns:
        Sentences that name a kind of statement and what it needs, and three arrays. needStart: where the needs of
        each token begin, uint32 [n + 1]. needAt: the first token of each need's statement, needWhat: the index of its
        sentence, uint32 [needs].
    """
    rows = list[tuple[int, int, str]]()
    if question := question_in("".join(trace.texts[: trace.prompt])):
        reading = read(question, trace.texts, trace.prompt)
        for need in reading.needs:
            statement = reading.statements[need.statement]
            rows += ((place, statement.start, f"{statement.kind}: {' '.join(need.key)}") for place in need.places)
    rows.sort()
    said = {what: i for i, what in enumerate(dict.fromkeys(what for *_, what in rows))}
    return list(said), {
        "needStart": np.searchsorted([place for place, *_ in rows], np.arange(trace.tokens + 1)).astype("<u4"),
        "needAt": np.array([at for _, at, _ in rows], dtype="<u4"),
        "needWhat": np.array([said[what] for *_, what in rows], dtype="<u4"),
    }


def _thinned(count: int, most: int) -> Array:
    """Indices of at most `most` of `count` things, evenly spaced; the last one is among them."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _ranks(trace: Trace, snapshots: Array) -> Array:
    """The rank of each token's score, 1 to 255; 0: it has none. uint8 [snapshots · n]."""
    out = np.zeros((len(snapshots), trace.tokens), dtype=np.uint8)
    ends = trace.score_count.cumsum()
    for row, i in zip(out, snapshots, strict=True):
        part = slice(int(ends[i] - trace.score_count[i]), int(ends[i]))
        row[trace.score_pos[part]] = np.maximum(1, trace.rank[part])
    return out.ravel()


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _fill(template: str, values: dict[str, str]) -> str:
    """Put the values into the template's {{name}}. Braces in a value stay as they are."""
    pieces = template.split("{{")
    out = pieces[0]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += values[name] + rest
    return out
