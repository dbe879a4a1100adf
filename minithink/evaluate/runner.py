"""Evaluate policies: generate, grade, measure, sum up.

A cell is a policy at a budget. Each cell in turn generates for all problems. The batch has one shape from beginning
to end, and a sequence's draws depend only on its number in the dataset. So no token depends on the order of the
sequences, on an interruption or on the number of processes. A finished sequence is in the journal at once.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from minithink.checkpoint.calibration import identity
from minithink.cli.commands import INTERRUPTED, SCHEDULES, finite, location, natural, positive
from minithink.cli.models import add_model_arguments, model_name, model_options, model_settings
from minithink.engine import DTYPES, Engine, check_count, load
from minithink.errors import NON_FINITE, MinithinkError, UsageError, counted, escaped
from minithink.evaluate import plots, summary
from minithink.evaluate import trace as tracing
from minithink.evaluate.datasets import Example, add_fields_argument, check_graders, hash_of, load_dataset
from minithink.evaluate.grading import CHOICES, Graded, grade
from minithink.evaluate.job import Job
from minithink.evaluate.journal import BYTES, RESUME, SOURCES, Journal, Key, Record, read, settings_of, text_hash
from minithink.evaluate.leaderboard import Leaderboard
from minithink.evaluate.meter import Held, Seconds, both, meter
from minithink.evaluate.needed import NeededKept, check_questions
from minithink.evaluate.padding import charge
from minithink.evaluate.plan import (
    Cell,
    budgets,
    check,
    check_share,
    known,
    plan,
    said_of_budgets,
    said_of_bytes,
    said_of_prompts,
    said_of_stages,
    tokens_by_bytes,
    tokens_of,
)
from minithink.evaluate.ranks import Ranks, refuse_ranks
from minithink.evaluate.recall import Recall
from minithink.evaluate.summary import FULL, Row
from minithink.evaluate.trace import Recording, path_of
from minithink.kv.stack import members
from minithink.policies import load_list
from minithink.reread import diagnosis
from minithink.results import origin, pooled, record
from minithink.results.progress import progress
from minithink.results.sources import source_of
from minithink.sampling import SamplingParams
from minithink.sequence import Track
from minithink.stream import Stream
from minithink.text.looped import looped
from minithink.text.thinking import Stage, count_thinking, split_thinking

GPU_BATCH, CPU_BATCH = 256, 8
TRACED = 0  # the number of the sequence that --trace records: the first problem's first sample
SPLIT = "of the dataset (default: test)"
OF_TABLE = "; several with commas between them (default: those of the table that are graded)"
FREE = ("model",)  # settings that a resumed run may change: the checkpoint's hash stays


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run."""
    add = parser.add_argument
    add(
        "--policies",
        "--policy",
        type=load_list,
        metavar="P,P,…",
        help="as in full,rkv:buffer=0,kivi, or FILE.py:Class of your own (default: full)",
    )
    add(
        "--budgets",
        type=budgets,
        default=[],
        metavar="N,N,…",
        help="for the policies that take one and do not name "
        "it: tokens that a KV head holds, the prompt's too (256,512); or shares (0.25,0.5), of what the full cache "
        "generates on average in this run, beside the prompt: then full is run first. So --limit changes these "
        "budgets, unless --reference-length fixes them. Or bytes (512KiB,2MiB): the tokens whose keys and values "
        "take so many bytes in all KV heads of a sequence",
    )
    add("--schedule", help=f"when a policy evicts: {SCHEDULES}")
    add(
        "--leaderboard",
        type=location,
        nargs="?",
        const=record.default_path("x").parent,
        metavar="DIR",
        help=f"also put the policies beside those whose results are committed in DIR/{pooled.FILE}, at the same "
        "weights, problems, draws and budget, with paired differences and tests (default: docs/results of the "
        "checkout)",
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser, split: str = SPLIT, of_table: bool = False) -> None:
    """The options that do not name policies or budgets.

    Args:
        split: the help of --split.
        of_table: some defaults are those of a paper's table; the options are then None, and --output-dir may be
            missing.
    """
    add_drawing_arguments(parser, split, of_table)
    add = parser.add_argument
    add(
        "--reference-length",
        type=positive,
        metavar="N",
        help="budgets that are shares are of N tokens, and full is "
        "not run for them (default: of what the full cache generates on average)",
    )
    add(
        "--grader",
        default=None if of_table else "exact",
        choices=list(CHOICES),
        help="of files that name none (default: exact); with none, problems need no answer, and texts are not graded",
    )
    add(
        "--calibration",
        type=location,
        metavar="FOLDER",
        help="where minithink.calibrate wrote its files (default: beside the model)",
    )
    add(
        "--batch-size",
        type=positive,
        metavar="N",
        help=f"rows at once, from beginning to end (default: {GPU_BATCH} on a GPU, else {CPU_BATCH})",
    )
    add(
        "--padded-budget",
        type=positive,
        metavar="N",
        help="for comparison: charge each budget the padding that an "
        "engine would keep which pads the prompts of batches of N sequences (`evaluate/padding.py`)",
    )
    add("--group", action="store_true", help="with --padded-budget: its batches are of prompts of similar length")
    add(
        "--recall",
        action="store_true",
        help="also find how many of the tokens that full attention looks at most are kept: slow, for reference",
    )
    add(
        "--needed",
        action="store_true",
        help="also find how much of what the statements of a text need is kept when "
        "they begin: for problems of the embedded families",
    )
    add(
        "--trace",
        type=location,
        metavar="FILE",
        help="record what happens in the cache of the first problem's "
        "first sequence, for `python -m minithink.trace view FILE`. Where several policies or budgets are run "
        "each has its own file, with its name before the suffix: FILE run.trace, run.rkv-256.trace. A sequence that "
        "is done already is not run again, and not recorded",
    )
    add("--output-dir", type=location, required=not of_table, metavar="DIR", help="where the results go")
    add("--resume", action="store_true", help="finish what an earlier start with the same options left in DIR")
    add("--keep-text", action="store_true", help="keep what was generated in results.jsonl, not only its hash")


