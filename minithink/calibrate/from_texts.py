"""Calibrations that read a model's own texts again: `steering` and `centers`.

The model answers problems with the full cache; the texts wait in a journal. When all are there, they are read, and
what was learned goes to a safetensors file with how it was made in its metadata.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from minithink.calibrate.journal import Journal, folder_of_texts
from minithink.calibrate.models import load_model
from minithink.calibrate.problems import dataset_options, graded_of, is_right
from minithink.calibrate.thoughts import drawing_of, hash_of, load_examples, machine_of
from minithink.checkpoint.calibration import METADATA
from minithink.cli.models import model_settings
from minithink.engine import Engine
from minithink.errors import UsageError, counted, escaped, unwritable
from minithink.evaluate.datasets import Example
from minithink.results import record
from minithink.results.files import dumps, rounded
from minithink.results.files import replace as replace_file
from minithink.results.progress import progress
from minithink.sampling import SamplingParams

SETTINGS = ("dataset", "split", "num_prompts")
# Engine, problems, lines of the journal by prompt → the tensors of the file, more fields of its metadata.
Learn = Callable[[Engine, Sequence[Example], Sequence[Mapping[str, Any]]], tuple[dict[str, Tensor], dict[str, Any]]]


def calibrate(
    args: argparse.Namespace,
    argv: list[str],
    file: str,
    learn: Learn,
    *,
    resumed_with: Sequence[str] = (),
    recorded: Mapping[str, Any] | None = None,
) -> tuple[Path, dict[str, Any]] | None:
    """Generate the texts, read them again, write the file.

    Args:
        args: with the options of `thoughts.add_common_arguments`.
        argv: the words of the command, for the record.
        file: the name of the result; without its ending, that of the calibration.
        learn: reads the texts.
        resumed_with: more options that must be the same when a run is resumed.
        recorded: more settings, which may differ then.

    Returns:
        The path of the file and what `learn` said for its metadata; None: interrupted, and it was said how to go on.

    Raises:
        UsageError: the file is there already, or an option is off.
        MinithinkError: it cannot be written.
    """
    SamplingParams(args.temperature or 0, top_p=1 if args.top_p is None else args.top_p, seed=args.seed)
    examples, args.split = load_examples(args)
    engine = load_model(args)
    assert engine.loaded.home is not None
    path = (args.output or engine.loaded.home.calibration) / file
    if path.exists() and not args.replace:
        raise UsageError(
            f"{path} is there already: --replace makes it anew, --output FOLDER puts the new one elsewhere."
        )
    drawn = drawing_of(engine, args)
    settings = {
        "checkpoint": engine.loaded.home.checkpoint,
        "problems": hash_of(examples),
        **{name: getattr(args, name) for name in (*SETTINGS, *resumed_with)},
        **dataset_options(args).settings(),
        **model_settings(args),
        **drawn,
        **machine_of(engine),
    }
    result = record.new(path.stem, argv, engine.device, program="minithink.calibrate")
    record.check(path)
    texts = folder_of_texts(args.output, settings["checkpoint"])
    with Journal(texts / f"{path.stem}.jsonl", settings, args.resume) as journal:
        try:
            generate(engine, examples, drawn, journal)
            lines = sorted(journal.lines, key=lambda line: line["prompt"])
            tensors, about = learn(engine, examples, lines)
        except KeyboardInterrupt:
            say(
                f"interrupted: {journal.path} holds {len(journal.lines)} of {counted(len(examples), 'prompt')}; give "
                "the same command with --resume to finish the rest"
            )
            return None
        result |= {
            "checkpoint": settings["checkpoint"],
            "settings": settings | dict(recorded or {}),
            **about,
            "complete": True,
        }
        try:
            replace_file(path, save(tensors, {METADATA: dumps(rounded(result))}))
        except OSError as error:
            raise unwritable("The calibration", path, error, "--output") from None
        journal.remove()
    return path, about


def generate(engine: Engine, examples: Sequence[Example], drawn: Mapping[str, Any], journal: Journal) -> None:
    """Generate with the full cache the texts that the journal does not hold yet."""
    done = {line["prompt"]: line["right"] for line in journal.lines}
    if len(done) == len(examples):
        return
    graded = graded_of(done.values())
    stream = engine.stream([engine.prompt_ids(example.question) for example in examples], fixed=True, **drawn)
    stream.sequences = [s for s in stream.sequences if s.number not in done]
    stream.tolerant = False  # no calibration comes from a text that broke off
    with progress(len(examples), len(done), "full cache", right=sum(graded), graded=len(graded)) as advance:
        for advanced in stream.advances():
            for s in advanced:
                if not s.finish_reason:
                    continue
                right = is_right(engine.tokenizer, s, examples[s.number])
                journal.append({"prompt": s.number, "right": right, "tokens": list(s.tokens)})
                advance(right)


def say(text: str) -> None:
    """Tell the user something that is no result."""
    print(f"minithink.calibrate: {escaped(text)}", file=sys.stderr, flush=True)
