"""ThinKV's layers and thresholds: which layers' attention sparsity tells thoughts apart, and where (algorithm 1).

The model answers problems with the full cache. The sparsity of every layer is measured at each decode step, and its
modes are found per prompt and layer (`density.py`). `choose.py` chooses layers and thresholds. The file says how far
to trust them: how the types agree with keywords (`minithink/text/thoughts.py`), and how often they change under
eviction.

The comparison under eviction is teacher-forced: the policy reads the text of the full cache token by token. So the
segments are the same, and only the cache differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

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
from minithink.calibrate.reading import averaged, types
from minithink.calibrate.report import conclude, eviction, summary
from minithink.checkpoint.calibration import AVERAGE
from minithink.cli.commands import INTERRUPTED, finite, location, natural, positive
from minithink.cli.models import add_model_arguments, model_settings
from minithink.engine import Engine
from minithink.errors import UsageError, counted, escaped, unwritable
from minithink.evaluate.datasets import Example
from minithink.kv.sizes import check_budget
from minithink.policies import load as load_policy
from minithink.policies import read
from minithink.policies.thinkv import ThinKV
from minithink.reread.attention import sparsity
from minithink.reread.density import density, noise_like, peaks
from minithink.results import record
from minithink.results.files import dumps, rounded
from minithink.results.files import replace as replace_file
from minithink.results.progress import progress
from minithink.sampling import SamplingParams
from minithink.sequence import Track
from minithink.text.thoughts import kinds, segments

ROWS = (1, 4, 16, 64)  # numbers of averaged queries for which the modes are reported
GPU_BATCH, CPU_BATCH = 64, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `calibrate thoughts`."""
    add_common_arguments(parser, 100, "thoughts.json")
    add = parser.add_argument
    add("--thoughts", type=positive, choices=(2, 3), default=3, help="|T|, types (default: 3)")
    add("--num-layers", type=positive, default=4, metavar="N", help="|L*|, layers at most (default: 4)")
    add("--sparsity-rows", type=positive, default=1, metavar="N", help="last queries that are averaged (default: 1)")
    add(
        "--policy",
        type=load_policy,
        default="thinkv",
        help="thinkv, tbe or tbq, as in thinkv:tau=64: types are measured with its τ, "
        "and compared with the types under its eviction (default: thinkv)",
    )
    add("--budget", type=positive, metavar="N", help="budget of that policy, tokens (default: 1024)")
    add("--compare", type=natural, default=16, metavar="N", help="prompts read under eviction; 0: none (default: 16)")


