"""Which thinking tokens the answer attends to, and whether they are those that the text needs (DynTS).

Texts of the full cache are read again. The importance of a token is the attention that it gets from the answer's
tokens, summed over them, mean over layers and heads (eq. 6). Means over texts that answer:

    above_mean    share of the tokens whose importance is above the mean: of the thinking, and of the question
                  (§3.1, figure 2)
    on_top        share of the importance of the thinking that its top 30 % have
    along         mean score in each tenth of the thinking, the oldest first, by the attention of the answer and of
                  all later tokens; 1 is the mean of the text
    content       share of content tokens in each tenth of the thinking, the most important tenth first (figure 9). A
                  token is content if it holds a digit or an operator, or is a name of the question. All other words
                  of the embedded model's sentences are the same in all texts
    needed        of the tokens that later statements need (`tasks/needs.py`), the share that is in the top 30 % by
                  the attention of the answer, of all later tokens, and by position; 30 % by chance

With --pareto the model answers again from a part of its thinking (§3.2, figures 3 and 12): p % of the thinking tokens
stay, the most important ones, the least important ones, or tokens drawn by lot. The prompt (the question in its chat
template), `<think>` and `</think>` always stay. Each selection is measured in two forms, with the same draws:

    right         keys and values are those of the whole text; a mask hides the other tokens while the answer is
                  generated. Tokens keep their positions
    right_anew    what stays is a new prompt, in the order of the text. Its tokens have the positions 0, 1, 2, …, and
                  their keys and values are computed anew. This is the paper's form (B.1). The paper names only the
                  question and the thinking tokens; that the tags stay, too, is chosen here
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import compress, product
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minithink.analysis import runs
from minithink.analysis.dense import batches, decode
from minithink.cli.commands import location, natural
from minithink.engine import Engine
from minithink.errors import MinithinkError, counted
from minithink.reread.importance import importance
from minithink.reread.later import answer_rows, later, thinking_of
from minithink.results import record
from minithink.results.figures import drawing, need_matplotlib
from minithink.results.progress import progress
from minithink.tasks import Problem
from minithink.tasks.needs_rules import NAME

TOP = 0.3  # of the thinking tokens
PERCENT = (2, 4, 6, 8, 10, 20, 30, 40, 50, 100)  # p: 100 is the whole thinking
WAYS = ("top", "bottom", "random")
LATER = {"answer": "the answer", "hindsight": "all later tokens"}
ANSWER = 256  # tokens of an answer at most
OPERATOR = re.compile(r"[-+*/=@\d]")


class Text(NamedTuple):
    """A text that answers."""

    problem: Problem
    prompt: list[int]
    tokens: list[int]
    think: range  # its thinking tokens
    scores: dict[str, Tensor]  # answer, hindsight and, where the rules read the text, needs: [L]
    question: Tensor  # importance of the prompt's tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser)
    add = parser.add_argument
    add(
        "--pareto",
        type=natural,
        default=0,
        metavar="N",
        help="answer again from parts of the thinking, N times with other draws; 0: never (default: 0)",
    )
    add(
        "--plot",
        type=location,
        metavar="DIR",
        help="draw DIR/importance-FAMILY.svg: the scores along one text, content by tenths, and the Pareto curves",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, read again, measure, answer again, draw, write the result."""
    if args.plot is not None:
        need_matplotlib()
        record.check(args.plot / "picture.svg", "--plot")
    engine, problems, result = runs.begin(args, "importance", argv)
    result["settings"]["pareto"] = args.pareto
    generated = runs.generate(engine, problems, args)
    texts = [text for pair in zip(problems, generated, strict=True) if (text := text_of(engine, *pair)) is not None]
    if not texts:
        raise MinithinkError(
            f"None of {counted(len(problems), 'text')} answers: give more --max-new-tokens or another --family."
        )
    found = measured(engine, texts) | {"full_cache": runs.outcome(engine, problems, generated)}
    if args.pareto:
        found["pareto"] = pareto(engine, texts, args)
    result["measurements"] = found
    if args.plot is not None:
        draw(args, texts[0], found)
    above = found["above_mean"]
    needed = ", ".join(f"{k} {v:.0%}" for k, v in found["needed"].items())
    lines = [
        f"above the mean: {above['thinking']:.1%} of the thinking, {above['question']:.1%} of the question",
        f"needed tokens in the top 30 %: {needed}",
    ]
    for m in found.get("pareto", []):
        lines.append(f"{m['way']} {m['percent']} %: {m['right']:.1%} right, {m['right_anew']:.1%} read anew")
    return runs.finish(args, result, lines)


