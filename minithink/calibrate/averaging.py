"""Whether ThinKV's types depend on where heads are averaged: before the 1 % rule, or after it.

ThinKV measures the sparsity of a layer by one row of attention, and the layer has a row for each KV head. §C.2 ends
with "for sparsity analysis, attention scores are averaged across groups"; a group is the query heads of one KV head.
Three rules can be read in that:

    weights    the weights of eq. 4 are averaged over KV heads, and the mean row is counted. Footnote 2 calls these
               weights "normalized attention scores", so this is the nearest to the paper's words. It is what `thinkv`
               and `calibrate thoughts` do
    shares     every KV head is counted, and the shares of its tokens below 1 % are averaged. The control
               `thinkv_head_rows` does this (`minithink/bench/methods/thinkv_controls.py`)
    scores     the largest logits of eq. 3, which §C.2 calls scores, are averaged, softmax follows, and its row is
               counted

With one KV head the three are the same. With several, a mean row is compared with one largest weight, which is that
of the heads that look most sharply: a head that spreads its attention hardly counts.

The model answers problems with the full cache, and its texts are read once. Each rule gets the whole calibration of
`calibrate thoughts`. Segments are then typed by each rule, and compared with the types by `weights`:

    own        with the rule's own L* and thresholds: a calibration that is made anew
    layers     with the L* of `weights`, and thresholds that give each type its usual share of the rule's own values
               there (quantiles, `choose.py`): layers that are chosen by chance make no difference
    same       with the L* and the thresholds of `weights`: the rule changes, and the calibration is kept
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink.calibrate import choose
from minithink.calibrate.agreement import compare
from minithink.calibrate.models import load_model
from minithink.calibrate.problems import add_dataset_arguments, dataset_options
from minithink.calibrate.report import conclude
from minithink.calibrate.thoughts import (
    CPU_BATCH,
    GPU_BATCH,
    drawing_of,
    first_query,
    hash_of,
    line_about,
    load_examples,
    machine_of,
)
from minithink.checkpoint.calibration import AVERAGE
from minithink.cli.commands import finite, location, natural, positive
from minithink.cli.models import add_model_arguments, model_settings
from minithink.engine import Engine
from minithink.errors import counted
from minithink.evaluate.datasets import Example
from minithink.loaded import Loaded
from minithink.policies.thinkv import Tbe, type_of
from minithink.ref.decode_attention import group_reduce
from minithink.reread.attention import QUERIES, layer_row, read
from minithink.results import record
from minithink.results.progress import progress
from minithink.sampling import SamplingParams

TYPES = 3  # |T|
HERE = AVERAGE  # the rule of `thinkv`, with which the others are compared

Line = dict[str, Any]  # of `thoughts.line_about`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `calibrate averaging`."""
    add_model_arguments(parser)
    add_dataset_arguments(
        parser,
        dataset="as in minithink.evaluate; several, with commas between them, take turns",
        split="split of the dataset, never test (default: validation)",
    )
    add = parser.add_argument
    add("--num-prompts", type=positive, default=60, metavar="N", help="problems (default: 60)")
    add("--num-layers", type=positive, default=4, metavar="N", help="|L*|, layers at most (default: 4)")
    add("--tau", type=positive, default=Tbe.tau, metavar="N", help=f"τ, tokens of a segment (default: {Tbe.tau})")
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
        default=Path("averaging.json"),
        metavar="FILE",
        help="where the result goes, as JSON (default: averaging.json)",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, read under every rule, calibrate with each, compare, write the result."""
    SamplingParams(args.temperature or 0, top_p=1 if args.top_p is None else args.top_p, seed=args.seed)
    policy = Tbe(tau=args.tau, layers="0", thresholds="0/1")  # it says τ; its thresholds are not used
    examples, args.split = load_examples(args)
    record.check(args.output)
    engine = load_model(args)
    assert engine.loaded.home is not None
    drawing = drawing_of(engine, args)
    result = record.new("averaging", argv, engine.device, program="minithink.calibrate")
    result["checkpoint"] = engine.loaded.home.checkpoint
    result["settings"] = {
        **{name: getattr(args, name) for name in ("dataset", "split", "num_prompts", "num_layers", "tau")},
        "problems": hash_of(examples),
        **dataset_options(args).settings(),
        **model_settings(args),
        **drawing,
        **machine_of(engine),
    }
    lines = measure(engine, examples, policy, drawing)
    result["measurements"] = concluded(lines, args.num_layers)
    record.write(args.output, result | {"complete": True})
    for line in summary(result["measurements"]):
        print(line)
    print(f"written to {args.output}", file=sys.stderr)
    return 0


def by_shares(logits: Tensor, seen: Tensor) -> Tensor:
    """One row for each KV head. logits: [n, Hkv, g, S]; seen: bool [n, 1, S] → [n, Hkv, S]."""
    return group_reduce(logits, seen, "max_logit")


def by_scores(logits: Tensor, seen: Tensor) -> Tensor:
    """The softmax of the mean of the groups' largest logits: [n, 1, S]."""
    largest = logits.amax(2, keepdim=True)  # [n, Hkv, 1, S]
    mean = largest.mean(1, keepdim=True)
    return group_reduce(mean, seen, "max_logit")


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    HERE: layer_row,
    "shares": by_shares,
    "scores": by_scores,
}


