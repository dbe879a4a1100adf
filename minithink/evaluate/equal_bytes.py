"""Print the summary of runs again, or with --at-bytes compare their policies at equal bytes; with --leaderboard say
where they stand among the committed ones.

A policy that was run at two budgets is taken on a straight line between them, problem by problem: where it held
1.0 MiB and 1.4 MiB a sequence, the middle of its right answers at the two budgets stands for 1.2 MiB. Bytes are
those that the ledger counted: the mean over sequences of each one's peak, with scales, tables, buffers and state.
Nothing is taken beyond the least and the most that a policy held.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import fsum

from minithink.cli.commands import location
from minithink.errors import NON_FINITE, UsageError, alternatives, escaped, quoted
from minithink.evaluate.intervals import RESAMPLES, bootstrap, wilson
from minithink.evaluate.journal import FULL, INSTRUMENT, Record, Run, join, read
from minithink.evaluate.plots import unfinished
from minithink.evaluate.summary import (
    Budget,
    as_markdown,
    budget_text,
    code,
    points,
    shares_of,
    size,
    summarize,
)
from minithink.kv.byte_size import ByteSize

HELP = (
    "The intervals are of the draw of problems. They do not say how far from the straight line a policy would have "
    "been: run it at a budget nearby to know. Texts are not generated again."
)


@dataclass(frozen=True)
class Held:
    """What a policy did at one budget."""

    budget: Budget
    size: float  # bytes: the mean over sequences of each one's peak
    tokens: float  # generated, mean
    right: Mapping[str, float]  # problem → the share of its samples that are right


@dataclass(frozen=True)
class Point:
    """A policy at given bytes, between two of its budgets; or at one of them, which is both then."""

    low: Held
    high: Held
    weight: float  # of `high`, 0 to 1
    right: dict[str, float]  # as of Held, on the line

    @property
    def tokens(self) -> float:
        """Generated, mean, on the line."""
        return self.low.tokens + self.weight * (self.high.tokens - self.low.tokens)

    def __str__(self) -> str:
        """The budgets, and the bytes at them."""
        if self.low is self.high:
            return f"{budget_text(self.low.budget)} ({size(self.low.size)})"
        low, high = (f"{budget_text(one.budget)} ({size(one.size)})" for one in (self.low, self.high))
        return f"{low} to {high}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate summary`."""
    add = parser.add_argument
    add("folders", type=location, nargs="+", metavar="DIR", help="what runs wrote; several go into one summary")
    add(
        "--at-bytes",
        type=sizes,
        nargs="?",
        const=(),
        metavar="SIZE,SIZE,…",
        help="behind DIR: compare policies where they hold so many bytes a sequence, as in 1MiB,2MiB (default: "
        "wherever one was measured and another one has budgets on both sides)",
    )
    add(
        "--against",
        metavar="POLICY",
        help="with --at-bytes: the policy that the others are compared with (default: the run's first but full)",
    )
    add(
        "--leaderboard",
        type=location,
        nargs="?",
        const=False,  # the checkout's
        metavar="RESULTS",
        help="behind DIR: put the policies beside those whose results are committed in RESULTS/pool.jsonl.gz, by "
        "right answers and bytes; several folders are of a dataset each, as in facts, ledger, search, and means over "
        "them are taken (default: docs/results of the checkout)",
    )


