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
from importlib.resources import files
from typing import Any

import numpy as np

from minithink.tasks import question_in
from minithink.tasks.needs import read
from minithink.trace.format import KINDS, Array, File, Trace, pack

RANKS = 2**20  # ranks of scores that a page holds for a trace: a longer trace has fewer snapshots
SNAPSHOTS = 256  # at most: steps with scores
FLOAT_MASK = 0xFFFFF000  # the 11 bits of a score that are shown; what is 0 deflates


def render(file: File, sequence: int, others: Sequence[tuple[File, int]] = ()) -> str:
    """The HTML of a page.

    Args:
        file, sequence: the trace that is shown, or the first one.
        others: further traces, beside it in this order.
    """
    shown = [(f, f.traces[number]) for f, number in ((file, sequence), *others)]
    names = [f"{' + '.join(trace.head.policies)}, sequence {trace.sequence}" for _, trace in shown]
    title = f"minithink trace: {' | '.join(names)}"
    parts = {name: (files("minithink.trace") / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    blocks = [base64.b64encode(pack(*data(trace, f.done))).decode() for f, trace in shown]
    return _fill(
        parts["html"],
        {
            "title": html.escape(title),
            "policy": f"default-src 'none'; script-src '{_hash(parts['js'])}'; style-src '{_hash(parts['css'])}'; "
            "img-src data:",
            "css": parts["css"],
            "js": parts["js"],
            "data": "\n".join(f'<script type="application/octet-stream" class="data">{b}</script>' for b in blocks),
        },
    )


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
        "kinds": [KINDS[i] for i in kinds],
        "fullBytes": head.full_bytes,
        "about": {str(key): str(value) for key, value in head.about.items()},
        "done": done,
        "texts": trace.texts,
    }
    about["needs"], needs = _needs(trace)
    order = np.argsort(trace.evict_pos, kind="stable")  # of one token together, in the order of their steps
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
        "bytes": np.diff(trace.ledger[:, kinds], axis=0, prepend=0).astype("<f8").T.ravel(),  # differences, by kind
        "budgetStep": trace.budget_step.astype("<u4"),
        "budget": trace.budget.astype("<i4"),
        "snapshotStep": trace.score_step[snapshots].astype("<u4"),
        "rank": _ranks(trace, snapshots),
        **needs,
    }
    return about, arrays


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