@torch.inference_mode()
def sparsities(loaded: Loaded, ids: Sequence[int], first: int) -> dict[str, Tensor]:
    """The sparsity of every query from position `first` on, in every layer and by every rule, from one reading: name
    → float32 [len(ids) − first, L]."""
    found = {name: defaultdict[int, list[Tensor]](list) for name in RULES}

    def see(layer: int, logits: Tensor, seen: Tensor) -> None:
        for name, rule in RULES.items():
            rows = rule(logits, seen)
            found[name][layer].append(loaded.decoder.backend.sparsity(rows, seen).cpu())

    queries = torch.arange(first, len(ids), device=loaded.device)
    read(loaded, ids, see, queries=queries, at_once=QUERIES)
    out = {}
    for name, of_layers in found.items():
        layers = [torch.cat(parts) for parts in of_layers.values()]
        out[name] = torch.stack(layers, dim=1)
    return out


def measure(
    engine: Engine, examples: Sequence[Example], policy: Tbe, drawing: Mapping[str, Any]
) -> dict[str, list[Line]]:
    """Generate the texts with the full cache, and measure each by every rule: name → a line for each prompt."""
    prompts = [engine.prompt_ids(example.question) for example in examples]
    stream = engine.stream(prompts, fixed=True, **drawing)
    stream.tolerant = False  # no calibration comes from a text that broke off
    lines: dict[str, list[Line]] = {name: [] for name in RULES}
    with progress(len(prompts), 0, "full cache") as advance:
        for advanced in stream.advances():
            for s in advanced:
                if not s.finish_reason:
                    continue
                first = first_query(len(s.prompt), policy.sparsity_rows)
                found = sparsities(engine.loaded, [*s.prompt, *s.tokens[:-1]], first)
                for name, u in found.items():
                    lines[name].append(line_about(engine, s, examples[s.number], policy, u))
                advance(None)
    return {name: sorted(own, key=lambda line: int(line["prompt"])) for name, own in lines.items()}


def concluded(lines: Mapping[str, Sequence[Line]], count: int) -> dict[str, Any]:
    """The calibration of every rule, and how its types differ from those of `weights`. count: |L*| at most."""
    calibrations = {name: conclude(own, TYPES, count) for name, own in lines.items()}
    usual = calibrations[HERE]
    refresh = {name: refreshes(own) for name, own in lines.items()}
    here = types_of(refresh[HERE], usual)
    compared = {}
    for name, calibration in calibrations.items():
        if name == HERE:
            continue
        values = refresh[name]
        at_layers = {"layers": usual["layers"]}
        at_layers["thresholds"] = choose.quantiles(values[:, usual["layers"]].mean(1), TYPES)
        compared[name] = {
            "own": compare(here, types_of(values, calibration)),
            "layers": compare(here, types_of(values, at_layers)),
            "same": compare(here, types_of(values, usual)),
            "correlation_by_layer": correlations(refresh[HERE], values),
        }
    return {"rules": calibrations, f"types_beside_{HERE}": compared}


def refreshes(lines: Sequence[Line]) -> Tensor:
    """The sparsity at the beginning of every segment of all texts: float64 [N, L]."""
    return torch.tensor([row for line in lines for row in line["refresh"]], dtype=torch.float64)


def types_of(refresh: Tensor, calibration: Mapping[str, Any]) -> Tensor:
    """The types of segments by a calibration: uint8 [N]. refresh: the sparsity where each begins, [N, L]."""
    return type_of(refresh[:, calibration["layers"]].mean(1), calibration["thresholds"])


def correlations(a: Tensor, b: Tensor) -> list[float | None]:
    """How two rules' values correlate in every layer; None: one of them is constant. a, b: [N, L], N ≥ 2."""
    out: list[float | None] = []
    for x, y in zip(a.unbind(1), b.unbind(1), strict=True):
        varies = float(x.std()) > 0 and float(y.std()) > 0
        out.append(float(torch.stack((x, y)).corrcoef()[0, 1]) if varies else None)
    return out


def summary(found: Mapping[str, Any]) -> list[str]:
    """The findings, in lines for people."""
    out = []
    for name, calibration in found["rules"].items():
        m = calibration["measurements"]
        means = " ".join(f"{layer['mean']:.2f}" for layer in m["layers"])
        theta = ", ".join(f"{x:.4g}" for x in calibration["thresholds"])
        out.append(f"{name}: sparsity by layer {means}")
        out.append(
            f"    L* = {', '.join(map(str, calibration['layers']))}; thresholds {theta}; chosen by "
            f"{calibration['chosen']}; κ with keywords {m['keywords']['kappa']:.2f}"
        )
    for name, of in found[f"types_beside_{HERE}"].items():
        ways = {
            "its own calibration": of["own"],
            f"the layers of {HERE}": of["layers"],
            f"the calibration of {HERE}": of["same"],
        }
        for how, m in ways.items():
            said = f"{m['agree']:.0%} of {counted(m['segments'], 'segment')} (κ {m['kappa']:.2f})"
            out.append(f"{name} with {how}: types agree with {HERE} in {said}")
    return out
