"""Accuracy of a full cache on the embedded problems, by length of the reference trace.

Every finished sequence goes to a JSONL file beside the output at once; `--resume` continues from it. A sequence's
draws depend on the seed and its number in the split alone, so neither `--limit`, nor the batch size, nor an
interruption changes which tokens it draws (beyond the rounding of sums of another shape). Several processes can share
a run: each takes a `--shard`, and a last call with `--join` counts their journals and writes the result, with the
machine and the commit that each of them names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minithink import results
from minithink.commands import positive
from minithink.engine import DTYPES, TINY, Engine, load
from minithink.errors import MinithinkError, UsageError, reason
from minithink.intervals import wilson
from minithink.progress import progress
from minithink.sampling import SamplingParams
from minithink.stream import Track
from minithink.tasks import BINS, SPLITS, Problem, families, grade, load_problems
from minithink.tasks.facts import FAMILY as FACTS
from minithink.thinking import Stage, split_thinking
from minithink.weights import checkpoint_hash, resolve

GPU_BATCH = 256
ORIGIN = ("command", "date", "commit", "machine", "versions")  # of a result: what a journal says of its outcomes


class Outcome(NamedTuple):
    """How one sequence ended."""

    id: str  # of the problem
    sample: int
    right: bool
    tokens: int  # generated, with the one that stopped
    finish: str  # stop | length | context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench accuracy`."""
    add = parser.add_argument
    add("--model", default="tiny", help="folder, Hugging Face id, or tiny: the embedded one (default)")
    add("--family", default=FACTS, choices=families(), help="of the problems (default: facts)")
    add("--split", default="test", choices=SPLITS)
    add("--temperature", type=float, default=0.6, help="0: greedy (default 0.6)")
    add("--num-samples", type=positive, default=1, metavar="N", help="sequences for each problem (default 1)")
    add("--seed", type=int, default=0, metavar="N")
    add("--max-new-tokens", type=positive, metavar="N", help="default: what the context leaves")
    add("--batch-size", type=positive, metavar="N", help=f"default: {GPU_BATCH} on a GPU, else up to 32")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--limit", type=positive, metavar="N", help="only the first N problems")
    add("--resume", action="store_true", help="continue an interrupted run")
    add("--shard", type=_shard, metavar="I/N", help="only every N-th sequence from the I-th on; leaves its journal")
    add("--join", type=Path, nargs="+", default=[], metavar="JOURNAL", help="count what shards have done already")
    add("--output", type=Path, metavar="FILE", help="default: docs/results/accuracy.json; with -MODEL, with "
        "-FAMILY where these are others")  # fmt: skip


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, grade, write the result, print a table."""
    others = [] if args.model == "tiny" else [args.model.rstrip("/").rpartition("/")[2]]
    others += [] if args.family == FACTS else [args.family]
    name = "-".join(["accuracy", *others])
    output = args.output or results.default_path(name)
    SamplingParams(args.temperature, seed=args.seed)  # refuses what makes no sense, before a model is loaded
    problems = load_problems(args.split, args.family)
    chosen = problems[: args.limit]
    engine = load(args.model, device=args.device, dtype=args.dtype)
    settings = {
        "model": checkpoint_hash(TINY if args.model == "tiny" else resolve(args.model)),
        "family": args.family,
        "split": args.split,
        "temperature": args.temperature,
        "num_samples": args.num_samples,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "dtype": str(engine.dtype).removeprefix("torch."),
    }
    journal = Journal(output.with_suffix(".jsonl"), settings)
    this_run = results.new("accuracy", argv, engine.device)
    done = journal.open(args.resume, {name: this_run[name] for name in ORIGIN})
    joined = [Journal(path, settings) for path in args.join]
    for one in joined:
        done |= one.read()
    keys = [(p.id, k) for p in chosen for k in range(args.num_samples)]
    wanted = set(keys[args.shard[0] :: args.shard[1]] if args.shard else keys)
    outcomes = {key: outcome for key, outcome in done.items() if key in wanted}
    batch_size = args.batch_size or (GPU_BATCH if engine.device.type == "cuda" else None)
    began, generated = time.monotonic(), 0
    try:
        with progress(len(wanted), len(outcomes), right=sum(x.right for x in outcomes.values())) as advance:
            for outcome in generate(engine, problems, wanted - outcomes.keys(), settings, batch_size):
                journal.add(outcome)
                outcomes[outcome.id, outcome.sample] = outcome
                generated += outcome.tokens
                advance(outcome.right)
    except KeyboardInterrupt:
        print(
            f"\nminithink.bench: interrupted after {len(outcomes)} of {len(wanted)} sequences, which are in "
            f"{journal.path}; continue with --resume.",
            file=sys.stderr,
        )
        return 130
    finally:
        journal.close()

    if args.shard:
        print(f"{len(outcomes)} sequences are in {journal.path}; name it after --join.", file=sys.stderr)
        return 0
    seconds = time.monotonic() - began
    result = results.new("accuracy", argv, engine.device)
    rows = [outcomes[p.id, k] for p in chosen for k in range(args.num_samples)]
    result["settings"] = {"model_name": args.model, **settings, "device": engine.device.type, "limit": args.limit}
    result["measurements"] = summarize(chosen, rows)
    if args.join or args.resume:
        result["sources"] = sources([journal, *joined], outcomes)
    if not args.join:
        # of this run, if it was resumed
        result["seconds"], result["tokens_per_second"] = seconds, generated / seconds
    result["outcome_columns"] = list(Outcome._fields)
    result["outcomes"] = [list(row) for row in rows]
    result["complete"] = True
    results.write(output, result)
    journal.path.unlink()  # the result holds all of it now
    for m in result["measurements"]:
        low, high = m["interval"]
        print(
            f"{m['bin']:>10}  n {m['n']:4}  right {m['right']:4}  {m['share']:6.1%} ({low:.1%} to {high:.1%})  "
            f"{m['mean_tokens']:,.0f} tokens  cut off {m['cut_off']:.1%}"
        )
    print(f"written to {output}", file=sys.stderr)
    return 0


def sources(journals: Sequence[Journal], counted: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """Where the sequences that are counted were generated, and how many: one row for every run, in order.

    Args:
        journals: where a sequence is in several, the last one counts.
        counted: problems' ids and samples.
    """
    origins = {key: origin for journal in journals for key, origin in journal.origins.items()}
    rows: list[dict[str, Any]] = []
    for key in counted:
        origin = origins.get(key, {})
        row = next((r for r in rows if {**r, "sequences": 0} == {"sequences": 0, **origin}), None)
        if row is None:
            rows.append(row := {"sequences": 0, **origin})
        row["sequences"] += 1
    return rows


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with whole numbers, I from 0 to N − 1")
    return int(index), int(count)


def generate(
    engine: Engine,
    problems: Sequence[Problem],
    wanted: set[tuple[str, int]],
    settings: dict[str, Any],
    batch_size: int | None,
) -> Iterator[Outcome]:
    """Outcomes as the sequences end.

    Args:
        engine: the model.
        problems: the whole split: a sequence's number in it decides its draws.
        wanted: problems' ids and samples to generate.
        settings: temperature, num_samples, seed, max_new_tokens.
        batch_size: sequences at once.
    """
    if not wanted:
        return
    options = {k: settings[k] for k in ("temperature", "num_samples", "seed", "max_new_tokens")}
    stream = engine.stream([p.question for p in problems], batch_size=batch_size, **options)
    # The longest first, so that the batch stays full until near the end.
    running = [s for s in stream.sequences if (problems[s.prompt_index].id, s.sample) in wanted]
    running.sort(key=lambda s: -problems[s.prompt_index].thinking_tokens)
    stream.sequences = list(running)
    for _ in stream.steps():
        if any(s.finish_reason for s in running):
            for s in running:
                if s.finish_reason:
                    yield _outcome(engine, s, problems[s.prompt_index], stream.stop_ids)
            running = [s for s in running if not s.finish_reason]


def _outcome(engine: Engine, s: Track, problem: Problem, stop_ids: frozenset[int]) -> Outcome:
    text = engine.tokenizer.decode(s.tokens[:-1] if s.tokens[-1] in stop_ids else s.tokens)
    # What a sequence writes while it still thinks is no answer.
    _, answer = split_thinking(text, Stage(engine.tokenizer, s.prompt).name == "think")
    return Outcome(problem.id, s.sample, grade(answer, problem.answer), len(s.tokens), s.finish_reason)


def summarize(problems: Sequence[Problem], rows: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row for each length bin that has problems, and one for all."""
    lengths = {p.id: p.thinking_tokens for p in problems}
    groups = [(f"{low}–{high}", [r for r in rows if low <= lengths[r.id] < high]) for low, high in BINS]
    out = []
    for name, group in [*groups, ("all", list(rows))]:
        if not group:
            continue
        n, right = len(group), sum(r.right for r in group)
        # Samples of one problem are no independent trials: the interval counts problems.
        low, high = wilson(right / n, len({r.id for r in group}))
        out.append({
            "bin": name,
            "problems": len({r.id for r in group}),
            "n": n,
            "right": right,
            "share": right / n,
            "interval": [low, high],
            "mean_tokens": sum(r.tokens for r in group) / n,
            "cut_off": sum(r.finish != "stop" for r in group) / n,
        })  # fmt: skip
    return out


