"""Fit steering vectors: for each layer, the mean hidden state before execution thoughts minus that before others.

The model answers problems with the full cache. Its texts are then read again, and the hidden states at blank lines
are averaged in every layer (`minithink/text/openings.py`). The file holds two vectors for each layer:

    plain      V = mean of E − mean of O, over all thoughts (SEAL, SkipKV §4.2)
    matched    V = Σ_k w_k·(mean of E_k − mean of O_k), over the thoughts after a sentence of kind k

A hidden state at a blank line also depends on the sentence before it. Execution and other thoughts follow different
sentences, so the plain difference contains that, too. The matched difference compares like with like: k is ThinKV's
kind of the sentence before (`thoughts.py`), and w_k ∝ n_E·n_O / (n_E + n_O), the weights with the least variance.

Separation of a layer is the probability that the state before an execution thought lies further along V than the
state before another thought, both after the same kind of sentence. V is fitted on every second prompt, and the pairs
are of the remaining prompts. The recommended layer separates best by the plain vector; of equals the first.

Chosen: prompts with right and with wrong answers are pooled as they come (SEAL takes 500 of each).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minithink.calibrate.from_texts import calibrate, say
from minithink.calibrate.problems import graded_of
from minithink.calibrate.thoughts import add_common_arguments
from minithink.cli.commands import INTERRUPTED, location
from minithink.engine import Engine
from minithink.errors import MinithinkError, counted
from minithink.evaluate.datasets import Example
from minithink.reread.attention import read
from minithink.results.figures import drawing, need_matplotlib
from minithink.results.progress import progress
from minithink.text.openings import Thought, area, found

FILE = "steering.safetensors"
KINDS = ("reasoning", "execution", "transition")  # of the sentence before a thought


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `calibrate steering`."""
    add_common_arguments(parser, 500, FILE)
    add = parser.add_argument
    add(
        "--labels",
        choices=("seal", "words"),
        default="seal",
        help="what labels a thought as other than execution: "
        "SEAL's word lists, or ThinKV's and the embedded model's words (default: seal)",
    )
    add("--plot", type=location, metavar="FILE", help="draw the separation by layer, as SVG")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, read again, fit, write."""
    if args.plot is not None:
        need_matplotlib()
    done = calibrate(args, argv, FILE, partial(fit, labels=args.labels), recorded={"labels": args.labels})
    if done is None:
        return INTERRUPTED
    path, about = done
    if args.plot is not None:
        draw(about, args.plot)
    for line in summary(about):
        print(line)
    say(f"written to {path}")
    return 0


class Sums:
    """Sums of hidden states before thoughts, by the kind of the sentence before, and by execution or not."""

    def __init__(self) -> None:
        self.total: dict[tuple[str, bool], Tensor] = {}  # float64 [L, d]
        self.count: dict[tuple[str, bool], int] = defaultdict(int)

    def add(self, thought: Thought, states: Tensor) -> None:
        """states: [L, d], of any float dtype, at the blank line before the thought."""
        key = thought.after, thought.other
        self.total[key] = self.total.get(key, torch.zeros(())) + states.double()
        self.count[key] += 1

    def mean(self, other: bool, kinds: Sequence[str] = KINDS) -> Tensor:
        """Over the thoughts after these kinds of sentences: float64 [L, d]. There must be some."""
        keys = [(kind, other) for kind in kinds if self.count[kind, other]]
        return torch.stack([self.total[key] for key in keys]).sum(0) / sum(self.count[key] for key in keys)

    @property
    def both(self) -> list[str]:
        """The kinds of sentences after which there are execution thoughts and other thoughts."""
        return [kind for kind in KINDS if self.count[kind, True] and self.count[kind, False]]

    def vectors(self) -> dict[str, Tensor]:
        """`plain` and `matched`, float32 [L, d].

        Raises:
            MinithinkError: there are no execution thoughts, or no other ones; or none of both after the same kind.
        """
        if not (both := self.both):
            execution, other = (sum(self.count[kind, x] for kind in KINDS) for x in (False, True))
            raise MinithinkError(
                f"The texts hold {execution} execution and {other} other thoughts, none of both after the same kind "
                "of sentence: give more --num-prompts, more --max-new-tokens, or other --labels."
            )
        weight = [1 / (1 / self.count[kind, True] + 1 / self.count[kind, False]) for kind in both]
        parts = []
        for w, kind in zip(weight, both, strict=True):
            difference = self.mean(False, [kind]) - self.mean(True, [kind])
            parts.append(w / sum(weight) * difference)
        matched = sum(parts)
        assert isinstance(matched, Tensor)
        plain = self.mean(False) - self.mean(True)
        return {"plain": plain.float().contiguous(), "matched": matched.float().contiguous()}

    def __add__(self, more: Sums) -> Sums:
        out = Sums()
        for one in (self, more):
            for key, total in one.total.items():
                out.total[key] = out.total.get(key, torch.zeros(())) + total
                out.count[key] += one.count[key]
        return out


def fit(
    engine: Engine, examples: Sequence[Example], lines: Sequence[Mapping[str, Any]], labels: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The vectors of all prompts; the recommended layer with all measurements.

    Args:
        engine: the model whose texts these are.
        examples: the problems; a line's `prompt` is an index into them.
        lines: of the journal, one a prompt.
        labels: see `openings.found`.

    Returns:
        `plain` and `matched`, float32 [L, d]; `layer` and `measurements`, for the metadata.

    Raises:
        MinithinkError: see `Sums.vectors`.
    """
    halves = (Sums(), Sums())
    n = len(lines)
    with progress(n + n // 2, 0, "reading the texts again") as advance:
        for i, line in enumerate(lines):
            for thought, states in before_thoughts(engine, examples[line["prompt"]], line["tokens"], labels):
                halves[i % 2].add(thought, states)
            advance(line["right"])
        whole = halves[0] + halves[1]
        vectors = whole.vectors()
        separation = None
        if n > 1 and halves[0].both:
            fitted = {name: v.to(engine.device) for name, v in halves[0].vectors().items()}
            along: dict[tuple[str, bool], list[dict[str, Tensor]]] = defaultdict(list)
            for line in lines[1::2]:
                for thought, states in before_thoughts(engine, examples[line["prompt"]], line["tokens"], labels):
                    at = {name: (states.to(v.device) * v).sum(-1).cpu() for name, v in fitted.items()}
                    along[thought.after, thought.other].append(at)
                advance(line["right"])
            separation = {name: separated(along, name) for name in fitted}
    best = separation["plain"] if separation and separation["plain"] else None
    counted = []
    for kind in KINDS:
        counted.append({"after": kind, "execution": whole.count[kind, False], "other": whole.count[kind, True]})
    graded = graded_of(line["right"] for line in lines)
    return vectors, {
        "layer": best.index(max(best)) if best else round(0.7 * engine.config.num_layers) - 1,
        "measurements": {
            "prompts": n,
            "right": sum(graded) if graded else None,
            "tokens": sum(len(line["tokens"]) for line in lines),
            "thoughts": counted,
            "separation": separation,
            "norm": {name: v.norm(dim=-1).tolist() for name, v in vectors.items()},
            "cosine": torch.cosine_similarity(vectors["plain"], vectors["matched"], dim=-1).tolist(),
        },
    }


def before_thoughts(
    engine: Engine, example: Example, tokens: Sequence[int], labels: str
) -> list[tuple[Thought, Tensor]]:
    """The thoughts of a text but the first, each with the hidden states at the blank line before it: float32 [L, d].

    Args:
        tokens: ids that were generated; those before `</think>` are read.
        labels: see `openings.found`.
    """
    close = engine.tokenizer.think_ids[1]
    n = next((i for i, token in enumerate(tokens) if token == close), len(tokens))
    thoughts = found(engine.tokenizer.pieces(tokens[:n]), labels)
    if not thoughts:
        return []
    prompt = engine.prompt_ids(example.question)
    at = torch.tensor([len(prompt) + thought.before for thought in thoughts], device=engine.device)
    states = list[Tensor]()

    def tap(layer: int, hidden: Tensor) -> None:
        if layer >= 0:
            states.append(hidden[at].float().cpu())

    none = torch.zeros(0, dtype=torch.long, device=engine.device)  # no attention is wanted
    read(engine.loaded, [*prompt, *tokens[:n]], lambda *_: None, queries=none, tap=tap)
    return list(zip(thoughts, torch.stack(states, 1), strict=True))


def separated(along: Mapping[tuple[str, bool], Sequence[Mapping[str, Tensor]]], name: str) -> list[float]:
    """The separation of each layer, over all pairs after the same kind of sentence; []: there is no pair.

    Args:
        along: the kind of the sentence before, and whether it is an other thought → of each thought float32 [L], how
            far its state lies along each vector.
        name: `plain` or `matched`.
    """
    total = torch.zeros(())
    pairs = 0
    for kind in KINDS:
        if not (along.get((kind, True)) and along.get((kind, False))):
            continue
        execution, other = (torch.stack([x[name] for x in along[kind, which]]) for which in (False, True))  # [n, L]
        areas = [area(a, b) for a, b in zip(execution.unbind(1), other.unbind(1), strict=True)]
        total = total + len(execution) * len(other) * torch.tensor(areas)
        pairs = pairs + len(execution) * len(other)
    return (total / pairs).tolist() if pairs else []


def summary(about: Mapping[str, Any]) -> list[str]:
    """The findings, in lines."""
    m = about["measurements"]
    right = "not graded" if m["right"] is None else f"{m['right']} answered rightly"
    said = [
        f"{counted(m['prompts'], 'prompt')}, {right}, {counted(m['tokens'], 'token')}",
        *(f"after {x['after']}: {x['execution']:,} execution thoughts, {x['other']:,} others" for x in m["thoughts"]),
    ]
    for name, values in (m["separation"] or {}).items():
        said.append(f"separation by layer, {name}: " + " ".join(f"{x:.2f}" for x in values))
    return [*said, f"recommended layer: {about['layer']}"]


def draw(about: Mapping[str, Any], path: Path) -> None:
    """Separation by layer."""
    with drawing(path, 4.5, 2.8) as figure:
        axes = figure.add_subplot()
        for name, values in (about["measurements"]["separation"] or {}).items():
            axes.plot(range(len(values)), values, marker="o", markersize=3, label=name)
        axes.axvline(about["layer"], color="#999999", linewidth=0.8, linestyle="--")
        axes.axhline(0.5, color="#cccccc", linewidth=0.8)
        axes.set(xlabel="layer", ylabel="separation")
        axes.legend()
