"""Three premises, looked at in full-cache traces: attention sparsity tells thoughts apart; answers attend to thinking
far back; a steering vector makes a model doubt less.

Sparsity is ThinKV's: the share of cached tokens whose attention is below 1 % of the row's largest. The row of a layer
is the mean of its KV heads' rows, and sparsity is averaged over segments of τ tokens. A segment's kind is that of
most of its tokens. Sparsity grows with the length of a text, so kinds are compared within thirds of a text. Thoughts
are known from the traces' wording (`thoughts.py`): a line has the kind of its first sentence. Answer attention is
DynTS's and Crystal-KV's.

The steering vector is a difference of mean hidden states at blank lines: that before other thoughts minus that before
transitions (SEAL, SkipKV §4.2). This sign is meant to lessen transitions. The vector is added at blank lines, as SEAL
does, or at every token of the thinking, as SkipKV does. The last problems are steered, by a vector that is fitted on
the other problems. If all problems are steered, the vector is fitted on them, and the result says `in_sample`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import combinations, combinations_with_replacement, permutations, product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minithink.analysis import runs
from minithink.analysis.dense import thinking_end
from minithink.cli.commands import natural, positive
from minithink.engine import Engine
from minithink.ref.decode_attention import group_reduce
from minithink.ref.sparsity import sparsity
from minithink.reread.attention import layer_row, read
from minithink.results.progress import progress
from minithink.tasks import Problem
from minithink.text.openings import area, direction, openings, sentences
from minithink.text.tags import THINK
from minithink.text.thoughts import NAMES

KINDS = tuple(reversed(NAMES))  # reasoning, execution, transition
FAR = 64  # thinking tokens before the answer that count as near
STRENGTHS = {"boundary": (0.25, 0.5, 1.0), "every": (0.1, 0.25)}  # more destroys the texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser)
    add = parser.add_argument
    add(
        "--layer",
        type=natural,
        metavar="N",
        help="layer whose output is steered, from 0 (default: at 0.7 of the depth, 5 of the embedded model's 8)",
    )
    add("--tau", type=positive, default=32, metavar="N", help="τ, tokens of a segment (default: 32)")
    add(
        "--steered",
        type=positive,
        default=16,
        metavar="N",
        help="problems that are steered, the last ones of --limit; the vector is fitted on the others (default: 16)",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, look, steer, write the result."""
    engine, problems, result = runs.begin(args, "premises", argv)
    generated = runs.generate(engine, problems, args)
    traces = [(engine.prompt_ids(p.question), g) for p, g in zip(problems, generated, strict=True)]
    looks = list[Look]()
    with progress(len(traces), 0, "reading the texts again") as advance:
        for problem, (prompt, g) in zip(problems, traces, strict=True):
            looks.append(look(engine, prompt, g, args.layer, args.tau))
            runs.ended(engine, [problem], [g], advance)
    result["measurements"] = {
        "full_cache": runs.outcome(engine, problems, generated),
        "sparsity": sparsity_by_kind(looks),
        "separability": separability(looks),
        "answer_attention": answer_attention(looks),
        "steering": steering(engine, problems, args, looks),
    }
    return runs.finish(args, result)


class Look(NamedTuple):
    """The measurements of one trace."""

    kinds: list[str]  # of every segment of the thinking
    sparsity: Tensor  # [segments, L]
    tokens: Tensor  # [thinking tokens, L]: sparsity of single rows
    token_kinds: list[str]
    # The answer's attention to thinking tokens:
    far: Tensor  # [L]: share that goes to tokens more than FAR before the end of the thinking
    top: Tensor  # [L]: share that goes to the tenth of the thinking tokens that receives most
    on_thinking: Tensor  # [L]: share of all attention of the answer's tokens that is on thinking tokens
    opening: Tensor  # [thoughts but the first, d]: the steered layer's hidden states at the blank lines before them
    doubts: Tensor  # bool [thoughts but the first]: which of them are transitions


class Sparse(Protocol):
    """What is asked of a trace by the functions that compare kinds of thoughts; fields as those of Look."""

    @property
    def kinds(self) -> list[str]: ...
    @property
    def sparsity(self) -> Tensor: ...
    @property
    def tokens(self) -> Tensor: ...
    @property
    def token_kinds(self) -> list[str]: ...


