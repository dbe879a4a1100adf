"""Train the predictors of importance for a model (DynTS §4.1).

The model writes texts with the full cache, and the right texts are kept (`traces.py`). Each text is read again: a
thinking token's hidden state is the input, the attention that the token gets later on is the target
(`importance.py`). A predictor of three layers learns to predict the target from the input (`training.py`), with the
backbone frozen. It is measured on traces of other problems, beside a predictor that knows positions only
(`quality.py`).

Files that are written beside the model, or to --output:

    predictor-TARGET.safetensors    the weights, with settings and measurements as metadata
    predictor.json                  the measurements of all targets, for people and tables
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from minithink.calibrate import curves
from minithink.calibrate.models import load_model
from minithink.calibrate.problems import add_dataset_arguments, dataset_options, names_of, say_of_graders
from minithink.calibrate.quality import by_position, mean, quality
from minithink.calibrate.thoughts import CPU_BATCH, GPU_BATCH, hash_of
from minithink.calibrate.traces import Trace, held_out, problems_of, sample
from minithink.calibrate.training import Recipe, look, settings_of, train
from minithink.checkpoint.calibration import TARGETS, WEIGHTS
from minithink.cli.commands import INTERRUPTED, different, finite, location, natural, positive
from minithink.cli.models import add_model_arguments, model_settings
from minithink.engine import Engine
from minithink.errors import UsageError, counted, escaped, quoted, unwritable
from minithink.evaluate.grading import GRADERS
from minithink.results import record
from minithink.results.figures import need_matplotlib
from minithink.results.files import dumps, replace, rounded
from minithink.sampling import SamplingParams

HELP = (
    "After an interruption the same command goes on: finished texts stay in --traces. --traces can be given again "
    "with other targets or another recipe."
)
TRACES = Path("runs/traces")  # from where the command is started
ALL = "all"  # a predictor that is trained on all datasets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `calibrate predictor`."""
    add_model_arguments(parser)
    add_dataset_arguments(
        parser,
        dataset="as in minithink.evaluate; several, with commas between them, take turns. Of the embedded families, "
        "training problems are drawn",
        split="split of the dataset, never test (default: train of the embedded families, else validation)",
        graders=tuple(GRADERS),  # it is trained on right texts
    )
    add = parser.add_argument
    recipe = Recipe()
    add("--num-prompts", type=positive, default=100, metavar="N", help="problems (default: 100)")
    add("--num-samples", type=positive, default=5, metavar="N", help="texts of each problem (default: 5)")
    add(
        "--targets",
        type=targets,
        default=["answer"],
        metavar="T,T,…",
        help="what is predicted: attention from the "
        "answer, from all later tokens (hindsight), or what the rules of the task families need (needs) (default: "
        "answer)",
    )
    add(
        "--held-out",
        type=share,
        default=0.1,
        metavar="X",
        help="share of the problems that no predictor is trained on (default: 0.1)",
    )
    add("--transfer", action="store_true", help="also train on each dataset alone, and measure on the others")
    add(
        "--learning-curve",
        type=amounts,
        default=[],
        metavar="N,N,…",
        help="also train on so many of the texts, and measure on the same held-out texts",
    )
    add("--epochs", type=positive, default=recipe.epochs, metavar="N", help=f"default: {recipe.epochs}")
    add(
        "--batch",
        type=positive,
        default=recipe.batch,
        metavar="N",
        help=f"texts of a step of training (default: {recipe.batch})",
    )
    add(
        "--micro",
        type=positive,
        default=recipe.micro,
        metavar="N",
        help=f"of these, texts whose activations are in memory at once (default: {recipe.micro})",
    )
    add("--lr", type=rate, default=recipe.lr, metavar="X", help=f"learning rate (default: {recipe.lr:g})")
    add("--max-new-tokens", type=positive, metavar="N", help="default: the model's own, or what the context leaves")
    add("--temperature", type=finite, help="0 is greedy (this and the next default to the model's own)")
    add("--top-p", type=finite, help="1 is off")
    add("--seed", type=natural, default=0, help="seed of problems, draws and training (default: 0)")
    add(
        "--batch-size",
        type=positive,
        metavar="N",
        help=f"texts at once while sampling (default: {GPU_BATCH} on a GPU, else {CPU_BATCH})",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", help="auto, float32, float16, bfloat16")
    add(
        "--traces",
        type=location,
        metavar="DIR",
        help="where texts, hidden states and unfinished trainings "
        "lie (default: a folder for each checkpoint in runs/traces)",
    )
    add(
        "--output",
        type=location,
        metavar="FOLDER",
        help="where the predictors go (default: beside the model, where "
        "they are looked for); give it again as --calibration",
    )
    add("--replace", action="store_true", help="replace predictors that are there already")
    add("--plot", type=location, metavar="DIR", help="draw DIR/predictor-TARGET.svg: MSE, τ and overlap by step")


def targets(text: str) -> list[str]:
    """For argparse: different names of TARGETS."""
    return different(text, "target", TARGETS)


def amounts(text: str) -> list[int]:
    """For argparse: different whole numbers, at least 1."""
    found = [positive(number) for number in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{quoted(text)} names a number twice")
    return found


def share(text: str) -> float:
    """For argparse: a number above 0 and below 1."""
    return _number(text, "share above 0 and below 1", 1.0)


def rate(text: str) -> float:
    """For argparse: a number above 0 and below 10."""
    return _number(text, "rate above 0 and below 10", 10.0)


def _number(text: str, what: str, below: float) -> float:
    try:
        value = finite(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if not 0 < value < below:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no {what}")
    return value


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Sample, measure, train, look, write."""
    SamplingParams(args.temperature or 0, top_p=1 if args.top_p is None else args.top_p, seed=args.seed)
    if args.plot is not None:
        need_matplotlib()
        record.check(args.plot / "picture.svg", "--plot")
    options = dataset_options(args)
    problems = problems_of(names_of(args), args.split, args.num_prompts, args.seed, options)
    say_of_graders([example for _, example in problems])
    engine = load_model(args)
    assert engine.loaded.home is not None
    folder = args.output or engine.loaded.home.calibration
    for target in args.targets:
        if (path := folder / file_of(target)).exists() and not args.replace:
            raise UsageError(f"{path} is there already: --replace makes it anew, --output FOLDER puts it elsewhere.")
    record.check(folder / "predictor.json")
    own = engine.generation_config
    drawing: dict[str, Any] = {
        "temperature": own.temperature if args.temperature is None else args.temperature,
        "top_k": own.top_k,
        "top_p": own.top_p if args.top_p is None else args.top_p,
        "min_p": own.min_p,
        "seed": args.seed,
        "num_samples": args.num_samples,
        "max_new_tokens": args.max_new_tokens or own.max_new_tokens or engine.config.max_position,
        "batch_size": args.batch_size or (GPU_BATCH if engine.device.type == "cuda" else CPU_BATCH),
    }
    recipe = Recipe(args.epochs, args.batch, args.micro, args.lr, args.seed)
    settings = {
        "checkpoint": engine.loaded.home.checkpoint,
        "dataset": args.dataset,
        "split": args.split,
        "num_prompts": args.num_prompts,
        "problems": hash_of([example for _, example in problems]),
        **options.settings(),
        **model_settings(args),
        **drawing,
        "device": engine.device.type,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "backend": engine.decoder.backend.name,
    }
    if args.traces is None:
        args.traces = TRACES / settings["checkpoint"]
    finished = []
    try:
        traces = sample(engine, problems, drawing, args.traces, settings)
        result = record.new("predictor", argv, engine.device, program="minithink.calibrate")
        result["settings"] = settings | settings_of(recipe) | {"held_out": args.held_out}
        result["texts"] = {
            "sampled": len(problems) * args.num_samples,
            "right": len(traces),
            "thinking_tokens": sum(t.length for t in traces),
        }
        result |= {"measurements": [], "curves": {}}
        for target in args.targets:
            learned = learn(engine, args, target, traces=traces, recipe=recipe, result=result)
            finished.append(learned)
    except KeyboardInterrupt:
        _say(f"interrupted: what is finished is in {args.traces}; the same command goes on")
        return INTERRUPTED
    for target, (weights, about) in zip(args.targets, finished, strict=True):  # all or none
        write(folder / file_of(target), weights, result, about)
    result["checkpoint"] = settings["checkpoint"]
    record.write(folder / "predictor.json", result | {"complete": True})
    for row in result["measurements"]:
        print(line(row))
    _say(f"written to {folder}: {', '.join(map(file_of, args.targets))}, predictor.json")
    return 0


def learn(
    engine: Engine,
    args: argparse.Namespace,
    target: str,
    traces: Sequence[Trace],
    recipe: Recipe,
    result: dict[str, Any],
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train the predictors of one target, and put their measurements into the result → the weights of the one that is
    trained on all texts, and what its file says of them."""
    names = args.dataset.split(",")
    trained, held = held_out(traces, args.num_prompts, args.held_out)
    groups: dict[str, Sequence[Trace]] = {ALL: trained}
    for name in names if args.transfer and len(names) > 1 else ():
        groups[name] = [t for t in trained if t.dataset == name]
    for count in args.learning_curve:
        if count >= len(trained):
            raise UsageError(
                f"--learning-curve {count}: the predictor is trained on {counted(len(trained), 'text')}; give fewer."
            )
        # Spread over all of them, so that each dataset has its share.
        groups[f"{count} texts"] = [trained[i * len(trained) // count] for i in range(count)]
    for name, own in groups.items():
        if not own:
            raise UsageError(f"No text of {name} is right: give more --num-prompts, or leave {name} out.")
        said = json.dumps([settings_of(recipe), target, name, [t.path.name for t in own]])
        path = args.traces / f"training-{target}-{hashlib.sha256(said.encode()).hexdigest()[:12]}.safetensors"
        done = train(own, held, target, engine.config.hidden_size, recipe, path, engine.device, _say)
        weights = [w.detach().to(torch.bfloat16) for w in done.weights]  # as they are written
        rows = measured([w.float() for w in weights], own, held, target, name)
        result["measurements"] += rows
        if name != ALL:
            continue
        result["curves"][target] = done.curve
        about = {"settings": result["settings"] | {"target": target}, "measurements": rows, "curve": done.curve}
        if args.plot is not None:
            curves.draw(args.plot / f"predictor-{target}.svg", target, done.curve or [])
        of_all = weights, about
    return of_all


def measured(
    weights: Sequence[torch.Tensor], trained: Sequence[Trace], held: Sequence[Trace], target: str, name: str
) -> list[dict[str, Any]]:
    """A row for each dataset of the held-out traces, and one for all of them. name: the dataset of the training."""
    known = by_position(trace.load(target)[1] for trace in trained)
    pairs = []
    for found, trace in look(weights, held, target):
        truth = trace.load(target)[1]
        pairs.append((trace.dataset, found, quality(known(len(truth)), truth), float(truth.var(correction=0))))
    rows = []
    for dataset in dict.fromkeys([ALL, *(t.dataset for t in held)]):
        of = [x for x in pairs if dataset in (ALL, x[0])]
        rows.append(
            {
                "target": target,
                "trained": name,
                "dataset": dataset,
                "traces": len(of),
                "trained_traces": len(trained),
                **mean([found for _, found, _, _ in of]),
                "position": mean([position for _, _, position, _ in of]),
                "variance": sum(variance for *_, variance in of) / len(of),
            }
        )
    return rows


def write(path: Path, weights: Sequence[torch.Tensor], result: dict[str, Any], about: dict[str, Any]) -> None:
    """Write a predictor: bfloat16, with its settings and measurements as metadata. MinithinkError: it cannot be
    written."""
    metadata = {name: str(result[name]) for name in ("command", "date", "commit")}
    metadata |= {"checkpoint": about["settings"]["checkpoint"]}
    metadata |= {name: dumps(rounded(value)) for name, value in about.items()}
    tensors = {name: w.cpu().contiguous() for name, w in zip(WEIGHTS, weights, strict=True)}
    try:
        replace(path, save(tensors, metadata))
    except OSError as error:
        raise unwritable("The predictor", path, error, "--output") from None


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    parts = []
    for what, name, form in (
        ("MSE", "mse", ".3f"),
        ("τ", "tau", ".3f"),
        ("top 20 % in the top 30 %", "top_30", ".1%"),
    ):
        own, other = ("–" if x[name] is None else format(x[name], form) for x in (row, row["position"]))
        parts.append(f"{what} {own} (by position {other})")
    about = f"{row['target']}, trained on {row['trained']}, on {row['dataset']} ({counted(row['traces'], 'text')})"
    return f"{about}: {', '.join(parts)}, variance {row['variance']:.3f}"


def file_of(target: str) -> str:
    """The name of a predictor's file."""
    return f"predictor-{target}.safetensors"


def _say(text: str) -> None:
    print(f"minithink.calibrate: {escaped(text)}", file=sys.stderr, flush=True)
