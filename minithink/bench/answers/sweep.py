"""Comparisons whose tables and plots the documents show: which policies, at which budgets, on which problems.

A comparison has a name and lists policies and budgets (`bench/methods`). Each policy at each budget is a run
of `python -m minithink.evaluate`, on all embedded families. Runs go into the pool of results (`answers/pool.py`). A
run that the pool holds is not run again, whichever comparison has brought it there. An interrupted run is resumed.
Settings are chosen on validation problems; the test split is for a method's main table.

On a machine that is lent for minutes a run may not end. --finished then generates nothing, and takes the runs whose
sequences are all there, on any machine. --join takes the runs of another pool. Where kernels have changed since a
run, --recheck generates its first sequences again and compares their answers. All of this is an offer: a table shows
the run that the pool holds, and marks it if its policy's code has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from minithink.bench.answers import losses, overall, pool
from minithink.bench.answers.overall import DIFFERENCE, compared, points
from minithink.bench.answers.pool import Run, key_of, pick, serves
from minithink.bench.answers.processes import spread, visible_gpus
from minithink.bench.methods import Column, Result, Sweep, Table, collected
from minithink.bench.tables.markdown import short
from minithink.checkpoint.calibration import FORESIGHT, identity
from minithink.checkpoint.calibration import read as read_calibration
from minithink.checkpoint.weights import checkpoint_hash, resolve
from minithink.cli.commands import location, positive
from minithink.config import ModelConfig
from minithink.engine import DTYPES, TINY, device_of
from minithink.errors import NON_FINITE, MinithinkError, UsageError, alternatives, counted, escaped, quoted
from minithink.evaluate import counts, journal, plots, runner
from minithink.evaluate.datasets import hash_of, load_dataset
from minithink.evaluate.job import Job
from minithink.evaluate.plan import Cell, Spec, budgets, plan
from minithink.evaluate.summary import FULL, Row, budget_text, summarize
from minithink.generation import GenerationConfig
from minithink.kv.stack import members
from minithink.results import origin, record
from minithink.results.figures import need_matplotlib
from minithink.results.pooled import need
from minithink.tasks import families
from minithink.text.tokenizer import Tokenizer

SWEEPS: dict[str, Sweep] = collected("SWEEPS")
OF_ANSWERS = tuple(name for name, one in SWEEPS.items() if not one.losses)
ON_INTERRUPT = "interrupted: what is finished stays, and the same command runs the rest"  # printed after Ctrl-C
# What a picture and a table need of a row; tables know older rows without the rest.
IN_PICTURES = tuple(f.name for f in fields(Row) if f.default is MISSING and f.name != "group")
IN_TABLES = (
    "policy",
    "budget",
    "samples",
    "pass_at_1",
    "pass_at_1_low",
    "pass_at_1_high",
    "generated_mean",
    "cut_off",
    "kv_bytes_peak",
    "counts",
)
LOOK = ("checkpoint", "limit", "problems", "max_new_tokens")  # parts of a key that a quick look changes
# Parts of a key that only a model's folder says: runs of weights that are not here fit whatever theirs are.
OF_FOLDER = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "calibration")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sweep`."""
    add = parser.add_argument
    add("names", nargs="+", choices=tuple(SWEEPS), metavar="NAME", help=f"which comparisons: {', '.join(SWEEPS)}")
    add("--model", default="tiny", help="folder of another model that knows the families (default: the embedded one)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=tuple(DTYPES), help="default: the checkpoint's own on a GPU, float32 elsewhere")
    add("--families", nargs="+", default=families(), choices=families(), help="default: all")
    add(
        "--texts",
        type=location,
        metavar="DIR",
        help="for comparisons of losses: the folder that `python -m minithink.models texts` wrote (default: only "
        "reference traces)",
    )
    add("--limit", type=positive, metavar="N", help="fewer problems, for a quick look; needs --results")
    add("--batch-size", type=positive, metavar="N", help="as in minithink.evaluate")
    add("--max-new-tokens", type=positive, metavar="N", help="as in minithink.evaluate")
    add(
        "--runs",
        type=location,
        default=Path("runs"),
        metavar="DIR",
        help="where unfinished runs lie (default: runs)",
    )
    add(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help="run so many policies at a time, each with a log beside its run (default 1)",
    )
    add(
        "--gpus",
        type=positive,
        metavar="N",
        help="spread the processes over the first N GPUs (default: all run on the one of --device)",
    )
    add(
        "--budgets",
        type=budgets,
        metavar="N,N,…",
        help="only these budgets, as in 0.25,0.5; policies without a budget run, too (default: all)",
    )
    add(
        "--policies",
        type=lambda text: [part.strip() for part in text.split(",")],
        metavar="NAME,NAME,…",
        help="only policies of these names, alone or in a stack, whatever their options, and the full cache; NAM* "
        "fits all names that begin so (default: all)",
    )
    add(
        "--plot",
        type=location,
        metavar="DIR",
        help="draw accuracy by bytes, or recall by budget, DIR/sweep-NAME-FAMILY.svg, several names into one "
        "picture; and DIR/sweep-NAME-overall.svg, differences from the policy that a comparison names",
    )
    add("--plot-only", action="store_true", help="run nothing: draw the runs of the pool")
    add("--finished", action="store_true", help="generate nothing: take the runs that are finished")
    add(
        "--discard",
        action="store_true",
        help="delete the folder of a run when the pool has it: what is left in --runs is all that the next machine "
        "needs to go on",
    )
    add(
        "--needed",
        action="store_true",
        help="also measure how much of what the statements of a text need is kept: runs without it are made again",
    )
    add("--recheck", action="store_true", help="generate the first sequences again where kernels have changed")
    add("--join", type=location, nargs="+", default=[], metavar="FILE", help="also take the runs of other pools")
    pool.add_results_argument(parser)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Evaluate the runs that the pool lacks, add them, draw."""
    chosen = {name: SWEEPS[name] for name in dict.fromkeys(args.names)}
    if args.plot_only and args.plot is None:
        raise UsageError("--plot-only draws to the folder that --plot names: give it.")
    for option, part in (("--budgets", args.budgets), ("--policies", args.policies)):
        if args.plot is not None and part is not None:
            raise UsageError(f"--plot draws all of a comparison: leave {option} out.")
    if args.plot is not None:
        need_matplotlib()
        record.check(args.plot / "picture.svg", "--plot")
    given = {"--plot": args.plot is not None, "--recheck": args.recheck, "--needed": args.needed}
    for option in given:
        if given[option]:
            losses.refuse(chosen, option)
    known = {budget for sweep in chosen.values() for budget in sweep.budgets}
    for budget in args.budgets or ():
        if budget not in known:
            raise UsageError(
                f"{' and '.join(chosen)}: there is no budget of {budget_text(budget)}; {budgets_said(known)}."
            )
    for pattern in args.policies or ():
        texts = policies_of(chosen.values())
        if not any(is_named(text, [pattern]) for text in texts):
            names = sorted({name for text in texts for name in names_in(text)})
            raise UsageError(
                f"{' and '.join(chosen)}: no policy is named {quoted(pattern)}; {alternatives(pattern, names)}."
            )
    if args.gpus is not None and args.device not in ("auto", "cuda"):
        raise UsageError(f"--gpus chooses the GPUs, and --device is {args.device}: leave one of the two out.")
    if args.gpus is not None and args.gpus > args.processes:
        raise UsageError(
            f"--gpus is {args.gpus} and --processes {args.processes}: give a process or more for each GPU."
        )
    if args.limit and args.results == record.default_path("x").parent:
        raise UsageError("--limit is a quick look, and the documents show the pool: give another --results.")
    if not args.plot_only:
        fill(args, argv, list(chosen.values()))
    if args.plot is not None:
        draw_all(args, chosen)
    return 0


def budgets_said(known: Collection[int | float]) -> str:
    """The budgets of comparisons, in words."""
    if not known:
        return "no policy takes one"
    return f"give some of {', '.join(f'{budget:g}' for budget in sorted(known))}"


def fill(args: argparse.Namespace, argv: list[str], chosen: Sequence[Sweep]) -> None:
    """Add the runs that the pool lacks for some comparisons."""
    wanted = list[Wanted]()
    for sweep in chosen:
        losses.check(sweep, args.texts)
        wanted += wanted_of(sweep, args)
    record.check(args.results / pool.FILE, "--results")
    for path in args.join:
        pool.add(args.results, joined(path))
    if not args.finished:
        device_of(args.device)
    todo = list[Wanted]()
    for key in unchecked(args, wanted) if args.recheck else missing(args, chosen):
        if key not in todo:  # several comparisons may ask for one run
            todo.append(key)
    generate(args, argv, todo)
    left = missing(args, chosen)
    print(f"{len(wanted) - len(left)} of {len(wanted)} runs are in {args.results / pool.FILE}", file=sys.stderr)


def draw_all(args: argparse.Namespace, chosen: Mapping[str, Sweep]) -> None:
    """Draw every family, and all families together where a comparison compares in pairs."""
    runs = dict[str, list[Run]]()
    for name, sweep in chosen.items():
        runs[name] = drawn(name, args.results, wanted_of(sweep, args))
    draw(runs, args.results, args.plot)
    for name, sweep in chosen.items():
        if sweep.beside and len(args.families) > 1:
            found = result_of(name, args.results, wanted_of(sweep, args))
            overall.draw(found, args.plot / f"sweep-{name}-overall.svg")


Wanted = dict[str, Any]  # a key without the machine's parts


def wanted_of(sweep: Sweep, args: argparse.Namespace | None = None) -> list[Wanted]:
    """The keys of a comparison, by family, then by policy and budget. args: None: as the documents show it."""
    if args is not None and args.needed:
        sweep = replace(sweep, needed=True)
    if args is not None and args.policies is not None:
        sweep = replace(sweep, policies=tuple(text for text in sweep.policies if is_named(text, args.policies)))
    names = datasets_of(sweep, args)
    folder = TINY if args is None or args.model == "tiny" else resolve(args.model)
    elsewhere = sweep.checkpoint and (args is None or args.plot_only)
    keys = list[Wanted]()
    for name in names:
        settings = settings_of(sweep, name, folder, args)
        keys += [key_of(settings, cell) for cell in cells_for(sweep, folder) if is_asked_for(cell, args)]
    for key in keys:
        if key["policy"] == FULL and not sweep.losses:
            key["recall"] = False  # it holds all that attention looks at
        if elsewhere:
            key["checkpoint"] = sweep.checkpoint
            for part in OF_FOLDER:
                key.pop(part, None)
    return keys


def is_asked_for(cell: Cell, args: argparse.Namespace | None) -> bool:
    """Whether the options leave a cell in."""
    chosen = None if args is None else args.budgets
    return chosen is None or cell.budget is None or cell.budget in chosen


def is_named(text: str, wanted: Sequence[str]) -> bool:
    """Whether a policy, or a member of a stack, has one of these names, in which * fits anything."""
    return any(fnmatchcase(name, pattern) for name in names_in(text) for pattern in wanted)


def names_in(text: str) -> list[str]:
    """The names of a policy, or of the members of a stack."""
    return [member.name for member in Spec(text).written.members]


def datasets_of(sweep: Sweep, args: argparse.Namespace | None = None) -> Sequence[str]:
    """The names of a comparison's problems or texts, of which the options may leave some out."""
    names = sweep.datasets or families()
    if args is None:
        return names
    if sweep.losses:
        return [name for name in names if name != losses.FIXED or args.texts is not None]
    return [name for name in names if name.partition(":")[0] in args.families]


def settings_of(sweep: Sweep, family: str, folder: Path, args: argparse.Namespace | None = None) -> dict[str, Any]:
    """The settings that `minithink.evaluate` would write for the comparison and the model in a folder, without the
    machine's."""
    config, own, weights = _about(folder)
    calibration = dict[str, Any]()
    for cell in cells_for(sweep, folder):
        calibration |= calibrations_of(cell, folder)
    if sweep.losses:
        limit = None if args is None else args.limit
        return losses.settings_of(sweep, family, weights, limit) | {"calibration": calibration}
    limit = sweep.problems
    longest = own.max_new_tokens or config.max_position
    if args is not None:
        limit = args.limit or limit
        longest = args.max_new_tokens or longest
    padding = {"padded_budget": sweep.padded, "group": sweep.group}
    return {
        "checkpoint": weights,
        "dataset": family,
        "split": sweep.split,
        "limit": limit,
        "problems": hash_of(load_dataset(family, sweep.split, limit)),
        "num_samples": sweep.samples,
        "recall": sweep.recall,
        "needed": sweep.needed,
        "temperature": own.temperature,
        "top_k": own.top_k,
        "top_p": own.top_p,
        "min_p": own.min_p,
        "seed": 0,
        "max_new_tokens": longest,
        "calibration": calibration,
        **(padding if sweep.padded else {}),
    }


@cache
def _about(folder: Path) -> tuple[ModelConfig, GenerationConfig, str]:
    """A model's shape, its default sampling, and the hash of its weights."""
    config = ModelConfig.from_folder(folder)
    own = GenerationConfig.from_folder(folder, config, Tokenizer.from_folder(folder))
    return config, own, checkpoint_hash(folder)


def calibrations_of(cell: Cell, folder: Path) -> dict[str, Any]:
    """The calibrations in a model's folder that a cell needs: name → what of it decides. MinithinkError: it lacks
    one."""
    files = {member.calibration for member in members(cell.make())} - {"", FORESIGHT}
    return {name: _calibration(folder, name) for name in files}


@cache
def _calibration(folder: Path, name: str) -> dict[str, Any]:
    return identity(name, read_calibration(folder, name, folder, "" if folder == TINY else str(folder)))


@cache
def cells_for(sweep: Sweep, folder: Path) -> list[Cell]:
    """The cells of a comparison that the model in a folder is calibrated for. It is said once which policies are left
    out, and why."""
    lacking = dict[str, dict[str, None]]()  # reason → policies, each once
    found = list[Cell]()
    for cell in cells_of(sweep):
        try:
            calibrations_of(cell, folder)
        except MinithinkError as error:
            lacking.setdefault(str(error), {})[cell.policy] = None
        else:
            found.append(cell)
    for why, policies in lacking.items():
        print(f"minithink.bench: {escaped(why)} Left out: {'; '.join(policies)}", file=sys.stderr)
    return found


def policies_of(sweeps: Iterable[Sweep]) -> list[str]:
    """All policies of these comparisons, each once; the full cache first."""
    policies = [FULL]
    for sweep in sweeps:
        policies += sweep.policies
    return list(dict.fromkeys(policies))


def cells_of(sweep: Sweep) -> list[Cell]:
    """The policies of a comparison at its budgets; the full cache first."""
    return plan([Spec(text) for text in policies_of([sweep])], sweep.budgets)


def missing(args: argparse.Namespace, chosen: Iterable[Sweep]) -> list[Wanted]:
    """Keys of which the pool has no run that is whole and not stale. A comparison of pairs also lacks a run that does
    not say which of its sequences were right."""
    there = [run for run in pool.read(args.results) if run.state != "stale"]
    lacking = []
    for sweep in chosen:
        wanted = wanted_of(sweep, args)
        for key, run in zip(wanted, pick(there, wanted), strict=True):
            in_pairs = sweep.beside and key["policy"] != FULL
            if run is None or (in_pairs and not run.right):
                lacking.append(key)
    return lacking


def unchecked(args: argparse.Namespace, wanted: Sequence[Wanted]) -> list[Wanted]:
    """Keys whose runs were generated by other kernels."""
    there = [run for run in pool.read(args.results) if run.state != "stale"]
    found = pick(there, wanted)
    return [key for key, run in zip(wanted, found, strict=True) if run is not None and run.state == "unchecked"]


def generate(args: argparse.Namespace, argv: list[str], keys: Sequence[Wanted]) -> None:
    """Run the cells with these keys, --processes at a time, and add each to the pool when it ends. The full cache is
    first. Cells whose budgets are shares of what it generates wait for it, in each family.

    Raises:
        MinithinkError: a cell failed. Several processes run the others, but for those that need a full cache that
            failed.
        KeyboardInterrupt: what has finished is in the pool, and the rest can be resumed.
    """
    work = partial(recheck if args.recheck else evaluated, args, argv)
    ordered = sorted(keys, key=lambda key: (key["policy"] != FULL, needs_length(key)))
    # Families whose full cache has not ended.
    without_full = {key["dataset"] for key in keys if key["policy"] == FULL}
    errors = list[Exception]()
    done = 0
    if args.processes > 1 and not args.finished:
        each = spread(
            work,
            ordered,
            args.processes,
            gpus=[] if args.gpus is None else visible_gpus(args.gpus),
            log=partial(log_of, args),
            waits=lambda key: needs_length(key) and key["dataset"] in without_full,
        )
    else:
        each = ((key, work(key)) for key in ordered)
    for key, found in each:
        done += 1
        if isinstance(found, Exception):
            errors.append(found)
            said = str(found)
        elif not found:  # with --finished: it is not whole
            continue
        else:
            pool.add(args.results, found)
            said = ", ".join(map(_said_of_run, found))
            if args.discard:
                shutil.rmtree(folder_of(args, key), ignore_errors=True)
                log_of(args, key).unlink(missing_ok=True)
            if key["policy"] == FULL:
                without_full.discard(key["dataset"])
        parts = (key["dataset"], key["policy"], key["budget"])
        cell = ", ".join(str(part) for part in parts if part is not None)
        print(f"{done} of {len(keys)}: {cell}: {said}", file=sys.stderr, flush=True)
    if errors:
        raise errors[0]


def needs_length(key: Wanted) -> bool:
    """Whether a cell's budget is a share of what the full cache generates."""
    return isinstance(key["budget"], float) and journal.INSTRUMENT not in key


def _said_of_run(run: Run) -> str:
    """How many answers of a run are right, and whether it was found stale; or the loss of its texts."""
    if "losses" in run.row:
        return f"loss {run.row['loss']:.4f}"
    stale = ", stale" if run.stale else ""
    return f"{run.row['pass_at_1']:.1%} right{stale}"


def folder_of(args: argparse.Namespace, key: Wanted) -> Path:
    """Where the run of a cell lies."""
    what = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    kind = f"recheck-{origin.commit()[:10]}" if args.recheck else "sweep"
    return Path(args.runs / f"{kind}-{key['dataset']}-{what}")


def log_of(args: argparse.Namespace, key: Wanted) -> Path:
    """The file to which a process writes the output of a cell."""
    folder = folder_of(args, key)
    return folder.with_name(f"{folder.name}.log")


def job_of(args: argparse.Namespace, key: Wanted, limit: int) -> Job:
    """The evaluation that generates a cell. limit: how many problems."""
    return Job(
        policies=[Spec(key["policy"])],
        budgets=[] if key["budget"] is None else [key["budget"]],
        model=args.model,
        dataset=key["dataset"],
        split=key["split"],
        limit=limit,
        num_samples=key["num_samples"],
        max_new_tokens=args.max_new_tokens,
        device=args.device,
        dtype=args.dtype or "auto",
        batch_size=args.batch_size,
        padded_budget=key.get("padded_budget"),
        group=key.get("group", False),
        recall=key["recall"],
        needed=key["needed"],
    )


def evaluate(args: argparse.Namespace, argv: list[str], key: Wanted, limit: int) -> None:
    """Generate a cell, or finish it, in its folder. KeyboardInterrupt: it was interrupted."""
    folder = folder_of(args, key)
    command = origin.command("minithink.bench", argv)
    if journal.INSTRUMENT in key:
        done = losses.measure(args, key, folder, command)
    else:
        mean = length_of_full(args, key)
        job = job_of(args, key, limit)
        resume = folder.is_dir()
        rows = runner.evaluate_alone(
            job,
            folder,
            command=command,
            resume=resume,
            mean=mean,
            again=losses.AGAIN,
        )
        done = rows is not None
    if not done:
        raise KeyboardInterrupt


def evaluated(args: argparse.Namespace, argv: list[str], key: Wanted) -> list[Run]:
    """The run of a cell; none: with --finished, if it is not whole. KeyboardInterrupt: it was interrupted."""
    folder = folder_of(args, key)
    if not args.finished:
        evaluate(args, argv, key, key["limit"])
    elif not folder.is_dir():
        return []
    done = journal.read(folder)
    own = [r for r in done.records if (r.policy, r.budget) == (key["policy"], key["budget"])]
    if len(own) < sequences_of(done, key):
        return []
    broken = sum(r.finish_reason == NON_FINITE for r in own)
    if broken:
        raise MinithinkError(
            f"{folder}: the logits of {broken:,} of {counted(len(own), 'sequence')} were not finite, and a pool "
            "holds whole runs only: try another --dtype."
        )
    own.sort(key=lambda record: (record.id, record.sample))
    last = done.runs[-1]
    settings = done.settings
    found = dict[str, Any]()
    if journal.INSTRUMENT in key:
        settings = {**settings, **{name: key[name] for name in (*pool.ALWAYS, *pool.OF_LOSSES)}}
        found = {"row": losses.row_of(own), "answers": []}
    else:
        [row] = [row for row in summarize(own) if row.group is None]
        found["row"] = {f.name: getattr(row, f.name) for f in fields(Row) if f.name != "group"}
        found["answers"] = answers_of(own, key)
        found["right"] = "".join(map(digit_of, own))
    run = Run(
        key=key_of(settings, Cell(Spec(key["policy"]), key["budget"])),
        source=_source_of(done, key["policy"]),
        tokens=[sum(record.generated_tokens for record in own), len(own)],
        **found,
        command=origin.command("minithink.bench", argv),
        commit=last["commit"],
        date=last["date"],
        machine=last["machine"],
        versions=last["versions"],
    )
    return [run]


def sequences_of(done: journal.Run, key: Wanted) -> int:
    """How many sequences a whole run has."""
    if journal.INSTRUMENT in key:
        return len(done.settings["texts"])
    return len(load_dataset(key["dataset"], key["split"], key["limit"])) * int(key["num_samples"])


def answers_of(records: Sequence[journal.Record], key: Wanted) -> list[list[Any]]:
    """The answers of the first problems, which are kept: problem, sample, answer."""
    some = math.ceil(pool.ANSWERS / key["num_samples"])
    examples = load_dataset(key["dataset"], key["split"], key["limit"])
    asked = {example.id for example in examples[:some]}
    return [[record.id, record.sample, record.found] for record in records if record.id in asked]


def digit_of(record: journal.Record) -> str:
    """What `Run.right` says of a sequence."""
    if record.right:
        return "1"
    return "0" if record.finish_reason == "stop" else "-"


def _source_of(done: journal.Run, policy: str) -> dict[str, str]:
    """The code that a run ran; of a run that an earlier version wrote, the code of now."""
    known: dict[str, dict[str, str]] = done.settings.get(journal.SOURCES, {})
    return known.get(policy) or pool.source_of(policy, done.settings["backend"])


def length_of_full(args: argparse.Namespace, key: Wanted) -> float | None:
    """Tokens that the full cache generates for these problems, if the pool knows: it need not run again."""
    # What was measured beside does not change the length, and recall of the full cache is never measured.
    of_full = key_of({**key, **dict.fromkeys(pool.WATCHED, False), "calibration": None}, Cell(Spec(FULL), None))
    found = [run for run in pool.read(args.results) if serves(run, of_full) and run.state != "stale"]
    return found[0].tokens[0] / found[0].tokens[1] if found else None


def recheck(args: argparse.Namespace, argv: list[str], key: Wanted) -> list[Run]:
    """Generate the first sequences of a cell again: a run whose answers are the same is as good as new, any other is
    stale. KeyboardInterrupt: it was interrupted."""
    there = [run for run in pool.read(args.results) if serves(run, key) and run.state == "unchecked"]
    [run] = pick(there, [key])
    assert run is not None  # `unchecked` has found it
    if not run.answers:
        raise MinithinkError(
            f"The pool has no answers of {run.cell} to compare with: run it again with another --results, and --join "
            f"the {pool.FILE} there."
        )
    count = len({id for id, _, _ in run.answers})
    if "padded_budget" in key:  # the padding depends on all prompts
        count = key["limit"]
    evaluate(args, argv, key, count)
    _, policy, budget = run.cell
    now = {record.key: record.found for record in journal.read(folder_of(args, key)).records}
    run.stale = False
    for id, sample, answer in run.answers:
        if now.get(journal.Key(policy, budget, id, sample)) != answer:
            run.stale = True
    if not run.stale:
        run.source = pool.source_of(policy, run.key["backend"])
    return [run]


def joined(path: Path) -> list[Run]:
    """The runs of another pool. UsageError: it has none."""
    runs = pool.read(path.parent) if path.name in (pool.FILE, pool.PLAIN) else []
    if not runs:
        raise UsageError(f"{path} holds no runs: name a {pool.FILE} that bench sweep has written.")
    return runs


def shown(name: str, where: Path, wanted: Sequence[Wanted], runs: Sequence[Run] | None = None) -> dict[int, Run]:
    """The runs that a table shows for these keys, by the key's place in the list.

    Args:
        name: of the comparison.
        where: the folder of the pool.
        wanted: keys.
        runs: of the pool; None: they are read.

    Raises:
        MinithinkError: there are none.
    """
    path = where / pool.FILE
    picked = pick(pool.read(where) if runs is None else runs, wanted, pool.shows)
    found = {place: run for place, run in enumerate(picked) if run is not None}
    if found:
        return found
    command = f"`bench sweep {name}`"
    weights = wanted[0]["checkpoint"]
    if weights != checkpoint_hash(TINY):
        command = f"`bench sweep {name} --model FOLDER` with the folder of the weights {escaped(weights)}"
    if not path.is_file():
        raise MinithinkError(f"{path} does not exist yet: {command} writes it.")
    raise MinithinkError(
        f"{path} has no run of the comparison {name} on all of its problems: run {command}. Tables of a "
        "quick look are printed by `bench tables --results DIR`."
    )


def drawn(name: str, where: Path, wanted: Sequence[Wanted]) -> list[Run]:
    """The same as a list. MinithinkError: there are none."""
    return list(shown(name, where, wanted).values())


def draw(chosen: Mapping[str, Sequence[Run]], where: Path, folder: Path) -> None:
    """Accuracy by bytes, of each family; recall by budget, where that was measured. Several comparisons share one
    picture, with their names behind those of the policies. where: the folder of the pool. MinithinkError: a run lacks
    a number."""
    names = "-".join(chosen)
    what = "recall" if all(SWEEPS[name].recall for name in chosen) else "bytes"
    rows = dict[str, list[Row]]()  # by family
    for name, runs in chosen.items():
        for run in runs:
            need(run, IN_PICTURES, where / pool.FILE)
            row = Row(**run.row, group=None)
            if len(chosen) > 1:
                row = replace(row, policy=f"{row.policy}, {name}")
            rows.setdefault(run.key["dataset"], []).append(row)
    for family, some in rows.items():
        plots.draw_one(some, what, folder / f"sweep-{names}-{family}.svg")


# The table of a comparison, of the runs in the pool ----------------------------------------------------------------


def looks(where: Path) -> dict[str, list[Wanted]]:
    """The comparisons that were run in a folder for a quick look: their keys, by name. The settings that a look
    changes are those of the newest run of each family; a comparison is there if it is whole for some family."""
    runs = sorted(pool.read(where), key=lambda run: run.date)
    seen = dict[str, dict[str, Any]]()  # by family
    for run in runs:
        seen[run.key["dataset"]] = {name: run.key[name] for name in LOOK if name in run.key}
    found = dict[str, list[Wanted]]()
    for name, sweep in SWEEPS.items():
        if sweep.losses:  # they have no table of their own
            continue
        keys = [key | seen[key["dataset"]] for key in wanted_of(sweep) if key["dataset"] in seen]
        lacking = set[str]()
        for key, ran in zip(keys, pick(runs, keys, pool.shows), strict=True):
            if ran is None:
                lacking.add(key["dataset"])
        whole = [key for key in keys if key["dataset"] not in lacking]
        if whole:
            found[name] = whole
    return found


def result_of(
    name: str,
    where: Path,
    wanted: Sequence[Wanted] | None = None,
    *,
    runs: Sequence[Run] | None = None,
    marked: bool = True,
) -> dict[str, Any]:
    """A comparison's runs in the pool of a folder, as a result.

    Args:
        name: of the comparison.
        where: the folder of the pool.
        wanted: the comparison's keys; None: as the documents show it.
        runs: of the pool; None: they are read.
        marked: look which runs are of other code, or of other defaults, than their policies have now.

    Raises:
        MinithinkError: the pool has no such run, or a run lacks a number.
    """
    sweep = SWEEPS[name]
    command = f"python -m minithink.bench sweep {name}"
    look = wanted is not None
    if wanted is None:
        wanted = wanted_of(sweep)
    found = shown(name, where, wanted, runs)
    runs = sorted(found.values(), key=lambda run: run.date)
    last = max(found.values(), key=lambda run: run.date)
    for run in found.values():
        need(run, IN_TABLES, where / pool.FILE)
    pairs = compared(list(found.values()), sweep.beside)
    full = {run.key["dataset"]: run.row["kv_bytes_peak"] for run in runs if run.key["policy"] == FULL}
    counted = _counted(found.values())
    rows = []
    for place, run in found.items():
        family, *cell = run.cell
        row = run.row | {"family": family, "counts": counted[run.cell[1:]]}
        # A run may know more than the comparison asks for; a column that only some rows fill compares nothing.
        if not sweep.recall:
            row["recall"] = None
        if not sweep.needed:
            row["needed_kept"] = None
        row["of_full"] = row["kv_bytes_peak"] / full[family] if family in full else None
        row["less"] = pairs.get(run.cell)
        row["all"] = pairs.get(("", *cell))
        row["changed"] = marked and has_changed(run, wanted[place])
        rows.append(row)
    missing = len(wanted) - len(found)
    return {
        "benchmark": "sweep",
        "command": last.command if look else command,
        "commit": last.commit,
        "date": last.date,
        "machine": pool.machine_of(runs),
        "versions": last.versions,
        "settings": {
            "limit": wanted[0]["limit"],
            "split": wanted[0]["split"],
            "samples": wanted[0]["num_samples"],
            "beside": sweep.beside if pairs else "",
            "tokens": any(isinstance(key["budget"], int) for key in wanted),
        },
        "measurements": rows,
        "complete": not missing,
        "missing": missing,
        "others": other_commits(runs),
    }


def _counted(runs: Iterable[Run]) -> dict[tuple[str, Any], Any]:
    """What policies count, by policy and budget, all families together."""
    counts_of = dict[tuple[str, Any], list[Any]]()
    for run in runs:
        counts_of.setdefault(run.cell[1:], []).append(run.row["counts"])
    return {cell: counts.total(own) for cell, own in counts_of.items()}


def has_changed(run: Run, key: Wanted) -> bool:
    """Whether a policy has other code, other defaults or another calibration than it had in this run."""
    return run.state == "stale" or not serves(run, key)


def said(result: Result) -> Iterable[str]:
    """What the columns of a comparison mean."""
    columns = ["Bytes: the mean of peaks."]
    if any(m["counts"] for m in result["measurements"]):
        columns.append("Counted: by the policy, in all sequences of all families.")
    beside = result["settings"]["beside"]
    if beside:
        columns.append(f"Difference: points to `{beside}` at the same budget, problem by problem.")
    return [_said(result, columns), ""]


def said_of_needs(result: Result) -> Iterable[str]:
    """What the columns of a comparison's needs mean."""
    columns = [
        "Kept: of what the lines read, the share that the cache still held when they began.",
        "Beyond the prompt: likewise, of what no token of the prompt carries.",
        "Parsed: the share of the lines that the rules of the family read; the other figures are of these lines.",
    ]
    if any(m.get("needed_unknown") is not None for m in result["measurements"]):
        columns.append("Written nowhere: of all that the lines read, the share that the text lacks.")
    return [_said(result, columns), ""]


def _said(result: Result, columns: Sequence[str]) -> str:
    """The problems and budgets of a comparison, what its columns mean, and the commits of other runs."""
    settings = result["settings"]
    tokens = ", or tokens, with those of the prompt" if settings["tokens"] else ""
    problems = (
        f"{settings['limit']} {settings['split']} problems of each family × {settings['samples']}; budgets are the "
        f"prompt and that share of what the full cache generates{tokens}."
    )
    parts = [problems, *columns]
    return " ".join([*parts, *said_of_commits(result)])


def other_commits(runs: Sequence[Run]) -> list[str]:
    """The commits at which some runs were measured, but for that of the newest, each with its date."""
    last = max(runs, key=lambda run: run.date)
    commits = {short(run.commit): run.date[:10] for run in sorted(runs, key=lambda run: run.date)}
    return [f"{commit} ({date})" for commit, date in commits.items() if commit != short(last.commit)]


def said_of_commits(result: Result) -> list[str]:
    """A sentence about the other commits, if there are any."""
    others = result["others"]
    return [f"Some rows were measured at commit {', '.join(others)}."] if others else []


COLUMNS: tuple[Column, ...] = (("policy", "policy", "`{}`"), ("budget", lambda m: m["budget"] or 0, "{:share}"))
TABLE = Table(
    COLUMNS,
    across="family",
    cells=(
        ("{}: right", ("pass_at_1", "pass_at_1_low", "pass_at_1_high"), "**{:.1%}** ({:.1%} to {:.1%})"),
        ("tokens", "generated_mean", "{:,.0f}"),
        ("of full's bytes", "of_full", "{:.1%}"),
        ("recall?", "recall", "{:.1%}"),
        ("needed, kept?", "needed_kept", "{:.1%}"),
        ("difference?", points, DIFFERENCE),
    ),
    last=(
        ("all: right?", ("all.right", "all.low", "all.high"), "**{:.1%}** ({:.1%} to {:.1%})"),
        ("all: difference?", lambda m: points(m, "all"), DIFFERENCE),
        ("counted?", lambda m: counts.said(m["counts"]) if m["counts"] else None, "{}"),
    ),
    said=said,
)
NEEDED = Table(
    COLUMNS,
    across="family",
    cells=(
        ("{}: kept", "needed_kept", "{:.1%}"),
        ("beyond the prompt?", "needed_beyond", "{:.1%}"),
        ("parsed?", "parsed", "{:.1%}"),
        ("written nowhere?", "needed_unknown", "{:.1%}"),
    ),
    said=said_of_needs,
)
