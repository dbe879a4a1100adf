"""What is said of a table: before it runs, what differs here; afterwards, the paper's numbers beside those found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minithink.engine import Engine
from minithink.errors import counted, escaped
from minithink.evaluate import runner, summary
from minithink.evaluate.datasets import Example
from minithink.evaluate.job import Job
from minithink.evaluate.papers.parts import Part
from minithink.evaluate.papers.table import CODE, Table
from minithink.evaluate.summary import budget_text

DRAWING = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k"}  # field of a table → its name in a text


def said(
    table: Table,
    parts: Sequence[Part],
    args: argparse.Namespace,
    engine: Engine,
    examples: Sequence[Sequence[Example]],
) -> list[str]:
    """What is run, then what is not as in the paper, in sentences."""
    lines = [f"{table.paper}, {table.place}: {table.shows}"]
    for part, problems in zip(parts, examples, strict=True):
        lines += _said_of(part, len(problems))
    lines.append(_said_of_draws(parts[0].job, engine))
    lines += [f"differs: {sentence.rstrip('.')}" for sentence in differences(table, parts, args, engine)]
    return lines


def _said_of(part: Part, problems: int) -> list[str]:
    """The rows of a part with their budgets."""
    job = part.job
    head = f"{part.name}: {counted(problems, 'problem')}, {counted(job.num_samples, 'sample')} each"
    head += f", at most {job.max_new_tokens:,} new tokens"
    if job.padded_budget is not None:
        order = "sorted by length" if job.group else "in their order"
        head += f"; budgets pay for the padding of batches of {job.padded_budget} prompts, {order}"
    lines = [head]
    cells = runner.cells_of(job)
    for row in part.rows:
        own = [cell.budget for cell in cells if cell.policy == row.policy]
        at = ", ".join(budget_text(budget) for budget in own if budget is not None)
        lines.append(f"{part.name}: {row.name} is {row.policy}" + (f" at {at}" if at else ""))
    return lines


def _said_of_draws(job: Job, engine: Engine) -> str:
    """How tokens are drawn."""
    numbers = []
    for field, name in DRAWING.items():
        asked = getattr(job, field)
        value = getattr(engine.generation_config, field) if asked is None else asked
        numbers.append(f"{name} {value:g}")
    return f"tokens are drawn with {', '.join(numbers)}"


def differences(table: Table, parts: Sequence[Part], args: argparse.Namespace, engine: Engine) -> list[str]:
    """What is not as in the paper, in full sentences."""
    found = []
    model = Path(str(args.model)).name
    if model.casefold() not in [name.casefold() for name in table.models]:
        found.append(f"The paper's models are {', '.join(table.models)}; this is {escaped(args.model)}.")
    found += _of_draws(table, parts[0].job, args)
    found += _of_options(parts, args)
    found += _of_datasets(table, parts, args)
    found += _of_lengths(parts, args, engine)
    found.append(
        "Prompts and graders are minithink's: questions of datasets of the hub end with the instruction to reason "
        r"step by step and to put the answer within \boxed{}."
    )
    return [*found, *table.differs]


def _of_draws(table: Table, job: Job, args: argparse.Namespace) -> list[str]:
    """What is not as in the paper about the draws."""
    found = []
    silent = []
    for field, name in DRAWING.items():
        of_paper = getattr(table, field)
        asked = getattr(args, field)
        if of_paper is None and asked is None:
            silent.append(name)
        if of_paper is not None and asked is not None and asked != of_paper:
            found.append(f"The paper's {name} is {of_paper:g}; here it is {asked:g}.")
    if silent:
        found.append(f"The paper gives no {', '.join(silent)}: here the model's own generation_config.json decides.")
    if table.samples is not None and job.num_samples != table.samples:
        found.append(f"The paper has {table.samples} samples of each problem, and this run {job.num_samples}.")
    return found


def _of_options(parts: Sequence[Part], args: argparse.Namespace) -> list[str]:
    """What the user's options change."""
    found = []
    if args.limit is not None:
        found.append(f"Of each dataset only the first problems are run: --limit {args.limit:,}.")
    if args.budgets is not None:
        found.append("The budgets are those of --budgets, not the table's.")
        if any(part.column.scaled for part in parts):
            found.append("Local windows in tokens have become shares of these budgets, as they are of the paper's.")
    if args.rows is not None:
        found.append("Of the table's rows only those of --rows are run.")
    if args.padded_budget is not None:
        found.append(f"Budgets pay for the padding of batches of {args.padded_budget:,}: --padded-budget.")
    if any(part.job.group != part.column.group for part in parts):
        found.append("Batches are of prompts of similar length: --group. So the paper's numbers are left out.")
    if args.think_tags is not None:
        found.append(f"The model thinks between {escaped(' and '.join(args.think_tags))}: --think-tags.")
    if args.template:
        variables = ", ".join(f"{name}={value}" for name, value in args.template.items())
        found.append(f"The chat template gets {escaped(variables)}.")
    return found


