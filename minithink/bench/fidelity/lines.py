"""The tables of docs/fidelity.md, made from the rows; they show no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import PurePosixPath

from minithink.bench.fidelity import baselines, crystal_kv, dynts, skipkv, thinkv
from minithink.bench.fidelity.item import VERDICTS, Item, Paper
from minithink.bench.methods import Table

PAPERS = {  # name of the table behind "fidelity-" → its rows
    "thinkv": thinkv.PAPER,
    "skipkv": skipkv.PAPER,
    "crystal-kv": crystal_kv.PAPER,
    "dynts": dynts.PAPER,
    "baselines": baselines.PAPER,
}
NOTHING = "–"


def of_counts(papers: Iterable[Paper]) -> list[str]:
    """How many rows of each paper have which verdict, and what the verdicts mean."""
    papers = list(papers)
    counts = [Counter(item.verdict for item in paper.items) for paper in papers]
    rows = []
    for verdict, meaning in VERDICTS.items():
        numbers = [count[verdict] for count in counts]
        shown = [str(number) if number else NOTHING for number in numbers]
        rows.append([f"**{verdict}**", meaning, *shown, f"**{sum(numbers)}**"])
    rows.append(
        ["rows", "", *(str(count.total()) for count in counts), f"**{sum(count.total() for count in counts)}**"]
    )
    return of_cells([["verdict", "what it means", *(paper.name for paper in papers), "all"], *rows])


def of_paper(paper: Paper) -> list[str]:
    """The rows of a paper, those that differ first."""
    heading = [paper.heading, "verdict", "code", "tests", "shown here", "paper, authors' code, here"]
    return of_cells([heading, *(cells_of(item) for item in paper.ordered())])


def of_cells(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown whose first row is the heading. A bar within a cell is escaped."""
    lines = []
    for row in rows:
        cells = [cell.replace("|", r"\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "| --- " * len(rows[0]) + "|")
    return lines


def cells_of(item: Item) -> list[str]:
    """The cells of a row."""
    commands = [f"`evaluate paper {name}`" for name in item.runs]
    shown = [link_to_page(place) for place in item.shown]
    parts = {"Paper": item.paper, "Authors' code": item.authors, "Here": item.here}
    texts = [f"**{name}:** {text}" for name, text in parts.items() if text]
    return [
        item.of,
        item.verdict,
        joined(link_to_code(name) for name in item.code),
        joined(link_to_test(name) for name in item.tests),
        joined([*shown, *commands]),
        " ".join(texts) or NOTHING,
    ]


def joined(parts: Iterable[str]) -> str:
    """Parts with commas between them, or a dash."""
    return ", ".join(parts) or NOTHING


def link_to_code(name: str) -> str:
    """A link from docs/ to the file of a symbol, such as ref.lrfu:hit_set."""
    module, _, symbol = name.partition(":")
    room, _, rest = module.partition(".")
    folder = "kernels" if room == "kernels" else f"minithink/{room}"
    path = f"../{folder}/{rest.replace('.', '/')}.py" if rest else f"../minithink/{room}.py"
    return f"[`{symbol}`]({path})"


def link_to_test(name: str) -> str:
    """A link from docs/ to the file of a test, such as ref/test_lrfu.py:test_by_hand."""
    path, _, test = name.partition(":")
    return f"[`{test}`](../tests/{path})"


def link_to_page(place: str) -> str:
    """A link to a page, named by its anchor, or to a picture."""
    path, _, anchor = place.partition("#")
    name = PurePosixPath(path)
    title = name.stem if name.suffix == ".md" else name.name
    if anchor:
        title += f": {anchor.replace('-', ' ')}"
    return f"[{title}]({place})"


TABLES = {"fidelity": Table((), written=lambda: of_counts(PAPERS.values()))} | {
    f"fidelity-{name}": Table((), written=partial(of_paper, paper)) for name, paper in PAPERS.items()
}
