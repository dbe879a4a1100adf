"""The summary of a run that took losses: how much each policy costs above the full cache, with intervals.

A text counts once, however many tokens it has: its loss is the mean over its tokens, and a policy's is the mean over
the texts. A policy is compared with the full cache text by text. The interval of the mean difference is the bootstrap
over texts, not over tokens: the tokens of one text are not independent of each other.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from pathlib import Path
from typing import Any

from minithink.errors import NON_FINITE, escaped, unwritable
from minithink.evaluate.intervals import CONFIDENCE, RESAMPLES, bootstrap
from minithink.evaluate.journal import FULL, Record
from minithink.evaluate.summary import Budget, budget_order, budget_text, size
from minithink.results.files import dumps, replace, rounded

BAND = 128  # positions that are summed up together
RESULTS = "results.json"
COLUMNS = ("policy", "budget", "loss", "above full", "behind the budget", "kept", "KV mean", "tokens/s")

Where = Callable[[Record, int], int | None]  # a record and a position → a number that orders it; None: leave it out


@dataclass(frozen=True)
class Above:
    """How far a policy's loss is above the full cache's, in nats: mean over texts, and its interval."""

    texts: int  # that both have
    loss: float  # the policy's, mean over these texts
    mean: float
    low: float | None  # None: all differences are the same, or there is one text
    high: float | None


@dataclass(frozen=True)
class Band:
    """Some consecutive positions, or distances."""

    first: int
    last: int
    above: Above


@dataclass(frozen=True)
class LossRow:
    """A policy at a budget, over all texts."""

    policy: str
    budget: Budget  # as in a Record
    budget_tokens: float | None  # what a share comes to, mean over texts; None: no share
    texts: int
    tokens: int  # whose loss was taken
    loss: float  # nats, mean over texts of the mean over their tokens
    above: Above | None  # None: the full cache itself, or the two have no text in common
    behind: Above | None  # the same of tokens at positions behind the budget; None: there are none
    by_position: list[Band]  # the same by position in the text, the prompt included
    by_distance: list[Band]  # the same by distance behind the budget; empty: the policy has none
    tokens_mean: float  # kept a lane at an average step
    tokens_peak: float  # mean over texts of the peak
    kv_bytes_mean: float  # held by a text at an average step
    kv_bytes_peak: float  # mean over texts of the peak
    tokens_per_second: float | None  # of all texts together; None: no time was measured
    non_finite: int  # texts whose logits were not finite: they count in no other column


def summarize(records: Iterable[Record], seed: int = 0, policies: Sequence[str] = ()) -> list[LossRow]:
    """One row for every policy and budget.

    Args:
        records: with losses, in any order.
        seed: of the bootstrap.
        policies: the order of the rows. Those that it lacks follow, by name.
    """
    cells = defaultdict[tuple[str, Budget], list[Record]](list)
    for record in records:
        cells[record.policy, record.budget].append(record)
    place = {policy: number for number, policy in enumerate(policies)}

    def order(cell: tuple[str, Budget]) -> tuple[int, str, tuple[int, float]]:
        return place.get(cell[0], len(place)), cell[0], budget_order(cell[1])

    full = {r.id: r for r in cells.get((FULL, None), []) if r.finish_reason != NON_FINITE}
    rows = []
    for cell in sorted(cells, key=order):
        finite = [r for r in cells[cell] if r.finish_reason != NON_FINITE]
        if finite:
            finite.sort(key=lambda r: r.id)
            broken = len(cells[cell]) - len(finite)
            rows.append(_row(cell, finite, {} if cell[0] == FULL else full, seed, broken))
    return rows


def _row(
    cell: tuple[str, Budget], records: Sequence[Record], full: Mapping[str, Record], seed: int, broken: int
) -> LossRow:
    count = len(records)
    steps = sum(r.steps for r in records)
    weights = [r.steps if steps else 1 for r in records]  # a step of a long text counts as much as one of a short one
    seconds = fsum(r.seconds for r in records)
    shares = [r.budget_tokens for r in records if r.budget_tokens is not None]
    kept = fsum(w * r.tokens_mean for w, r in zip(weights, records, strict=True))
    held = fsum(w * r.kv_bytes_mean for w, r in zip(weights, records, strict=True))
    return LossRow(
        policy=cell[0],
        budget=cell[1],
        budget_tokens=fsum(shares) / len(shares) if shares else None,
        texts=count,
        tokens=sum(len(losses_of(r)) for r in records),
        loss=fsum(map(mean_of, records)) / count,
        above=above(records, full, seed, lambda record, position: 0),
        behind=above(records, full, seed, distance),
        by_position=bands(records, full, seed, lambda record, position: position),
        by_distance=bands(records, full, seed, distance),
        tokens_mean=kept / sum(weights),
        tokens_peak=fsum(r.tokens_peak for r in records) / count,
        kv_bytes_mean=held / sum(weights),
        kv_bytes_peak=sum(r.kv_bytes_peak for r in records) / count,
        tokens_per_second=steps / seconds if seconds else None,
        non_finite=broken,
    )


def losses_of(record: Record) -> list[float]:
    """The losses of a record, one for each token after the prompt."""
    return record.losses or []


def mean_of(record: Record) -> float:
    """The loss of a text: the mean over its tokens."""
    return _mean(losses_of(record))


def first_of(record: Record) -> int:
    """The position of the first token whose loss is there: behind the prompt, or the thinking (`--answers`)."""
    return record.prompt_tokens + record.generated_tokens - len(losses_of(record))


def distance(record: Record, position: int) -> int | None:
    """How far a token is behind the budget: 0 for the first one that is foretold when a token had to go. None: it is
    not behind it, or there is no budget."""
    budget = record.budget if record.budget_tokens is None else record.budget_tokens
    if not isinstance(budget, (int, float)) or position <= budget:
        return None
    return position - int(budget) - 1


def above(records: Sequence[Record], full: Mapping[str, Record], seed: int, where: Where) -> Above | None:
    """How far a policy is above the full cache at some positions; None: no text has such positions.

    Args:
        records: of the policy.
        full: the records of the full cache, by text.
        seed: of the bootstrap.
        where: None for positions that do not count.
    """
    own = []
    differences = []
    for record in records:
        other = full.get(record.id)
        if other is None:
            continue
        mine = []
        theirs = []
        pairs = zip(losses_of(record), losses_of(other), strict=True)
        for position, (loss, reference) in enumerate(pairs, first_of(record)):
            if where(record, position) is not None:
                mine.append(loss)
                theirs.append(reference)
        if mine:
            own.append(_mean(mine))
            differences.append(_mean(mine) - _mean(theirs))
    if not own:
        return None
    interval = bootstrap(differences, seed)
    return Above(
        texts=len(own),
        loss=_mean(own),
        mean=_mean(differences),
        low=None if interval is None else interval[0],
        high=None if interval is None else interval[1],
    )


def bands(records: Sequence[Record], full: Mapping[str, Record], seed: int, where: Where) -> list[Band]:
    """The same for BAND numbers at a time. where: the number of a position."""
    found = set[int]()
    for record in records:
        first = first_of(record)
        for position in range(first, first + len(losses_of(record))):
            number = where(record, position)
            if number is not None:
                found.add(number // BAND)
    out = []
    for band in sorted(found):

        def inside(record: Record, position: int, band: int = band) -> int | None:
            number = where(record, position)
            return number if number is not None and number // BAND == band else None

        one = above(records, full, seed, inside)
        if one is not None:
            out.append(Band(BAND * band, BAND * band + BAND - 1, one))
    return out


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


# -- what is written and shown


def write(
    folder: Path, rows: Sequence[LossRow], settings: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]
) -> Path:
    """Write results.json → where it is. It has the form of the results in docs/results.

    Args:
        folder: where it goes.
        rows: the summary.
        settings: of the run.
        starts: how the run was started and resumed. What the first start says of itself stands in the result; of
            later ones that read texts, "resumed" says it.

    Raises:
        MinithinkError: the file cannot be written.
    """
    first, *later = starts
    resumed = []
    for start in later:
        if start["sequences_before"] < start["sequences_total"]:
            resumed.append({name: start[name] for name in ("commit", "date", "machine", "versions")})
    result = {
        "benchmark": "loss",
        "complete": True,
        **{name: first[name] for name in ("command", "date", "commit", "machine", "versions")},
        **({"resumed": resumed} if resumed else {}),
        "checkpoint": settings["checkpoint"],
        "settings": settings,
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "band": BAND,
        "measurements": rounded([asdict(row) for row in rows]),
    }
    path = folder / RESULTS
    try:
        replace(path, dumps(result) + "\n")
    except OSError as error:
        raise unwritable("The summary", path, error, "folder") from None
    return path


def show(rows: Sequence[LossRow]) -> None:
    """Print the table: on a terminal in columns, elsewhere as Markdown."""
    lines = [_cells(row) for row in rows]
    if not sys.stdout.isatty():
        for cells in (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *lines):
            print(f"| {' | '.join(cells)} |")
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*COLUMNS, box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for cells in lines:
            table.add_row(*map(Text, cells))
        Console(highlight=False).print(table)
    print(
        "\nLosses are in nats a token, means over texts. In brackets is the 95 % interval of the difference, by "
        "bootstrap over texts. Behind the budget: tokens that were foretold when some token had to go. All numbers: "
        f"{RESULTS}."
    )


def _cells(row: LossRow) -> tuple[str, ...]:
    tokens = "" if row.budget_tokens is None else f" ({row.budget_tokens:,.0f})"
    speed = "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    return (
        escaped(row.policy),
        budget_text(row.budget) + tokens,
        f"{row.loss:.4f}",
        difference_text(row.above),
        difference_text(row.behind),
        f"{row.tokens_mean:,.0f}",
        size(row.kv_bytes_mean),
        speed,
    )


def difference_text(one: Above | None) -> str:
    """As in "+0.0991 (+0.0650 to +0.1450)"; "–": there is none."""
    if one is None:
        return "–"
    interval = "" if one.low is None or one.high is None else f" ({_signed(one.low)} to {_signed(one.high)})"
    return _signed(one.mean) + interval


def _signed(nats: float) -> str:
    return f"{round(nats, 4) + 0.0:+.4f}".replace("-", "−")  # + 0.0: there is no −0.0