def text_of(engine: Engine, problem: Problem, tokens: list[int]) -> Text | None:
    """A text and its scores; None: it has no answer, or hardly any thinking."""
    prompt = engine.prompt_ids(problem.question)
    think = thinking_of(engine.loaded, tokens)
    if len(think) < 10 or not answer_rows(engine.loaded, len(prompt), tokens):
        return None
    _, scores = importance(engine.loaded, prompt, tokens)
    question = later(engine.loaded, prompt, tokens, "answer", 1)[0, : len(prompt)].cpu()
    return Text(problem, prompt, tokens, think, {name: x.cpu() for name, x in scores.items()}, question)


def measured(engine: Engine, texts: Sequence[Text]) -> dict[str, Any]:
    """Everything but the Pareto curves, as the module's docstring says."""
    answer = [text.scores["answer"] for text in texts]
    above = {
        "thinking": fmean(float((x > x.mean()).float().mean()) for x in answer),
        "question": fmean(float((t.question > t.question.mean()).float().mean()) for t in texts),
    }
    needed: dict[str, float] = {}
    with_needs = [t for t in texts if float(t.scores.get("needs", torch.zeros(1)).sum()) > 0]
    for name in ("answer", "hindsight", "position") if with_needs else ():
        shares = []
        for t in with_needs:
            wanted = t.scores["needs"] > 0
            top = best(scores_of(t, name), TOP)
            shares.append(float((top & wanted).sum() / wanted.sum()))
        needed[name] = fmean(shares)
    return {
        "texts": len(texts),
        "thinking_tokens": fmean(len(t.think) for t in texts),
        "above_mean": above,
        "on_top": fmean(float(x[best(x, TOP)].sum() / x.sum()) for x in answer),
        "along": {name: along(texts, name) for name in ("answer", "hindsight")},
        "content": [fmean(of) for of in zip(*(content_by_tenth(engine, t) for t in texts), strict=True)],
        "needed": needed,
    }


def along(texts: Sequence[Text], name: str) -> list[float]:
    """The mean score in each tenth of the thinking, the oldest first."""
    tenths = ([float(x.mean()) for x in text.scores[name].tensor_split(10)] for text in texts)
    return [fmean(of) for of in zip(*tenths, strict=True)]


def scores_of(text: Text, name: str) -> Tensor:
    """Scores of the thinking tokens; "position": the newest first."""
    return torch.arange(len(text.think)) if name == "position" else text.scores[name]


def best(score: Tensor, share: float) -> Tensor:
    """The tokens with the highest scores, of equals the older: bool [L]. share: of all, at least one token."""
    order = score.argsort(descending=True, stable=True)[: max(1, round(share * len(score)))]
    return torch.zeros(len(score), dtype=torch.bool).index_fill_(0, order, True)


def content_by_tenth(engine: Engine, text: Text) -> list[float]:
    """The share of content tokens in each tenth, the most important first."""
    names = set(NAME.findall(text.problem.question))
    pieces = engine.tokenizer.pieces(text.tokens)[text.think.start : text.think.stop]
    content = torch.tensor([bool(OPERATOR.search(x)) or x.strip() in names for x in pieces], dtype=torch.float32)
    order = text.scores["answer"].argsort(descending=True, stable=True)
    return [float(part.mean()) for part in content[order].tensor_split(10)]


def masks(texts: Sequence[Text], way: str, percent: int, seed: int) -> list[Tensor]:
    """The thinking tokens of each text that are masked: bool [L]."""
    draw = torch.Generator().manual_seed(seed)
    out = []
    for text in texts:
        score = text.scores["answer"]
        score = {"top": score, "bottom": -score, "random": torch.rand(len(score), generator=draw)}[way]
        out.append(~best(score, percent / 100))
    return out