def add_common_arguments(parser: argparse.ArgumentParser, prompts: int, file: str) -> None:
    """The options of all calibrations. prompts: the default of --num-prompts; file: the name of the result."""
    add_model_arguments(parser)
    add_dataset_arguments(
        parser,
        dataset="as in minithink.evaluate; several, with commas between them, take turns",
        split="split of the dataset, never test (default: validation)",
    )
    add = parser.add_argument
    add("--num-prompts", type=positive, default=prompts, metavar="N", help=f"problems (default: {prompts})")
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
        help=f"where {file} goes (default: beside the model, where it is looked for); give it again as --calibration",
    )
    add("--replace", action="store_true", help="replace a calibration that is there already")
    add("--resume", action="store_true", help="finish an interrupted calibration")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure, choose, compare, write."""
    SamplingParams(args.temperature or 0, top_p=1 if args.top_p is None else args.top_p, seed=args.seed)
    policy = policy_of(args)
    examples, args.split = load_examples(args)
    engine = load_model(args)
    assert engine.loaded.home is not None
    if args.num_layers > engine.config.num_layers:
        raise UsageError(f"--num-layers {args.num_layers}: the model has {engine.config.num_layers}.")
    prompts = [engine.prompt_ids(example.question) for example in examples]
    for prompt in prompts[: args.compare]:
        check_budget(policy, len(prompt))
    engine.try_out(replace(policy, layers="0", thresholds="/".join(["0.5"] * (policy.types - 1))))
    folder = args.output or engine.loaded.home.calibration
    name = "thoughts.json" if args.thoughts == 3 else f"thoughts-{args.thoughts}.json"
    if (folder / name).exists() and not args.replace:
        raise UsageError(
            f"{folder / name} is there already: --replace makes it anew, --output FOLDER puts the new one elsewhere."
        )
    drawing, settings = settings_of(engine, args, examples, policy)
    result = record.new("thoughts", argv, engine.device, program="minithink.calibrate")
    record.check(folder / name)
    texts = folder_of_texts(args.output, settings["checkpoint"])
    with Journal(texts / f"{name}l", settings, args.resume) as journal:
        try:
            measure(engine, prompts, examples, policy, drawing, journal)
            lines = sorted((x for x in journal.lines if "prompt" in x), key=lambda x: x["prompt"])
            values = conclude(lines, args.thoughts, args.num_layers)
            under_eviction(engine, policy, values, prompts[: args.compare], lines, journal)
        except KeyboardInterrupt:
            done = sum("prompt" in line for line in journal.lines)
            _say(
                f"interrupted: {journal.path} holds {done} of {counted(len(prompts), 'prompt')}; give the same "
                "command with --resume to finish the rest"
            )
            return INTERRUPTED
        evicted = {x["evicted"]: x["types"] for x in journal.lines if "evicted" in x}
        values["measurements"]["eviction"] = eviction(values, lines, evicted)
        result |= {"checkpoint": settings["checkpoint"], "settings": settings, **values, "complete": True}
        try:
            replace_file(folder / name, dumps(rounded(result)) + "\n")
        except OSError as error:
            raise unwritable("The calibration", folder / name, error, "--output") from None
        journal.remove()
    for line in summary(result):
        print(line)
    if values["fallback"]:
        _say(
            f"attention sparsity does not tell this model's thoughts apart: no layer has {args.thoughts} modes for "
            "most prompts, so the thresholds only give each type of thought its usual share"
        )
    _say(f"written to {folder / name}")
    return 0


def policy_of(args: argparse.Namespace) -> ThinKV:
    """The policy whose types are measured; it learns thresholds later.

    Raises:
        UsageError: the policy uses no thresholds, or sets what is calibrated.
    """
    written = read(args.policy)
    budget = args.budget
    if budget is None and written.leaves_open("budget"):
        budget = 1024
    policy = written.make(budget=budget)
    if not isinstance(policy, ThinKV):
        raise UsageError(f"--policy {args.policy} knows no types of thoughts: give thinkv, tbe or tbq.")
    if policy.thoughts != "sparsity":
        raise UsageError(
            f"--policy {args.policy} tells types by words, which need no thresholds: drop thoughts=keyword."
        )
    if policy.layers or policy.thresholds or policy.types != 3 or policy.sparsity_rows != 1:
        raise UsageError(
            f"--policy {args.policy} says what is calibrated: leave out layers, thresholds, types and sparsity_rows; "
            "there are --thoughts and --sparsity-rows."
        )
    return replace(policy, types=args.thoughts, sparsity_rows=args.sparsity_rows, layers="", thresholds="")


def load_examples(args: argparse.Namespace) -> tuple[list[Example], str | None]:
    """The problems, of several datasets in turn, and their split.

    Raises:
        UsageError: they are of a test split, or there are too few.
    """
    names = names_of(args)
    options = dataset_options(args)
    lists = []
    splits = []
    for name, wanted in zip(names, splits_of(args.split, names), strict=True):
        examples, split = options.load_allowed(name, wanted)
        lists.append(examples)
        splits.append(split)
    turns = []
    for i in range(max(map(len, lists))):
        turns += [of[i] for of in lists if i < len(of)]
    if len(turns) < args.num_prompts:
        raise UsageError(
            f"{args.dataset} holds {counted(len(turns), 'problem')}: give --num-prompts {len(turns)} or fewer."
        )
    chosen = turns[: args.num_prompts]
    say_of_graders(chosen)
    if len(set(splits)) == 1:
        return chosen, splits[0]
    return chosen, ",".join(split or "" for split in splits)


def settings_of(
    engine: Engine, args: argparse.Namespace, examples: Sequence[Example], policy: ThinKV
) -> tuple[dict[str, Any], dict[str, Any]]:
    """How tokens are drawn, as options of Engine.stream; and all settings that decide the result."""
    drawing = drawing_of(engine, args)
    assert engine.loaded.home is not None
    names = ("dataset", "split", "num_prompts", "thoughts", "num_layers", "sparsity_rows", "policy")
    settings = {
        "checkpoint": engine.loaded.home.checkpoint,
        "average": AVERAGE,  # over KV heads, see `averaging.py`
        "control": "spectrum",  # modes are also counted in noise with this in common, see `noise_like`
        **{name: getattr(args, name) for name in names},
        "budget": policy.budget,
        "problems": hash_of(examples),
        **dataset_options(args).settings(),
        **model_settings(args),
        **drawing,
        **machine_of(engine),
    }
    return drawing, settings


def drawing_of(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """How tokens are drawn, as options of Engine.stream."""
    own = engine.generation_config
    return {
        "temperature": own.temperature if args.temperature is None else args.temperature,
        "top_k": own.top_k,
        "top_p": own.top_p if args.top_p is None else args.top_p,
        "min_p": own.min_p,
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens or own.max_new_tokens or engine.config.max_position,
        "batch_size": args.batch_size or (GPU_BATCH if engine.device.type == "cuda" else CPU_BATCH),
    }


def machine_of(engine: Engine) -> dict[str, Any]:
    """The parts of the machine that decide the result."""
    dtype = str(engine.dtype).removeprefix("torch.")
    return {"device": engine.device.type, "dtype": dtype, "backend": engine.decoder.backend.name}


def hash_of(examples: Sequence[Example]) -> str:
    """A hash by which problems are recognized."""
    questions = json.dumps([[e.id, e.question] for e in examples])
    return hashlib.sha256(questions.encode()).hexdigest()[:16]


def measure(
    engine: Engine,
    prompts: Sequence[list[int]],
    examples: Sequence[Example],
    policy: ThinKV,
    drawing: Mapping[str, Any],
    journal: Journal,
) -> None:
    """Generate with the full cache the texts that the journal does not hold yet, and measure them."""
    done = {line["prompt"]: line["right"] for line in journal.lines if "prompt" in line}
    if len(done) == len(prompts):
        return
    graded = graded_of(done.values())
    stream = engine.stream(list(prompts), fixed=True, **drawing)
    stream.sequences = [s for s in stream.sequences if s.number not in done]
    stream.tolerant = False  # no calibration comes from a text that broke off
    with progress(len(prompts), len(done), "full cache", right=sum(graded), graded=len(graded)) as advance:
        for advanced in stream.advances():
            for s in advanced:
                if s.finish_reason:
                    line = line_of(engine, s, examples[s.number], policy)
                    journal.append(line)
                    advance(line["right"])


def line_of(engine: Engine, s: Track, example: Example, policy: ThinKV) -> dict[str, Any]:
    """The journal's line of one finished sequence."""
    first = first_query(len(s.prompt), policy.sparsity_rows)
    u = sparsity(engine.loaded, [*s.prompt, *s.tokens[:-1]], first)
    return line_about(engine, s, example, policy, u)