def sizes(text: str) -> tuple[float, ...]:
    """For argparse: "1MiB,512KiB" → bytes."""
    try:
        return tuple(float(ByteSize(part.strip()).number) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; DIR comes before this option") from None


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Print the tables."""
    if args.against is not None and args.at_bytes is None:
        raise UsageError("--against names a policy to compare with at equal bytes: give --at-bytes, too, or drop it.")
    if args.leaderboard is not None and args.at_bytes is not None:
        raise UsageError("--leaderboard and --at-bytes are two comparisons: give one of them.")
    board = None
    if args.leaderboard is not None:
        # Both import torch, which the other tables do not need.
        from minithink.evaluate.leaderboard import Leaderboard
        from minithink.results.record import default_path

        board = Leaderboard(args.leaderboard or default_path("x").parent)
    runs = [read(folder) for folder in args.folders]
    for one in runs:
        if INSTRUMENT in one.settings:
            raise UsageError(
                f"{one.folder} holds losses of texts, and this sums up answers: give the command of `evaluate loss` "
                "with --resume to see its table again."
            )
    for note in [*chain.from_iterable(one.notes for one in runs), *filter(None, map(unfinished, runs))]:
        print(f"minithink.evaluate: {escaped(note)}", file=sys.stderr)
    if board is not None:
        print(board.together(runs), end="")
        return 0
    records = join(runs)
    if all(record.finish_reason == NON_FINITE for record in records):
        folders = ", ".join(map(str, args.folders))
        raise UsageError(f"No sequence is finished in {folders}: wait for the first, or continue with --resume.")
    policies = _policies(runs, records)
    if args.at_bytes is None:
        budgets = list(chain.from_iterable(one.settings.get("budgets") or [] for one in runs))
        print(as_markdown(summarize(records, policies=policies, budgets=budgets)), end="")
        return 0
    print(compared(records, policies, args.at_bytes, args.against), end="")
    return 0


def _policies(runs: Sequence[Run], records: Sequence[Record]) -> list[str]:
    """All policies, in the order of the runs' command lines."""
    listed = chain.from_iterable(one.settings.get("policies") or [] for one in runs)
    return list(dict.fromkeys([*listed, *sorted(record.policy for record in records)]))


def compared(
    records: Sequence[Record], policies: Sequence[str], at: Sequence[float] = (), against: str | None = None
) -> str:
    """The comparison at equal bytes, in Markdown.

    Args:
        records: of whole runs.
        policies: their order.
        at: bytes; empty: all that a policy held and another one reaches.
        against: the policy with which the others are compared; None: the first but `full`.

    Raises:
        UsageError: nothing was graded, there is no such policy, or no policy reaches the bytes.
    """
    records = of_whole_problems(records)
    held = {name: cells for name in policies if (cells := cells_of(records, name))}
    if not held:
        raise UsageError("No text was graded, and policies are compared by right answers: choose another --grader.")
    full = held.pop(FULL, None)
    if not held:
        raise UsageError(f"Only {FULL} was run, and nothing can be compared with it: run other policies.")
    beside = next(iter(held)) if against is None else against
    if beside not in held:
        raise UsageError(f"There is no policy {quoted(beside)} in the runs; {alternatives(beside, held)}.")
    wanted = sorted(set(at)) or common(held)
    if not wanted:
        raise UsageError(
            "No policy was measured where another one has a budget on both sides, so nothing can be compared at "
            f"equal bytes: run more budgets. Held were: {reaches(held)}."
        )
    parts = [table for number in wanted if (table := _table(held, number, beside))]
    if not parts:
        said = ", ".join(map(size, wanted))
        raise UsageError(f"No policy reaches {said}: held were {reaches(held)}.")
    if full:
        share = _mean(full[0].right)
        parts.append(f"{code(FULL)} holds {size(full[0].size)} and has {share:.1%}.")
    parts.append(
        "Bytes are those of one sequence by the ledger, at its peak, mean over sequences. Between two budgets a "
        "policy is taken on a straight line, problem by problem; nothing is taken beyond the budgets that were run. "
        "pass@1 and differences in percentage points have 95 % intervals (bootstrap over problems, "
        f"{RESAMPLES:,} resamples; "
        "Wilson's where each problem has the same share), which do not contain the error of the straight line. A "
        "difference without an interval is the same for each problem."
    )
    return "\n\n".join(parts) + "\n"


def of_whole_problems(records: Sequence[Record]) -> list[Record]:
    """The records of the problems that every policy has finished at every budget. UsageError: there are none."""
    by_cell = dict[tuple[str, Budget], set[str]]()
    for record in records:
        by_cell.setdefault((record.policy, record.budget), set()).add(record.id)
    shared = set.intersection(*by_cell.values())
    if not shared:
        raise UsageError("No problem is finished at every policy and budget: continue the run with --resume.")
    return [record for record in records if record.id in shared]


def cells_of(records: Sequence[Record], policy: str) -> list[Held]:
    """A policy at each of its budgets, those with the fewest bytes first. Budgets without a graded text are left
    out."""
    by_budget = dict[Budget, list[Record]]()
    for record in sorted(records, key=lambda r: (r.id, r.sample)):
        if record.policy == policy and record.finish_reason != NON_FINITE:
            by_budget.setdefault(record.budget, []).append(record)
    found = []
    for budget, own in by_budget.items():
        right = shares_of(own)
        if right:
            held = Held(
                budget=budget,
                size=fsum(r.kv_bytes_peak for r in own) / len(own),
                tokens=fsum(r.generated_tokens for r in own) / len(own),
                right=right,
            )
            found.append(held)
    return sorted(found, key=lambda held: held.size)


def between(ascending: Sequence[float], number: float) -> tuple[int, int, float] | None:
    """The places of the two neighbours of a number, and the weight of the upper one, 0 to 1. An equal number is its
    own neighbour. None: the number is below or above all."""
    for place, one in enumerate(ascending):
        if one == number:
            return place, place, 0.0
    for place, (low, high) in enumerate(pairwise(ascending)):
        if low < number < high:
            return place, place + 1, (number - low) / (high - low)
    return None


def at_bytes(cells: Sequence[Held], number: float) -> Point | None:
    """A policy where it holds so many bytes; None: it never does. cells: as of `cells_of`."""
    found = between([cell.size for cell in cells], number)
    if found is None:
        return None
    low = cells[found[0]]
    high = cells[found[1]]
    weight = found[2]
    right = {}
    for problem, share in low.right.items():
        if problem in high.right:
            right[problem] = share + weight * (high.right[problem] - share)
    return Point(low, high, weight, right) if right else None


def common(held: Mapping[str, Sequence[Held]]) -> list[float]:
    """The bytes that some policy held and at least one other policy reaches."""
    found = set[float]()
    for policy, cells in held.items():
        others = [own for name, own in held.items() if name != policy]
        for cell in cells:
            if any(at_bytes(own, cell.size) for own in others):
                found.add(cell.size)
    return sorted(found)


def reaches(held: Mapping[str, Sequence[Held]]) -> str:
    """The bytes from the least to the most of each policy, in words."""
    parts = []
    for policy, cells in held.items():
        ends = dict.fromkeys((size(cells[0].size), size(cells[-1].size)))
        parts.append(f"{escaped(policy)} {' to '.join(ends)}")
    return ", ".join(parts)


def _table(held: Mapping[str, Sequence[Held]], number: float, beside: str) -> str:
    """The policies that hold so many bytes; "": none does."""
    reached = {name: point for name, cells in held.items() if (point := at_bytes(cells, number)) is not None}
    if not reached:
        return ""
    other = reached.get(beside)
    lines = [
        ["policy", "budgets (bytes)", "problems", "pass@1", "difference", "tokens, mean"],
        ["---", *["---:"] * 5],
    ]
    for name, point in reached.items():
        difference = "–"
        if other is not None and name != beside:
            difference = f"{_difference(point, other)} against {code(beside)}"
        lines.append(
            [
                code(name),
                str(point),
                f"{len(point.right):,}",
                _accuracy(point),
                difference,
                f"{point.tokens:,.0f}",
            ]
        )
    parts = [f"## At {size(number)}", "\n".join(f"| {' | '.join(cells)} |" for cells in lines)]
    missing = {name: cells for name, cells in held.items() if name not in reached}
    if missing:
        parts.append(f"Never at {size(number)}: {reaches(missing)}.")
    return "\n\n".join(parts)


def _mean(shares: Mapping[str, float]) -> float:
    return fsum(shares.values()) / len(shares)


def _accuracy(point: Point) -> str:
    """pass@1 with its interval."""
    shares = list(point.right.values())
    mean = _mean(point.right)
    low, high = bootstrap(shares) or wilson(mean, len(shares))
    return f"{mean:.1%} ({low:.1%} to {high:.1%})"


def _difference(own: Point, other: Point) -> str:
    """The paired difference with its interval, over the problems that both have."""
    pairs = [share - other.right[problem] for problem, share in own.right.items() if problem in other.right]
    if not pairs:
        return "–"
    found = bootstrap(pairs)
    said = points(fsum(pairs) / len(pairs))
    return f"{said} ({points(found[0])} to {points(found[1])})" if found else said