def add_drawing_arguments(parser: argparse.ArgumentParser, split: str = SPLIT, of_table: bool = False) -> None:
    """The options that decide what is generated with the full cache. Arguments: as in `add_run_arguments`."""
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--dataset",
        default=None if of_table else "facts",
        help="facts, ledger or search, which are embedded, MATH-500, AIME24, …, a "
        ".jsonl, .csv, .json or .parquet file, such a file in place of a dataset of the hub, as in AIME24=FILE, or "
        f"hub:owner/name{OF_TABLE if of_table else ' (default: facts)'}",
    )
    add("--split", help=split)
    add_fields_argument(parser)
    add(
        "--num-samples",
        type=positive,
        default=None if of_table else 1,
        metavar="N",
        help=f"sequences for each problem (default: {'as many as the table has' if of_table else 1})",
    )
    of_draws = "the table's, or the model's own" if of_table else "the model's own"
    add("--temperature", type=finite, help=f"0 is greedy (default of this and the next two: {of_draws})")
    add("--top-p", type=finite, help="1 is off")
    add("--top-k", type=natural, metavar="N", help="0 is off")
    add("--seed", type=natural, default=0, help="of the draws (default: 0)")
    add("--limit", type=positive, metavar="N", help="only the first N problems")
    of_length = "the table's" if of_table else "the model's own"
    add(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help=f"default: {of_length}, or what the context leaves",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--backend", default="auto", help="auto, reference, triton")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Evaluate, write the summary, print the table."""
    board = None if args.leaderboard is None else Leaderboard(args.leaderboard)
    with Ranks() as ranks:
        command = origin.command("minithink.evaluate", argv)
        rows = evaluate(Job.of(args), args.output_dir, ranks, command=command, resume=args.resume, board=board)
        if rows is None:
            return INTERRUPTED
        if not ranks.rank:
            finish(args.output_dir, rows)
        if board is not None and not ranks.rank:
            show_places(board, args.output_dir, rows)
    return 0


def evaluate(
    job: Job,
    folder: Path,
    ranks: Ranks,
    *,
    command: str,
    resume: bool = False,
    mean: float | None = None,
    engine: Engine | None = None,
    board: Leaderboard | None = None,
    again: str = RESUME,
) -> list[Row] | None:
    """Generate the sequences that are not in the journal yet → a row for each policy and budget; None: Ctrl-C came,
    and the user was told.

    Args:
        job: what is run.
        folder: where the results go.
        ranks: the processes that share the work.
        command: the command line, for the record.
        resume: finish what an earlier start of the same job left in the folder.
        mean: tokens that the full cache generates for these problems, on average; budgets that are shares need it.
            None: the full cache is run first if a budget is a share.
        engine: the job's model; None: it is loaded.
        board: refuses a run that has nothing committed beside it; None: nothing is compared.
        again: what the user must do after Ctrl-C or an error to go on.
    """
    cells = cells_of(job)
    policies = [FULL] if job.policies is None else [spec.text for spec in job.policies]
    if mean is None:
        mean = job.reference_length
    if mean is not None:
        cells = [cell for cell in cells if cell.policy in policies]
    refuse(job, cells, policies, folder)
    examples = examples_of(job)
    check_count(len(examples), job.num_samples)
    if job.needed:
        check_questions(examples)
    notes = [*said_of_limit(job, examples), *check_graders(examples)]
    if engine is None:
        engine = engine_of(job, ranks)
    caution = engine.generation_config.caution
    if caution and not ranks.rank:
        _say(caution)
    cells = known(cells, engine.loaded.tokens_of)
    calibration = calibrations(engine, cells)
    notes += sorted(engine.cautions)
    notes += said_of_bytes(cells, engine.loaded.said_of_bytes)
    names = {cell.policy for cell in cells} - {*policies}  # full, where only a share needs it
    evaluation = Evaluation(engine, examples, job, [*names, *policies])
    for cell in cells:
        engine.check_draws(cell.make(), evaluation.drawing, evaluation.prompts)
    settings = evaluation.settings
    if calibration:
        settings["calibration"] = calibration
    if mean is not None:
        settings["full_tokens"] = mean
    settings[SOURCES] = {cell.policy: source_of(cell.make(), settings["backend"]) for cell in cells}
    by_bytes = tokens_by_bytes(cells)
    if by_bytes:
        settings[BYTES] = by_bytes
    prompts = [len(prompt) for prompt in evaluation.prompts]
    longest = min(evaluation.drawing["max_new_tokens"], engine.config.max_position - min(prompts))
    if job.reference_length is not None:
        for cell in cells:
            check_share(cell, min(prompts), job.reference_length, given=True)
    check(cells, prompts, longest)
    if board is not None:
        board.check(settings, cells)
    notes += said_of_prompts(cells, prompts)
    total = sum(len(evaluation.keys(cell)) for cell in cells)
    about = {
        "command": command,
        "date": origin.date(),
        "commit": origin.commit(),
        "machine": origin.machine(engine.device),
        "versions": origin.versions(),
        "processes": ranks.size,
        "sequences_total": total,
    }
    journal = ranks.in_turn(
        partial(Journal, folder, settings, resume=resume, rank=ranks.file, allow=FREE, about=about)
    )
    with journal:
        ranks.wait()
        for note in journal.notes:
            if not ranks.rank or str(journal.path) in note:
                _say(note)
        for note in [*notes, *about_before(journal, resume, total)]:
            if not ranks.rank:
                _say(note)
        first = FULL not in policies and cells[0].policy == FULL
        if first and not ranks.rank and not journal.done.issuperset(evaluation.keys(cells[0])):
            _say("budgets are shares of what the full cache generates, so full is run first")
        try:
            _run(evaluation, cells, journal, ranks, mean or 0.0)
        except KeyboardInterrupt:
            _say(
                f"interrupted: {folder} holds {len(journal.done):,} of {counted(total, 'sequence')}; {again} to "
                "finish the rest"
            )
            return None
        except MinithinkError:
            say_what_stays(journal, f"{len(journal.done):,} of {counted(total, 'sequence')}", again)
            raise
        finally:
            for recording in evaluation.recordings:
                recording.close()
                _say(recording.said)
        ranks.wait()
    records = read(folder).records
    if not ranks.rank:
        tokenizer = engine.tokenizer
        said = said_of_budgets(cells, records)
        if None not in tokenizer.think_ids:
            said += said_of_stages(cells, records, tokenizer.tags)
        for note in said:
            _say(note)
    if all(record.finish_reason == NON_FINITE for record in records):
        raise MinithinkError(
            f"No logits were finite, in {counted(len(records), 'sequence')}, so there is nothing to sum up: try "
            "another --dtype or another checkpoint."
        )
    return summary.summarize(records, policies=settings["policies"], budgets=job.budgets)


def cells_of(job: Job) -> list[Cell]:
    """The cells of a job. UsageError: as in `plan`."""
    cells = plan(job.policies, job.budgets, job.schedule)
    return [cell for cell in cells if cell.name not in job.without]


def examples_of(job: Job) -> list[Example]:
    """The problems of a job. Errors: as in `load_dataset`."""
    return load_dataset(job.dataset, job.split, job.limit, grader=job.grader, fields=job.fields)


def engine_of(job: Job, ranks: Ranks) -> Engine:
    """Load a job's model. Errors: as in `load`."""
    return load(
        job.model,
        **model_options(job),
        device=ranks.device(job.device),
        dtype=job.dtype,
        backend=job.backend,
        calibration=job.calibration,
    )


def refuse(job: Job, cells: Sequence[Cell], policies: Sequence[str], folder: Path) -> None:
    """UsageError: some options make no sense together. Called before a model is loaded."""
    if job.reference_length is not None and not any(isinstance(cell.budget, float) for cell in cells):
        raise UsageError(
            f"--reference-length {job.reference_length:,} is what shares are of, and no budget is a share: "
            "leave it out, or give --budgets such as 0.25,0.5."
        )
    SamplingParams(
        job.temperature or 0,
        top_k=job.top_k or 0,
        top_p=1 if job.top_p is None else job.top_p,
        seed=job.seed,
    )
    if job.group and job.padded_budget is None:
        raise UsageError("--group groups the batches of --padded-budget: give both, or neither.")
    if job.padded_budget is not None and all(cell.make().budget is None for cell in cells):
        raise UsageError(
            f"--padded-budget charges budgets, and {', '.join(policies)} {'have' if policies[1:] else 'has'} none: "
            "leave it out, or name a policy with a budget."
        )
    if job.trace is not None:
        tracing.check(job.trace, cells, folder)


def evaluate_alone(
    job: Job, folder: Path, *, command: str, resume: bool = False, mean: float | None = None, again: str = RESUME
) -> list[Row] | None:
    """Evaluate in this process alone. Arguments and result: as in `evaluate`."""
    refuse_ranks()
    with Ranks() as ranks:
        return evaluate(job, folder, ranks, command=command, resume=resume, mean=mean, again=again)


def said_of_limit(job: Job, examples: Sequence[Example]) -> list[str]:
    """A sentence if there are fewer problems than --limit allows; else none."""
    if job.limit is None or job.limit <= len(examples):
        return []
    problems = counted(len(examples), "problem")
    return [f"--limit {job.limit:,} is more than the {problems} of {job.dataset}: no more are taken"]


def about_before(journal: Journal, resume: bool, total: int, done: str = "generated") -> list[str]:
    """A sentence that says what --resume has found. total: sequences of the run; done: what is done with them."""
    if not resume:
        return []
    if not journal.records:
        if journal.replaced is not None:  # it has said why
            return []
        return [f"there is no finished sequence in {journal.folder} to resume from: the run begins anew"]
    there = f"{journal.folder} already holds {len(journal.records):,} of {counted(total, 'sequence')}"
    if len(journal.records) == total:
        return [f"{there}: nothing is {done}, only summed up again"]
    return [f"{there}: the rest is {done}"]


def say_what_stays(journal: Journal, there: str, again: str) -> None:
    """Say what an error leaves of a run, if that is anything.

    Args:
        journal: of the run.
        there: how much there is, of how much.
        again: as of `evaluate`.
    """
    if journal.done:
        _say(f"an error ends the run: {journal.folder} holds {there}; {again} to finish the rest")


def calibrations(engine: Engine, cells: Sequence[Cell]) -> dict[str, Any]:
    """The calibrations that policies read: file name → what of it decides. Every policy is tried out, so that none
    fails after hours.

    Raises:
        UsageError: a policy does not suit the model. MinithinkError: a calibration is missing.
    """
    found = dict[str, Any]()
    for cell in cells:
        policy = cell.make()
        for member in members(policy):
            if (name := member.calibration) and (decides := identity(name, engine.calibration(name))):
                found[name] = decides
        engine.try_out(engine.bind(policy))
    return found


def _run(evaluation: Evaluation, cells: list[Cell], journal: Journal, ranks: Ranks, mean: float = 0.0) -> None:
    """Run the cells in turn: of each, this process's part of the sequences that are not in the journal. mean: as in
    `evaluate`; 0: it is not known yet."""
    lengths = {(r.id, r.sample): r.generated_tokens for r in journal.records if r.policy == FULL}
    shares = [cell for cell in cells if isinstance(cell.budget, float)]
    for number, cell in enumerate(cells, 1):
        keys = evaluation.keys(cell)
        own = keys[ranks.rank :: ranks.size]
        trace = None if evaluation.job.trace is None else path_of(evaluation.job.trace, cell, cells)
        if trace is not None and not ranks.rank and keys[TRACED] in journal.done:
            _say(
                f"nothing to record in {trace}: {keys[TRACED]}, is in {journal.folder} already and is not generated "
                "again"
            )
        todo = [key for key in own if key not in journal.done]
        if shares and not mean and number > 1:
            ranks.wait()  # until all processes have generated with the full cache
            whole = [r for r in read(journal.folder).records if r.policy == FULL]
            mean = fmean(r.generated_tokens for r in whole)
            for one in shares:
                check_share(one, min(map(len, evaluation.prompts)), mean)
        if not todo:
            continue
        mine = set(own)
        before = [r for r in journal.records if r.key in mine]
        with progress(
            len(own),
            len(before),
            f"{cell} ({number} of {len(cells)})",
            ranks.rank > 0,
            right=sum(r.right is True for r in before),
            tokens=sum(r.generated_tokens for r in before),
            graded=sum(r.right is not None for r in before),
        ) as advance:
            for record in evaluation.records(cell, set(todo), mean, lengths, advance.step, trace):
                journal.append(record)
                advance(record.right)
                if cell.policy == FULL:
                    lengths[record.id, record.sample] = record.generated_tokens
        gc.collect()  # streams and graphs refer to each other, and the next cell needs their memory


class Evaluation:
    """A job with its model, problems and settings, which all cells share."""

    def __init__(self, engine: Engine, examples: list[Example], job: Job, policies: list[str]) -> None:
        """policies: the texts of all that are run."""
        self.engine = engine
        assert engine.loaded.home is not None
        self.examples = examples
        self.job = job
        self.recordings: list[Recording] = []
        self._has_said_why = False
        self.prompts = [engine.prompt_ids(example.question) for example in examples]
        own = engine.generation_config
        self.drawing: dict[str, Any] = {  # options of Engine.stream
            "temperature": own.temperature if job.temperature is None else job.temperature,
            "top_k": own.top_k if job.top_k is None else job.top_k,
            "top_p": own.top_p if job.top_p is None else job.top_p,
            "min_p": own.min_p,
            "seed": job.seed,
            "num_samples": job.num_samples,
            "max_new_tokens": job.max_new_tokens or own.max_new_tokens or engine.config.max_position,
            "batch_size": job.batch_size or (GPU_BATCH if engine.device.type == "cuda" else CPU_BATCH),
        }
        self.settings: dict[str, Any] = {
            "model": model_name(job.model, job.adapter),
            "checkpoint": engine.loaded.home.checkpoint,
            "dataset": job.dataset,
            "split": job.split,
            "limit": job.limit,
            "problems": hash_of(examples),
            "policies": list(dict.fromkeys(policies)),
            "budgets": list(job.budgets),
            "schedule": job.schedule,
            "recall": job.recall,
            "needed": job.needed,
            **self.drawing,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "backend": engine.decoder.backend.name,
            "device": engine.device.type,
            "keep_text": job.keep_text,
            "trace": job.trace.name if job.trace is not None else None,
        }
        self.settings |= model_settings(job)
        if job.fields:
            self.settings["fields"] = job.fields
        if job.padded_budget is not None:
            self.settings |= {"padded_budget": job.padded_budget, "group": job.group}

    def keys(self, cell: Cell) -> list[Key]:
        """The keys of all sequences of a cell, in the order of their numbers."""
        found = []
        for example in self.examples:
            found += [Key(*cell.name, example.id, sample) for sample in range(self.job.num_samples)]
        return found

    def records(
        self,
        cell: Cell,
        wanted: Collection[Key],
        mean: float,
        lengths: Mapping[tuple[str, int], int],
        step: Callable[[int], object],
        trace: Path | None = None,
    ) -> Iterator[Record]:
        """Run a cell → the records of the wanted sequences, in the order in which they end.

        Args:
            cell: the policy and its budget.
            wanted: the sequences that are generated.
            mean: tokens that the full cache generates on average, for budgets that are shares.
            lengths: tokens that the full cache generated, by problem and sample, as far as they are known.
            step: called after every step with the number of its new tokens.
            trace: the file in which sequence TRACED is recorded, if it is wanted; None: no recording.
        """
        stream = self.stream(cell, mean)
        measure = meter(stream)
        watches: list[Recall | NeededKept] = [Recall(stream)] if self.job.recall else []
        watches += [NeededKept(stream)] if self.job.needed else []
        for watch in watches:
            stream.on_step = both(stream.on_step, watch)
        keys = self.keys(cell)
        of_bytes = cell.tokens
        chosen = [s for s in stream.sequences if keys[s.number] in wanted]
        # if a sequence's length is not known, its prompt's length is a guess
        stream.sequences = in_order(chosen, [lengths.get(keys[s.number][2:], len(s.prompt)) for s in chosen])
        recording = None
        if trace is not None and keys[TRACED] in wanted:
            recording = Recording(trace, stream, TRACED, self._about(keys[TRACED]))
            self.recordings.append(recording)
            # it goes first: on a GPU, policies decide kernel by kernel while it runs
            stream.sequences.sort(key=lambda s: s.number != TRACED)
        seconds = Seconds()
        for advanced in stream.advances():
            seconds.step(advanced)
            step(len(advanced))
            ended = [s for s in advanced if s.finish_reason]
            if recording is not None and any(s.number == TRACED for s in ended):
                recording.close()
            if any(s.finish_reason == NON_FINITE for s in ended):
                self._say_why_not_finite(stream)
            for s, held in zip(ended, measure.take(ended), strict=True):
                shares = dict[str, float | None]()
                for watch in watches:
                    shares |= watch.take(s)
                budget = of_bytes if s.budget is None else s.budget
                yield self._record(stream, s, keys[s.number], held, seconds.take(s), shares, budget)

    def _say_why_not_finite(self, stream: Stream) -> None:
        """Say once in a run why logits were not finite. MinithinkError: a weight is not, so no answer counts."""
        if self._has_said_why:
            return
        self._has_said_why = True
        why = stream.diagnose()
        if diagnosis.broken_weight(self.engine.loaded) is not None:
            raise MinithinkError(why)
        _say(f"{why} Such sequences count neither as right nor as wrong")

    def stream(self, cell: Cell, mean: float) -> Stream:
        """The stream of a cell's sequences, each with its own budget. mean: as in `records`."""
        own = [tokens_of(cell.budget, len(prompt), mean) for prompt in self.prompts]
        policy = cell.make(longest=max(n or 0 for n in own))
        # The full cache is read from pages where kernels do that, and else from a plain buffer, as without a policy.
        chosen = None if cell.policy == FULL else policy
        stream = self.engine.stream(self.prompts, policy=chosen, fixed=True, **self.drawing)
        # The meter counts bytes, between two steps.
        stream.ahead = True
        stream.accounts = False
        for s in stream.sequences:
            s.budget = own[s.prompt_index]
        if self.job.padded_budget is not None and policy.budget is not None:
            charge(stream.sequences, policy, self.job.padded_budget, self.job.group)
        return stream

    def _about(self, key: Key) -> dict[str, Any]:
        """What a trace's page shows about its sequence."""
        names = ("model", "dataset", "split", "schedule", "seed", "temperature")
        about = {"policy": key.policy, "budget": key.budget, "problem": key.id, "sample": key.sample}
        about |= {name: self.settings[name] for name in names}
        about |= model_settings(self.job)
        return {name: value for name, value in about.items() if value is not None}

    def _record(
        self,
        stream: Stream,
        s: Track,
        key: Key,
        held: Held,
        seconds: float,
        shares: Mapping[str, Any],
        budget: int | None,
    ) -> Record:
        """budget: tokens that a share or bytes come to."""
        tokenizer = self.engine.tokenizer
        example = self.examples[s.prompt_index]
        stopped = bool(s.tokens) and s.tokens[-1] in stream.stop_ids
        text = tokenizer.decode(s.tokens[:-1] if stopped else s.tokens)
        # What a sequence writes while it still thinks is no answer.
        _, answer = split_thinking(text, Stage(tokenizer, s.prompt).name == "think", tokenizer.tags)
        graded = grade(answer, example.answer, example.grader)
        if s.finish_reason == NON_FINITE:
            graded = Graded(None, False)
        return Record(
            policy=key.policy,
            budget=key.budget,
            id=key.id,
            sample=key.sample,
            group=example.group,
            right=graded.right,
            found=graded.found,
            finish_reason=s.finish_reason,
            prompt_tokens=len(s.prompt),
            generated_tokens=len(s.tokens),
            thinking_tokens=count_thinking(tokenizer, s.prompt, s.tokens),
            kv_bytes_peak=held.bytes_peak,
            kv_bytes_mean=held.bytes_mean,
            tokens_peak=held.tokens_peak,
            tokens_mean=held.tokens_mean,
            steps=held.steps,
            evicting_steps=held.evicting_steps,
            seconds=seconds,
            text_sha=text_hash(text),
            text=text if self.job.keep_text else None,
            **shares,
            looped=float(s.finish_reason not in ("stop", NON_FINITE) and looped(s.tokens)),
            counts=s.counts or None,
            budget_tokens=budget,
        )


def in_order(sequences: list[Track], lengths: Sequence[int]) -> list[Track]:
    """The sequences, the longest first, so that the batch stays full until near the end."""
    order = sorted(range(len(sequences)), key=lambda i: -lengths[i])
    return [sequences[i] for i in order]


def finish(folder: Path, rows: list[Row]) -> None:
    """Write the summary and the plots, print the table."""
    paths = summary.write(folder, rows)
    try:
        paths += plots.draw(rows, folder, plots.title_of(settings_of(folder), rows))
    except MinithinkError as error:
        _say(f"no plots: {error}")
    summary.show(rows, folder)
    _say(f"written to {folder}: {', '.join(path.name for path in paths)}")


def show_places(board: Leaderboard, folder: Path, rows: list[Row]) -> None:
    """Write and print the leaderboard of a finished run, and draw it."""
    finished = read(folder)
    places = board.places(finished, rows)
    print(board.write(folder, finished, rows, places), end="", flush=True)
    try:
        path = board.draw(folder, finished, places)
    except MinithinkError as error:
        _say(f"no picture of the leaderboard: {error}")
        return
    if path is not None:
        _say(f"drawn to {path}")


def _say(text: str) -> None:
    print(f"minithink.evaluate: {escaped(text)}", file=sys.stderr, flush=True)
