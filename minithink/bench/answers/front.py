"""Every policy of a comparison on one model: right answers by bytes, with all else that the pool knows of them.

This is the table of docs/methods.md. A row is a policy at a budget, or a number format, which has no budget. Its
figures are means over families. A row is on the *front* if no other row has as many right answers or more with as
many bytes or fewer (`pareto_front`). Other rows say how many points they are below the best row of at most their
bytes.

Nothing is generated: `bench sweep` has brought the runs into the pool. What the pool lacks is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from minithink.bench.answers import losses, pool, sweep, transfer
from minithink.bench.answers.overall import DIFFERENCE, LEVEL, together
from minithink.bench.answers.pool import Run
from minithink.bench.answers.sweep import said_of_commits, wanted_of
from minithink.bench.answers.transfer import ENOUGH, SPREAD, Cell, Entry, Source, add_tests, right_of, tested
from minithink.bench.methods import Column, Result, Row, Table, Transfer, collected
from minithink.bench.methods.settings import PROTECTED
from minithink.bench.tables.markdown import CHANGED, LEGEND
from minithink.bench.tables.markdown import source as said_of_source
from minithink.cli.commands import location, positive
from minithink.errors import MinithinkError, UsageError, alternatives, counted
from minithink.evaluate.paired import holm
from minithink.evaluate.plots import pareto_front
from minithink.evaluate.summary import FULL, budget_text, code
from minithink.results import record
from minithink.results.figures import drawing, need_matplotlib

LIMITS = (0.125, 0.25, 0.5)  # shares of the full cache's bytes for which the best row is named
SHAPE = "llama-8b"  # of the steps that are timed, and how many sequences they have
SEQUENCES = 64
MARK = "●"  # before rows of the front


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench front`."""
    add = parser.add_argument
    names = tuple(transfer.TRANSFERS)
    add("name", nargs="?", default=transfer.DEFAULT, choices=names, help=f"which comparison: {', '.join(names)}")
    add("--model", metavar="TITLE", help="a model of the comparison (default: its last one)")
    add("--plot", type=location, metavar="FILE", help="draw right answers by bytes, and the fronts, as SVG")
    add("--limit", type=positive, metavar="N", help="show a quick look that `bench sweep --limit N` has made")
    pool.add_results_argument(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Print what is best by bytes and by tokens, and which differences are significant; draw."""
    one = transfer.TRANSFERS[args.name]
    model = args.model or last_of(one)
    if model not in one.models:
        raise UsageError(f"{args.name} has no model {model!r}; {alternatives(model, list(one.models))}.")
    if args.plot is not None:
        need_matplotlib()
    result = result_of(Source(one, args.results, limit=args.limit), model)
    print("\n".join(said_first(result)))
    if args.plot is not None:
        draw(result, args.plot)
    return 0


def last_of(one: Transfer) -> str:
    """The model that the others are compared with."""
    *_, model = one.models
    return model


# The rows ---------------------------------------------------------------------------------------------------------


def result_of(source: Source, model: str) -> Result:
    """The comparison on one model, as of `sweep.result_of`, but with a row for each policy and budget that has runs,
    in the order of the table.

    A row has what `overall.together` makes of its families, and beside it

        by_family      family → the row of its run
        lacks          families without a run; the row is not ranked then
        front, below   whether it is on the front; how far it is below the best row of at most its bytes
        tests          policy → the paired test against it (`transfer.add_tests`)
        untested       why there is no test
        tokens_mean, kv_bytes_peak, needed_kept     means over families; None where a run does not know
        loss           of real text, above the full cache's, nats a token
        own_step       milliseconds of a step of this model
        step           milliseconds of a step, of another model's shape

    MinithinkError: the pool has no run of this model.
    """
    name = source.one.answers
    wanted = wanted_of(source.sweep_of(name, model))
    result = sweep.result_of(name, source.where, wanted, runs=source.runs, marked=source.marked)
    runs = source.runs_of(name, model)
    families = families_of(result["measurements"])
    if not families:
        raise MinithinkError(
            f"{source.where / pool.FILE} has no run of the full cache on {model}, of which bytes are shares: run "
            f"`bench sweep {name}` with its folder."
        )
    needs = {run.cell: run.row.get("needed_kept") for run in runs}
    by_cell = dict[Cell, dict[str, Any]]()
    for m in result["measurements"]:
        if m["family"] in families:
            needed = needs[m["family"], m["policy"], m["budget"]]
            own_of_cell = by_cell.setdefault((m["policy"], m["budget"]), {})
            own_of_cell[m["family"]] = {**m, "needed_kept": needed, "tests": {}}
    lost = above_full(source, model)
    steps = steps_of(source.one, source.where)
    own_steps = own_steps_of(source.one, model, wanted[0]["checkpoint"], source.where)
    rows = list[dict[str, Any]]()
    for (policy, budget), own in by_cell.items():
        row = together(policy, budget, [*own.values()]) | {"tests": {}, "front": False, "below": None}
        row["by_family"] = own
        row["lacks"] = [family for family in families if family not in own]
        for column in ("tokens_mean", "kv_bytes_peak", "needed_kept"):
            row[column] = mean_of(own.values(), column)
        row["loss"] = lost.get((policy, budget))
        row["own_step"] = own_steps["milliseconds"].get((policy, budget))
        row["step"] = steps["milliseconds"].get(without_protection(policy))
        rows.append(row)
    shown = [run for run in runs if run.cell[0] in families]
    add_all_tests(rows, right_of(shown), source.one)
    add_family_tests(rows, shown, source.one)
    mark_front(rows)
    return result | {
        "measurements": sorted(rows, key=place_of),
        "model": model,
        "weights": wanted[0]["checkpoint"],
        "families": families,
        "too_few": sorted({key["dataset"] for key in wanted} - set(families)),
        "lacking": lacking(wanted, by_cell),
        "beside": beside_of(source.one),
        "ranked": source.one.ranked,
        "steps": steps,
        "own_steps": own_steps,
    }


def beside_of(one: Transfer) -> str:
    """The policy with which all are compared that evict: the last one that the comparison names."""
    return one.beside[-1]


def families_of(measurements: Sequence[Row]) -> list[str]:
    """The families that count: those that the full cache has run on, and that have enough runs to compare."""
    counts = dict[str, int]()
    for m in measurements:
        counts[m["family"]] = counts.get(m["family"], 0) + 1
    of_full = {m["family"] for m in measurements if m["policy"] == FULL}
    most = max(counts.values())
    return sorted(family for family in of_full if counts[family] >= ENOUGH * most)


def mean_of(own: Iterable[Row], column: str) -> float | None:
    """The mean over families; None: some run does not know."""
    values = list[float]()
    for m in own:
        value = m.get(column)
        if value is None:
            return None
        values.append(value)
    return fmean(values)


def above_full(source: Source, model: str) -> dict[Cell, float]:
    """Policy and budget → the loss of real text, above the full cache's; empty if there are no runs."""
    try:
        source.runs_of(source.one.losses, model)
    except MinithinkError:
        return {}
    found = dict[Cell, float]()
    for row in source.losses(model)["measurements"]:
        if row["family"] == losses.FIXED and row["above"] is not None:
            found[row["policy"], row["budget"]] = row["above"]["less"]
    return found


def steps_of(one: Transfer, where: Path) -> dict[str, Any]:
    """The step times of a file of results: milliseconds by the text of a policy without its budget, `budget`, and
    `said`, the file's source in words. Without a file there are none."""
    found: dict[str, Any] = {"milliseconds": {}, "budget": None, "said": ""}
    path = where / f"{one.steps}.json"
    if not one.steps or not path.is_file():
        return found
    result = record.read(path)
    texts = collected("CASES")[one.steps].methods
    for m in result["measurements"]:
        text = texts.get(m["method"])
        own = m["settings"]
        if m["kind"] != "step" or m["batch"] != SEQUENCES or own["model_shape"] != SHAPE or text is None:
            continue
        found["milliseconds"][without_budget(text)] = m["step_milliseconds"]
        found["budget"] = own["budget"]
    found["said"] = f"{said_of_source(result)} ({path.name})"
    return found


def own_steps_of(one: Transfer, model: str, weights: str, where: Path) -> dict[str, Any]:
    """The step times of `bench model-steps` on the model with these weights: milliseconds by policy and budget, and
    `said`, what they are in words, or that a file of this model is missing."""
    found: dict[str, Any] = {"milliseconds": {}, "said": ""}
    if model not in one.model_steps:
        return found
    path = where / f"{one.model_steps[model]}.json"
    if not path.is_file():
        found["said"] = "No step of this model was timed (`bench model-steps` does)."
        return found
    result = record.read(path)
    if result["settings"]["weights"] != weights:
        found["said"] = f"Steps in {path.name} are of other weights, and are not shown."
        return found
    found["milliseconds"] = {(m["policy"], m["budget"]): m["step_milliseconds"] for m in result["measurements"]}
    size = result["settings"]
    found["said"] = (
        f"Step: {size['batch']} sequences of this model in {size['dtype']}, random prompts of "
        f"{size['prompt_tokens']:,} tokens, the row's share of {size['tokens']:,} tokens, the mean of "
        f"{size['steps']:,} steps in the middle: {said_of_source(result)} ({path.name})"
    )
    return found


def without_budget(text: str) -> str:
    """ "rkv:budget={budget},lam=0.3" → "rkv:lam=0.3"."""
    name, _, options = text.partition(":")
    own = [option for option in options.split(",") if option and not option.startswith("budget=")]
    return f"{name}:{','.join(own)}" if own else name


def without_protection(text: str) -> str:
    """The same policy without what keeps its prompt, which is taken to cost no time."""
    name, _, options = text.partition(":")
    own = [option for option in options.split(",") if option and option != PROTECTED]
    return f"{name}:{','.join(own)}" if own else name


def add_all_tests(rows: Sequence[dict[str, Any]], right: Mapping[Cell, Sequence[float]], one: Transfer) -> None:
    """Test each row against one policy (`beside_of`) at its own budget, and a row without a budget against the full
    cache: row["tests"]. row["untested"] says why there is no test; "": it is one of the two."""
    beside = beside_of(one)
    add_tests(rows, right, (beside, FULL))
    for row in rows:
        row["untested"] = ""
        other = FULL if row["budget"] is None else beside
        if row["tests"] or row["policy"] == other or row.get("lacks"):
            continue
        row["untested"] = f"no answers of {code(other)}"
        if (other, row["budget"]) in right:
            row["untested"] = "its answers were not kept"


def add_family_tests(rows: Sequence[Row], runs: Iterable[Run], one: Transfer) -> None:
    """The same for the row of each family, corrected for all of these tests together."""
    by_family = dict[str, list[Run]]()
    for run in runs:
        by_family.setdefault(run.cell[0], []).append(run)
    tests = list[dict[str, Any]]()
    for family, own in by_family.items():
        right = {run.cell[1:]: run.shares for run in own if run.right}
        some = [row["by_family"][family] for row in rows if family in row["by_family"]]
        add_all_tests(some, right, one)
        for m in some:
            tests += m["tests"].values()
    for test, p in zip(tests, holm([test["p"] for test in tests]), strict=True):
        test["corrected"] = p


def mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Set `front` and `below` of the rows that no family lacks; likewise of each family's rows, by themselves."""
    ranked = [row for row in rows if not row["lacks"]]
    for i in pareto_front([(row["of_full"], row["right"]) for row in ranked]):
        ranked[i]["front"] = True
    for row in ranked:
        row["below"] = max(x["right"] for x in ranked if x["of_full"] <= row["of_full"]) - row["right"]
    by_family = dict[str, list[Any]]()
    for row in rows:
        for family, m in row["by_family"].items():
            by_family.setdefault(family, []).append(m)
    for own in by_family.values():
        best = pareto_front([(m["of_full"], m["pass_at_1"]) for m in own])
        for i, m in enumerate(own):
            m["front"] = i in best


def place_of(row: Row) -> tuple[Any, ...]:
    """The order of the table: the front by bytes, then the other rows, the nearest to the front first, then those
    that lack a family."""
    below = 0.0 if row["front"] or row["lacks"] else row["below"]
    return bool(row["lacks"]), not row["front"], below, row["of_full"], row["policy"], row["budget"] or 0


def lacking(wanted: Sequence[Mapping[str, Any]], found: Mapping[Cell, object]) -> dict[str, list[float | None]]:
    """Policy → its budgets without any run."""
    cells = dict.fromkeys((key["policy"], key["budget"]) for key in wanted)
    without = dict[str, list[float | None]]()
    for policy, budget in cells:
        if (policy, budget) not in found:
            without.setdefault(policy, []).append(budget)
    return without


# Sentences ----------------------------------------------------------------------------------------------------------


def said_first(result: Result) -> list[str]:
    """What is best when bytes count, when tokens count and when neither is known, and which differences are
    significant, as a list."""
    settings = result["settings"]
    ranked = [row for row in result["measurements"] if not row["lacks"]]
    said = [
        f"On **{result['model']}** (weights `{result['weights']}`), {settings['limit']} {settings['split']} problems "
        f"of each of {', '.join(code(family) for family in result['families'])}:",
        "",
        f"* **When bytes count**: {said_of_bytes(ranked)}",
        f"* **When tokens count**: {said_of_tokens(ranked)}",
        f"* **When it is not known which of them counts**: {said_of_neither(ranked)}",
        f"* **What is significant**: {said_of_significance(ranked, result['beside'], result['ranked'])}",
        "",
    ]
    return [*said, LEGEND, ""] if any(CHANGED in line for line in said) else said


def named(row: Row) -> str:
    """A policy and its budget."""
    budget = "" if row["budget"] is None else f" at {budget_text(row['budget'])}"
    return f"{marked(row)}{budget}"


def marked(row: Row) -> str:
    """A policy, with the mark of those whose code has changed."""
    return f"{code(row['policy'])}{CHANGED if row.get('changed') else ''}"


def percent(share: float) -> str:
    """With one decimal."""
    return f"{100 * share:.1f} %"


def said_of_bytes(ranked: Sequence[Row]) -> str:
    """The row with the most right answers within each limit of bytes."""
    limits = dict[str, list[str]]()  # what is said of the best row → the limits at which it is the best
    for limit in LIMITS:
        within = [row for row in ranked if row["of_full"] <= limit]
        said = "there is nothing"
        if within:
            best = max(within, key=lambda row: (row["right"], -row["of_full"]))
            figures = f"{percent(best['right'])} right, with {percent(best['of_full'])} of the bytes"
            said = f"{named(best)} is best ({figures})"
        limits.setdefault(said, []).append(budget_text(limit))
    parts = [f"within {joined(own)} of the full cache's bytes {said}" for said, own in limits.items()]
    return f"{'; '.join(parts)}."


def joined(words: Sequence[str]) -> str:
    """As in "12.5 %, 25 % and 50 %"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def said_of_tokens(ranked: Sequence[Row]) -> str:
    """The row with the most right answers at each budget."""
    parts = []
    for budget in budgets_of(ranked):
        own = [row for row in ranked if row["budget"] == budget]
        best = max(own, key=lambda row: (row["right"], -(row["tokens_mean"] or 0)))
        figures = f"{percent(best['right'])} right"
        if best["tokens_mean"] is not None:
            figures += f", holding {best['tokens_mean']:,.0f} tokens on average"
        parts.append(f"at a budget of {budget_text(budget)} {marked(best)} is best ({figures})")
    return f"{'; '.join(parts) or 'no policy with a budget was measured'}."


def said_of_neither(ranked: Sequence[Row]) -> str:
    """Of what keeps all tokens, the row with the fewest bytes whose interval lies near the full cache's answers."""
    whole = [row for row in ranked if row["budget"] is None and FULL in row["tests"]]
    near = [row for row in whole if row["tests"][FULL]["less_low"] >= -transfer.EQUAL]
    points = f"{100 * transfer.EQUAL:g} points"
    if not near:
        return f"of nothing that keeps all tokens it is shown that it is at most {points} below the full cache."
    best = min(near, key=lambda row: row["of_full"])
    less, low, high = (100 * best["tests"][FULL][name] for name in ("less", "less_low", "less_high"))
    return (
        f"{marked(best)} has the fewest bytes of what is at most {points} below the full cache by its whole interval "
        f"({percent(best['right'])} right, {less:+.1f} points, {low:+.1f} to {high:+.1f}, with "
        f"{percent(best['of_full'])} of the bytes)."
    )


def budgets_of(rows: Iterable[Row]) -> list[float]:
    """The budgets of some rows, the smallest first."""
    return sorted({row["budget"] for row in rows if row["budget"] is not None})


def said_of_significance(ranked: Sequence[Row], beside: str, names: Mapping[str, str]) -> str:
    """How many differences from `beside` are significant, and which policies are above it; then the same of rows
    without a budget and the full cache. names: short name → policy with its settings."""
    tests = sum(len(row["tests"]) for row in ranked)
    if not tests:
        return "nothing was tested, as no two runs say which of their answers were right."
    parts = []
    for budget in budgets_of(ranked):
        own = [row for row in ranked if row["budget"] == budget and beside in row["tests"]]
        if own:
            parts.append(f"at {budget_text(budget)} {above_and_below(own, beside, names)}")
    said = []
    if parts:
        said.append(f"compared with {code(short_of(beside, names))} at the same budget, {'; '.join(parts)}")
    whole = [row for row in ranked if row["budget"] is None and FULL in row["tests"]]
    if whole:
        said.append(f"without a budget, compared with {code(FULL)}, {above_and_below(whole, FULL, names)}")
    return f"at p ≤ {LEVEL:g} after Holm's correction for {counted(tests, 'test')}, {'; '.join(said)}."


def short_of(policy: str, names: Mapping[str, str]) -> str:
    """A policy without the settings that the comparison gives it; other settings are named."""
    for name, text in sorted(names.items(), key=lambda item: -len(item[1])):
        if policy == text or policy.startswith(f"{text}+"):
            return f"{name}{policy.removeprefix(text)}"
    return policy


def above_and_below(rows: Sequence[Row], beside: str, names: Mapping[str, str]) -> str:
    """The names of those that are significantly above, and the number of those below and of the others."""
    above = list[str]()
    below = 0
    for row in rows:
        test = row["tests"][beside]
        if test["corrected"] <= LEVEL and test["less"] > 0:
            above.append(code(short_of(row["policy"], names)))
        elif test["corrected"] <= LEVEL:
            below += 1
    others = len(rows) - len(above) - below
    which = f" ({', '.join(above)})" if above else ""
    return f"{len(above) or 'none'} above{which}, {below or 'none'} below, {others or 'none'} neither"


def said_below(result: Result) -> list[str]:
    """What the columns mean, and what is missing."""
    steps = result["steps"]
    parts = [
        f"{MARK}: on the front, of right answers and bytes as they were measured, without their intervals. Below the "
        "front: points less than the best row of at most the same bytes. A budget is the prompt and that share of "
        "what the full cache generates. Right: of the problems of all families, with Wilson's 95 % interval.",
        f"Difference: points from {code(result['beside'])} at the same budget, of rows without a budget from "
        f"{code(FULL)}, with the 95 % interval (bootstrap over problems) and the probability of McNemar's exact "
        "test, corrected by Holm for all tests of this table. ≈: the whole interval is within "
        f"{100 * transfer.EQUAL:g} points.",
        "Held: tokens of a lane at an average step. Bytes: by the ledger, with the policy's state and its "
        "observations, the mean of peaks. Loss: of real text, nats a token above the full cache's.",
    ]
    if all(row["needed_kept"] is None for row in result["measurements"]):
        parts.append(
            "No column says how much of what the statements of a text need is kept: no run here measured it "
            "(`bench sweep --needed` does)."
        )
    if result["own_steps"]["said"]:
        parts.append(result["own_steps"]["said"])
    if steps["said"]:
        parts.append(
            f"8B step: {SEQUENCES} sequences of a random model of the shape {SHAPE} that hold {steps['budget']:,} "
            f"tokens, whatever the row's budget, where exactly these settings were timed: {steps['said']}"
        )
    lines = [" ".join([*parts, *said_of_commits(result)]), ""]
    missing = said_of_missing(result)
    return [*lines, " ".join(missing), ""] if missing else lines


def said_of_missing(result: Result) -> list[str]:
    """Sentences that name families with too few runs, and policies without runs."""
    said = []
    if result["too_few"]:
        families = ", ".join(code(family) for family in result["too_few"])
        said.append(f"Too few policies have run on {families}, which is not shown.")
    without_some = {budget for budgets in result["lacking"].values() for budget in budgets if budget is not None}
    nowhere = sorted(without_some - {m["budget"] for m in result["measurements"]})
    if nowhere:
        said.append(f"In these families no policy has run at {', '.join(map(budget_text, nowhere))}.")
    names = []
    for policy, budgets in result["lacking"].items():
        left = [budget for budget in budgets if budget not in nowhere]
        if left:
            at = ", ".join(budget_text(budget) for budget in left if budget is not None)
            names.append(f"{code(policy)}{f' ({at})' if at else ''}")
    if names:
        said.append(f"**Not run on this model**: {'; '.join(names)}.")
    return said


def said_below_families(result: Result) -> list[str]:
    """What the columns of the families' table mean."""
    text = [
        f"The rows of the table above, in its order. {MARK}: on the front of the family. Difference: as there, but "
        "corrected for all tests of this table. Bytes: of the full cache's.",
        *said_of_commits(result),
    ]
    return [" ".join(text), ""]


# Tables -------------------------------------------------------------------------------------------------------------


def policy_of(row: Row) -> str:
    """The policy as code, with the mark of the front."""
    return f"{MARK} {code(row['policy'])}" if row["front"] else code(row["policy"])


def right_answers(row: Row) -> str:
    """The share of right answers and its interval, or which families lack a run."""
    if row["lacks"]:
        return f"– (not run on {', '.join(row['lacks'])})"
    return SPREAD.format(row["right"], row["low"], row["high"])


def ranked_value(row: Row, name: str) -> Any:
    """A mean over families; None where one is missing, as the others are not comparable."""
    return None if row["lacks"] else row[name]


def difference_of(row: Row) -> str:
    """A difference in points, its interval, and what the test says of it; or why there is none."""
    for other in row["tests"]:
        less, low, high, said = tested(row, other)
        named_other = f", from {code(FULL)}" if other == FULL else ""
        return f"{DIFFERENCE.format(less, low, high)}, {said}{named_other}"
    return f"– ({row['untested']})" if row["untested"] else "–"


NO_RUN: Row = {"front": False, "tests": {}, "untested": ""}  # of a policy in a family


def family_rows(result: Result) -> list[Row]:
    """A row for each family of each row."""
    rows = list[Row]()
    for row in result["measurements"]:
        for family in result["families"]:
            m = row["by_family"].get(family, NO_RUN)
            rows.append({**m, "policy": row["policy"], "budget": row["budget"], "family": family})
    return rows


def right_in_family(row: Row) -> str:
    """The mark of the family's front, if the row is on it; right answers and their interval."""
    if "pass_at_1" not in row:
        return "– (not run)"
    mark = f"{MARK} " if row["front"] else ""
    return mark + SPREAD.format(row["pass_at_1"], row["pass_at_1_low"], row["pass_at_1_high"])


def tables() -> dict[str, Table]:
    """The tables of a model by the middle of their names: the sentences above, all families, each family."""
    budget: Column = ("budget", lambda m: m["budget"] or 0, "{:share}")

    def mean(name: str) -> Any:
        return partial(ranked_value, name=name)

    return {
        "methods-said": Table((), said=said_first),
        "methods": Table(
            (
                ("policy", policy_of, "{}"),
                budget,
                ("right", right_answers, "{}"),
                ("below the front", lambda m: None if m["below"] is None else 100 * m["below"], "{:.1f}"),
                ("difference", difference_of, "{}"),
                ("held", mean("tokens_mean"), "{:,.0f}"),
                ("MiB", mean("kv_bytes_peak"), "{:mib}"),
                ("of full's bytes", mean("of_full"), "{:.1%}"),
                ("length", mean("generated_mean"), "{:,.0f}"),
                ("cut off", mean("cut_off"), "{:.1%}"),
                ("in a loop", mean("looped"), "{:.1%}"),
                ("needs kept?", mean("needed_kept"), "{:.1%}"),
                ("loss", "loss", "{:+.4f}"),
                ("step?", "own_step", "{:.2f} ms"),
                ("8B step", "step", "{:.1f} ms"),
            ),
            said=said_below,
        ),
        "methods-families": Table(
            (("policy", "policy", "`{}`"), budget),
            rows=family_rows,
            across="family",
            cells=(
                ("{}: right", right_in_family, "{}"),
                ("difference", difference_of, "{}"),
                ("bytes", "of_full", "{:.1%}"),
            ),
            said=said_below_families,
        ),
    }


def entries() -> dict[str, Entry]:
    """All tables by name: NAME-methods-said-MODEL, NAME-methods-MODEL and NAME-methods-families-MODEL. The same names
    without a model are of the last one."""
    found = dict[str, Entry]()
    for name, one in transfer.TRANSFERS.items():
        for model in one.models:
            result = partial(result_of, model=model)
            for kind, table in tables().items():
                found[f"{name}-{kind}-{model}"] = Entry(table, one, result)
        for kind in tables():
            found[f"{name}-{kind}"] = found[f"{name}-{kind}-{last_of(one)}"]
    return found


ENTRIES = entries()


# The picture --------------------------------------------------------------------------------------------------------

COLORS = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7")  # of budgets, the smallest first
GREY = "#666666"  # of rows without a budget
LINE = "#222222"  # of a front
TICKS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the axis of bytes, as shares of the full cache's
MANY = 30  # names that are written small
NEAR = 0.4  # of a family, rows that are farther below its front are not drawn
# Settings that make the file small: one font in place of a list, and dots that are lines without a length.
SMALL: dict[str, Any] = {"font.sans-serif": ["DejaVu Sans"], "path.simplify": False}


def draw(result: Result, path: Path) -> None:
    """Right answers by bytes, a point a row: all families together, and below them each family. The points of fronts
    have numbers, which a list beside the picture explains.

    MinithinkError: nothing can be ranked, matplotlib is missing, or the file cannot be written.
    """
    ranked = [row for row in result["measurements"] if not row["lacks"]]
    if not ranked:
        raise MinithinkError(f"No policy has run on all families of {result['model']}, so there is no front to draw.")
    families = result["families"]
    panels = {family: of_family(result["measurements"], family) for family in families}
    whole = [Point(named(row), row["budget"], row["of_full"], row["right"], row["front"]) for row in ranked]
    numbers = numbered([whole, *panels.values()])
    colors = colors_of(budgets_of(result["measurements"]))
    with drawing(path, 3.2 * max(3, len(families)), 7.6, **SMALL) as figure:
        grid = figure.add_gridspec(2, 3 * len(families), height_ratios=(1.6, 1))
        split = 2 * len(families)
        axis = figure.add_subplot(grid[0, :split])
        panel(axis, "all families", whole, numbers, colors)
        axis.grid(color="#e4e4e4")
        axis.set_axisbelow(True)
        axis.legend(loc="lower right", title="budget")
        list_names(figure.add_subplot(grid[0, split:]), numbers)
        for place, (family, points) in enumerate(panels.items()):
            below = figure.add_subplot(grid[1, 3 * place : 3 * place + 3])
            panel(below, family, near(points), numbers, colors)
            below.set_yticks(range(0, 101, 50))
        figure.supylabel(f"{result['model']}: right answers, %", fontsize="medium")
        figure.supxlabel(
            f"bytes, % of the full cache's (of a family, rows at most {100 * NEAR:g} points below its front)",
            fontsize="medium",
        )


@dataclass(frozen=True)
class Point:
    """A row in a panel."""

    name: str
    budget: float | None
    x: float  # bytes, as a share of the full cache's
    y: float  # share of right answers
    front: bool


def of_family(rows: Iterable[Row], family: str) -> list[Point]:
    """The points of one family."""
    points = list[Point]()
    for row in rows:
        m = row["by_family"].get(family)
        if m is not None:
            points.append(Point(named(row), row["budget"], m["of_full"], m["pass_at_1"], m["front"]))
    return points


def near(points: Sequence[Point]) -> list[Point]:
    """Those that are not far below the front."""
    found = list[Point]()
    for point in points:
        best = max(other.y for other in points if other.x <= point.x)
        if best - point.y <= NEAR:
            found.append(point)
    return found


def numbered(panels: Iterable[Sequence[Point]]) -> dict[str, int]:
    """The numbers of all points that are on a front: those of the first panel first, by bytes."""
    numbers = dict[str, int]()
    for points in panels:
        for point in sorted(points, key=lambda point: point.x):
            if point.front:
                numbers.setdefault(point.name, len(numbers) + 1)
    return numbers


def colors_of(budgets: Sequence[float]) -> dict[float | None, str]:
    """The colour of each budget."""
    found: dict[float | None, str] = {None: GREY}
    for place, budget in enumerate(budgets):
        found[budget] = COLORS[place % len(COLORS)]
    return found


def panel(
    axis: Any, title: str, points: Sequence[Point], numbers: Mapping[str, int], colors: Mapping[float | None, str]
) -> None:
    """Points by budget, and the front as steps."""
    for budget, color in colors.items():
        x = list[float]()
        y = list[float]()
        for point in points:
            if point.budget == budget:
                x += [100 * point.x, 100 * point.x, nan]
                y += [100 * point.y, 100 * point.y, nan]
        # Lines without a length, whose round ends are the dots: half of the bytes that markers take in an SVG.
        axis.plot(
            x,
            y,
            color=color,
            label="none" if budget is None else budget_text(budget),
            linewidth=3,
            solid_capstyle="round",
        )
    front = sorted((point for point in points if point.front), key=lambda point: point.x)
    axis.plot(
        [100 * point.x for point in front],
        [100 * point.y for point in front],
        color=LINE,
        drawstyle="steps-post",
        linewidth=0.8,
        zorder=0,
    )
    for point in front:
        at = (100 * point.x, 100 * point.y)
        axis.annotate(
            str(numbers[point.name]), at, xytext=(-2, 3), textcoords="offset points", fontsize=6, ha="right"
        )
    axis.set_title(title, fontsize=8)
    axis.set_ylim(-3, 108)
    axis.set_xscale("log", base=2)
    least = min(point.x for point in points)
    shares = [share for share in TICKS if share >= least / 2]
    axis.set_xticks([100 * share for share in shares], [f"{100 * share:g}" for share in shares])
    axis.minorticks_off()


def list_names(axis: Any, numbers: Mapping[str, int]) -> None:
    """What the numbers stand for."""
    axis.set_axis_off()
    lines = [f"{number}  {name.replace('`', '')}" for name, number in numbers.items()]
    text = "\n".join(["on a front:", *lines])
    size = 6 if len(lines) < MANY else 4.5
    axis.text(0, 1, text, va="top", fontsize=size, linespacing=1.3, transform=axis.transAxes)
