"""A pilot: accuracy if oracles, or three sketches of policies, choose the tokens to keep, with masks for evictions.

Every KV head evicts every 16 tokens. It keeps its prompt, the last 64 tokens, and the other generated tokens with the
highest scores. A budget is the prompt and a share of the tokens that the full cache generates, on average over the
problems, rounded as in `minithink.evaluate`. (Results without the setting `budgets_of` took a share of what the full
cache generated for the same problem.) The scores:

    window      the position
    h2o         attention received so far
    lrfu        hits of a recency-frequency rule, as in Crystal-KV (ref/lrfu.py; λ = 0.6, p = 0.9)
    answer      an oracle: attention from the answer of the full-cache run
    hindsight   an oracle: the largest attention that the full-cache run still pays to the token, in this head
    oracle      an oracle: first what the text, by its rules, may still read (tasks/needs.py), then the rest of these
                statements, then the position

All runs draw the same noise, so a run writes the full cache's text until evictions change a choice. From there on,
the positions of `answer` and `hindsight` are those of another text: their figures are lower bounds. `oracle` reads
the text that is written, and nothing of what follows.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minithink import results
from minithink.analysis import runs
from minithink.analysis.dense import EVERY, Dense, Sketch, batches, decode, thinking_end
from minithink.commands import different, finite
from minithink.engine import Engine
from minithink.errors import MinithinkError, quoted
from minithink.files import rounded
from minithink.progress import progress
from minithink.reading import read
from minithink.ref.decode_attention import group_reduce
from minithink.ref.lrfu import Decay, lrfu
from minithink.tasks import Problem
from minithink.tasks.needs import Reader, reader

POLICIES = ("window", "h2o", "lrfu", "answer", "hindsight", "oracle")
Make = Callable[[Dense, Tensor], Sketch]  # (cache, lengths of the prompts) → sketch


class Window(Sketch):
    def score(self, step: int) -> Tensor:
        c = self.cache
        return c.column[: c.end].expand(c.mass[..., : c.end].shape)


class H2O(Sketch):
    def __init__(self, cache: Dense, prompts: Tensor) -> None:
        super().__init__(cache, prompts)
        self.sum = torch.zeros_like(cache.mass)

    def observe(self, step: int, token: Tensor) -> None:
        end = self.cache.end
        self.sum[..., :end] += self.cache.mass[..., :end]

    def score(self, step: int) -> Tensor:
        return self.sum[..., : self.cache.end]


class Lrfu(Sketch):
    def __init__(self, cache: Dense, prompts: Tensor) -> None:
        super().__init__(cache, prompts)
        self.crf = torch.zeros_like(cache.mass, dtype=torch.float64)
        self.decay = Decay(0.6, cache.mass.device)
        self.last = torch.zeros(cache.mass.shape, dtype=torch.int32, device=cache.mass.device)

    def observe(self, step: int, token: Tensor) -> None:
        c, end = self.cache, self.cache.end
        valid = c.kept[..., :end] & (c.column[:end] <= c.pos)[None, :, None]
        t = torch.tensor(step, dtype=torch.int32, device=c.mass.device)
        state = (c.mass[..., :end], valid, valid, self.crf[..., :end], self.last[..., :end], t)
        self.crf[..., :end], self.last[..., :end], now = lrfu(*state, self.decay, p=0.9)
        self.current = now.log2()

    def score(self, step: int) -> Tensor:
        return self.current.clamp_min(-1e30)  # tokens never hit still rank above evicted ones, which have −∞


class Known(Sketch):
    """An oracle: the score of every slot is known beforehand, for every block of EVERY steps."""

    def __init__(self, cache: Dense, prompts: Tensor, scores: Tensor) -> None:
        """scores: [blocks or 1, L, rows, Hkv, slots]."""
        super().__init__(cache, prompts)
        self.scores = scores

    def score(self, step: int) -> Tensor:
        scores = self.scores[min((step + 1) // EVERY, len(self.scores) - 1)].float()
        return F.pad(scores, (0, max(0, self.cache.end - scores.shape[-1])))[..., : self.cache.end]


class Oracle(Sketch):
    """Knows from the text so far what a continuation may still read, and evicts it last. The other tokens of the same
    statements go second to last, for the model may find a value by its neighbours. All other tokens go by age."""

    def __init__(self, cache: Dense, prompts: Tensor, readers: Sequence[Reader], texts: Sequence[str]) -> None:
        """readers: of the rows' texts, behind their prompts; texts: of all tokens."""
        super().__init__(cache, prompts)
        self.readers, self.texts = readers, texts
        self.unread: list[Tensor] = []  # tokens since the last eviction: only there the host waits for the device

    def observe(self, step: int, token: Tensor) -> None:
        self.unread.append(token)

    def score(self, step: int) -> Tensor:
        c = self.cache
        live = torch.zeros(len(self.readers), c.end)
        for row, tokens in enumerate(torch.stack(self.unread, 1).tolist()):
            for token in tokens:
                self.readers[row].add(self.texts[token])
            found = sorted(self.readers[row].live())
            for statement in self.readers[row].reading.statements:
                inside = bisect_left(found, statement.start), bisect_left(found, statement.end)
                if inside[0] < inside[1]:
                    live[row, statement.start : statement.end] = 1.0
            live[row, found] = 2.0
        self.unread = []
        score = c.column[: c.end] + c.end * live.to(c.column.device)  # [rows, end]
        return score[None, :, None].expand(c.mass[..., : c.end].shape)


