"""`--leaderboard`: put the policies of a run beside those whose results are committed, at the same setting.

The results lie in the pool (`docs/results/pool.jsonl.gz`). A committed run counts if it is of the same weights, the
same problems and the same draws, at the same budget. Every committed policy is compared with one's own problem by
problem: the difference with its interval (bootstrap over problems), and McNemar's exact test with Holm's correction
for all tests of the leaderboard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minithink.errors import NON_FINITE, MinithinkError, UsageError, escaped, unwritable
from minithink.evaluate import journal, summary
from minithink.evaluate.journal import FULL, Record, Run, differences
from minithink.evaluate.paired import difference, holm, mcnemar
from minithink.evaluate.plan import Cell
from minithink.evaluate.summary import Budget, Row, budget_text, code, points
from minithink.results import files, pooled
from minithink.results.files import dumps, rounded
from minithink.sampling import DRAWS

# What must be equal, beside the budget. `problems` is a hash of them: `limit` may differ where they are equal.
SAME = (
    "checkpoint",
    "dataset",
    "split",
    "problems",
    "num_samples",
    *DRAWS,
    "max_new_tokens",
    "padded_budget",
    "group",
    "template",
    "think_tags",
)
NEEDED = ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "generated_mean", "cut_off", "kv_bytes_peak")  # of a row
SURE = 1e-4  # smaller probabilities are shown as this


@dataclass(frozen=True)
class Line:
    """A policy of the leaderboard. Shares are from 0 to 1."""

    policy: str
    budget: Budget
    own: bool  # of this run, not of the pool
    right: float
    right_low: float
    right_high: float
    generated_mean: float  # tokens
    cut_off: float  # share of the sequences that did not stop by themselves
    of_full: float | None  # bytes at the peak, of the full cache's on the same machine; None: that did not run
    changed: bool = False  # the code has changed since
    less: float | None = None  # one's own right answers minus these, paired; None: the pool does not say which
    less_low: float | None = None
    less_high: float | None = None
    p: float | None = None  # of McNemar's exact test
    corrected: float | None = None  # the same with Holm's correction


@dataclass(frozen=True)
class Part:
    """One of one's own policies at its budget, and what stands beside it: those with the most right answers first."""

    policy: str
    budget: Budget
    lines: list[Line]


