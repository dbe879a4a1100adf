"""Texts of traces as one picture (SVG), one above the other: the darker a token, the more heads keep it when thinking
ends."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from math import ceil

from minithink.errors import CONTROL, counted
from minithink.trace.format import Trace

COLUMNS = 110  # characters of a line
SIZE, WIDE, HIGH = 10, 6, 14  # pixels: of the font, of a character, of a line
LEVELS = 8  # shades
NO_XML = re.compile(f"{CONTROL.pattern}|[\ufffe\uffff]")  # characters that no XML may hold
Part = tuple[str, int]  # text of a line, and its shade: 0 no head keeps it, LEVELS all


def render(traces: Sequence[Trace]) -> str:
    """The picture, as SVG."""
    out = list[str]()
    y = HIGH
    for trace in traces:
        out.append(f'<text x="{WIDE}" y="{y}" font-weight="bold">{escape(title(trace))}</text>')
        y += HIGH
        for line in lines(parts(trace)):
            x = WIDE
            spans = list[str]()
            for text, shade in line:
                if shade:
                    out.append(
                        f'<rect x="{x}" y="{y - SIZE}" width="{WIDE * len(text)}" height="{HIGH}" '
                        f'fill-opacity="{0.08 + 0.6 * shade / LEVELS:.2f}"/>'
                    )
                spans.append(escape(text) if shade else f'<tspan fill="#888">{escape(text)}</tspan>')
                x += WIDE * len(text)
            out.append(f'<text x="{WIDE}" y="{y}" textLength="{x - WIDE}">{"".join(spans)}</text>')
            y += HIGH
        y += HIGH
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE * (COLUMNS + 2)}" height="{y}" font-size="{SIZE}" '
        'font-family="DejaVu Sans Mono, monospace" fill="#111" style="background: #fff">'
        "<style>text { white-space: pre } rect { fill: #56B4E9 }</style>"
    )
    return "\n".join([head, *out, "</svg>\n"])


def title(trace: Trace) -> str:
    """What stands above a text."""
    step = end_of(trace)
    head = trace.head
    none = int((trace.holders(step)[: trace.prompt + step] == 0).sum())
    held = counted(round(trace.held(step).mean()), "token")
    about = f"after {counted(step, 'thinking token')}, a head holds {held} on average"
    policies = NO_XML.sub("\ufffd", " + ".join(head.policies))
    return f"{policies}: {about}; {counted(none, 'token')} {'is' if none == 1 else 'are'} held by no head (grey)"


def end_of(trace: Trace) -> int:
    """The step with which thinking ends, or the last one."""
    return trace.think_end if trace.think_end >= 0 else max(0, trace.steps)


def parts(trace: Trace) -> Iterator[Part]:
    """The tokens until then. Line breaks are shown as ↵."""
    step = end_of(trace)
    count = trace.prompt + step
    shares = (trace.holders(step)[:count] / trace.head.units).tolist()
    for text, share in zip(trace.texts[:count], shares, strict=True):
        yield NO_XML.sub("\ufffd", text.replace("\n", "↵")), ceil(share * LEVELS)


def lines(found: Iterator[Part]) -> Iterator[list[Part]]:
    """Lines of COLUMNS characters; neighbours of one shade are one part."""
    line = list[Part]()
    room = COLUMNS
    for text, shade in found:
        while text:
            piece = text[:room]
            text = text[room:]
            if line and line[-1][1] == shade:
                line[-1] = (line[-1][0] + piece, shade)
            else:
                line.append((piece, shade))
            room -= len(piece)
            if not room:
                yield line
                line = []
                room = COLUMNS
    if line:
        yield line
