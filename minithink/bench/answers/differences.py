"""Compare two policies problem by problem, with the answers that the pool of runs holds.

A difference is the share of right answers of one policy minus that of another one, on the same problems. Its interval
of 95 % is the bootstrap's over problems. Nothing is generated: a comparison (`bench sweep`) has brought the runs into
the pool. Differences that a page quotes and no table shows are printed by its script, docs/appendix/NAME.sh, or by a
command that the page names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from minithink.bench.answers import pool
from minithink.bench.answers.overall import DIFFERENCE, points
from minithink.bench.answers.sweep import OF_ANSWERS, SWEEPS, drawn, wanted_of
from minithink.bench.tables.markdown import aligned
from minithink.errors import MinithinkError, UsageError, alternatives
from minithink.evaluate.equal_bytes import between
from minithink.evaluate.paired import difference
from minithink.evaluate.plan import budgets
from minithink.evaluate.summary import FULL, budget_text
from minithink.results.pooled import need

ALL = "all"  # the families together
HEADINGS = (
    "budget",
    "family",
    "right",
    "difference",
    "bytes",
    "tokens",
    "other's budget",
    "right",
    "bytes",
    "tokens",
)


@dataclass(frozen=True)
class Side:
    """What one policy did at one budget."""

    budget: str
    right: list[float]  # of each problem: the share of its samples that were right
    size: float  # bytes at the peak, as a share of the full cache's
    tokens: float  # of a text, on average
    less: bool = False  # whether `right` is a difference from another family


Budget = float | None
Sides = dict[tuple[str, str, Budget], Side]  # by family, policy and budget


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench differences`."""
    add = parser.add_argument
    add("comparison", choices=OF_ANSWERS, metavar="COMPARISON", help=f"its name: {', '.join(OF_ANSWERS)}")
    add("policy", metavar="POLICY", help="as its table writes it")
    add("other", nargs="?", metavar="OTHER", help="default: the policy with which the comparison compares")
    add(
        "--other-in",
        nargs="+",
        choices=OF_ANSWERS,
        metavar="COMPARISON",
        help="those that have OTHER (default: the same)",
    )
    add("--budgets", type=budgets, metavar="N,N,…", help="as in 0.25,0.5 (default: all of POLICY)")
    add("--at", type=budgets, metavar="N,N,…", help="OTHER's budget: one, or one for each family (default: the same)")
    add("--families", nargs="+", metavar="FAMILY", help="default: all that the comparison has")
    add("--checkpoint", metavar="HASH", help="runs of these weights (default: those that the tables show)")
    add("--less", metavar="FAMILY", help="subtract what either policy does on this family, problem by problem")
    add("--same-bytes", action="store_true", help="OTHER at POLICY's bytes, on straight lines between its budgets")
    pool.add_results_argument(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Print a line for each budget and family, and one for all families together."""
    elsewhere = args.other_in or [args.comparison]
    other = args.other or SWEEPS[args.comparison].beside
    if not other:
        raise UsageError(f"The comparison {args.comparison} names no policy to compare with: give OTHER.")
    own = sides_of(args.comparison, args.results, args.checkpoint)
    others: Sides = {}
    for comparison in elsewhere:
        others |= sides_of(comparison, args.results, args.checkpoint)
    check(own, args.comparison, args.policy, args.budgets)
    check(others, " and ".join(elsewhere), other, args.at)
    families = families_of(own, args.families)
    if args.less is not None:
        families_of(own, [args.less])
        own = subtracted(own, args.less)
        others = subtracted(others, args.less)
        families = [family for family in families if family != args.less]
        if not families:
            raise UsageError(f"--less subtracts {args.less}, and no other family is left: give more --families.")
    if args.at is not None and args.same_bytes:
        raise UsageError("--at and --same-bytes both choose OTHER's budgets: give one of the two.")
    if args.at is not None and len(args.at) not in (1, len(families)):
        count = f"{len(args.at)} budgets for {len(families)} {'family' if len(families) == 1 else 'families'}"
        raise UsageError(f"--at gives {count}: give one, or one for each.")
    rows: list[tuple[str, ...]] = [HEADINGS]
    for budget in args.budgets or budgets_of(own, args.policy):
        mine = [found(own, family, args.policy, budget) for family in families]
        theirs = []
        for place, family in enumerate(families):
            if args.same_bytes:
                theirs.append(at_bytes(others, family, other, mine[place].size))
            else:
                at = args.at[place % len(args.at)] if args.at else budget
                theirs.append(found(others, family, other, at))
        if len(families) > 1:
            rows.append(line(ALL, together(mine), together(theirs)))
        for family, one, another in zip(families, mine, theirs, strict=True):
            rows.append(line(family, one, another))
    if args.other_in is None:
        print(f"{args.policy} minus {other}")
    else:
        print(f"{args.policy} in {args.comparison} minus {other} in {' and '.join(elsewhere)}")
    print(aligned(rows))
    return 0


def sides_of(comparison: str, where: Path, checkpoint: str | None = None) -> Sides:
    """The runs of a comparison that say which of their answers were right: those that its tables show, or those of
    other weights with the hash `checkpoint`. MinithinkError: there are none, or a run lacks a number."""
    sweep = SWEEPS[comparison]
    if checkpoint is not None:
        sweep = replace(sweep, checkpoint=checkpoint)
    runs = drawn(comparison, where, wanted_of(sweep))
    for run in runs:
        need(run, ("kv_bytes_peak", "generated_mean"), where / pool.FILE)
    full = {run.key["dataset"]: run.row["kv_bytes_peak"] for run in runs if run.key["policy"] == FULL}
    sides: Sides = {}
    for run in runs:
        if run.right and run.key["dataset"] in full:
            sides[run.cell] = Side(
                budget=budget_text(run.key["budget"]),
                right=run.shares,
                size=run.row["kv_bytes_peak"] / full[run.key["dataset"]],
                tokens=run.row["generated_mean"],
            )
    return sides


def budgets_of(sides: Iterable[tuple[str, str, Budget]], policy: str) -> list[Budget]:
    """All budgets of a policy; None for a policy that takes none."""
    found = {budget for _, name, budget in sides if name == policy}
    return sorted(found, key=lambda budget: budget or 0)


def families_of(sides: Iterable[tuple[str, str, Budget]], wanted: Sequence[str] | None) -> list[str]:
    """The families that were asked for. UsageError: the comparison has no such family."""
    known = sorted({family for family, _, _ in sides})
    for family in wanted or ():
        if family not in known:
            raise UsageError(f"The comparison has no family {family!r}; {alternatives(family, known)}.")
    return list(wanted or known)


def check(sides: Sides, comparison: str, policy: str, wanted: Sequence[Budget] | None) -> None:
    """UsageError: a comparison has no run of a policy, or not at these budgets."""
    policies = sorted({name for _, name, _ in sides})
    if policy not in policies:
        raise UsageError(f"{comparison} has no answers of {policy!r}; {alternatives(policy, policies)}.")
    known = budgets_of(sides, policy)
    for budget in wanted or ():
        if budget not in known:
            there = ", ".join(map(budget_text, known))
            raise UsageError(f"{comparison} has {policy} at {there}, not at {budget_text(budget)}.")


def found(sides: Sides, family: str, policy: str, budget: Budget) -> Side:
    """A policy at a budget on one family. A policy that takes no budget is compared with any."""
    if (family, policy, None) in sides:
        budget = None
    if (family, policy, budget) not in sides:
        raise MinithinkError(
            f"The pool has no answers of {policy} at {budget_text(budget)} in {family} that say which were right: "
            "give other --budgets, --at or --families."
        )
    return sides[family, policy, budget]


def at_bytes(sides: Sides, family: str, policy: str, size: float) -> Side:
    """A policy between two of its budgets, where it takes so many bytes. MinithinkError: it never does."""
    own = [side for (name, method, _), side in sides.items() if (name, method) == (family, policy)]
    if not own:
        raise MinithinkError(
            f"The pool has no answers of {policy} in {family} that say which were right: give other --families."
        )
    own.sort(key=lambda side: side.size)
    places = between([side.size for side in own], size)
    if places is not None:
        low = own[places[0]]
        high = own[places[1]]
        share = places[2]
        return Side(
            budget=low.budget if low is high else f"{low.budget} to {high.budget}",
            right=[x + share * (y - x) for x, y in zip(low.right, high.right, strict=True)],
            size=size,
            tokens=low.tokens + share * (high.tokens - low.tokens),
        )
    raise MinithinkError(
        f"{policy} takes {own[0].size:.1%} to {own[-1].size:.1%} of the full cache's bytes in {family}, never "
        f"{size:.1%}: give other --budgets or --families."
    )


def subtracted(sides: Sides, family: str) -> Sides:
    """Each side minus what the same policy does on another family, whose problems correspond to its own."""
    out: Sides = {}
    for (name, policy, budget), side in sides.items():
        base = sides.get((family, policy, budget))
        if base is not None:
            right = [x - y for x, y in zip(side.right, base.right, strict=True)]
            out[name, policy, budget] = replace(side, right=right, less=True)
    return out


def together(sides: Sequence[Side]) -> Side:
    """All families: their problems together, the means of their bytes and lengths."""
    return Side(
        budget=", ".join(dict.fromkeys(side.budget for side in sides)),
        right=[share for side in sides for share in side.right],
        size=fmean(side.size for side in sides),
        tokens=fmean(side.tokens for side in sides),
        less=sides[0].less,
    )


def line(family: str, own: Side, other: Side) -> tuple[str, ...]:
    """A line of the table."""
    return (
        own.budget,
        family,
        said(own),
        DIFFERENCE.format(*points({"less": difference(own.right, other.right)})),
        f"{own.size:.1%}",
        f"{own.tokens:,.0f}",
        other.budget,
        said(other),
        f"{other.size:.1%}",
        f"{other.tokens:,.0f}",
    )


def said(side: Side) -> str:
    """The share of right answers; what was subtracted from it makes it a difference, which has an interval."""
    if not side.less:
        return f"{fmean(side.right):.1%}"
    return DIFFERENCE.format(*points({"less": difference(side.right, [0.0] * len(side.right))}))
