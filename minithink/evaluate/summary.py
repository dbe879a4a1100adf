"""The summary of a run: a row for every policy and budget, with intervals and a paired comparison."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import fsum
from pathlib import Path
from statistics import median

from minithink.errors import NON_FINITE, MinithinkError, UsageError, escaped, is_disk_full, reason
from minithink.evaluate import counts
from minithink.evaluate.intervals import CONFIDENCE, RESAMPLES, bootstrap, wilson
from minithink.evaluate.journal import FULL, SHARES, Record, check_unique
from minithink.kv.byte_size import ByteSize
from minithink.results.files import dumps, replace, rounded

Budget = int | float | ByteSize | None
Cell = tuple[str, Budget]  # a policy at a budget


@dataclass(frozen=True)
class Row:
    """A policy at a budget, over all problems or those of one group. Shares are from 0 to 1."""

    policy: str
    budget: Budget  # as in a Record
    group: str | None  # None: all problems
    problems: int
    samples: int  # sequences, over all problems
    pass_at_1: float | None  # mean over problems of the share of samples that are right; None: none were graded
    pass_at_1_low: float | None  # its interval
    pass_at_1_high: float | None
    interval: str  # how the interval was found: bootstrap | wilson | none
    reference: str | None  # the policy that this one is compared with; None: there is none
    paired_problems: int  # problems that both policies have
    difference: float | None  # pass@1 minus the reference's, over the paired problems
    difference_low: float | None  # its interval; None: the difference is the same for each problem
    difference_high: float | None
    generated_mean: float  # tokens
    generated_median: float
    cut_off: float  # share of the sequences that did not stop by themselves
    kv_bytes_peak: float  # mean over sequences of a sequence's peak
    kv_bytes_most: int  # the highest peak of any sequence
    kv_bytes_mean: float  # held by a sequence at an average step
    tokens_peak: float  # kept a lane; mean over sequences of a sequence's peak
    tokens_mean: float  # kept a lane at an average step
    evicting_share: float | None  # share of the sequences' steps that evicted a token; None: there were no steps
    tokens_per_second: float | None  # of all sequences of one device together; None: no time was measured
    recall: float | None  # mean over the sequences for which it was measured; None: it was measured for none
    counts: dict[str, int] | None  # sums over all sequences of what the policy counts; None: it counts nothing
    budget_tokens: float | None = None  # what a share or bytes come to, mean over sequences; None: unknown, or tokens
    looped: float | None = None  # share of the sequences that were cut off in a loop
    needed_kept: float | None = None  # these five: means, as recall; results of older versions lack them
    needed_somewhere: float | None = None
    needed_beyond: float | None = None
    needed_unknown: float | None = None
    parsed: float | None = None
    # Sequences whose logits were not finite. They count in no other column, nor in `samples`. None: there are none.
    non_finite: int | None = None

    @property
    def accuracy(self) -> tuple[float, float, float]:
        """pass@1 and its interval: low, high. UsageError: nothing was graded."""
        if self.pass_at_1 is None or self.pass_at_1_low is None or self.pass_at_1_high is None:
            raise UsageError(f"The texts of {escaped(self.policy)} were not graded: choose a grader other than none.")
        return self.pass_at_1, self.pass_at_1_low, self.pass_at_1_high


def summarize(
    records: Iterable[Record], seed: int = 0, policies: Sequence[str] = (), budgets: Sequence[Budget] = ()
) -> list[Row]:
    """One row for every policy and budget; if there are several groups of problems, one more for each group.

    pass@1 is the mean over problems of the mean over their samples, so a problem counts once, however many samples
    it has. Its 95 % interval is the percentile bootstrap over problems, 10,000 resamples (`intervals.bootstrap`).
    If each problem has the same share (all right, all wrong, a single problem), all resamples are alike, and an
    interval without width would claim too much. Then the interval is Wilson's, of this share in as many trials as
    there are problems.

    The reference of a comparison is `full`; if there is none, the first policy. It is taken at the same budget, or
    else without a budget. Each problem that both policies have is compared by the difference of its two shares. The
    interval is the bootstrap over these differences; if all are equal, there is none.

    A sequence whose logits were not finite has no answer. It counts neither as right nor as wrong, and only in
    `non_finite`. A policy that has only such sequences has no row.

    Args:
        records: in any order, which changes nothing.
        seed: of the resamples.
        policies: the order of the rows. Policies that it lacks follow, `full` first, the others by name.
        budgets: the order of a policy's rows. Budgets that it lacks follow, tokens before shares before bytes, each
            from the smallest.

    Raises:
        UsageError: two records are about one sequence.
    """
    ordered = sorted(records, key=lambda r: (r.policy, str(r.budget), r.id, r.sample))
    check_unique(ordered)
    broken = [r for r in ordered if r.finish_reason == NON_FINITE]
    ordered = [r for r in ordered if r.finish_reason != NON_FINITE]
    names = [*policies, FULL, *(r.policy for r in ordered)]
    place = {name: i for i, name in reversed(list(enumerate(names)))}
    rank = {budget: i - len(budgets) for i, budget in enumerate(budgets)}

    def order(cell: Cell) -> tuple[int, int, int, float]:
        return place[cell[0]], rank.get(cell[1], 0), *budget_order(cell[1])

    cells = sorted({(r.policy, r.budget) for r in ordered}, key=order)
    present = [policy for policy, _ in cells]
    reference = FULL if FULL in present else next(iter(present), FULL)
    groups = sorted({r.group for r in ordered}, key=_by_numbers)
    out = []
    for group in [None, *(groups if len(groups) > 1 else [])]:
        members: dict[Cell, list[Record]] = defaultdict(list)
        for r in ordered:
            if group in (None, r.group):
                members[r.policy, r.budget].append(r)
        shares = {cell: shares_of(rows) for cell, rows in members.items()}
        for cell in cells:
            if cell not in members:
                continue
            others = [] if cell[0] == reference else [(reference, cell[1]), (reference, None)]
            other = next((shares[c] for c in others if c in shares), None)
            beside = sum((r.policy, r.budget) == cell and group in (None, r.group) for r in broken)
            row = _row(
                cell,
                group,
                records=members[cell],
                shares=shares[cell],
                reference=reference,
                other=other,
                seed=seed,
                non_finite=beside or None,
            )
            out.append(row)
    return out


def _by_numbers(group: str) -> list[tuple[int, str]]:
    """A key that sorts groups by the numbers in their names: 600–1200 comes before 1200–2000."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", group)]


