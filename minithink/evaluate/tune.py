"""Choose the hyperparameters of a policy, on problems that are not of a test split.

Every combination of the given values is a policy of one evaluation (`runner.py`), with its journal, --resume and
intervals. The best combination has the highest pass@1; of equals, the one that holds fewer bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from minithink.cli.commands import INTERRUPTED, SCHEDULES
from minithink.errors import UsageError, counted, quoted, unwritable
from minithink.evaluate import runner, summary
from minithink.evaluate.datasets import LEVELS, check_name, is_file, load_dataset
from minithink.evaluate.grading import NONE
from minithink.evaluate.job import Job
from minithink.evaluate.plan import budgets
from minithink.evaluate.ranks import Ranks
from minithink.evaluate.summary import Row
from minithink.policies import extended
from minithink.policies import load as load_policy
from minithink.results import origin
from minithink.results.files import dumps, replace, rounded
from minithink.tasks import families, load_problems, search

SPLITS = ("validation", "train")  # splits on which hyperparameters may be chosen
HELP = (
    "Every combination of the --grid values is run at one budget; the best has the highest pass@1, of equals the "
    "fewest bytes, and those whose intervals overlap its own are marked. Written to DIR: tuning.json and tuning.md, "
    "beside all that an evaluation writes."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate tune`."""
    add = parser.add_argument
    add(
        "--policy",
        type=load_policy,
        required=True,
        metavar="P",
        help="whose hyperparameters are chosen, as in rkv:buffer=0, or FILE.py:Class of your own",
    )
    add(
        "--grid",
        type=_grid,
        action="append",
        required=True,
        metavar="FIELD=V,V,…",
        help="values to try of a field; several --grid are combined",
    )
    add(
        "--budget",
        "--budgets",
        dest="budget",
        type=budgets,
        default=[],
        metavar="N",
        help="of all of them: tokens, a share, or bytes, as --budgets of a run",
    )
    add("--schedule", help=f"when the policy evicts: {SCHEDULES}")
    runner.add_run_arguments(
        parser,
        "validation or train, never test (default: validation; a file has none, a dataset of the hub needs it)",
    )


def _grid(text: str) -> tuple[str, list[str]]:
    """For argparse: FIELD=V,V,… → the field, its values."""
    field, equals, values = text.partition("=")
    if not (field and equals and all(values.split(","))):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not FIELD=V,V,…, as in lam=0.1,0.5")
    return field, values.split(",")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Evaluate every point of the grid, write tuning.json and tuning.md, print the table."""
    if len(args.budget) > 1:
        raise UsageError(f"Hyperparameters are chosen at one budget, and --budget names {len(args.budget)}.")
    if args.grader == NONE:
        raise UsageError("--grader none grades nothing, and hyperparameters are chosen by right answers: drop it.")
    fields = [field for field, _ in args.grid]
    if twice := next((field for field in fields if fields.count(field) > 1), None):
        raise UsageError(f"--grid names {twice} twice: put all of its values behind one.")
    args.split = allowed(args.dataset, args.split, args.limit, args.fields)
    points = grid(args.policy, args.grid)
    args.policies = list(points)
    args.budgets = args.budget
    with Ranks() as ranks:
        command = origin.command("minithink.evaluate", argv)
        rows = runner.evaluate(Job.of(args), args.output_dir, ranks, command=command, resume=args.resume)
        if rows is None:
            return INTERRUPTED
        if not ranks.rank:
            runner.finish(args.output_dir, rows)
            ranked = ranking(rows, points)
            print(write(args.output_dir, ranked, points, args))
    return 0


def grid(policy: str, fields: Sequence[tuple[str, Sequence[str]]]) -> dict[str, dict[str, str]]:
    """The text of each point's policy → its values by field."""
    points = {}
    for values in product(*(values for _, values in fields)):
        chosen = dict(zip((field for field, _ in fields), values, strict=True))
        said = ",".join(f"{field}={value}" for field, value in chosen.items())
        points[extended(policy, said)] = chosen
    return points


def allowed(
    dataset: str,
    split: str | None,
    limit: int | None = None,
    fields: Mapping[str, str] | None = None,
) -> str | None:
    """The split on which hyperparameters may be chosen.

    Args:
        dataset, split, limit, fields: as of `load_dataset`.

    Raises:
        UsageError: it is a test split, or holds problems of an embedded test split.
    """
    check_name(dataset)
    if dataset in (*families(), *LEVELS):
        split = split or "validation"
    if split is None and not is_file(dataset):
        raise UsageError(
            f"{dataset} without --split is its test split, and nothing is ever tuned on that: give another."
        )
    if split is not None and split not in SPLITS:
        raise UsageError(f"Nothing is ever tuned on the split {quoted(split)}: give --split {' or '.join(SPLITS)}.")
    problems = chain.from_iterable(load_problems("test", family) for family in families())
    tests = {_words(problem.question) for problem in problems}
    examples = load_dataset(dataset, split, limit, grader=NONE, fields=fields)
    found = sum(_words(example.question) in tests for example in examples)
    if found:
        raise UsageError(
            f"{dataset} holds {counted(found, 'problem')} of an embedded test split: nothing is ever tuned on that."
        )
    return split


def _words(question: str) -> str:
    """A question without what does not make it another problem: white space, and the redundancy that it asks for."""
    words = " ".join(question.split())
    return search.reworded(words, 0) if words.endswith(search.WORDING) else words


def ranking(rows: Sequence[Row], points: dict[str, Any]) -> list[Row]:
    """The points, best first: by pass@1, of equals by bytes."""
    mine = [row for row in rows if row.group is None and row.policy in points]
    return sorted(mine, key=lambda row: (-row.accuracy[0], row.kv_bytes_mean))


def write(folder: Path, ranked: Sequence[Row], points: dict[str, dict[str, str]], args: argparse.Namespace) -> str:
    """Write tuning.json and tuning.md → the table."""
    best = ranked[0]
    table = []
    for row in ranked:
        point = {
            **points[row.policy],
            "policy": row.policy,
            "pass_at_1": row.pass_at_1,
            "interval": [row.pass_at_1_low, row.pass_at_1_high],
            "kv_bytes_mean": row.kv_bytes_mean,
            "generated_mean": row.generated_mean,
            "problems": row.problems,
        }
        table.append(point)
    head = {"dataset": args.dataset, "split": args.split, "budget": best.budget, "best": best.policy}
    header = ["", *next(iter(points.values())), "pass@1", "95 % interval", "KV mean", "tokens"]
    lines = [header, ["---"] * len(header)]
    for row in ranked:
        # If an interval overlaps the best point's, chance may have chosen the best.
        share, low, high = row.accuracy
        mark = "**best**" if row is best else "≈" if high >= best.accuracy[1] else ""
        lines.append(
            [
                mark,
                *points[row.policy].values(),
                f"{share:.1%}",
                f"{low:.1%} to {high:.1%}",
                summary.size(row.kv_bytes_mean),
                f"{row.generated_mean:,.0f}",
            ]
        )
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    text += (
        f"\n\n`{args.policy}`, budget {summary.budget_text(best.budget)}, {args.dataset} {args.split or ''}, "
        f"{counted(best.problems, 'problem')}. ≈: its interval overlaps the best one's, so chance may have chosen.\n"
    )
    try:
        replace(folder / "tuning.json", dumps(rounded({**head, "points": table})) + "\n")
        replace(folder / "tuning.md", text)
    except OSError as error:
        raise unwritable("The table", folder, error, "folder") from None
    return text
