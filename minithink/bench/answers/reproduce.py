"""Run a cell of a comparison again, and compare its answers with those that the documents are made of.

A cell is a policy at a budget. The pool of results keeps the answers of the first 32 sequences of every run
(`answers/pool.py`). They are generated again on this machine, with the settings of the run, and compared one by one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minithink.bench.answers import pool
from minithink.bench.answers.pool import Run, key_of, pick
from minithink.bench.answers.sweep import OF_ANSWERS, SWEEPS, wanted_of
from minithink.bench.tables.markdown import aligned, short
from minithink.checkpoint.weights import checkpoint_hash
from minithink.cli.commands import INTERRUPTED, positive
from minithink.engine import DTYPES, TINY
from minithink.errors import MinithinkError, UsageError, alternatives, quoted
from minithink.evaluate import journal, runner
from minithink.evaluate.datasets import load_dataset
from minithink.evaluate.job import Job
from minithink.evaluate.plan import Cell, Spec, budgets
from minithink.evaluate.summary import FULL, budget_text
from minithink.results import origin
from minithink.tasks import families

SHOWN = 10  # answers that differ, in words
HELP = "The exit code is 0 if all answers are equal, and 1 if some differ."


@dataclass
class Compared:
    """An answer in the pool, and the one that was generated again."""

    dataset: str
    id: str
    sample: int
    then: str | None
    now: str | None
    right_then: bool | None  # None: the pool does not say whether it was right
    right_now: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench reproduce`."""
    add = parser.add_argument
    add("comparison", choices=OF_ANSWERS, metavar="COMPARISON", help=f"its name: {', '.join(OF_ANSWERS)}")
    add("policy", metavar="POLICY", help="as its table writes it")
    add(
        "budget",
        nargs="?",
        type=budgets,
        metavar="BUDGET",
        help="a share or tokens, as in 0.25 or 512; none for a policy that takes no budget",
    )
    add("--limit", type=positive, metavar="N", help=f"only the first N problems of a family (at most {pool.ANSWERS})")
    add("--families", nargs="+", default=families(), choices=families(), help="default: all")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=tuple(DTYPES), help="default: that of the run")
    add("--batch-size", type=positive, metavar="N", help="as in minithink.evaluate")
    pool.add_results_argument(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate the answers again, print how many are equal → 0 if all are."""
    budget = None if args.budget is None else args.budget[0]
    if args.budget is not None and len(args.budget) > 1:
        raise UsageError(f"{len(args.budget)} budgets were given, and one cell is run again: give one of them.")
    runs = pool.read(args.results)
    found = cells(runs, args.comparison, policy=args.policy, budget=budget, names=args.families)
    compared = list[Compared]()
    settings = dict[str, Any]()
    for done in found:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{done.key['dataset']}: {args.policy} runs again", file=sys.stderr, flush=True)
            length = length_of_full(runs, done)
            if length is None and isinstance(budget, float):
                raise MinithinkError(
                    f"The pool has no run of {FULL} for {quoted(done.key['dataset'])}, and the budget {budget} is a "
                    "share of what that generates: give a budget in tokens, or another comparison."
                )
            rows = runner.evaluate_alone(
                job_of(done, args),
                Path(folder),
                command=origin.command("minithink.bench", argv),
                mean=length,
                again="that folder goes now, and nothing was compared; give the same command",
            )
            if rows is None:
                return INTERRUPTED
            again = journal.read(Path(folder))
        settings = again.settings | again.runs[-1]
        compared += compare(done, again.records)
    if not compared:
        raise MinithinkError(
            f"None of the problems whose answers the pool has of {args.policy} is there any more, so nothing can be "
            "compared: restore the problems, or run the comparison again with `bench sweep`."
        )
    print(table(compared))
    for one in [one for one in compared if one.then != one.now][:SHOWN]:
        print(f"{one.id}, sample {one.sample}: {quoted(one.then)} then, {quoted(one.now)} now")
    different = sum(one.then != one.now for one in compared)
    print(verdict(found, settings, different, len(compared)))
    return 1 if different else 0


def cells(runs: Sequence[Run], comparison: str, policy: str, budget: float | None, names: Sequence[str]) -> list[Run]:
    """The runs of a cell that the documents show, one for each family.

    Raises:
        UsageError: the comparison has no such cell.
        MinithinkError: the pool lacks its runs, or their answers, or the weights do not ship.
    """
    wanted = wanted_of(SWEEPS[comparison])
    places = list[int]()
    for place, key in enumerate(wanted):
        family = key["dataset"].partition(":")[0]
        if (key["policy"], key["budget"]) == (policy, budget) and family in names:
            places.append(place)
    if not places:
        policies = list(dict.fromkeys(key["policy"] for key in wanted))
        some = sorted({key["budget"] for key in wanted if key["policy"] == policy and key["budget"] is not None})
        if policy not in policies:
            raise UsageError(f"{comparison} has no policy {quoted(policy)}; {alternatives(policy, policies)}.")
        has = f"the budgets {', '.join(map(str, some))}" if some else "no budget"
        raise UsageError(f"The comparison {comparison} has {policy} with {has}: give one of these.")
    picked = pick(runs, wanted, pool.shows)
    found = [run for run in (picked[place] for place in places) if run is not None and run.answers]
    if not found:
        raise MinithinkError(f"The pool has no answers of {policy} in the comparison {comparison}.")
    if found[0].key["checkpoint"] != checkpoint_hash(TINY):
        raise MinithinkError(
            f"The comparison {comparison} is of other weights than the embedded ones, and they do not ship: choose "
            "another comparison."
        )
    return found


def job_of(run: Run, args: argparse.Namespace) -> Job:
    """The evaluation that generates the answers of a run again."""
    key = run.key
    limit = len({id for id, _, _ in run.answers})
    if args.limit is not None:
        limit = min(limit, args.limit)
    if "padded_budget" in key:  # the padding depends on all prompts
        limit = key["limit"]
    return Job(
        policies=[Spec(key["policy"])],
        budgets=[] if key["budget"] is None else [key["budget"]],
        dataset=key["dataset"],
        split=key["split"],
        limit=limit,
        num_samples=key["num_samples"],
        max_new_tokens=key["max_new_tokens"],
        device=args.device,
        dtype=args.dtype or key["dtype"],
        batch_size=args.batch_size,
        padded_budget=key.get("padded_budget"),
        group=key.get("group", False),
    )


def length_of_full(runs: Sequence[Run], run: Run) -> float | None:
    """The mean length that the full cache generated for the problems of a run. Budgets may be shares of it."""
    of_full = key_of({**run.key, **dict.fromkeys(pool.WATCHED, False), "calibration": None}, Cell(Spec(FULL), None))
    found = [other for other in runs if pool.shows(other, of_full)]
    return found[0].tokens[0] / found[0].tokens[1] if found else None


def compare(run: Run, records: Sequence[journal.Record]) -> list[Compared]:
    """Each answer that was generated again, beside that of the pool."""
    now = {(r.id, r.sample): r for r in records if r.policy == run.key["policy"]}
    examples = load_dataset(run.key["dataset"], run.key["split"], run.key["limit"])
    order = list[tuple[str, int]]()
    for example in examples:
        order += [(example.id, sample) for sample in range(run.key["num_samples"])]
    order.sort()
    right = {key: digit == "1" for key, digit in zip(order, run.right, strict=False)}
    out = []
    for id, sample, answer in run.answers:
        if (id, sample) in now:
            record = now[id, sample]
            one = Compared(
                dataset=run.key["dataset"],
                id=id,
                sample=sample,
                then=answer,
                now=record.found,
                right_then=right.get((id, sample)),
                right_now=bool(record.right),
            )
            out.append(one)
    return out


def table(compared: Sequence[Compared]) -> str:
    """A table in text: how many answers of each family are equal."""
    rows = [("family", "answers", "equal", "right then", "right now")]
    for dataset in dict.fromkeys(one.dataset for one in compared):
        own = [one for one in compared if one.dataset == dataset]
        then = [one.right_then for one in own if one.right_then is not None]
        equal = sum(one.then == one.now for one in own)
        right = sum(one.right_now for one in own)
        rows.append((dataset, str(len(own)), str(equal), str(sum(then)) if then else "–", str(right)))
    return aligned(rows)


def verdict(found: Sequence[Run], now: Mapping[str, Any], different: int, count: int) -> str:
    """One sentence that says whether all answers are equal, and if not, what may have changed them."""
    run = found[0]
    cell = run.key["policy"]
    if run.key["budget"] is not None:
        cell += f" at {budget_text(run.key['budget'])}"
    since = f"measured at commit {short(run.commit)} ({run.date[:10]})"
    if not different:
        if count == 1:
            return f"The answer of {cell} is the one that was {since}."
        return f"All {count} answers of {cell} are those that were {since}."
    then = _place(run.key, run.machine, run.versions)
    here = _place(now, now["machine"], now["versions"])
    why = f"the run was on {then}, and this one on {here}"
    if then == here:
        why = f"both ran on {here}"
    if any(one.state == "stale" for one in found):
        why += "; the code or the defaults of the policy have changed since"
    elif then != here:
        why += "; another machine, backend or number type rounds sums differently, and near ties then fall otherwise"
    if count == 1:
        return f"The answer of {cell} differs from the one that was {since}: {why}."
    return f"{different} of {count} answers of {cell} differ from those that were {since}: {why}."


def _place(key: Mapping[str, Any], machine: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """The machine, the backend, the number type and torch's version of a run."""
    name = machine.get("gpu") or machine.get("cpu")
    return f"{name} ({key['backend']}, {key['dtype']}, torch {versions.get('torch')})"
