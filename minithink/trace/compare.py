"""Answer one problem under several policies, and write a page that shows their caches side by side.

The first column is that of the full cache. The others have the same draws, so a text departs from the full cache's
text only because of its policy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minithink.cli.commands import finite, location, natural, positive, tokens_or_bytes
from minithink.cli.models import add_model_arguments, model_name, model_options, model_settings
from minithink.cli.prompts import nonsense_expected
from minithink.cli.terminal import counter
from minithink.engine import Engine, load
from minithink.errors import NON_FINITE, MinithinkError, UsageError, counted, escaped, quoted
from minithink.evaluate.datasets import Example, add_fields_argument, check_graders, load_dataset
from minithink.evaluate.grading import NONE, Graded, grade
from minithink.kv.byte_size import ByteSize
from minithink.policies import ample, load_list, read
from minithink.sequence import Result
from minithink.stream import Stream
from minithink.trace import page_file
from minithink.trace.format import read as read_trace
from minithink.trace.page import Column, Outcome, departure, holds, side_by_side
from minithink.trace.recorder import Recorder

FULL = "full"
DEMO = "full,window,rkv,thinkv:thoughts=keyword"  # of the embedded model's first problem: wrong, right, right
BUDGET = 512  # tokens
DATASET = "facts"
LONGER = 2  # times the full cache's text: what is longer has rarely found back
CUT_OFF = ("length", "context")  # finish_reasons of texts that reach a limit
ON_INTERRUPT = "interrupted; no page was written"


@dataclass(frozen=True)
class Entry:
    """A policy that is compared, and its budget if it takes --budget."""

    policy: str
    budget: int | ByteSize | None

    @property
    def name(self) -> str:
        """What stands above its column."""
        return self.policy if self.budget is None else f"{self.policy}, budget {self.budget}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    add = parser.add_argument
    add(
        "--policies",
        type=load_list,
        default=load_list(DEMO),
        metavar="P,P,…",
        help=f"a column each, beside that of the full cache; or FILE.py:Class of your own (default: {DEMO})",
    )
    add(
        "--budget",
        type=tokens_or_bytes,
        metavar="TOKENS",
        help="how many tokens each KV head may keep, for the policies that do not say it; or bytes, as in 2MiB "
        f"(default: {BUDGET} tokens)",
    )
    add("--prompt", help="a question of your own, which is not graded")
    add(
        "--dataset",
        help="where the problem is from: facts, ledger, search, MATH-500, …, a file, or hub:owner/name "
        f"(default: {DATASET})",
    )
    add("--split", help="of the dataset (default: test)")
    add_fields_argument(parser)
    add("--index", type=natural, metavar="N", help="number of the problem in the dataset (default: 0, the first)")
    add_model_arguments(parser, default=None)
    add(
        "--calibration",
        type=location,
        metavar="FOLDER",
        help="where minithink.calibrate wrote its files (default: beside the model)",
    )
    add(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="default: the model's own for the full cache, and twice as many as it generates for the others",
    )
    add("--temperature", type=finite, help="0 is greedy (default: the model's own)")
    add("--seed", type=natural, default=0, help="of the draws, which are the same in all columns (default: 0)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    add("--output", type=location, default=Path("replay.html"), metavar="PAGE", help="default: replay.html")
    add("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, grade, write the page."""
    entries = entries_of(args.policies, args.budget)
    page_file.check_place(args.output)
    problem = problem_of(args)
    warning = nonsense_expected([problem.question]) if args.model is None else ""
    if warning:
        _say(warning)
    for note in check_graders([problem]):
        _say(note)
    engine = load(
        args.model,
        device=args.device,
        dtype=args.dtype,
        calibration=args.calibration,
        **model_options(args),
    )
    for entry in entries:  # what does not suit the model or the prompt is refused before anything is generated
        engine.stream(problem.question, policy=entry.policy, budget=entry.budget, max_new_tokens=1)
    about = _about(args, problem)
    limit = args.max_new_tokens
    columns = list[Column]()
    with tempfile.TemporaryDirectory(prefix="minithink-") as folder:
        for entry in entries:
            path = Path(folder, f"{len(columns)}.trace")
            column, result = _column(engine, entry, problem, path, about, limit=limit, args=args)
            if not columns and result.finish_reason == NON_FINITE:
                raise MinithinkError(
                    f"The full cache broke off after {counted(result.generated_tokens, 'token')}, because the logits "
                    "were not finite, so there is nothing to compare with: `python -m minithink.generate` says why."
                )
            if limit is None:
                limit = limit_of(result)
            columns.append(column)
            print(escaped(sentence(columns[0], column, result)), flush=True)
    for caution in sorted(engine.cautions):
        _say(f"{caution}.")
    page_file.write(args.output, side_by_side(columns))
    print(f"written to {escaped(args.output)}")
    if args.open:
        page_file.show(args.output)
    return 0


