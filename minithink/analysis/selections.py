"""Which tokens DynTS's windows select, by target of its predictor.

Undisturbed reference texts of the families are read once. DynTS's windows run along them with different scores: those
of the three predictors, the true attention of all later tokens, lots, the order of `needs_oracle`, positions (a
window). After every trigger the tokens that stay in the selection window are measured:

    place     mean place of these tokens, 0: the oldest token of the thinking, 1: the newest
    stays     share of the first trigger's tokens that the last trigger selects, too
    numbers   share of these tokens that holds a digit
    lines     number of lines that hold these tokens
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from statistics import fmean

from minithink import results
from minithink.commands import location, positive
from minithink.engine import Engine, load
from minithink.foresight import followers, importance
from minithink.kv.contract import Live
from minithink.kv.schedule import divided
from minithink.policies.dynts import DynTS
from minithink.ref.predict import predict
from minithink.tasks import families, prepare

SHARE = 0.25  # of the mean length, the budget beside the prompt
LENGTHS = range(900, 1801)  # tokens of the texts
FIRST = 10_000  # seed of the first problem
Found = dict[str, list[tuple[list[int], int, int]]]  # score → after each trigger: selected; local from here; newest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=positive, default=12, metavar="N", help="texts of each family (default 12)")
    parser.add_argument(
        "--output", type=location, default=results.default_path("selections"), metavar="FILE",
        help="default: docs/results/selections.json",
    )  # fmt: skip


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Read texts, select, write the result."""
    path = Path(args.output)
    results.check(path)
    engine = load(device="cpu", backend="reference", dtype="float32")
    result = results.new("selections", argv, "cpu", program="minithink.analysis")
    result |= {"settings": {"limit": args.limit, "share": SHARE, "seed": FIRST}, "measurements": []}
    for family in families():
        some = list(islice(texts(engine, family), args.limit))
        budget = round(SHARE * fmean(len(tokens) for _, tokens in some))
        of = [measured(engine, *text, budget) for text in some]
        for name in of[0]:
            values = {x: fmean(one[name][x] for one in of) for x in of[0][name]}
            result["measurements"].append({"family": family, "score": name, **values})
        print(f"{family}: {len(some)} texts", file=sys.stderr)
    result["complete"] = True
    results.write(path, result)
    print(f"written to {path}", file=sys.stderr)
    return 0


def texts(engine: Engine, family: str) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and reference texts of a family, without end."""
    seed = FIRST
    while True:
        draw, seed = random.Random(seed), seed + 1
        problem = prepare.FAMILIES[family].draw_problem(draw, draw.randint(*prepare.SIZES[family]))
        prompt, tokens = (list(engine.tokenizer.encode(x)) for x in prepare.document(problem, draw))
        if len(tokens) in LENGTHS:
            yield prompt, tokens


def measured(engine: Engine, prompt: list[int], tokens: list[int], budget: int) -> dict[str, dict[str, float]]:
    """Of each score: place, stays, numbers, lines. budget: tokens beside the prompt."""
    hidden, true = importance(engine, prompt, tokens)
    weights = {x: engine.calibration(f"predictor-{x}.safetensors")["weights"] for x in true}
    scores: dict[str, Sequence[float]] = {x: predict(hidden, [w.float() for w in weights[x]]).tolist() for x in true}
    scores["true hindsight"], draw = true["hindsight"].tolist(), random.Random(0)
    scores["lots"] = [draw.random() for _ in scores["answer"]]
    scores |= {name: range(len(hidden)) for name in ("needs_oracle", "window")}
    found = selected(scores, followers(engine)(prompt), len(prompt), tokens, budget)
    pieces = engine.tokenizer.pieces(tokens)
    lines, digits = list(accumulate("\n" in x for x in pieces)), [any(map(str.isdigit, x)) for x in pieces]
    return {
        name: {
            "place": fmean(p / newest for best, _, newest in after for p in best),
            "stays": len({*after[0][0]} & {*after[-1][0]}) / len(after[0][0]),
            "numbers": fmean(digits[p] for best, *_ in after for p in best),
            "lines": fmean(len({lines[p] for p in best}) for best, *_ in after),
        }
        for name, after in found.items()
    }  # fmt: skip


def selected(
    scores: Mapping[str, Sequence[float]], text: Live, question: int, tokens: Sequence[int], budget: int
) -> Found:
    """DynTS's windows along a text.

    Args:
        scores: name → a score of each thinking token, "window" among them. "needs_oracle" ranks live tokens first.
        text: what `followers` makes of the prompt.
        question: tokens of the prompt.
        tokens: ids of the thinking, at least one for each score.
        budget: tokens beside the prompt.

    Returns:
        name → for each trigger: what stays in the selection window, the first local token, the newest token. All
        are numbers of thinking tokens, from 0 on.
    """
    _, k, local = divided(question + budget, question, DynTS.ratio, DynTS.local)
    found: Found = {name: [] for name in scores}
    held: dict[str, list[int]] = {name: [] for name in scores}  # beside the prompt
    for i in range(len(scores["window"])):
        text.add(tokens[i])
        for own in held.values():
            own.append(i)
        if len(held["window"]) < budget:
            continue
        for name, score in scores.items():
            live, beside = text.live() if name == "needs_oracle" else ((), ())
            rank = [(i in live, i in beside, x, -p) for p, x in enumerate(score[: i + 1]) for i in (question + p,)]
            best = sorted(held[name][:-local], key=rank.__getitem__)[-k:]
            found[name].append((best, i + 1 - local, i))
            held[name] = [*best, *range(i + 1 - local, i + 1)]
    return found