class Leaderboard:
    """The committed runs, and a run's place among them."""

    def __init__(self, folder: Path) -> None:
        """Read the pool in a folder. MinithinkError: there is none, or it cannot be read."""
        self.path = folder / pooled.FILE
        self.runs = pooled.read_file(self.path)
        if not self.runs:
            raise MinithinkError(
                f"{self.path} holds no committed results: give --leaderboard DIR, the folder docs/results of a "
                "checkout."
            )

    def check(self, settings: Mapping[str, Any], cells: Iterable[Cell]) -> None:
        """Refuse a run that has nothing beside it, before anything is generated.

        Args:
            settings: of the run.
            cells: all that is run.

        Raises:
            UsageError: no policy but `full` is run, or no committed run has the same setting.
        """
        own = [cell for cell in cells if cell.policy != FULL]
        if not own:
            raise UsageError(
                f"--leaderboard puts a policy beside the committed ones, and only {FULL} is run: name one with "
                "--policies, such as FILE.py:Class, or drop --leaderboard."
            )
        beside = self.same_setting(settings)
        for cell in own:
            if isinstance(cell.budget, float) and settings.get("full_tokens") is not None:
                raise UsageError(
                    f"{cell}: with --reference-length shares are of another length than in the committed runs, where "
                    "they are of what the full cache generates: drop it, or --leaderboard."
                )
            budgets = {run.key["budget"] for run in beside if run.key["policy"] != FULL}
            if rounded(cell.budget) not in budgets:
                known = sorted(budgets, key=summary.budget_order)
                there = ", ".join("none" if budget is None else budget_text(budget) for budget in known)
                raise UsageError(
                    f"--leaderboard: the committed runs of this setting have the budgets {there}, and "
                    f"{escaped(cell.policy)} has {'none' if cell.budget is None else budget_text(cell.budget)}: give "
                    "one of them."
                )

    def same_setting(self, settings: Mapping[str, Any]) -> list[pooled.Run]:
        """The committed runs of the same weights, problems and draws. UsageError: there are none; the message names
        what differs from those that are nearest."""
        mine = _setting_of(settings)
        answers = [run for run in self.runs if journal.INSTRUMENT not in run.key]
        found = [run for run in answers if _setting_of(run.key) == mine]
        if found:
            return [*found, *_without_budget(answers, mine)]

        def differing(run: pooled.Run) -> int:
            theirs = _setting_of(run.key)
            return sum(theirs[name] != mine[name] for name in SAME)

        nearest = min(answers, key=differing, default=None)
        if nearest is None:
            raise UsageError(f"{self.path} has no answers, only losses of texts: drop --leaderboard.")
        ours = {"limit": settings.get("limit"), **mine}
        theirs = {"limit": nearest.key.get("limit"), **_setting_of(nearest.key)}
        # other problems because there are fewer: the hash says nothing more
        said = differences(theirs, ours, ["problems"] if ours["limit"] != theirs["limit"] else [])
        raise UsageError(
            f"--leaderboard: {self.path} has no run of this setting; the nearest differ (theirs and this one's: "
            f"{said}): give the same, or drop --leaderboard."
        )

    def parts(self, run: Run, rows: Sequence[Row]) -> list[Part]:
        """Where the policies of a finished run stand.

        Args:
            run: the run, with its records.
            rows: its summary.

        Raises:
            MinithinkError: a committed run lacks a number.
        """
        beside = self.same_setting(run.settings)
        whole = {(row.policy, row.budget): row for row in rows if row.group is None}
        full = whole.get((FULL, None))
        their_full = next((one for one in beside if one.key["policy"] == FULL), None)
        if their_full is not None:
            pooled.need(their_full, NEEDED, self.path)
        parts = list[Part]()
        for (policy, budget), row in whole.items():
            if policy == FULL:
                continue
            right, low, high = row.accuracy
            own = Line(
                policy=policy,
                budget=budget,
                own=True,
                right=right,
                right_low=low,
                right_high=high,
                generated_mean=row.generated_mean,
                cut_off=row.cut_off,
                of_full=None if full is None else row.kv_bytes_peak / full.kv_bytes_peak,
            )
            records = [r for r in run.records if (r.policy, r.budget) == (policy, budget)]
            records.sort(key=lambda r: (r.id, r.sample))
            lines = [own]
            for one in self._at_budget(beside, budget):
                lines.append(self._line(one, their_full, records))
            lines.sort(key=lambda line: (-line.right, not line.own, line.policy))
            parts.append(Part(policy, budget, lines))
        return _corrected(parts)

    def _at_budget(self, beside: Sequence[pooled.Run], budget: Budget) -> list[pooled.Run]:
        """The full cache and the policies at this budget: of each the run whose answers were found to be equal again,
        or that says which were right, or the newest."""
        best = dict[str, pooled.Run]()
        for run in beside:
            if run.key["budget"] != (None if run.key["policy"] == FULL else rounded(budget)):
                continue
            old = best.setdefault(run.key["policy"], run)
            best[run.key["policy"]] = max(old, run, key=lambda run: (not run.stale, bool(run.right), run.date))
        return list(best.values())

    def _line(self, run: pooled.Run, full: pooled.Run | None, own: Sequence[Record]) -> Line:
        """A committed run beside one's own records, which are in order. full: the committed run of the full cache."""
        pooled.need(run, NEEDED, self.path)
        line = Line(
            policy=run.key["policy"],
            budget=run.key["budget"],
            own=False,
            right=run.row["pass_at_1"],
            right_low=run.row["pass_at_1_low"],
            right_high=run.row["pass_at_1_high"],
            generated_mean=run.row["generated_mean"],
            cut_off=run.row["cut_off"],
            of_full=None if full is None else run.row["kv_bytes_peak"] / full.row["kv_bytes_peak"],
            changed=run.state == "stale",
        )
        has_answer = all(record.finish_reason != NON_FINITE for record in own)
        if not has_answer or len(own) != len(run.right):  # "": which were right was not kept
            return line
        mine = _shares(own, run.key["num_samples"])
        theirs = run.shares
        found = difference(mine, theirs)
        return replace(
            line,
            less=found["less"],
            less_low=found["less_low"],
            less_high=found["less_high"],
            p=mcnemar([share == 1 for share in mine], [share == 1 for share in theirs]),
        )

    def write(self, folder: Path, run: Run, rows: Sequence[Row]) -> str:
        """Write leaderboard.json and leaderboard.md → the Markdown. Arguments: as of `parts`.

        Raises:
            MinithinkError: a file cannot be written, or a committed run lacks a number.
        """
        parts = self.parts(run, rows)
        text = as_markdown(parts, self._said_of_machines(run))
        content = {"pool": self.path.name, "parts": [asdict(part) for part in parts]}
        try:
            files.replace(folder / "leaderboard.json", dumps(rounded(content)) + "\n")
            files.replace(folder / "leaderboard.md", text)
        except OSError as error:
            raise unwritable("The leaderboard", folder, error, "--output-dir") from None
        return text

    def _said_of_machines(self, run: Run) -> str:
        """On what the committed runs and this one were made."""
        kinds = dict.fromkeys(
            f"{one.machine.get('gpu', one.machine.get('cpu', '?'))} in {one.key['dtype']}"
            for one in self.same_setting(run.settings)
        )
        mine = f"{run.settings['device']} in {run.settings['dtype']}"
        return (
            f"The committed runs were made on {escaped(' and '.join(kinds))}, this one on {mine}: where sums are "
            "rounded differently a few texts go on differently, of the same policy, too."
        )