def entries_of(policies: list[str], budget: int | ByteSize | None) -> list[Entry]:
    """The policies that are compared, the full cache first.

    Args:
        policies: their texts.
        budget: of --budget; None: it was not given.

    Raises:
        UsageError: a policy makes no sense, one is named twice, there is only the full cache, or nothing takes the
            budget.
    """
    names = [FULL, *(policy for policy in policies if policy != FULL)]
    if len(set(policies)) < len(policies):
        twice = next(policy for policy in policies if policies.count(policy) > 1)
        raise UsageError(f"--policies names {quoted(twice)} twice: leave one of them out.")
    if len(names) == 1:
        raise UsageError(f"--policies names {FULL} alone, which is compared with nothing: name others, as in {DEMO}.")
    entries = list[Entry]()
    for name in names:
        written = read(name)
        takes = written.leaves_open("budget")
        entry = Entry(name, (budget or BUDGET) if takes else None)
        written.make(budget=entry.budget, tokens_of=ample)
        entries.append(entry)
    if budget is not None and all(entry.budget is None for entry in entries):
        raise UsageError(f"--budget {budget} was given, and no policy takes it: drop it.")
    return entries


def problem_of(args: argparse.Namespace) -> Example:
    """The problem that is answered. UsageError: options contradict each other, or there is no such problem."""
    given = [name for name in ("dataset", "split", "fields", "index") if getattr(args, name) is not None]
    if args.prompt is not None:
        if given:
            raise UsageError(
                f"--prompt is a question of its own, and --{given[0]} chooses another: drop one of them."
            )
        if not args.prompt.strip():
            raise UsageError("--prompt is empty: give at least one word.")
        return Example(id="", question=args.prompt, answer="", grader=NONE)
    dataset = args.dataset or DATASET
    examples = load_dataset(dataset, args.split, fields=args.fields)
    index = args.index or 0
    if index >= len(examples):
        raise UsageError(
            f"--index {index:,} is not in {escaped(dataset)}, which holds {counted(len(examples), 'problem')}: give "
            f"0 to {len(examples) - 1:,}."
        )
    return examples[index]


def _about(args: argparse.Namespace, problem: Example) -> dict[str, Any]:
    """What the page shows about all columns."""
    about = {"model": model_name(args.model or "tiny", args.adapter), **model_settings(args), "seed": args.seed}
    if problem.id:
        about["problem"] = problem.id
    if args.temperature is not None:
        about["temperature"] = args.temperature
    return about


def _column(
    engine: Engine,
    entry: Entry,
    problem: Example,
    path: Path,
    about: dict[str, Any],
    *,
    limit: int | None,
    args: argparse.Namespace,
) -> tuple[Column, Result]:
    """Generate under one policy.

    Args:
        path: of the trace; it is read here, and nobody needs it afterwards.
        about: what the page shows about all columns.
        limit: tokens that are generated at most; None: the model's own limit.
        args: of the command line.
    """
    recorder = Recorder(path, engine.tokenizer, about={**about, "policy": entry.policy})
    try:
        stream = engine.stream(
            problem.question,
            policy=entry.policy,
            budget=entry.budget,
            max_new_tokens=limit,
            temperature=args.temperature,
            seed=args.seed,
            stop_loops=True,
            recorder=recorder,
        )
        _finish(stream)
    finally:
        recorder.close()
    file = read_trace(path)
    return Column(file, 0, entry.name, outcome_of(stream.result, problem)), stream.result


def _finish(stream: Stream) -> None:
    with counter() as advance:
        for count in stream.steps():
            advance(count)


def limit_of(full: Result) -> int:
    """Tokens that the other columns may generate. full: what the full cache has generated."""
    if full.finish_reason in CUT_OFF:
        return full.generated_tokens
    return LONGER * full.generated_tokens


def outcome_of(result: Result, problem: Example) -> Outcome:
    """What became of a text."""
    graded = grade(result.answer, problem.answer, problem.grader)
    if result.finish_reason == NON_FINITE and graded.right is not None:
        graded = Graded(None, False)
    tokens = counted(result.generated_tokens, "token")
    ended = ""
    if result.finish_reason in CUT_OFF:
        ended = f"cut off after {tokens}"
    elif result.finish_reason == "loop":
        ended = f"ended after {tokens}, for it only repeats itself"
    elif result.finish_reason == NON_FINITE:
        ended = f"broken off after {tokens}, for the logits were not finite"
    return Outcome(right=graded.right, found=graded.found, answer=problem.answer, ended=ended)


def sentence(full: Column, column: Column, result: Result) -> str:
    """One line for the terminal: the policy, what became of its text, its bytes, and where it departs.

    Args:
        full: the first column.
        column: the one that the line is about.
        result: of the column.
    """
    assert column.outcome is not None
    ended = column.outcome.ended or counted(result.generated_tokens, "token")
    parts = [f"{column.name}: {column.outcome.word}", ended, holds(column.trace)]
    if column is not full:
        step = departure(full, column)
        parts.append(f"departs at token {step:,}" if step else "the same text")
    return "; ".join(parts)


def _say(message: str) -> None:
    """A line on standard error, beside the output."""
    print(f"minithink.trace: {escaped(message)}", file=sys.stderr)
