"""`--leaderboard`: put the policies of a run beside those whose results are committed, at the same setting.

The results lie in the pool (`docs/results/pool.jsonl.gz`). A committed run counts if it is of the same weights, the
same problems and the same draws. One's own policies get their place among all of these by right answers and bytes
(`standing.py`). Every committed policy at the same budget is also compared with one's own problem by problem: the
difference with its interval (bootstrap over problems), and McNemar's exact test with Holm's correction for all tests
of the leaderboard.

A run on fewer problems of an embedded family is a quick look: of the committed runs only the answers to these
problems count. Bytes and lengths were kept as means over all of their problems, and stay that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from math import fsum
from pathlib import Path
from typing import Any, TypedDict

from minithink.errors import NON_FINITE, MinithinkError, UsageError, counted, escaped, unwritable
from minithink.evaluate import journal, standing, summary
from minithink.evaluate.datasets import hash_of, load_dataset
from minithink.evaluate.intervals import bootstrap, wilson
from minithink.evaluate.journal import FULL, Record, Run, differences
from minithink.evaluate.paired import difference, holm, mcnemar
from minithink.evaluate.plan import Cell
from minithink.evaluate.plots import unfinished
from minithink.evaluate.standing import Point
from minithink.evaluate.summary import Budget, Row, budget_text, code, points, summarize
from minithink.policies.dynts_oracles import AnswerOracle, HindsightOracle, NeedsOracle
from minithink.results import files, pooled
from minithink.results.files import dumps, rounded
from minithink.sampling import DRAWS
from minithink.tasks import families

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
ORACLES = {cls.name for cls in (AnswerOracle, HindsightOracle, NeedsOracle)}
SURE = 1e-4  # smaller probabilities are shown as this
BY_BYTES = (
    "●: on the front, which means that no policy is right as often with fewer bytes, or more often with as few; the "
    "intervals do not count. Bytes: the mean of peaks, of the full cache's on the same machine. Below the front: "
    "points less than the best policy of at most the same bytes."
)


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


class Figures(TypedDict):
    """What a line and a point say of a committed run alike: fields of both."""

    policy: str
    budget: Budget
    own: bool
    right: float
    right_low: float
    right_high: float
    changed: bool


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
        self._beside = dict[str, list[pooled.Run]]()  # what `same_setting` has found, by the setting

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
        """The committed runs of the same weights, problems and draws; of runs on more problems only the answers to
        these. UsageError: there are none; the message names what differs from those that are nearest."""
        asked = dumps({"limit": settings.get("limit"), **_setting_of(settings)})
        if asked not in self._beside:
            self._beside[asked] = self._look_up(settings)
        return self._beside[asked]

    def _look_up(self, settings: Mapping[str, Any]) -> list[pooled.Run]:
        """The same, from all that is committed."""
        mine = _setting_of(settings)
        answers = [run for run in self.runs if journal.INSTRUMENT not in run.key]
        found = [run for run in answers if _setting_of(run.key) == mine]
        if found:
            return [*found, *_without_budget(answers, mine)]
        found = _of_more_problems(answers, settings)
        if found:
            return found

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
        their_full = self._full_of(beside)
        parts = list[Part]()
        for (policy, budget), row in whole.items():
            if policy == FULL:
                continue
            right, low, high = rounded(row.accuracy)  # to the digits of the pool: else equal shares differ
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
            for one in _most_telling(beside):
                if one.key["budget"] == (None if one.key["policy"] == FULL else rounded(budget)):
                    lines.append(self._line(one, their_full, records))
            lines.sort(key=lambda line: (-line.right, not line.own, line.policy))
            parts.append(Part(policy, budget, lines))
        return _corrected(parts)

    def _full_of(self, beside: Iterable[pooled.Run]) -> pooled.Run | None:
        """The committed run of the full cache; None: there is none."""
        full = next((run for run in beside if run.key["policy"] == FULL), None)
        if full is not None:
            pooled.need(full, NEEDED, self.path)
        return full

    def points(self, run: Run, rows: Sequence[Row]) -> list[Point]:
        """The committed policies of the setting at all budgets, and those of a finished run: whose bytes can be
        divided by the full cache's, and which no oracle tells what a text will need. Arguments and errors: as of
        `parts`."""
        beside = self.same_setting(run.settings)
        whole = [row for row in rows if row.group is None]
        full = next((row for row in whole if row.policy == FULL), None)
        their_full = self._full_of(beside)
        found = list[Point]()
        for row in whole:
            if full is None or row.policy == FULL:
                continue
            right, low, high = rounded(row.accuracy)  # as in `parts`
            found.append(
                Point(
                    policy=row.policy,
                    budget=row.budget,
                    own=True,
                    right=right,
                    right_low=low,
                    right_high=high,
                    samples=row.samples,
                    of_full=rounded(row.kv_bytes_peak) / rounded(full.kv_bytes_peak),
                )
            )
        for one in _most_telling(beside):
            if their_full is None or _has_oracle(one.key["policy"]):
                continue
            pooled.need(one, ("samples",), self.path)
            found.append(
                Point(
                    **self._figures_of(one),
                    samples=len(one.right) or one.row["samples"],
                    of_full=one.row["kv_bytes_peak"] / their_full.row["kv_bytes_peak"],
                )
            )
        return found

    def places(self, run: Run, rows: Sequence[Row]) -> list[Point]:
        """The points of a finished run and their places. Arguments and errors: as of `parts`."""
        return standing.placed(self.points(run, rows))

    def together(self, runs: Sequence[Run]) -> str:
        """Where the policies of finished runs stand, in Markdown: by means over the runs, which have a dataset each.

        Raises:
            UsageError: a run is unfinished or has nothing committed beside it, two are of one dataset or of different
                settings, or no policy can be placed.
            MinithinkError: a committed run lacks a number.
        """
        for note in filter(None, map(unfinished, runs)):
            raise UsageError(f"--leaderboard takes finished runs. {note}: give its command with --resume first.")
        names = [_dataset_of(run) for run in runs]
        if len(set(names)) < len(names):
            raise UsageError(
                "--leaderboard takes the mean over datasets, and the folders are of "
                f"{', '.join(names)}: give one folder for each dataset."
            )
        for run in runs[1:]:
            first, other = (_setting_of(one.settings) for one in (runs[0], run))
            differing = differences(first, other, ("dataset", "problems"))
            if differing:
                raise UsageError(
                    f"{runs[0].folder} and {run.folder} are runs of different settings ({differing}): give folders "
                    "that differ in their dataset alone."
                )
        each = [self.points(run, summarize(run.records)) for run in runs]
        places = standing.placed(standing.together(each))
        if not any(point.own for point in places):
            where = "all of the folders" if runs[1:] else "the folder"
            raise UsageError(
                f"--leaderboard: no policy at one budget is in {where}, with {FULL} beside it, of which bytes are "
                f"shares: give finished runs of {FULL} and a policy."
            )
        looks = dict.fromkeys(chain.from_iterable(map(self._said_of_problems, runs)))
        parts = _standing_parts(places, ", ".join(names))
        parts += [f"{BY_BYTES} {self._said_of_machines(runs[0])}", *looks]
        parts += [f"## All {len(places)}", standing.whole_table(places)]
        return "\n\n".join(parts) + "\n"

    def _figures_of(self, run: pooled.Run) -> Figures:
        """Of a committed run. MinithinkError: it lacks a number."""
        pooled.need(run, NEEDED, self.path)
        return {
            "policy": run.key["policy"],
            "budget": run.key["budget"],
            "own": False,
            "right": run.row["pass_at_1"],
            "right_low": run.row["pass_at_1_low"],
            "right_high": run.row["pass_at_1_high"],
            "changed": run.state == "stale",
        }

    def _line(self, run: pooled.Run, full: pooled.Run | None, own: Sequence[Record]) -> Line:
        """A committed run beside one's own records, which are in order. full: the committed run of the full cache."""
        line = Line(
            **self._figures_of(run),
            generated_mean=run.row["generated_mean"],
            cut_off=run.row["cut_off"],
            of_full=None if full is None else run.row["kv_bytes_peak"] / full.row["kv_bytes_peak"],
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

    def write(self, folder: Path, run: Run, rows: Sequence[Row], places: Sequence[Point]) -> str:
        """Write leaderboard.json and leaderboard.md → what a terminal shows: the same without the table of all
        points, and what matters most at the end.

        Args:
            folder: of the files.
            run: the run, with its records.
            rows: its summary.
            places: of `places`.

        Raises:
            MinithinkError: a file cannot be written, or a committed run lacks a number.
        """
        parts = self.parts(run, rows)
        look = self._said_of_problems(run)
        if any(place.own for place in places):
            own = [*_standing_parts(places, _dataset_of(run)), BY_BYTES]
        else:
            own = [f"Without {FULL} among --policies there are no shares of its bytes, and no front."]
        first = "\n\n".join([*own, *look]) + "\n"
        second = as_markdown(parts, self._said_of_machines(run))
        rest = f"## All {len(places)} by right answers and bytes\n\n{standing.whole_table(places)}\n"
        content = {
            "pool": self.path.name,
            "points": [asdict(place) for place in places],
            "parts": [asdict(part) for part in parts],
        }
        try:
            files.replace(folder / "leaderboard.json", dumps(rounded(content)) + "\n")
            files.replace(folder / "leaderboard.md", "\n".join([first, second, rest]))
        except OSError as error:
            raise unwritable("The leaderboard", folder, error, "--output-dir") from None
        return f"{second}\n{first}All {len(places)} by right answers and bytes: {folder / 'leaderboard.md'}\n"

    def draw(self, folder: Path, run: Run, places: Sequence[Point]) -> Path | None:
        """Draw leaderboard.svg → where it is; None: no policy of the run can be placed. Arguments: as of `write`.

        Raises:
            MinithinkError: matplotlib is missing, or the file cannot be written.
        """
        if not any(place.own for place in places):
            return None
        path = folder / "leaderboard.svg"
        standing.draw(places, path, f"{_dataset_of(run)}: right answers by bytes, beside the committed policies")
        return path

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

    def _said_of_problems(self, run: Run) -> list[str]:
        """A paragraph if the committed runs have more problems; else none."""
        committed = self.same_setting(run.settings)[0]
        if committed.key["problems"] == run.settings["problems"]:
            return []
        pooled.need(committed, ("problems",), self.path)
        mine = counted(run.settings["limit"], "problem")
        return [
            f"**A quick look**: only {mine} of {committed.row['problems']:,}. The committed "
            "policies' right answers and differences are of these problems, their bytes, tokens and texts that were "
            "cut off are of all. A share as a budget is of what the full cache generates for these problems, so the "
            "budgets are only nearly equal. Before you conclude anything, run all problems."
        ]


def _without_budget(answers: Iterable[pooled.Run], mine: Mapping[str, Any]) -> list[pooled.Run]:
    """If budgets pay for padding, the runs that have none, such as the full cache: their keys do not name padding."""
    if mine["padded_budget"] is None:
        return []
    unpadded = {**mine, "padded_budget": None, "group": None}
    return [run for run in answers if run.key["budget"] is None and _setting_of(run.key) == unpadded]


def _of_more_problems(answers: Iterable[pooled.Run], settings: Mapping[str, Any]) -> list[pooled.Run]:
    """The runs of the same setting on more problems, with the answers to these problems alone. Those that do not say
    which answers were right are left out."""
    mine = {**_setting_of(settings), "problems": None}
    found = []
    for run in answers:
        if run.right and {**_setting_of(run.key), "problems": None} == mine:
            shared = _shared(run.key, settings)
            if shared:
                found.append(_cut(run, shared))
    return found


def _shared(key: Mapping[str, Any], settings: Mapping[str, Any]) -> list[int]:
    """Where a run's problems stand among those of a committed run with more problems, both in the order of ids; an
    empty list if they are not among them. Only embedded families can be looked up."""
    dataset = settings["dataset"]
    split = settings.get("split")
    limit = settings.get("limit")
    more = key.get("limit")
    family, _, _ = dataset.partition(":")  # as in "search:0", `search` with little redundancy
    if family not in families() or limit is None or (more is not None and more < limit):
        return []
    own, digits = _problems(dataset, split, limit)
    theirs, their_digits = _problems(dataset, split, more)
    if (digits, their_digits) != (settings["problems"], key["problems"]):
        return []
    places = {problem: place for place, problem in enumerate(theirs)}
    return [places[problem] for problem in own]


@cache
def _problems(dataset: str, split: str | None, limit: int | None) -> tuple[list[str], str]:
    """The sorted ids of a dataset's first problems, and the hash of these problems."""
    examples = load_dataset(dataset, split, limit)
    return sorted(example.id for example in examples), hash_of(examples)


def _cut(run: pooled.Run, places: Iterable[int]) -> pooled.Run:
    """A committed run with the answers to some of its problems alone. Its other figures stay those of all."""
    samples = run.key["num_samples"]
    right = "".join(run.right[place * samples : (place + 1) * samples] for place in places)
    cut = replace(run, right=right)
    share = fsum(cut.shares) / len(cut.shares)
    low, high = bootstrap(cut.shares) or wilson(share, len(cut.shares))
    figures = rounded({"pass_at_1": share, "pass_at_1_low": low, "pass_at_1_high": high})
    return replace(cut, row=run.row | figures)


def _most_telling(beside: Iterable[pooled.Run]) -> list[pooled.Run]:
    """One run of each policy at each budget: whose answers were found to be equal again, or that says which were
    right, or the newest."""
    best = dict[tuple[str, Any], pooled.Run]()
    for run in beside:
        cell = run.cell[1:]
        old = best.setdefault(cell, run)
        best[cell] = max(old, run, key=lambda run: (not run.stale, bool(run.right), run.date))
    return list(best.values())


def _dataset_of(run: Run) -> str:
    """The dataset of a run, as a title names it: of a file its last part."""
    return escaped(Path(str(run.settings.get("dataset"))).name)


def _has_oracle(policy: str) -> bool:
    """Whether a policy of the pool, or a member of the stack, is told what a text will need."""
    return any(member.partition(":")[0] in ORACLES for member in policy.split("+"))


def _standing_parts(places: Sequence[Point], title: str) -> list[str]:
    """The heading, the sentences about one's own points, and the table of the front."""
    heading = f"## Right answers by bytes ({title})"
    return [heading, *standing.said(places), standing.front_table(places)]


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
        name = standing.at_budget(code(part.policy), part.budget)
        texts.append(f"## {name} beside the committed policies")
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
    name = standing.in_cell(line.policy, line.own)
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