def _without_budget(answers: Iterable[pooled.Run], mine: Mapping[str, Any]) -> list[pooled.Run]:
    """If budgets pay for padding, the runs that have none, such as the full cache: their keys do not name padding."""
    if mine["padded_budget"] is None:
        return []
    unpadded = {**mine, "padded_budget": None, "group": None}
    return [run for run in answers if run.key["budget"] is None and _setting_of(run.key) == unpadded]


def _setting_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal, of a run's settings or of a key of the pool."""
    found = {name: rounded(settings.get(name)) for name in SAME}
    found["split"] = found["split"] or "test"
    return found


def _shares(records: Sequence[Record], samples: int) -> list[float]:
    """The share of right samples of each problem. records: in the order of problems and samples."""
    right = [record.right is True for record in records]
    return [sum(right[i : i + samples]) / samples for i in range(0, len(right), samples)]


def _corrected(parts: Sequence[Part]) -> list[Part]:
    """The same with the probabilities corrected for the number of all tests."""
    known = [line.p for part in parts for line in part.lines if line.p is not None]
    left = iter(holm(known))
    found = []
    for part in parts:
        lines = []
        for line in part.lines:
            lines.append(line if line.p is None else replace(line, corrected=next(left)))
        found.append(replace(part, lines=lines))
    return found


def as_markdown(parts: Sequence[Part], machines: str) -> str:
    """A table for each of one's own policies, and what the columns mean."""
    texts = []
    for part in parts:
        budget = "" if part.budget is None else f" at {budget_text(part.budget)}"
        texts.append(f"## {code(part.policy)}{budget} beside the committed policies")
        lines = [["policy", "right", "yours minus it", "p", "tokens", "cut off", "bytes of full"]]
        lines.append(["---", *["---:"] * 6])
        lines += [_cells(line) for line in part.lines]
        texts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    note = (
        "Right, with its 95 % interval. Yours minus it: percentage points, problem by problem, with the 95 % "
        "interval (bootstrap over problems). p: McNemar's exact test, corrected by Holm for all tests of this page. "
        "With several samples, a problem is right there if all of its samples are. "
        "Bytes: the mean of peaks, of the full cache's on the same machine."
    )
    if any(line.changed for part in parts for line in part.lines):
        note += " †: its code has changed since it was measured."
    return "\n\n".join([*texts, f"{note} {machines}"]) + "\n"


def _cells(line: Line) -> list[str]:
    """A row of a table."""
    name = f"**{code(line.policy)}**" if line.own else code(line.policy)
    if line.changed:
        name += " †"
    less = "–"
    if line.less is not None and line.less_low is not None and line.less_high is not None:
        less = f"{points(line.less)} ({points(line.less_low)} to {points(line.less_high)})"
    p = "–"
    if line.corrected is not None:
        p = f"< {SURE:g}" if line.corrected < SURE else f"{line.corrected:.2g}"
    return [
        name,
        f"{line.right:.1%} ({line.right_low:.1%} to {line.right_high:.1%})",
        less,
        p,
        f"{line.generated_mean:,.0f}",
        f"{line.cut_off:.1%}",
        "–" if line.of_full is None else f"{line.of_full:.1%}",
    ]
