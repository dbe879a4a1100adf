"""Record what the full cache writes, for oracles that know the future.

An evaluation of the same problems with the same options of drawing generates the same texts with the full cache. So
the options here are those of `minithink.evaluate`. One text of each problem is recorded, with its number: draws
depend on it.
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from typing import Any

from minithink.calibrate.journal import Journal, folder_of_texts
from minithink.calibrate.models import load_model
from minithink.calibrate.problems import (
    add_dataset_arguments,
    dataset_options,
    graded_of,
    is_right,
    names_of,
    say_of_graders,
    splits_of,
)
from minithink.calibrate.thoughts import CPU_BATCH, GPU_BATCH, hash_of
from minithink.checkpoint.calibration import FORESIGHT
from minithink.cli.commands import INTERRUPTED, finite, location, natural, positive
from minithink.cli.models import add_model_arguments, model_settings
from minithink.engine import Engine
from minithink.errors import UsageError, counted, escaped
from minithink.evaluate.datasets import Example
from minithink.results import record
from minithink.results.progress import progress
from minithink.sampling import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `calibrate foresight`."""
    add_model_arguments(parser)
    add_dataset_arguments(
        parser,
        dataset="as in minithink.evaluate; several, with commas between them",
        split="split of the dataset (default: that of minithink.evaluate)",
    )
    add = parser.add_argument
    add("--limit", type=positive, metavar="N", help="only the first N problems of each dataset")
    add("--max-new-tokens", type=positive, metavar="N", help="default: the model's own, or what the context leaves")
    add("--temperature", type=finite, help="0 is greedy (this and the next default to the model's own)")
    add("--top-p", type=finite, help="1 is off")
    add("--seed", type=natural, default=0, help="seed of the draws (default: 0)")
    add("--batch-size", type=positive, metavar="N", help=f"default: {GPU_BATCH} on a GPU, else {CPU_BATCH}")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    add(
        "--output",
        type=location,
        metavar="FOLDER",
        help="where foresight.json goes (default: beside the model, "
        "where it is looked for); give it again as --calibration",
    )
    add("--replace", action="store_true", help="replace a recording that is there already")
    add("--resume", action="store_true", help="finish an interrupted recording")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate with the full cache, write the texts."""
    SamplingParams(args.temperature or 0, top_p=1 if args.top_p is None else args.top_p, seed=args.seed)
    options = dataset_options(args)
    names = names_of(args)
    datasets = dict[str, list[Example]]()
    for name, split in zip(names, splits_of(args.split, names), strict=True):
        datasets[name] = options.load(name, split, args.limit)
        say_of_graders(datasets[name])
    engine = load_model(args)
    assert engine.loaded.home is not None
    path = (args.output or engine.loaded.home.calibration) / FORESIGHT
    if path.exists() and not args.replace:
        raise UsageError(f"{path} is there already: --replace makes it anew, --output FOLDER puts it elsewhere.")
    own = engine.generation_config
    drawing: dict[str, Any] = {
        "temperature": own.temperature if args.temperature is None else args.temperature,
        "top_k": own.top_k,
        "top_p": own.top_p if args.top_p is None else args.top_p,
        "min_p": own.min_p,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens or own.max_new_tokens or engine.config.max_position,
        "batch_size": args.batch_size or (GPU_BATCH if engine.device.type == "cuda" else CPU_BATCH),
    }
    examples = [*chain.from_iterable(datasets.values())]
    settings = {
        "dataset": args.dataset,
        "split": args.split,
        "limit": args.limit,
        "problems": hash_of(examples),
        **dataset_options(args).settings(),
        **model_settings(args),
        **drawing,
        "device": engine.device.type,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "backend": engine.decoder.backend.name,
        "checkpoint": engine.loaded.home.checkpoint,
    }
    result = record.new("foresight", argv, engine.device, program="minithink.calibrate")
    record.check(path)
    texts = folder_of_texts(args.output, settings["checkpoint"])
    with Journal(texts / path.with_suffix(".jsonl").name, settings, args.resume) as journal:
        try:
            for name, examples in datasets.items():
                generate_texts(engine, name, examples, drawing, journal)
        except KeyboardInterrupt:
            _say(
                f"interrupted: {journal.path} holds {counted(len(journal.lines), 'text')}; give the same command "
                "with --resume to finish the rest"
            )
            return INTERRUPTED
        found = [[line["prompt"], line["tokens"], line["text"]] for line in journal.lines]
        result |= {"checkpoint": settings["checkpoint"], "settings": settings, "texts": found, "measurements": []}
        record.write(path, result | {"complete": True})
        journal.remove()
    _say(f"written to {path}: {counted(len(found), 'text')}")
    return 0


def generate_texts(
    engine: Engine, name: str, examples: list[Example], drawing: dict[str, Any], journal: Journal
) -> None:
    """Generate the texts of a dataset that the journal does not hold yet."""
    done = {line["text"]: line["right"] for line in journal.lines if line["dataset"] == name}
    if len(done) == len(examples):
        return
    graded = graded_of(done.values())
    label = f"{name}, full cache"
    stream = engine.stream([engine.prompt_ids(example.question) for example in examples], fixed=True, **drawing)
    stream.sequences = [s for s in stream.sequences if s.number not in done]
    stream.tolerant = False  # no calibration comes from a text that broke off
    with progress(len(examples), len(done), label, right=sum(graded), graded=len(graded)) as advance:
        for advanced in stream.advances():
            advance.step(len(advanced))
            for s in advanced:
                if s.finish_reason:
                    right = is_right(engine.tokenizer, s, examples[s.number])
                    journal.append(
                        {"text": s.number, "dataset": name, "right": right, "prompt": s.prompt, "tokens": s.tokens}
                    )
                    advance(right)


def _say(text: str) -> None:
    print(f"minithink.calibrate: {escaped(text)}", file=sys.stderr, flush=True)