def pareto(engine: Engine, texts: Sequence[Text], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Accuracy by the thinking tokens that stay, in both forms."""
    rows: list[dict[str, Any]] = []
    cells = []
    for p in PERCENT:
        ways = WAYS if p < 100 else ("top",)
        cells += [(way, p) for way in ways]
    with progress(2 * len(cells) * args.pareto * len(texts), 0, "answers from a part of the thinking") as advance:
        for way, percent in cells:
            right = {"right": 0, "right_anew": 0}
            again = [*texts] * args.pareto
            hidden: list[Tensor] = []
            for draw in range(args.pareto):
                hidden += masks(texts, way, percent, draw)
            for (i, part), form in product(enumerate(batches(len(again), args.batch_size)), right):
                found = answers(engine, again[part], hidden[part], args, i, anew=form == "right_anew")
                for text, tokens in zip(again[part], found, strict=True):
                    good = runs.is_right("</think>" + engine.tokenizer.decode(tokens), text.problem)
                    right[form] += good
                    advance(good)
            rows.append({"way": way, "percent": percent} | {form: n / len(again) for form, n in right.items()})
    return rows


def answers(
    engine: Engine,
    texts: Sequence[Text],
    hidden: Sequence[Tensor],
    args: argparse.Namespace,
    seed: int,
    anew: bool = False,
) -> list[list[int]]:
    """What the model answers behind `</think>` if these thinking tokens are masked, or (anew) are left out of a new
    prompt."""
    read = [[*t.prompt, *t.tokens[: t.think.stop + 1]] for t in texts]
    masked = torch.zeros(len(texts), max(map(len, read)), dtype=torch.bool, device=engine.device)
    for row, text, own in zip(masked, texts, hidden, strict=True):
        start = len(text.prompt) + text.think.start
        row[start : start + len(own)] = own.to(engine.device)
    if anew:
        read = [list(compress(ids, row)) for ids, row in zip(read, (~masked).tolist(), strict=True)]
    return decode(
        engine, read, ANSWER, temperature=args.temperature, seed=args.seed + seed, masked=None if anew else masked
    )


def draw(args: argparse.Namespace, text: Text, found: dict[str, Any]) -> None:
    """The scores along one text, content by tenths and, if measured, the Pareto curves."""
    curves = found.get("pareto", [])
    with drawing(args.plot / f"importance-{args.family}.svg", 7.5, 4.6) as figure:
        grid = figure.add_gridspec(2, 2)
        axis = figure.add_subplot(grid[0, :])
        for name, color in (("hindsight", "#999999"), ("answer", "#0072B2")):
            axis.plot(text.scores[name], color=color, lw=0.6, label=f"attention of {LATER[name]}")
        if "needs" in text.scores:
            at = text.scores["needs"].nonzero().flatten()
            axis.plot(at, torch.zeros(len(at)), "|", color="#D55E00", label="needed later")
        axis.axhline(1, color="k", lw=0.5, ls="--")
        axis.set(xlabel="thinking token", ylabel="score, × the mean", yscale="symlog")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
        axis = figure.add_subplot(grid[1, 0] if curves else grid[1, :])
        axis.bar(range(1, 11), found["content"], color="#0072B2")
        axis.set(xlabel="tenth of the thinking, the most important first", ylabel="content tokens", ylim=(0, 1))
        axis.set_xticks(range(1, 11))
        if not curves:
            return
        axis = figure.add_subplot(grid[1, 1])
        for way, color in zip(WAYS, ("#0072B2", "#D55E00", "#999999"), strict=True):
            of = [m for m in curves if m["way"] == way and m["percent"] < 100]
            percent, right, anew = ([m[name] for m in of] for name in ("percent", "right", "right_anew"))
            axis.plot(percent, right, color=color, label=way, marker=".")
            axis.plot(percent, anew, color=color, ls="--")
        axis.plot([], [], color="k", ls="--", label="read anew")
        axis.axhline(next(m["right"] for m in curves if m["percent"] == 100), color="k", lw=0.5, ls=":")
        axis.set(xlabel="thinking tokens that stay, %", ylabel="right", ylim=(0, 1.02))
        axis.legend()