def first_query(prompt: int, rows: int) -> int:
    """The position of the first query whose sparsity is needed: the prompt's last queries are averaged with the first
    generated ones. prompt: its tokens; rows: queries that the policy averages."""
    return max(0, prompt - max(rows, *ROWS))


def line_about(engine: Engine, s: Track, example: Example, policy: ThinKV, u: Tensor) -> dict[str, Any]:
    """The same, of a sparsity that is measured already: u, [N, L], of the last N queries of the text."""
    tokenizer = engine.tokenizer
    steps = len(s.tokens)
    own = averaged(u, policy.sparsity_rows, steps)  # [steps, L], after the prompt and after every token but the last
    return {
        "prompt": s.number,
        "id": example.id,
        "right": is_right(tokenizer, s, example),
        "tokens": list(s.tokens),
        "refresh": own[:: policy.tau].tolist(),  # at the beginning of every segment
        "labels": segments(kinds(tokenizer.pieces(s.tokens)), policy.tau),
        "layers": layers_of(own),
        "modes_by_rows": modes_by_rows(u, steps),
        "modes_of_noise": modes_by_rows(noise_like(u, steps, s.number), steps),
    }


def modes_by_rows(u: Tensor, steps: int) -> dict[str, list[int]]:
    """How many modes every layer has when the last queries are averaged. u: [N, L]."""
    return {str(n): [len(peaks(density(x)).modes) for x in averaged(u, n, steps).unbind(1)] for n in ROWS}


def layers_of(u: Tensor) -> list[dict[str, Any]]:
    """The sparsity of every layer, and the modes of its density. u: [steps, L]."""
    out = []
    for x in u.unbind(1):
        mean = float(x.mean())
        sd = float(x.std(correction=0))
        out.append({"mean": mean, "sd": sd, **peaks(density(x))._asdict()})
    return out


def under_eviction(
    engine: Engine,
    policy: ThinKV,
    values: Mapping[str, Any],
    prompts: Sequence[list[int]],
    lines: Sequence[Mapping[str, Any]],
    journal: Journal,
) -> None:
    """Read the texts of the full cache under the policy, unless the journal holds them already."""
    done = {line["evicted"] for line in journal.lines if "evicted" in line}
    for i, prompt in enumerate(prompts):
        if i in done:
            continue
        one = replace(policy)
        one.take_thresholds(values)
        found = types(engine, one, prompt, lines[i]["tokens"][:-1])
        journal.append({"evicted": i, "types": found})
        _say(f"under {policy.name}: {i + 1} of {counted(len(prompts), 'text')}")


def _say(text: str) -> None:
    print(f"minithink.calibrate: {escaped(text)}", file=sys.stderr, flush=True)
