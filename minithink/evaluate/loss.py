"""The loss of any text under any policy.

A text is read token by token, as if the model had generated it, and the policy evicts as it would then. The loss of
every next token is kept. There is no sampling noise, so a few texts tell policies apart that need hundreds of
generated answers.

A cell is a policy at a budget, as in an evaluation (`runner.py`), and so are the journal, `--resume` and the batch,
whose shape never changes: no loss depends on an interruption or on the order of the texts.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from minithink.cli.commands import INTERRUPTED, SCHEDULES, location, natural, positive
from minithink.cli.models import add_model_arguments, model_name, model_options, model_settings
from minithink.engine import DTYPES, PROMPT_TOKENS, Engine, load, refuse_recorded, share_of
from minithink.errors import NON_FINITE, MinithinkError, UsageError, counted, escaped
from minithink.evaluate import loss_plots, loss_summary
from minithink.evaluate.journal import (
    BYTES,
    INSTRUMENT,
    RESUME,
    SOURCES,
    Journal,
    Key,
    Record,
    read,
    settings_of,
    starts_of,
)
from minithink.evaluate.loss_job import LossJob
from minithink.evaluate.loss_summary import LossRow
from minithink.evaluate.meter import Held, Seconds, meter
from minithink.evaluate.plan import (
    Cell,
    Spec,
    budgets,
    check_bytes,
    known,
    plan,
    said_of_budgets,
    said_of_bytes,
    tokens_by_bytes,
)
from minithink.evaluate.ranks import refuse_ranks
from minithink.evaluate.runner import CPU_BATCH, FREE, GPU_BATCH, about_before, calibrations, in_order, say_what_stays
from minithink.evaluate.summary import FULL
from minithink.evaluate.texts import (
    LENGTH,
    NAMES,
    REFERENCE,
    STDLIB,
    Text,
    given_answers,
    given_texts,
    read_answers,
    read_texts,
)
from minithink.kv.sizes import check_budget
from minithink.policies import load_list
from minithink.results import origin
from minithink.results.progress import progress
from minithink.results.sources import source_of
from minithink.sequence import Track
from minithink.stream import Stream
from minithink.text.spoken import differences
from minithink.text.tags import tags_of

HELP = (
    "The full cache is always run, too, because the others are compared with it. Written to DIR: config.json, a "
    "line of results.jsonl for each text and policy, results.json, and pictures if matplotlib is there."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `evaluate loss`."""
    add = parser.add_argument
    add(
        "--texts",
        default=STDLIB,
        metavar="WHERE",
        help="a text file, a .jsonl file with a field `text`, a folder of texts; stdlib: source files of the Python "
        "that runs, drawn by lot; or reference: worked solutions of the embedded model's puzzles, each behind its "
        "question as in a chat (default: stdlib)",
    )
    add(
        "--policies",
        "--policy",
        type=load_list,
        metavar="P,P,…",
        help="as in rkv:buffer=16,window,kivi, or FILE.py:Class of your own (default: full)",
    )
    add(
        "--budgets",
        type=budgets,
        default=[],
        metavar="N,N,…",
        help="for the policies that take one and do not name it: tokens that a KV head holds (256,512), shares of "
        "each text's length, its prompt included (0.25,0.5), or bytes of keys and values (512KiB,2MiB)",
    )
    add(
        "--answers",
        action="store_true",
        help="of the tokens behind the thinking alone: WHERE is the folder of an evaluation with --keep-text, a "
        ".jsonl file with prompt, thinking and answer, or reference; texts are read whole, and their prompts are as "
        "in a chat",
    )
    add("--schedule", help=f"when a policy evicts: {SCHEDULES}")
    add(
        "--prompt-tokens",
        type=positive,
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"the first tokens of a text are read at once, and have no loss (default: {PROMPT_TOKENS}; of reference "
        "always the question)",
    )
    add(
        "--length",
        type=positive,
        metavar="N",
        help=f"tokens of a text at most; what lies behind is left out (default: {LENGTH:,}; of reference all)",
    )
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="only the first N texts; of stdlib and reference, how many are drawn (default: all, 20 and 12)",
    )
    add("--seed", type=natural, default=0, help="of the draw of such texts, and of intervals (default: 0)")
    add_model_arguments(parser)
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
        help=f"rows at once (default: as many as there are texts, at most {GPU_BATCH} on a GPU, else {CPU_BATCH})",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--backend", default="auto", help="auto, reference, triton")
    add("--output-dir", type=location, required=True, metavar="DIR", help="where the results go")
    add("--resume", action="store_true", help="finish what an earlier start with the same options left in DIR")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Read the texts, write the summary, print the table."""
    command = origin.command("minithink.evaluate", argv)
    rows = measure(LossJob.of(args), args.output_dir, command=command, resume=args.resume)
    if rows is None:
        return INTERRUPTED
    settings = settings_of(args.output_dir)
    paths = [loss_summary.write(args.output_dir, rows, settings, starts_of(args.output_dir))]
    try:
        paths += loss_plots.draw(rows, args.output_dir, title_of(settings))
    except MinithinkError as error:
        _say(f"no plots: {error}")
    loss_summary.show(rows)
    _say(f"written to {args.output_dir}: {', '.join(path.name for path in paths)}")
    return 0


def measure(
    job: LossJob, folder: Path, *, command: str, resume: bool = False, again: str = RESUME
) -> list[LossRow] | None:
    """Read what is not in the journal yet → a row for each policy and budget; None: Ctrl-C came, and the user was
    told.

    Args:
        job: what is read.
        folder: where the results go.
        command: the command line, for the record.
        resume: finish what an earlier start of the same job left in the folder.
        again: what the user must do after Ctrl-C or an error to go on.
    """
    refuse_ranks()
    cells = cells_of(job)
    length = job.read_length
    tags = tags_of(job.think_tags)
    if job.answers:
        for note in said_of_chat(job):
            _say(note)
        texts = read_answers(job.texts, job.limit, job.seed, tags)
    else:
        texts = read_texts(job.texts, length=length or LENGTH, limit=job.limit, seed=job.seed, tags=tags)
    engine = load(
        job.model,
        **model_options(job),
        device=job.device,
        dtype=job.dtype,
        backend=job.backend,
        calibration=job.calibration,
    )
    if length is not None and length > engine.config.max_position:
        raise UsageError(
            f"--length is {length:,} tokens, and the model's context holds {engine.config.max_position:,}: give "
            "at most as many."
        )
    cells = known(cells, engine.loaded.tokens_of)
    calibration = calibrations(engine, cells)
    reading = Reading(engine, texts, job, cells)
    reading.check(cells)
    settings = reading.settings
    if calibration:
        settings["calibration"] = calibration
    by_bytes = tokens_by_bytes(cells)
    if by_bytes:
        settings[BYTES] = by_bytes
    total = len(cells) * len(texts)
    about = {
        "command": command,
        "date": origin.date(),
        "commit": origin.commit(),
        "machine": origin.machine(engine.device),
        "versions": origin.versions(),
        "sequences_total": total,
    }
    with Journal(folder, settings, resume=resume, allow=FREE, about=about) as journal:
        said = about_before(journal, resume, total, "read")
        in_bytes = said_of_bytes(cells, engine.loaded.said_of_bytes)
        for note in [*journal.notes, *sorted(engine.cautions), *in_bytes, *said]:
            _say(note)
        try:
            _run(reading, cells, journal)
        except KeyboardInterrupt:
            there = f"{len(journal.done):,} of {counted(total, 'text')}"
            _say(f"interrupted: {folder} holds {there}; {again} to read the rest")
            return None
        except MinithinkError:
            say_what_stays(journal, f"{len(journal.done):,} of {counted(total, 'text')}", again)
            raise
    records = read(folder).records
    if all(record.finish_reason == NON_FINITE for record in records):
        raise MinithinkError(
            f"No logits were finite, in {counted(len(records), 'text')}, so there is nothing to sum up: try another "
            "--dtype or another checkpoint."
        )
    for note in said_of_budgets(cells, records, "its losses are those of a cache that keeps every token"):
        _say(note)
    return loss_summary.summarize(records, job.seed, settings["policies"])


def said_of_chat(job: LossJob) -> list[str]:
    """A sentence, if the answers of an evaluation were generated with another chat template or other tags."""
    folder = Path(job.texts)
    if not job.answers or job.texts in NAMES or not folder.is_dir():
        return []
    other = differences(settings_of(folder), job.template or {}, tags_of(job.think_tags))
    if not other:
        return []
    return [
        f"the texts of {folder} were generated with {other}: to read them as they were generated, give the same "
        "--template and --think-tags"
    ]


def title_of(settings: dict[str, Any]) -> str:
    """What stands above a picture: "stdlib, 20 texts of up to 1,536 tokens"."""
    texts = counted(len(settings["texts"]), "text")
    return f"{escaped(settings['dataset'])}, {texts} of up to {settings['length']:,} tokens"


def cells_of(job: LossJob) -> list[Cell]:
    """The cells of a run, the full cache first. UsageError: as of `plan.plan`, and
    for a policy that foresees recorded texts."""
    planned = plan(job.policies, job.budgets, job.schedule)
    others = [cell for cell in planned if cell.policy != FULL]
    for cell in others:
        refuse_recorded(cell.make())
    if others and not job.beside_full:
        return others
    return [Cell(Spec(FULL, job.schedule), None), *others]


def _run(reading: Reading, cells: Sequence[Cell], journal: Journal) -> None:
    """Read the cells in turn: of each, the texts that are not in the journal."""
    for number, cell in enumerate(cells, 1):
        keys = reading.keys(cell)
        todo = {key for key in keys if key not in journal.done}
        if not todo:
            continue
        before = [record for record in journal.records if record.key in set(keys)]
        label = f"{cell} ({number} of {len(cells)})"
        tokens = sum(record.generated_tokens for record in before)
        with progress(len(keys), len(before), label, tokens=tokens, graded=0) as advance:
            for record in reading.records(cell, todo, advance.step):
                journal.append(record)
                advance(None)
        gc.collect()  # streams and graphs refer to each other, and the next cell needs their memory


class Reading:
    """The texts, the model and the settings, which all cells share."""

    def __init__(self, engine: Engine, texts: Sequence[Text], job: LossJob, cells: Sequence[Cell]) -> None:
        assert engine.loaded.home is not None
        self.engine = engine
        self.texts = texts
        length = job.read_length
        if job.answers:
            self.given = given_answers(engine, texts)
        else:
            self.given = given_texts(engine, texts, prompt_tokens=job.prompt_tokens, length=length)
        most = GPU_BATCH if engine.device.type == "cuda" else CPU_BATCH
        self.batch_size = job.batch_size or min(most, len(texts))
        self.has_said_why = False
        self.settings: dict[str, Any] = {
            INSTRUMENT: "loss",
            "model": model_name(job.model, job.adapter),
            "checkpoint": engine.loaded.home.checkpoint,
            "dataset": job.texts if job.texts in NAMES else Path(job.texts).name,
            "texts": {text.name: text.digits for text in texts},
            "answers": job.answers,
            "prompt_tokens": None if job.answers or job.texts == REFERENCE else job.prompt_tokens,
            "length": max(len(one.ids) for one in self.given) if length is None else length,
            "policies": list(dict.fromkeys(cell.policy for cell in cells)),
            "budgets": list(job.budgets),
            "schedule": job.schedule,
            "seed": job.seed,
            "batch_size": self.batch_size,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "backend": engine.decoder.backend.name,
            "device": engine.device.type,
            **model_settings(job),
        }
        backend = self.settings["backend"]
        self.settings[SOURCES] = {cell.policy: source_of(cell.make(), backend) for cell in cells}

    def keys(self, cell: Cell) -> list[Key]:
        """The keys of all texts of a cell, in their order."""
        return [Key(*cell.name, text.name, 0) for text in self.texts]

    def budgets(self, cell: Cell) -> list[int | None]:
        """Tokens that the policy may keep of each text, if its budget is a share."""
        return [share_of(cell.budget, len(one.ids)) for one in self.given]

    def check(self, cells: Sequence[Cell]) -> None:
        """UsageError: a budget is too small for its policy and a text."""
        for cell in cells:
            check_bytes(cell, max(one.prompt_tokens for one in self.given))
            for text, one, tokens in zip(self.texts, self.given, self.budgets(cell), strict=True):
                try:
                    check_budget(cell.make() if tokens is None else cell.make(tokens), one.prompt_tokens)
                except UsageError as error:
                    if tokens is None:
                        raise
                    raise UsageError(
                        f"{cell.policy}: the share {cell.budget} comes to {counted(tokens, 'token')} of "
                        f"{escaped(text.name)}; give a larger share, or tokens ({str(error).rstrip('.')})."
                    ) from None

    def records(self, cell: Cell, wanted: Collection[Key], step: Callable[[int], object]) -> Iterator[Record]:
        """Read a cell → the records of the wanted texts, in the order in which they end.

        Args:
            cell: the policy and its budget.
            wanted: the texts that are read.
            step: called after every step with the number of its new tokens.
        """
        stream = self.stream(cell)
        measure = meter(stream)
        keys = self.keys(cell)
        of_bytes = cell.tokens
        chosen = [s for s in stream.sequences if keys[s.number] in wanted]
        stream.sequences = in_order(chosen, [s.limit for s in chosen])
        seconds = Seconds()
        for advanced in stream.advances():
            seconds.step(advanced)
            step(len(advanced))
            ended = [s for s in advanced if s.finish_reason]
            if any(s.finish_reason == NON_FINITE for s in ended) and not self.has_said_why:
                self.has_said_why = True
                _say(f"{stream.diagnose()} Such texts count in no mean")
            for s, held in zip(ended, measure.take(ended), strict=True):
                budget = of_bytes if s.budget is None else s.budget
                yield self._record(s, keys[s.number], held, seconds.take(s), budget)

    def stream(self, cell: Cell) -> Stream:
        """The stream of a cell's texts, each with its own budget."""
        own = self.budgets(cell)
        shares = [tokens for tokens in own if tokens is not None]
        policy = cell.make(max(shares)) if shares else cell.make()
        # The full cache is read from pages where kernels do that, and else from a plain buffer, as without a policy.
        stream = self.engine.reading(
            [one.ids for one in self.given],
            None if cell.policy == FULL else policy,
            prompt_tokens=[one.prompt_tokens for one in self.given],
            batch_size=self.batch_size,
            fixed=True,
        )
        stream.ahead = True
        stream.accounts = False  # the meter counts bytes, between two steps
        for s in stream.sequences:
            s.budget = own[s.number]
        return stream

    def _record(self, s: Track, key: Key, held: Held, seconds: float, budget: int | None) -> Record:
        """budget: tokens that a share or bytes come to."""
        before = self.given[s.number].first - len(s.prompt)  # tokens whose loss does not count
        return Record(
            policy=key.policy,
            budget=key.budget,
            id=key.id,
            sample=key.sample,
            group="",
            right=None,
            found=None,
            finish_reason=s.finish_reason,
            prompt_tokens=len(s.prompt),
            generated_tokens=len(s.tokens),
            thinking_tokens=before,
            kv_bytes_peak=held.bytes_peak,
            kv_bytes_mean=held.bytes_mean,
            tokens_peak=held.tokens_peak,
            tokens_mean=held.tokens_mean,
            steps=held.steps,
            evicting_steps=held.evicting_steps,
            seconds=seconds,
            text_sha=self.texts[s.number].digits,
            budget_tokens=budget,
            counts=s.counts or None,
            losses=[float(f"{loss:.9g}") for loss in s.losses[before:]],  # nine digits are enough for each float32
        )


def _say(text: str) -> None:
    print(f"minithink.evaluate: {escaped(text)}", file=sys.stderr, flush=True)