def budget_order(budget: Budget) -> tuple[int, float]:
    """A key that sorts budgets: none, then tokens, then shares, then bytes."""
    if budget is None:
        return 0, 0
    if isinstance(budget, ByteSize):
        return 3, budget.number
    return (1 if isinstance(budget, int) else 2), budget


def shares_of(records: Sequence[Record]) -> dict[str, float]:
    """Problem → the share of its samples that are right. Samples that were not graded do not count."""
    samples: dict[str, list[bool]] = defaultdict(list)
    for r in records:
        if r.right is not None:
            samples[r.id].append(r.right)
    return {id: sum(right) / len(right) for id, right in samples.items()}


def _row(
    cell: Cell,
    group: str | None,
    records: Sequence[Record],
    shares: dict[str, float],
    reference: str,
    other: dict[str, float] | None,
    seed: int,
    non_finite: int | None,
) -> Row:
    """One row. shares, other: problem → share that is right, of this policy and of the reference."""
    count = len(records)
    share = None
    low = None
    high = None
    interval = "none"
    if shares:
        share = fsum(shares.values()) / len(shares)
        resampled = bootstrap(list(shares.values()), seed)
        low, high = resampled or wilson(share, len(shares))
        interval = "bootstrap" if resampled else "wilson"
    pairs = [shares[id] - other[id] for id in shares if id in other] if other else []
    difference = fsum(pairs) / len(pairs) if pairs else None
    difference_low, difference_high = bootstrap(pairs, seed) or (None, None)
    steps = sum(r.steps for r in records)
    seconds = fsum(r.seconds for r in records)
    # Means over time are means over the steps of all sequences: a sequence counts by its length.
    weights = [r.steps if steps else 1 for r in records]
    return Row(
        policy=cell[0],
        budget=cell[1],
        group=group,
        problems=len({r.id for r in records}),
        samples=count,
        pass_at_1=share,
        pass_at_1_low=low,
        pass_at_1_high=high,
        interval=interval,
        reference=reference if pairs else None,
        paired_problems=len(pairs),
        difference=difference,
        difference_low=difference_low,
        difference_high=difference_high,
        generated_mean=sum(r.generated_tokens for r in records) / count,
        generated_median=float(median(r.generated_tokens for r in records)),
        cut_off=sum(r.finish_reason != "stop" for r in records) / count,
        kv_bytes_peak=sum(r.kv_bytes_peak for r in records) / count,
        kv_bytes_most=max(r.kv_bytes_peak for r in records),
        kv_bytes_mean=fsum(w * r.kv_bytes_mean for w, r in zip(weights, records, strict=True)) / sum(weights),
        tokens_peak=fsum(r.tokens_peak for r in records) / count,
        tokens_mean=fsum(w * r.tokens_mean for w, r in zip(weights, records, strict=True)) / sum(weights),
        evicting_share=sum(r.evicting_steps for r in records) / steps if steps else None,
        tokens_per_second=sum(r.generated_tokens for r in records) / seconds if seconds else None,
        counts=counts.total(r.counts for r in records),
        non_finite=non_finite,
        budget_tokens=_mean(r.budget_tokens for r in records),
        looped=_mean(r.looped for r in records),
        recall=_mean(r.recall for r in records),
        needed_kept=_mean(r.needed_kept for r in records),
        needed_somewhere=_mean(r.needed_somewhere for r in records),
        needed_beyond=_mean(r.needed_beyond for r in records),
        needed_unknown=_mean(r.needed_unknown for r in records),
        parsed=_mean(r.parsed for r in records),
    )