def look(engine: Engine, prompt: list[int], generated: list[int], layer: int, tau: int) -> Look:
    """Read one trace again, and measure."""
    n = thinking_end(engine, generated)
    start = len(prompt)
    end = len(prompt) + n
    found = sentences(engine.tokenizer.pieces(generated[:n]))
    measured = defaultdict[str, list[Tensor]](list)
    states = list[Tensor]()

    def see(_: int, logits: Tensor, seen: Tensor) -> None:
        p = group_reduce(logits, seen, "none")  # [tokens, Hq, S]
        answer = p[end + 1 :, :, start:end].sum((0, 1))  # behind </think>; mass by thinking token
        total = answer.sum()
        row = layer_row(logits[start:end], seen[start:end])
        measured["sparsity"].append(sparsity(row, seen[start:end]).cpu())
        measured["far"].append((answer[:-FAR].sum() / total).cpu())
        measured["top"].append((answer.sort(descending=True).values[: max(1, n // 10)].sum() / total).cpu())
        measured["on"].append((total / p[end + 1 :].sum()).cpu())

    def tap(at: int, hidden: Tensor) -> None:
        if at == layer:
            states.append(hidden[start:end].clone())

    read(engine.loaded, [*prompt, *generated], see, tap=tap)
    tokens = torch.stack(measured["sparsity"], 1)  # [n, L]
    kinds: list[str] = []
    for s in found:
        kinds += [s.kind] * (s.end - s.start)
    segments = [slice(at, at + tau) for at in range(0, n - n % tau, tau)]  # whole ones
    return Look(
        [max(KINDS, key=kinds[s].count) for s in segments],
        torch.stack([tokens[s].mean(0) for s in segments]) if segments else tokens[:0],
        tokens,
        kinds,
        torch.stack(measured["far"]),
        torch.stack(measured["top"]),
        torch.stack(measured["on"]),
        *openings(states[0].cpu(), found),
    )


def sparsity_by_kind(looks: Sequence[Sparse]) -> list[dict[str, Any]]:
    """For every kind and layer: mean and standard deviation of the rows' sparsity, and the standard deviation of the
    segments' means."""
    out = list[dict[str, Any]]()
    for kind in KINDS:
        rows = torch.cat([x.tokens[[k == kind for k in x.token_kinds]] for x in looks])
        if not len(rows):
            continue
        means = torch.cat([x.sparsity[[k == kind for k in x.kinds]] for x in looks])
        for i in range(rows.shape[1]):
            measured = {
                "kind": kind,
                "layer": i,
                "tokens": len(rows),
                "mean": float(rows[:, i].mean()),
                "sd": float(rows[:, i].std(correction=0)),
                "segments": len(means),
                "sd_of_segments": float(means[:, i].std(correction=0)) if len(means) else None,
            }
            out.append(measured)
    return out


def separability(looks: Sequence[Sparse]) -> dict[str, Any]:
    """How well one layer's mean sparsity tells the kinds of segments apart.

    `auc`, for two kinds: the probability that a segment of one kind is sparser than a segment of the other, if both
    stand in the same third of a text; for the best layer, and in the order of kinds that fits better. `accuracy`: of
    the best layer with two thresholds. Layer, thresholds and the order of kinds are chosen on the even traces, the
    accuracy is counted on the odd ones. `majority`: the share of the most frequent kind there.
    """
    auc = list[dict[str, Any]]()
    x = torch.cat([one.sparsity for one in looks])
    cells: list[tuple[str, int]] = []  # of every segment: its kind, and the third of the text
    for one in looks:
        n = len(one.kinds)
        cells += [(k, 3 * i // n) for i, k in enumerate(one.kinds)]
    where = {}
    for cell in product(KINDS, range(3)):
        where[cell] = torch.tensor([own == cell for own in cells], dtype=torch.bool)
    for pair in combinations(KINDS, 2):
        first, second = ([x[where[kind, t]] for t in range(3)] for kind in pair)
        groups = [(a, b) for a, b in zip(first, second, strict=True) if len(a) and len(b)]
        if total := sum(len(a) * len(b) for a, b in groups):
            values = []
            for j in range(x.shape[1]):
                areas = sum(area(a[:, j], b[:, j]) * len(a) * len(b) for a, b in groups)
                values.append(areas / total)
            best = max(range(len(values)), key=lambda j: abs(values[j] - 0.5))
            auc.append({"kinds": [*pair], "layer": best, "auc": max(values[best], 1 - values[best])})
    halves = [[one for i, one in enumerate(looks) if i % 2 == half and one.kinds] for half in range(2)]
    if not all(halves):
        return {"auc": auc}
    fit_x, fit_y = _examples(halves[0])
    new_x, new_y = _examples(halves[1])
    rules = []
    for j in range(x.shape[1]):
        own = fit_x[:, j]
        steps = own.quantile(torch.linspace(0, 1, 21)).tolist()
        for (lo, hi), order in product(combinations_with_replacement(steps, 2), permutations(range(3))):
            fits = classify(own, lo, hi, order) == fit_y
            rules.append((float(fits.float().mean()), j, lo, hi, order))
    _, layer, low, high, order = max(rules)
    right = classify(new_x[:, layer], low, high, order) == new_y
    majority = new_y.bincount(minlength=3).max() / len(new_y)
    split = {"layer": layer, "accuracy": float(right.float().mean()), "majority": float(majority), "n": len(new_y)}
    return {"auc": auc, "two_thresholds": split}


def _examples(looks: Sequence[Sparse]) -> tuple[Tensor, Tensor]:
    """Sparsity of every segment, [segments, L], and its kind as an index into KINDS."""
    kinds = []
    for one in looks:
        kinds += [KINDS.index(kind) for kind in one.kinds]
    return torch.cat([one.sparsity for one in looks]), torch.tensor(kinds)


def classify(x: Tensor, low: float, high: float, order: Sequence[int]) -> Tensor:
    """The kind (an index into KINDS) of values below, between and above two thresholds."""
    return torch.tensor(order)[(x > low).long() + (x > high).long()]


def answer_attention(looks: Sequence[Look]) -> dict[str, Any]:
    """Means over traces, by layer and in all."""
    out = dict[str, Any]()
    for name in ("far", "top", "on_thinking"):
        values = torch.stack([getattr(one, name) for one in looks])  # [traces, L]
        values = values[~values.isnan().any(1)]  # leaves out traces that never answered
        out[name] = {"mean": float(values.mean()), "layers": values.mean(0).tolist()}
    out["far"]["beyond"] = FAR
    return out


def steering(
    engine: Engine, problems: Sequence[Problem], args: argparse.Namespace, looks: Sequence[Look]
) -> dict[str, Any]:
    """Runs with α·V added, of the last `args.steered` problems: right answers, tokens, doubts for each place and α.

    V is fitted on the problems before them; on all problems, if there is none before them. looks: of all problems.
    """
    before = max(0, len(problems) - args.steered)
    fit = looks[:before] or looks
    steered = problems[before:]
    about: dict[str, Any] = {"fitted_on": len(fit), "in_sample": not before}
    h, doubt = (torch.cat([getattr(one, name) for one in fit]) for name in ("opening", "doubts"))
    if doubt.all() or not doubt.any():
        return {**about, "runs": []}
    vector = direction(h, doubt)
    places = [("nowhere", 0.0)]
    for at, values in STRENGTHS.items():
        places += [(at, alpha) for alpha in values]
    found = list[dict[str, Any]]()
    for at, alpha in places:
        steer = partial(Steer, engine, alpha * vector, args.layer, at)
        tokens = runs.generate(engine, steered, args, steer, f"steered: {at}, {alpha:g}")
        found.append({"at": at, "strength": alpha, **runs.outcome(engine, steered, tokens)})
    about |= {"norm": float(vector.norm()), "residual_norm": float(h.norm(dim=-1).mean())}
    return {"layer": args.layer, **about, "thoughts": len(doubt), "transitions": int(doubt.sum()), "runs": found}


class Steer:
    """Adds a vector to one layer's output while a sequence thinks: at blank lines, or at every token."""

    def __init__(self, engine: Engine, vector: Tensor, layer: int, at: str) -> None:
        self.vector = vector.to(engine.device)
        self.layer = layer
        self.where = token_table(engine, "" if at == "every" else "\n\n")
        self.close = engine.tokenizer.id_of(THINK.close)
        self.answers = torch.tensor(False, device=engine.device)  # then bool [rows]: which have closed their thinking

    def __call__(self, last: Tensor, layer: int, hidden: Tensor) -> Tensor:
        if layer != self.layer:
            return hidden
        self.answers = self.answers | (last == (-1 if self.close is None else self.close))
        return hidden + (self.where[last] & ~self.answers)[:, None] * self.vector


def token_table(engine: Engine, part: str) -> Tensor:
    """bool [V]: the tokens whose text holds `part`."""
    pieces = engine.tokenizer.pieces(range(engine.config.vocab_size))
    return torch.tensor([bool(piece) and part in piece for piece in pieces], device=engine.device)