def foresee(engine: Engine, prompts: Sequence[list[int]], generated: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """The attention that full-cache runs pay to each token later on.

    Returns:
        answer: [1, L, rows, Hkv, slots], mean attention of the tokens behind `</think>`.
        future: [blocks, L, rows, Hkv, slots] float16; block i: the largest attention from block i of EVERY generated
            tokens on.
    """
    c, rows = engine.config, len(prompts)
    slots = max(len(p) + len(g) for p, g in zip(prompts, generated, strict=True))
    blocks = -(-max(map(len, generated)) // EVERY)
    shape = (c.num_layers, rows, c.num_kv_heads, slots)
    answer = torch.zeros(1, *shape, device=engine.device)
    future = torch.zeros(blocks, *shape, dtype=torch.float16, device=engine.device)
    for row, (prompt, tokens) in enumerate(zip(prompts, generated, strict=True)):
        start, behind = len(prompt), len(prompt) + thinking_end(engine, tokens) + 1

        def see(
            layer: int, logits: Tensor, seen: Tensor, row: int = row, start: int = start, behind: int = behind
        ) -> None:
            p = group_reduce(logits, seen, "mean")  # [n, Hkv, n]
            n = len(p)
            if behind < n:
                answer[0, layer, row, :, :n] = p[behind:].mean(0)
            own = F.pad(p[start:], (0, 0, 0, 0, 0, (start - n) % EVERY))
            own = own.unflatten(0, (-1, EVERY)).amax(1)  # [blocks, Hkv, n]
            future[: len(own), layer, row, :, :n] = own.flip(0).cummax(0).values.flip(0).half()

        read(engine, [*prompt, *tokens], see)
    return answer, future


def read_along(
    engine: Engine, questions: Sequence[str], prompts: Sequence[list[int]]
) -> tuple[list[Reader], list[str]]:
    """The arguments of Oracle: a reader for every row, and the text of every token."""
    texts = engine.tokenizer.pieces(range(engine.config.vocab_size))
    pairs = zip(questions, prompts, strict=True)
    return [reader(question, [texts[i] for i in prompt]) for question, prompt in pairs], texts


def makers(
    engine: Engine, questions: Sequence[str], prompts: Sequence[list[int]], full: Sequence[list[int]],
    names: Sequence[str],
) -> dict[str, Make]:  # fmt: skip
    """The function that makes each sketch. full: what the full cache generated."""
    made: dict[str, Make] = {
        "window": Window,
        "h2o": H2O,
        "lrfu": Lrfu,
        "oracle": lambda cache, lengths: Oracle(cache, lengths, *read_along(engine, questions, prompts)),
    }
    if {"answer", "hindsight"} & set(names):
        answer, future = foresee(engine, prompts, full)
        made["answer"] = lambda cache, lengths: Known(cache, lengths, answer)
        made["hindsight"] = lambda cache, lengths: Known(cache, lengths, future)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser)
    parser.add_argument("--budgets", type=shares, default=[0.25, 0.5], metavar="N,N,…", help="shares of "
        "the tokens that the full cache generates on average (default: 0.25,0.5)")  # fmt: skip
    parser.add_argument("--policies", type=sketches, default=list(POLICIES), metavar="P,P,…", help="scores: "
        f"{', '.join(POLICIES)} (default: all)")  # fmt: skip


def shares(text: str) -> list[float]:
    """For argparse: different numbers above 0, up to 1."""
    try:
        values = [finite(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        values = [0.0]
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{quoted(text)} are no shares above 0 and up to 1")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} names a share twice")
    return values


def sketches(text: str) -> list[str]:
    """For argparse: different names of POLICIES."""
    return different(text, "sketch", POLICIES)


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate with the full cache, then with every sketch and budget; write after each, print a table. A file of the
    same command that is not complete is completed."""
    engine, problems, result = runs.begin(args, "pilot", argv)
    result["settings"]["budgets_of"] = "mean"
    wanted = [(name, share) for name in args.policies for share in args.budgets]
    there = {(m["policy"], m["budget"]): m for m in begun(args.output, result) if m["problems"] == len(problems)}
    rows = {(name, x): there[name, rounded(x)] for name, x in [("full", 1.0), *wanted] if (name, rounded(x)) in there}
    left = [key for key in wanted if key not in rows]
    full = runs.generate(engine, problems, args)
    found: dict[tuple[str, float], list[list[int]]] = {}

    def note(key: tuple[str, float], tokens: list[list[int]]) -> None:
        """A batch of a sketch and budget has ended: write what is known."""
        here = found.setdefault(key, [])
        here += tokens
        rows[key] = {
            "policy": key[0],
            "budget": key[1],
            **runs.outcome(engine, problems[: len(here)], here),
            "tokens_until_other": sum(map(shared, here, full)) / len(here),
            "commit": result["commit"],
        }
        result["measurements"] = list(rows.values())
        results.write(args.output, result)

    note(("full", 1.0), full)
    for part in batches(len(problems), args.batch_size):
        for key, tokens in pilot(engine, problems[part], full[part], left, mean(full), args):
            note(key, tokens)
    return runs.finish(args, result, (
        f"{m['policy']:>10} {m['budget']:5.0%}  right {m['right']:6.1%}  {m['tokens']:7,.0f} tokens"
        for m in result["measurements"]
    ))  # fmt: skip


def begun(path: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements of an earlier run that was interrupted and had the same settings, model and machine. Any other
    file counts for nothing, and is replaced."""
    if not path.is_file():
        return []
    try:
        earlier = results.read(path)
    except MinithinkError:
        return []
    same = all(earlier.get(name) == rounded(result[name]) for name in ("settings", "embedded_model", "machine"))
    if earlier.get("complete", True) or not same:
        return []
    print(f"minithink.analysis: {path} is completed", file=sys.stderr)
    return [{"commit": earlier["commit"]} | m for m in earlier["measurements"]]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts share at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def mean(generated: Sequence[Sequence[int]]) -> float:
    """Tokens of a text, on average."""
    return sum(map(len, generated)) / len(generated)


def budget_of(share: float, mean: float) -> int:
    """Generated tokens that a lane keeps beside its prompt, as in `evaluate/plan.py`. mean: that the full cache
    generates."""
    return max(1, round(share * mean))


def pilot(
    engine: Engine, problems: Sequence[Problem], full: Sequence[list[int]], left: Sequence[tuple[str, float]],
    mean: float, args: argparse.Namespace,
) -> Iterator[tuple[tuple[str, float], list[list[int]]]]:  # fmt: skip
    """(sketch, share) → generated tokens, for one batch.

    Args:
        problems: of the batch.
        full: what the full cache generated for these problems.
        mean: tokens that it generates, on average over all problems.
    """
    options: dict[str, Any] = {"temperature": args.temperature, "seed": args.seed}
    questions = [problem.question for problem in problems]
    prompts = [engine.prompt_ids(question) for question in questions]
    made = makers(engine, questions, prompts, full, [name for name, _ in left])
    for name, share in left:
        options["budget"] = torch.full((len(prompts),), budget_of(share, mean), device=engine.device)
        with progress(len(problems), 0, f"{name} {share:.1%}") as advance:
            tokens = decode(engine, prompts, args.max_new_tokens, sketch=made[name], watch=advance.step, **options)
            runs.ended(engine, problems, tokens, advance)
        yield (name, share), tokens