def _mean(shares: Iterable[float | None]) -> float | None:
    """The mean of the shares that were measured; None: no share was measured."""
    known = [share for share in shares if share is not None]
    return fsum(known) / len(known) if known else None


def write(folder: Path, rows: Sequence[Row], seed: int = 0) -> list[Path]:
    """Write summary.json, summary.csv and summary.md → where they are. Each is replaced as a whole.

    Raises:
        MinithinkError: a file cannot be written.
    """
    contents = {"json": as_json(rows, seed), "csv": as_csv(rows), "md": as_markdown(rows, seed)}
    paths = []
    for suffix, text in contents.items():
        paths.append(path := folder / f"summary.{suffix}")
        try:
            replace(path, text)
        except OSError as error:
            mend = "make room there" if is_disk_full(error) else "mend that"
            raise MinithinkError(
                f"The summary cannot be written to {path}: {reason(error)}; no result is lost: {mend}, and run the "
                "command again with --resume."
            ) from None
    return paths


def as_json(rows: Sequence[Row], seed: int = 0) -> str:
    """The rows with their columns' names, and how the intervals were drawn. Unknown values are null."""
    head = {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": seed}
    return dumps(rounded({**head, "rows": [asdict(row) for row in rows]})) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """A header, and a line for each row; unknown values are empty. Units are those of Row: bytes, tokens, shares."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(rounded(asdict(row)) | {"counts": json.dumps(row.counts) if row.counts else None})
    return out.getvalue()


def as_markdown(rows: Sequence[Row], seed: int = 0) -> str:
    """A table of all problems and one of each group, with a paragraph that explains the columns."""
    groups = list(dict.fromkeys(row.group for row in rows))
    parts = []
    for group in groups:
        members = [row for row in rows if row.group == group]
        title = "All problems" if group is None else f"Group {_escaped(group)}"
        parts.append(f"## {title}\n\n{_table(members)}")
    parts.append(
        "pass@1 is the mean over problems of the mean over their samples, with its 95 % interval (bootstrap over "
        f"problems, {RESAMPLES:,} resamples, seed {seed}; marked w: Wilson's, for each problem has the same share). "
        "Differences are percentage points, paired over the problems that both policies have; one without an "
        "interval is the same for each problem. KV bytes and tokens kept a lane (a KV head of a layer) are those of "
        "one sequence: peaks are means over sequences of each one's peak; means are over the steps of all sequences, "
        "so that long ones count more, and may be above the peak. Tokens/s: all sequences of one device together."
    )
    if any(row.budget_tokens is not None for row in rows):
        parts.append(
            "In brackets behind a share or bytes: the tokens of the budget, prompt included, mean over sequences."
        )
    if any(row.pass_at_1 is None for row in rows):
        parts.append("A – in place of pass@1: these sequences were not graded (`--grader none`).")
    if any(row.non_finite for row in rows):
        parts.append(
            "Not finite: sequences whose logits held NaN or ∞. They have no answer, and count in no other column."
        )
    return "\n\n".join(parts) + "\n"


def show(rows: Sequence[Row], folder: Path) -> None:
    """Print the tables. A terminal gets the table of all problems, with few columns, and a path to the rest."""
    if not sys.stdout.isatty():
        print(as_markdown(rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    titles = ("policy", "budget", "right", "95 % interval", "tokens", "KV peak", "kept")
    table = Table(*titles, box=None, title="All problems", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for row in rows:
        if row.group is None:
            right, interval = accuracy_of(row)
            sizes = (f"{row.generated_mean:,.0f}", size(row.kv_bytes_peak), f"{row.tokens_peak:,.0f}")
            table.add_row(Text(escaped(row.policy)), budget_of(row), right, interval, *sizes)
    Console(highlight=False).print(table)
    print(f"All columns, what they mean, and the groups of problems: {escaped(folder / 'summary.md')}")


def accuracy_of(row: Row) -> tuple[str, str]:
    """pass@1 and its interval as a table shows them: "–" and an empty text if nothing was graded."""
    if row.pass_at_1 is None:
        return "–", ""
    share, low, high = row.accuracy
    return f"{share:.1%}", f"{low:.1%} to {high:.1%}"


def _table(rows: Sequence[Row]) -> str:
    """The Markdown table of one group's rows."""
    header = [
        "policy",
        "budget",
        "problems × samples",
        "pass@1",
        "difference",
        "tokens, mean (median)",
        "cut off",
        "KV peak",
        "KV mean",
        "kept, peak (mean)",
        "evicting steps",
        "tokens/s",
    ]
    shares = {name: title for name, title in SHARES.items() if any(getattr(r, name) is not None for r in rows)}
    counted = any(row.counts for row in rows)
    broken = any(row.non_finite for row in rows)
    header += [*shares.values(), *(["counted"] if counted else []), *(["not finite"] if broken else [])]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for row in rows:
        right, interval = accuracy_of(row)
        mark = " w" if row.interval == "wilson" else ""
        difference = "–"
        if row.difference is not None:
            difference = points(row.difference)
            if row.difference_low is not None and row.difference_high is not None:
                difference += f" ({points(row.difference_low)} to {points(row.difference_high)})"
            difference += f" against {code(str(row.reference))}"
        lines.append(
            [
                code(row.policy),
                budget_of(row),
                f"{row.problems:,} × {row.samples / row.problems:.3g}",
                f"{right} ({interval}{mark})" if interval else right,
                difference,
                f"{row.generated_mean:,.0f} ({row.generated_median:,.0f})",
                f"{row.cut_off:.1%}",
                size(row.kv_bytes_peak),
                size(row.kv_bytes_mean),
                f"{row.tokens_peak:,.0f} ({row.tokens_mean:,.0f})",
                "–" if row.evicting_share is None else f"{row.evicting_share:.1%}",
                "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
                *("–" if (share := getattr(row, name)) is None else f"{share:.1%}" for name in shares),
                *([counts.said(row.counts)] if counted else []),
                *([f"{row.non_finite or 0:,}"] if broken else []),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escaped(text: str) -> str:
    """Escape a text, so that a Markdown table shows it as it is, and a terminal obeys none of it."""
    marked = "".join("\\" + c if c in "\\|`*_<>[]#" else c for c in text)
    return escaped(" ".join(marked.split()))


def code(text: str) -> str:
    """Text as code in a Markdown table, where a bar would end the cell."""
    return "`" + escaped(" ".join(text.split())).replace("`", "'").replace("|", "\\|") + "`"


def points(difference: float) -> str:
    """A difference of shares, in percentage points with its sign."""
    return f"{round(100 * difference, 1) + 0.0:+.1f}".replace("-", "−")  # + 0.0: there is no −0.0


def budget_of(row: Row) -> str:
    """A row's budget. The tokens follow that a share or bytes come to: "25 % (412)"."""
    tokens = "" if row.budget_tokens is None else f" ({row.budget_tokens:,.0f})"
    return budget_text(row.budget) + tokens


def budget_text(budget: Budget) -> str:
    """256 → "256", 0.25 → "25 %", bytes as they were given, None → "–"."""
    if budget is None:
        return "–"
    if isinstance(budget, ByteSize):
        return budget
    return f"{budget:,}" if isinstance(budget, int) else f"{100 * budget:g} %"


def size(count: float) -> str:
    """Bytes with a unit: 512 B, 1.5 KiB, 24.0 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
