"""One comparison on several models (`Transfer`): do they put the policies into the same order, and does the loss?

Nothing is generated: `bench sweep` has brought the runs of each model, and the losses of texts, into the pool. Each
policy is tested against some others at the same budget, problem by problem. The probabilities are those of McNemar's
exact test, corrected for the number of tests in the table as Holm does. The intervals of rank correlations are the
bootstrap's over policies.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from minithink.bench.answers import pool, sweep
from minithink.bench.answers.overall import by_cell, together
from minithink.bench.answers.pool import Run
from minithink.bench.answers.sweep import (
    SWEEPS,
    Wanted,
    has_changed,
    other_commits,
    said_of_commits,
    shown,
    wanted_of,
)
from minithink.bench.methods import Column, Result, Row, Sweep, Table, Transfer, collected
from minithink.bench.methods.settings import best
from minithink.cli.commands import location, positive
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.paired import difference, holm, mcnemar
from minithink.evaluate.plan import budgets
from minithink.evaluate.rank_correlation import FEWEST, correlation_difference, interval, spearman
from minithink.evaluate.summary import FULL, budget_text
from minithink.results.figures import drawing, need_matplotlib
from minithink.results.pooled import need
from minithink.tasks import families

TRANSFERS: dict[str, Transfer] = collected("TRANSFERS")
DEFAULT = "transfer"  # the comparison of all policies
ANSWERS = "answers"
EQUAL = 0.05  # two policies count as equally right if the whole interval of their difference is below this
OF_LOSSES = ("loss", "losses", "kv_bytes_peak")  # what is read of a row
SURE = 0.001  # smaller probabilities are not told apart
ENOUGH = 0.75  # a family counts if it has at least this share of what the family with the most has
OF_TEXTS = ""  # stands for the family where a value is the loss of texts
Cell = tuple[str, Any]  # policy and budget
Values = Mapping[str, Mapping[Cell, float]]  # family → what policies are ranked by, the larger the better


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench transfer`."""
    add = parser.add_argument
    names = tuple(TRANSFERS)
    add("name", nargs="?", default=DEFAULT, choices=names, help=f"which comparison: {', '.join(names)}")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--plot", type=location, metavar="FILE", help="draw the right answers of the last model by all else, as SVG"
    )
    either.add_argument("--settings", action="store_true", help="print what the validation problems choose")
    add("--budget", type=budgets, default=[0.25], metavar="SHARE", help="of the picture (default: 0.25)")
    add("--limit", type=positive, metavar="N", help="show a quick look that `bench sweep --limit N` has made")
    add("--families", nargs="+", choices=families(), help="whose answers count (default: all)")
    pool.add_results_argument(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Print the rank correlations or the settings; draw."""
    if len(args.budget) > 1:
        raise UsageError(f"The picture shows one budget, and --budget gives {len(args.budget)}: give one.")
    if args.plot is not None:
        need_matplotlib()
    if args.settings and args.families:
        raise UsageError("--settings is of all families: leave --families out.")
    source = Source(TRANSFERS[args.name], args.results, limit=args.limit, of=args.families)
    if args.settings:
        for name, text in chosen(source).items():
            print(f'    "{name}": "{text}",')
        return 0
    for line in said_of_ranks(source.ranks()):
        print(line)
    if args.plot is not None:
        draw(source, args.budget[0], args.plot)
    return 0


class Source:
    """The runs of a comparison in a pool.

    Args:
        one: the comparison.
        where: the folder of the pool.
        limit: problems of a quick look; None: as the documents show it.
        runs: of the pool; None: they are read.
        marked: look which runs are of other code than their policies have now.
        of: families whose answers put policies into an order; None: all.
    """

    def __init__(
        self,
        one: Transfer,
        where: Path,
        *,
        limit: int | None = None,
        runs: Sequence[Run] | None = None,
        marked: bool = False,
        of: Sequence[str] | None = None,
    ) -> None:
        self.one = one
        self.where = where
        self.limit = limit
        self.runs = pool.read(where) if runs is None else runs
        self.marked = marked
        self.of = sorted(of or families())

    def sweep_of(self, name: str, model: str) -> Sweep:
        """A comparison on one of the models."""
        return self._limited(replace(SWEEPS[name], checkpoint=self.one.models[model]))

    def _limited(self, own: Sweep) -> Sweep:
        """A comparison on as many problems as a quick look has."""
        return own if self.limit is None else replace(own, problems=self.limit)

    def wanted_settings(self) -> list[Wanted]:
        """The keys of all runs that try settings, on the model on which they are tried."""
        return wanted_of(self._limited(replace(SWEEPS[self.one.settings], checkpoint=self.one.tuned[1])))

    def runs_of(self, name: str, model: str) -> list[Run]:
        """Its runs in the pool. MinithinkError: there are none."""
        wanted = wanted_of(self.sweep_of(name, model))
        return list(shown(name, self.where, wanted, self.runs).values())

    def answers(self, model: str) -> Result:
        """The comparison of answers on one model, as of `sweep.result_of`, but with a row for each policy and budget,
        of all families together, with its tests. A policy that lacks a family at a budget has no row. Beside the rows

            families    those that the rows are of
            left_out    budget → how many policies of the comparison have no row
        """
        name = self.one.answers
        wanted = wanted_of(self.sweep_of(name, model))
        result = sweep.result_of(name, self.where, wanted, runs=self.runs, marked=self.marked)
        right = right_of(self.runs_of(name, model))
        found = [together(*cell, own) | {"tests": {}} for cell, own in by_cell(result["measurements"]).items()]
        most = max(row["families"] for row in found)
        rows = [row for row in found if row["families"] == most]
        shown = {(row["policy"], row["budget"]) for row in rows}
        asked = {(key["policy"], key["budget"]) for key in wanted}
        left_out = Counter(budget for _, budget in asked - shown)
        add_tests([row for row in rows if row["budget"] is not None], right, self.one.beside)
        add_tests([row for row in rows if row["budget"] is None], right, (FULL,))
        families = sorted({m["family"] for m in result["measurements"] if (m["policy"], m["budget"]) in shown})
        return result | {"measurements": rows, "families": families, "left_out": left_out}

    def losses(self, model: str) -> Result:
        """The losses of texts on one model: how far each policy is above the full cache."""
        name = self.one.losses
        wanted = wanted_of(self.sweep_of(name, model))
        found = shown(name, self.where, wanted, self.runs)
        for run in found.values():
            need(run, OF_LOSSES, self.where / pool.FILE)
        full = {run.key["dataset"]: run for run in found.values() if run.key["policy"] == FULL}
        rows = list[Row]()
        for place, run in found.items():
            texts, policy, budget = run.cell
            row = {**run.row, "family": texts, "policy": policy, "budget": budget, "above": None, "of_full": None}
            row["changed"] = self.marked and has_changed(run, wanted[place])
            if texts in full:
                row["of_full"] = row["kv_bytes_peak"] / full[texts].row["kv_bytes_peak"]
                if policy != FULL:
                    row["above"] = difference(run.row["losses"], full[texts].row["losses"])
            rows.append(row)
        return self._about([*found.values()]) | {"measurements": rows, "complete": len(found) == len(wanted)}

    def settings(self) -> Result:
        """All settings that were tried, in the order of the tries: a row each, of all families together, with its
        test against the first policy that others are tested against. Beside it

            setting     the policy as Markdown, bold if it has the most right answers of its name
            by_family   family → share of right answers
        """
        name = self.one.settings
        wanted = self.wanted_settings()
        result = sweep.result_of(name, self.where, wanted, runs=self.runs, marked=self.marked)
        runs = [*shown(name, self.where, wanted, self.runs).values()]
        of_cell = by_cell(result["measurements"])
        rows = {cell: together(*cell, own) | {"tests": {}} for cell, own in of_cell.items()}
        add_tests([row for row in rows.values() if row["budget"] is not None], right_of(runs), self.one.beside[:1])
        best_of = best([run.row for run in runs], self.one.tries)
        tried = list[dict[str, Any]]()
        for named, texts in self.one.tries.items():
            for text in texts:
                for cell in (cell for cell in rows if cell[0] == text):
                    row = rows[cell]
                    row["by_family"] = {m["family"]: m["pass_at_1"] for m in of_cell[cell]}
                    row["setting"] = f"**`{text}`**" if best_of.get(named) == text else f"`{text}`"
                    tried.append(row)
        return result | {"measurements": tried}

    def answers_of(self, model: str) -> list[Run]:
        """The runs of answers of one model; an empty list if there are none."""
        try:
            return self.runs_of(self.one.answers, model)
        except MinithinkError:
            return []

    def values(self) -> dict[tuple[str, str], Values]:
        """What the policies are ranked by. The key is a model and ANSWERS or the name of texts. Models without runs
        are left out."""
        found = dict[tuple[str, str], Values]()
        for model in self.one.models:
            answers = dict[str, dict[Cell, float]]()
            for run in self.answers_of(model):
                family, *cell = run.cell
                if run.right and family in self.of:
                    answers.setdefault(family, {})[tuple(cell)] = fmean(run.shares)
            if answers:
                found[model, ANSWERS] = answers
            losses = dict[str, dict[Cell, float]]()
            try:
                runs = self.runs_of(self.one.losses, model)
            except MinithinkError:
                continue
            for run in runs:
                need(run, OF_LOSSES, self.where / pool.FILE)
                texts, *cell = run.cell
                losses.setdefault(texts, {})[tuple(cell)] = -run.row["loss"]
            for texts, own in losses.items():
                found[model, texts] = {OF_TEXTS: own}
        return found

    def ranks(self) -> Result:
        """Rank correlations: of the answers of every two models, and of a model's losses with its answers; and which
        of two models' answers are more like the last one's."""
        values = self.values()
        runs = list[Run]()
        for model in dict.fromkeys(model for model, _ in values):
            if (model, ANSWERS) in values:
                runs += self.runs_of(self.one.answers, model)
            if any(own == model and what != ANSWERS for own, what in values):
                runs += self.runs_of(self.one.losses, model)
        rows = list[Row]()
        for first, second in combinations(values, 2):
            of_answers = [first[1], second[1]].count(ANSWERS)
            if of_answers == 2 or (of_answers == 1 and first[0] == second[0]):
                rows += correlations(first, values[first], second, values[second], [*self.one.ranked.values()])
        answers = [what for what in values if what[1] == ANSWERS]
        for less, more in combinations(answers[:-1], 2):
            orders = {what: values[what] for what in (more, less, answers[-1])}
            rows += differences(orders, [*self.one.ranked.values()])
        if not rows:
            raise MinithinkError(
                f"{self.where / pool.FILE} has no two orders of policies to compare: it needs the answers of two "
                "models, or those of one and its losses; `bench sweep` makes them."
            )
        return self._about(runs) | {"measurements": rows, "complete": True, "families": self.of}

    def _about(self, runs: Sequence[Run]) -> dict[str, Any]:
        """The newest of some runs, as a result says where it comes from."""
        last = max(runs, key=lambda run: run.date)
        return {
            "benchmark": "sweep",
            "command": last.command,
            "commit": last.commit,
            "date": last.date,
            "machine": pool.machine_of(runs),
            "versions": last.versions,
            "settings": {},
            "others": other_commits(runs),
        }


def right_of(runs: Iterable[Run]) -> dict[Cell, list[float]]:
    """The problems of all families, by policy and budget: which were right. A policy that lacks a family is left
    out."""
    by_cell = dict[Cell, dict[str, list[float]]]()
    families = set[str]()
    for run in runs:
        family, policy, budget = run.cell
        families.add(family)
        if run.right:
            by_cell.setdefault((policy, budget), {})[family] = run.shares
    found = dict[Cell, list[float]]()
    for cell, own in by_cell.items():
        if own.keys() == families:
            found[cell] = [share for family in sorted(families) for share in own[family]]
    return found


def add_tests(rows: Sequence[dict[str, Any]], right: Mapping[Cell, Sequence[float]], beside: Sequence[str]) -> None:
    """Test each row's policy against others at its budget: row["tests"][other] is the difference, its interval, and
    the corrected probability. For the test a problem with several samples is right if all of them are."""
    tests = list[dict[str, Any]]()
    for row in rows:
        own = right.get((row["policy"], row["budget"]))
        for name in beside:
            other = right.get((name, row["budget"]))
            if own is None or other is None or name == row["policy"]:
                continue
            test: dict[str, Any] = difference(own, other)
            test["p"] = mcnemar([x == 1 for x in own], [x == 1 for x in other])
            row["tests"][name] = test
            tests.append(test)
    for test, p in zip(tests, holm([test["p"] for test in tests]), strict=True):
        test["corrected"] = p


@dataclass(frozen=True)
class Shared:
    """Where some orders of policies can be compared at a budget."""

    families: tuple[str, ...]  # in which all have run, but for those in which far fewer policies have
    policies: tuple[str, ...]  # that all have run in all of these

    def of(self, values: Values, budget: float) -> list[float]:
        """The value of each policy, the mean over the families."""
        return [
            fmean(in_family(values, family)[policy, budget] for family in self.families) for policy in self.policies
        ]


def in_family(values: Values, family: str) -> Mapping[Cell, float]:
    """A policy's loss of texts is the same whatever the family."""
    return values[OF_TEXTS] if OF_TEXTS in values else values.get(family, {})


def shared(orders: Sequence[Values], ranked: Sequence[str], budget: float) -> Shared:
    """Which families and policies some orders have in common at a budget. A family with few of them does not
    count (`ENOUGH`): a comparison may be unfinished."""
    found = dict[str, list[str]]()
    for family in sorted({family for order in orders for family in order} - {OF_TEXTS}):
        found[family] = [
            policy for policy in ranked if all((policy, budget) in in_family(order, family) for order in orders)
        ]
    most = max(map(len, found.values()), default=0)
    counts = tuple(family for family, own in found.items() if own and len(own) >= ENOUGH * most)
    return Shared(counts, tuple(p for p in ranked if counts and all(p in found[family] for family in counts)))


def correlations(
    first: tuple[str, str], x: Values, second: tuple[str, str], y: Values, ranked: Sequence[str]
) -> list[Row]:
    """A row for each budget at which both have enough policies for an interval."""
    rows = list[Row]()
    for budget in sorted({budget for own in x.values() for _, budget in own if budget is not None}):
        both = shared([x, y], ranked, budget)
        if len(both.policies) < FEWEST:
            continue
        mine = both.of(x, budget)
        theirs = both.of(y, budget)
        low, high = interval(mine, theirs) or (None, None)
        row = {"first": said_of(first), "second": said_of(second), "budget": budget, "policies": len(mine)}
        row["families"] = list(both.families)
        rows.append(row | {"rho": spearman(mine, theirs), "low": low, "high": high})
    return rows


def differences(orders: Mapping[tuple[str, str], Values], ranked: Sequence[str]) -> list[Row]:
    """How much better the first order agrees with the third than the second does: a row for each budget that all
    three have."""
    more, less, last = orders
    rows = list[Row]()
    for budget in sorted({budget for own in orders[last].values() for _, budget in own if budget is not None}):
        all_three = shared([*orders.values()], ranked, budget)
        if not all_three.policies:
            continue
        x, other, y = (all_three.of(order, budget) for order in orders.values())
        found = correlation_difference(x, other, y)
        if found is None:
            continue
        row = {"first": f"{more[0]} less {said_of(less)}", "second": said_of(last), "budget": budget}
        row |= {"policies": len(y), "families": list(all_three.families)}
        rows.append(row | dict(zip(("rho", "low", "high"), found, strict=True)))
    return rows


def said_of(what: tuple[str, str]) -> str:
    """As in "backbone, answers" or "embedded, loss of reference"."""
    model, kind = what
    return f"{model}, {kind if kind == ANSWERS else f'loss of {kind}'}"


def chosen(source: Source) -> dict[str, str]:
    """Name → the setting that has the most right answers on the validation problems."""
    runs = [*shown(source.one.settings, source.where, source.wanted_settings(), source.runs).values()]
    for run in runs:
        need(run, ("policy", "pass_at_1"), source.where / pool.FILE)
    rows = [run.row for run in runs]
    return best(rows, source.one.tries)


# Tables -----------------------------------------------------------------------------------------------------------

SPREAD = "**{:.1%}** ({:.1%} to {:.1%})"


def tested(row: Row, beside: str) -> tuple[Any, ...]:
    """A difference in points, its interval, and what the test says of it."""
    test = row["tests"].get(beside)
    if test is None:
        return None, None, None, None
    p = test["corrected"]
    said = f"p < {SURE:g}" if p < SURE else f"p = {p:.2g}"
    if test["less_low"] > -EQUAL and test["less_high"] < EQUAL:
        said += ", ≈"
    return 100 * test["less"], 100 * test["less_low"], 100 * test["less_high"], said


def of_tests(beside: Sequence[str]) -> tuple[Column, ...]:
    """A column for each policy that others are tested against. A ? in a heading: it may be left out."""
    return tuple(
        (f"less `{name}`?", partial(tested, beside=name), "{:+.1f} ({:+.1f} to {:+.1f}), {}") for name in beside
    )


def said_of_tests(result: Result) -> list[str]:
    """What the columns mean."""
    settings = result["settings"]
    points = f"{100 * EQUAL:g} points"
    budgets = sorted(result["left_out"], key=lambda budget: budget or 0)
    left_out = [f"{result['left_out'][budget]} at {budget_text(budget)}" for budget in budgets if budget is not None]
    if None in result["left_out"]:
        left_out.append(f"{result['left_out'][None]} without a budget")
    lacking = [f"Policies left out, because some family has no run yet: {', '.join(left_out)}."] if left_out else []
    families = ", ".join(f"`{family}`" for family in result["families"])
    text = [
        f"{settings['limit']} {settings['split']} problems each of {families}. Less: the difference in points, its "
        "95 % interval (bootstrap over problems), and the probability of McNemar's exact test, corrected by Holm for "
        f"all tests of this table. ≈: the whole interval is within {points}. Bytes: the mean of peaks, of the full "
        "cache's.",
        *lacking,
        *said_of_commits(result),
    ]
    return [" ".join(text), ""]


def said_of_losses(result: Result) -> list[str]:
    """What the columns mean."""
    text = "Above full: nats a token, mean over texts, with the 95 % interval (bootstrap over texts)."
    return [" ".join([text, *said_of_commits(result)]), ""]


def said_below_ranks(result: Result) -> list[str]:
    """What the columns mean."""
    text = [
        "Spearman's rank correlation over policies, one setting of each, with the 95 % interval (bootstrap over "
        "policies), and their number. Less loss counts as better. “Less” is the difference of two correlations with "
        "the same third order, over the policies that all three have.",
        *said_of_commits(result),
    ]
    few = dict[tuple[str, ...], list[str]]()
    for row in result["measurements"]:
        if row["families"] != result["families"]:
            few.setdefault(tuple(row["families"]), []).append(
                f"{row['first']} and {row['second']} at {budget_text(row['budget'])}"
            )
    for names, where in few.items():
        text.append(f"Only of {', '.join(names)}, because few policies have run elsewhere: {'; '.join(where)}.")
    return [" ".join(text), ""]


def said_of_settings(result: Result) -> list[str]:
    """What the columns mean."""
    about = result["settings"]
    text = [
        f"{about['limit']} {about['split']} problems of each family. Bold: the setting that is chosen, which has the "
        "most right answers of its three, whatever its bytes. All: with Wilson's 95 % interval. Less: the difference "
        "in points, its 95 % interval (bootstrap over problems), and the probability of McNemar's exact "
        "test, corrected by Holm for all tests of this table. Bytes: the mean of peaks, of the full cache's."
    ]
    return [" ".join([*text, *said_of_commits(result)]), ""]


def with_budget(result: Result) -> list[Row]:
    """Rows of policies with a budget, best first at the budget at which most policies have run, the least of several.
    Policies that have not run there come last."""
    rows = [m for m in result["measurements"] if m["budget"] is not None]
    numbers = Counter(row["budget"] for row in rows)
    first = min(numbers, key=lambda budget: (-numbers[budget], budget), default=None)
    rights = {row["policy"]: row["right"] for row in rows if row["budget"] == first}
    return sorted(rows, key=lambda row: (-rights.get(row["policy"], 0), row["policy"], row["budget"]))


def without_budget(result: Result) -> list[Row]:
    """The other rows, those with the most right answers first."""
    rows = [m for m in result["measurements"] if m["budget"] is None]
    return sorted(rows, key=lambda row: (-row["right"], row["policy"]))


def tables_of(one: Transfer) -> dict[str, Table]:
    """The tables of a comparison, by kind."""
    policy: Column = ("policy", "policy", "`{}`")
    ends: tuple[Column, ...] = (("cut off", "cut_off", "{:.1%}"), ("bytes", "of_full", "{:.1%}"))
    right: Column = ("right", ("right", "low", "high"), SPREAD)
    return {
        "right": Table(
            (policy,),
            rows=with_budget,
            across="budget",
            cells=(("{:share}: right", right[1], SPREAD), *of_tests(one.beside), *ends),
            said=said_of_tests,
        ),
        "bits": Table(
            (policy, right, *of_tests((FULL,)), ("tokens", "generated_mean", "{:,.0f}"), *ends),
            rows=without_budget,
            said=said_of_tests,
        ),
        "settings": Table(
            (
                ("setting", "setting", "{}"),
                ("budget", "budget", "{:share}"),
                *((family, f"by_family.{family}", "{:.0%}") for family in families()),
                ("all", ("right", "low", "high"), SPREAD),
                *of_tests(one.beside[:1]),
                *ends,
            ),
            said=said_of_settings,
        ),
        "losses": Table(
            (policy, ("budget", lambda m: m["budget"] or 0, "{:share}")),
            across="family",
            cells=(
                (
                    "{}: above full",
                    ("above.less", "above.less_low", "above.less_high"),
                    "{:+.4f} ({:+.4f} to {:+.4f})",
                ),
                ("bytes", "of_full", "{:.1%}"),
            ),
            said=said_of_losses,
        ),
        "ranks": Table(
            (("of", "first", "{}"), ("and", "second", "{}")),
            across="budget",
            cells=(("{:share}", ("rho", "low", "high", "policies"), "**{:+.2f}**[ ({:+.2f} to {:+.2f})], {}"),),
            said=said_below_ranks,
        ),
    }


@dataclass(frozen=True)
class Entry:
    """A table of a document."""

    table: Table
    one: Transfer
    result: Callable[[Source], Result]


def entries() -> dict[str, Entry]:
    """All tables by name: NAME-right-MODEL, NAME-bits-MODEL, NAME-losses-MODEL, NAME-settings-MODEL, NAME-ranks."""
    found = dict[str, Entry]()
    for name, one in TRANSFERS.items():
        tables = tables_of(one)
        for model in one.models:
            answers = partial(Source.answers, model=model)
            found[f"{name}-right-{model}"] = Entry(tables["right"], one, answers)
            found[f"{name}-bits-{model}"] = Entry(tables["bits"], one, answers)
            found[f"{name}-losses-{model}"] = Entry(tables["losses"], one, partial(Source.losses, model=model))
        found[f"{name}-settings-{one.tuned[0]}"] = Entry(tables["settings"], one, Source.settings)
        found[f"{name}-ranks"] = Entry(tables["ranks"], one, Source.ranks)
    return found


ENTRIES = entries()


def said_of_ranks(result: Result) -> list[str]:
    """The rank correlations in lines of text."""
    lines = []
    for row in result["measurements"]:
        rho = "–" if row["rho"] is None else f"{row['rho']:+.2f}"
        only = "" if row["families"] == result["families"] else f", only {', '.join(row['families'])}"
        if row["low"] is not None:
            rho += f" ({row['low']:+.2f} to {row['high']:+.2f})"
        names = f"{row['first']} | {row['second']} | {budget_text(row['budget'])}"
        lines.append(f"{names}: {rho}, {row['policies']} policies{only}")
    return lines


# The picture ----------------------------------------------------------------------------------------------------

COLOR = "#0072B2"


def draw(source: Source, budget: float, path: Path) -> None:
    """Right answers on the last model by those on each other one, and by its own losses: a point a policy.

    MinithinkError: there is nothing to compare with, matplotlib is missing, or the file cannot be written.
    """
    values = source.values()
    *_, model = source.one.models
    truth = values.pop((model, ANSWERS), {})
    named = {text: name for name, text in source.one.ranked.items()}
    panels = dict[tuple[str, str], Shared]()
    for what, own in values.items():
        both = shared([own, truth], [*named], budget)
        if both.policies and (what[1] == ANSWERS or what[0] == model):
            panels[what] = both
    if not panels:
        raise MinithinkError(
            f"The pool has no policies of {model} at {budget_text(budget)} to compare with another model or a loss: "
            "run `bench sweep`, or give another --budget."
        )
    with drawing(path, 4.2 * len(panels), 4.4) as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (what, both) in zip(axes, panels.items(), strict=True):
            is_loss = what[1] != ANSWERS
            mine = both.of(values[what], budget)
            theirs = both.of(truth, budget)
            x = [-value if is_loss else 100 * value for value in mine]
            y = [100 * value for value in theirs]
            axis.scatter(x, y, s=10, color=COLOR)
            axis.margins(x=0.15)  # room for the names
            for text, across, up in zip(both.policies, x, y, strict=True):
                axis.annotate(named[text], (across, up), xytext=(3, 2), textcoords="offset points", fontsize=5.5)
            if is_loss:
                axis.invert_xaxis()  # better is on the right, as in the others
            axis.set_xlabel(f"{said_of(what)}, {'nats' if is_loss else '% right'}")
            rho = spearman(mine, theirs)
            title = [] if rho is None else [f"rank correlation {rho:+.2f}"]
            if [*both.families] != source.of:
                title.append(f"only {', '.join(both.families)}")
            axis.set_title("; ".join(title), fontsize=8)
            axis.grid(color="#dddddd")
            axis.set_axisbelow(True)
        axes[0].set_ylabel(f"{model}, answers, % right at {budget_text(budget)}")