class Journal:
    """What is known of an unfinished run: a first line of settings, then a line for every outcome. A line that is an
    object says where those after it were generated; the first journals had none."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.lines: list[str] = []
        self.origins: dict[tuple[str, int], dict[str, Any]] = {}
        self.origin: dict[str, Any] = {}  # of what is added

    def open(self, resume: bool, origin: dict[str, Any]) -> dict[tuple[str, int], Outcome]:
        """Open for appending → the outcomes that are there already.

        Args:
            resume: there may be some.
            origin: where those that are added are generated.

        Raises:
            UsageError: there is an unfinished run, and it is not to be resumed or had other settings.
        """
        try:
            before = self.read() if self.path.exists() else {}
            if before and not resume:
                raise UsageError(
                    f"{self.path} holds {len(before)} sequences of an interrupted run: add --resume to continue it, "
                    "or delete the file to begin anew."
                )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Written anew, which drops a last line that was cut off.
            whole = self.path.with_name(self.path.name + ".new")
            lines = [json.dumps(self.settings), *(self.lines[1:] if before else []), json.dumps(origin)]
            whole.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            whole.replace(self.path)
            self.file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise MinithinkError(f"{self.path} cannot be written: {reason(error)}; give another --output.") from None
        self.origin = origin
        return before

    def read(self) -> dict[tuple[str, int], Outcome]:
        """The outcomes in the file. MinithinkError: there is none, or it is damaged, or of other settings."""
        if not self.path.is_file():
            raise MinithinkError(f"{self.path} does not exist: --join takes the journals that shards left.")
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last \n is cut off
        if not lines:
            return {}
        try:
            settings, *rows = map(json.loads, lines)
            outcomes, origin = list[Outcome](), dict[str, Any]()
            for row in rows:
                if isinstance(row, dict):
                    origin = row
                    continue
                outcomes.append(o := Outcome(*row))
                self.origins[o.id, o.sample] = origin
        except (ValueError, TypeError):
            raise MinithinkError(f"{self.path} is damaged: delete it, and run without --resume.") from None
        if settings != self.settings and outcomes:
            differing = ", ".join(k for k in self.settings if settings.get(k) != self.settings[k])
            raise UsageError(
                f"{self.path} holds an interrupted run with other settings ({differing}): give the same, or delete "
                "the file."
            )
        self.lines = lines
        return {(o.id, o.sample): o for o in outcomes}

    def add(self, outcome: Outcome) -> None:
        """Write one outcome, at once."""
        self.origins[outcome.id, outcome.sample] = self.origin
        self.file.write(json.dumps(outcome) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Write no more."""
        self.file.close()