def _of_lengths(parts: Sequence[Part], args: argparse.Namespace, engine: Engine) -> list[str]:
    """Where texts may be shorter, or longer, than in the table."""
    found = []
    for part in parts:
        limit = part.column.max_new_tokens
        context = engine.config.max_position
        if args.max_new_tokens is not None and args.max_new_tokens != limit:
            found.append(f"{part.name}: the table allows {limit:,} new tokens, and this run {args.max_new_tokens:,}.")
        elif context < limit:
            found.append(
                f"{part.name}: the table allows {limit:,} new tokens; the context of this model has {context:,}."
            )
    return found


def _of_datasets(table: Table, parts: Sequence[Part], args: argparse.Namespace) -> list[str]:
    """What is not as in the paper about the datasets."""
    found = []
    run_here = {part.column.dataset for part in parts}
    code = [column.dataset for column in table.columns if column.dataset in CODE]
    if args.dataset is None and code:
        found.append(f"{' and '.join(dict.fromkeys(code))} is code, which is not graded here, and is not run.")
    elif args.dataset is not None:
        others = [c.dataset for c in table.columns if c.dataset not in run_here and c.dataset not in CODE]
        if others:
            found.append(f"The table's other datasets are not run: {', '.join(dict.fromkeys(others))}.")
    for part in parts:
        if part.stands and part.job.dataset != part.column.dataset:
            file = part.job.dataset.partition("=")[2] or part.job.dataset
            found.append(f"In place of {part.column.dataset}, {escaped(file)} is read.")
        if not part.stands:
            found.append(
                f"{escaped(part.job.dataset)} is none of the table's datasets: it has the settings of "
                f"{part.column.dataset}."
            )
    return list(dict.fromkeys(found))  # a table may have two columns of one dataset


def compared(part: Part, rows: Sequence[summary.Row]) -> str:
    """The Markdown table of a part: its rows as the paper calls them, what the paper reports, and what was found."""
    is_the_papers = part.stands and part.job.group == part.column.group
    reported = part.column.reported if is_the_papers else {}
    found = {(row.policy, row.budget): row for row in rows if row.group is None}
    short = [model.replace("DeepSeek-R1-Distill-", "R1-") for model in reported]
    header = [
        "method",
        "budget",
        *(f"paper, {model}" for model in short),
        "here",
        "95 % interval",
        "tokens",
        "KV peak",
    ]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for method in part.rows:
        for cell in runner.cells_of(part.job):
            row = found.get(cell.name)
            if cell.policy != method.policy or row is None:
                continue
            right, interval = summary.accuracy_of(row)
            percents = []
            for numbers in reported.values():
                tokens = cell.budget if isinstance(cell.budget, int) else None
                percent = numbers.get((method.name, tokens))
                percents.append("–" if percent is None else f"{percent:g}%")
            sizes = [f"{row.generated_mean:,.0f}", summary.size(row.kv_bytes_peak)]
            lines.append([method.name, summary.budget_of(row), *percents, right, interval, *sizes])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    text = f"## {escaped(part.name)}\n\n{table}\n"
    if reported and part.column.reported_on:
        text += f"\nThe paper's numbers are of {part.column.reported_on}, and not of {part.column.dataset} alone.\n"
    return text
