"""A pilot: do policies of different kinds come out differently on a task? Sketches with masks, not the methods.

Every 16 tokens, every KV head keeps its prompt, the last 64 tokens, and of the other generated tokens those with the
highest scores, in all a share of what the full cache generated for the same problem:

    window      the position
    h2o         attention received so far
    rkv         R-KV's importance and redundancy (ref/window_importance.py, ref/redundancy.py; λ = 0.1)
    lrfu        hits of a recency-frequency rule, as in Crystal-KV (ref/lrfu.py; λ = 0.6, p = 0.9)
    sentences   rkv, less the similarity of a token's sentence to a later one where that is above 0.95, as in SkipKV
    skipkv      sentences, and steered away from transitions (premises.py), with a vector from the full cache's runs
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
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minithink import results
from minithink.analysis.dense import EVERY, Dense, Sketch, batches, decode, thinking_end, watch
from minithink.analysis.premises import (
    Steer,
    begin,
    direction,
    finish,
    look,
    outcome,
    steering_arguments,
    token_table,
)
from minithink.engine import Engine
from minithink.errors import MinithinkError
from minithink.files import rounded
from minithink.ref.lrfu import lrfu
from minithink.ref.redundancy import redundancy
from minithink.ref.window_importance import window_importance
from minithink.tasks.needs import Reader, reader


class Window(Sketch):
    def score(self, step: int) -> Tensor:
        return self.cache.column[: self.cache.end].expand(self.cache.mass[..., : self.cache.end].shape)


class H2O(Sketch):
    def __init__(self, cache: Dense, prompts: Tensor) -> None:
        super().__init__(cache, prompts)
        self.sum = torch.zeros_like(cache.mass)

    def observe(self, step: int, token: Tensor) -> None:
        end = self.cache.end
        self.sum[..., :end] += self.cache.mass[..., :end]

    def score(self, step: int) -> Tensor:
        return self.sum[..., : self.cache.end]


class Rkv(Sketch):
    lam = 0.1

    def score(self, step: int) -> Tensor:
        c = self.cache
        valid = c.kept[..., : c.end] & (c.column[: c.end] <= c.pos)[None, :, None]
        out = torch.zeros(valid.shape, device=valid.device)
        for i in range(len(out)):
            k = c.k[i, :, :, : c.end]
            importance = window_importance(c.queries[i, :, :, -min(c.window, step + 1) :], k, valid[i])
            out[i] = self.lam * importance - (1 - self.lam) * redundancy(k, valid[i])
        return out


class Lrfu(Sketch):
    def __init__(self, cache: Dense, prompts: Tensor) -> None:
        super().__init__(cache, prompts)
        self.crf = torch.zeros_like(cache.mass)
        self.last = torch.zeros(cache.mass.shape, dtype=torch.int32, device=cache.mass.device)

    def observe(self, step: int, token: Tensor) -> None:
        c, end = self.cache, self.cache.end
        valid = c.kept[..., :end] & (c.column[:end] <= c.pos)[None, :, None]
        t = torch.tensor(step, dtype=torch.int32, device=c.mass.device)
        state = (c.mass[..., :end], valid, valid, self.crf[..., :end], self.last[..., :end], t)
        self.crf[..., :end], self.last[..., :end], self.current = lrfu(*state, lam=0.6, p=0.9)

    def score(self, step: int) -> Tensor:
        return self.current.clamp_min(-1e30)  # what was never hit still goes after what is gone already


class Sentences(Rkv):
    threshold = 0.95

    def __init__(self, cache: Dense, prompts: Tensor, newline: Tensor) -> None:
        """newline: bool [V], the tokens that end a sentence."""
        super().__init__(cache, prompts)
        self.newline = newline
        rows, slots = cache.mass.shape[1], cache.mass.shape[-1]
        self.sentence = torch.zeros(rows, slots, dtype=torch.long, device=newline.device)  # of every slot
        self.current = self.sentence[:, 0].clone()
        self.sums = torch.zeros(rows, slots // 4, cache.hidden.shape[-1], device=newline.device)  # hidden states

    def observe(self, step: int, token: Tensor) -> None:
        row = self.cache.row[:, 0]
        self.sums[row, self.current] += self.cache.hidden
        self.sentence[row, self.cache.pos[:, 0]] = self.current
        self.current = (self.current + self.newline[token]).clamp(max=self.sums.shape[1] - 1)

    def score(self, step: int) -> Tensor:
        unit = F.normalize(self.sums, dim=-1)  # the direction of the sum is that of the mean
        index = torch.arange(unit.shape[1], device=unit.device)
        complete = index < self.current[:, None]  # [rows, S]
        later = (index[:, None] < index) & complete[:, None]
        largest = (unit @ unit.transpose(1, 2)).masked_fill(~later, 0.0).amax(-1)  # [rows, S]
        penalty = largest.where(largest > self.threshold, 0.0).gather(1, self.sentence[:, : self.cache.end])
        return super().score(step) - penalty[None, :, None]


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
        self.unread: list[Tensor] = []  # tokens since the last eviction: the host waits for the device there only

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
    """What full-cache runs attend to later on.

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

        def see(layer: int, p: Tensor, row: int = row, start: int = start, behind: int = behind) -> None:
            p = p.unflatten(0, (c.num_kv_heads, -1)).mean(1)  # [Hkv, n, n]
            n = p.shape[-1]
            if behind < n:
                answer[0, layer, row, :, :n] = p[:, behind:].mean(1)
            own = p[:, start:]
            own = F.pad(own, (0, 0, 0, -own.shape[1] % EVERY)).unflatten(1, (-1, EVERY)).amax(2)  # [Hkv, blocks, n]
            future[: own.shape[1], layer, row, :, :n] = own.flip(1).cummax(1).values.flip(1).transpose(0, 1).half()

        watch(engine, [*prompt, *tokens], see)
    return answer, future


def read_along(
    engine: Engine, questions: Sequence[str], prompts: Sequence[list[int]]
) -> tuple[list[Reader], list[str]]:
    """What Oracle needs: a reader for every row, and the text of every token."""
    texts = engine.tokenizer.pieces(range(engine.config.vocab_size))
    pairs = zip(questions, prompts, strict=True)
    return [reader(question, [texts[i] for i in prompt]) for question, prompt in pairs], texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steering_arguments(parser)
    parser.add_argument("--budgets", type=shares, default=(0.25, 0.5), metavar="N,N,…", help="shares of "
        "the full run's tokens (default: 0.25,0.5)")  # fmt: skip
    parser.add_argument("--policies", type=sketches, default=list(POLICIES), metavar="P,P,…", help="of "
        f"{', '.join(POLICIES)} (default: all)")  # fmt: skip
    parser.add_argument("--strength", type=strength, default=1.0, help="of skipkv's steering, 0 or more (default: 1)")
    parser.add_argument("--at", choices=("boundary", "every"), default="boundary", help="where skipkv steers: at "
        "blank lines, or at every token of the thinking (default: boundary)")  # fmt: skip


def shares(text: str) -> tuple[float, ...]:
    """For argparse: different numbers above 0, up to 1."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (0.0,)
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} are no shares above 0 and up to 1")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} names a share twice")
    return values


def sketches(text: str) -> list[str]:
    """For argparse: different names of POLICIES."""
    names = text.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise argparse.ArgumentTypeError(f"there is no sketch {unknown[0]!r}; there are {', '.join(POLICIES)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a sketch twice")
    return names


def strength(text: str) -> float:
    """For argparse: a finite number, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number of 0 or more")
    return value


ORACLES = ("answer", "hindsight")
POLICIES: dict[str, type[Sketch]] = {
    "window": Window,
    "h2o": H2O,
    "rkv": Rkv,
    "lrfu": Lrfu,
    "sentences": Sentences,
    "skipkv": Sentences,
    "answer": Known,
    "hindsight": Known,
    "oracle": Oracle,
}


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate with the full cache, then with every sketch and budget; write after each, print a table. A file of the
    same command that is not complete is completed."""
    engine, problems, result = begin(args, "pilot", argv)
    wanted = [(name, share) for name in args.policies for share in args.budgets]
    there = {(m["policy"], m["budget"]): m for m in begun(args.output, result) if m["problems"] == len(problems)}
    rows = {(name, x): there[name, rounded(x)] for name, x in [("full", 1.0), *wanted] if (name, rounded(x)) in there}
    left = [key for key in wanted if key not in rows]
    found: dict[tuple[str, float], list[list[int]]] = {}
    for part in batches(len(problems), args.batch_size):
        for key, tokens in pilot(engine, [p.question for p in problems[part]], left, args):
            found.setdefault(key, []).extend(tokens)
            here, full = found[key], found["full", 1.0]
            rows[key] = {
                "policy": key[0],
                "budget": key[1],
                **outcome(engine, problems[: len(here)], here),
                "tokens_until_other": sum(map(shared, here, full)) / len(here),
                "commit": result["commit"],
            }
            result["measurements"] = list(rows.values())
            results.write(args.output, result)
    return finish(args, result, (
        f"{m['policy']:>10} {m['budget']:5.0%}  right {m['right']:6.1%}  {m['tokens']:7,.0f} tokens"
        for m in result["measurements"]
    ))  # fmt: skip


def begun(path: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run has measured that was interrupted, with the same settings and model on the same machine;
    nothing, if another file is there, which is replaced."""
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


def pilot(
    engine: Engine, questions: Sequence[str], left: Sequence[tuple[str, float]], args: argparse.Namespace
) -> Iterator[tuple[tuple[str, float], list[list[int]]]]:
    """(sketch, share of the full run) → generated tokens, for one batch; the full cache first."""
    options: dict[str, Any] = {"temperature": args.temperature, "seed": args.seed}
    prompts = [engine.prompt_ids(question) for question in questions]
    full = decode(engine, prompts, args.max_new_tokens, **options)
    yield ("full", 1.0), full
    names = {name for name, _ in left}
    lengths = torch.tensor([len(g) for g in full], device=engine.device)
    newline = token_table(engine, "\n")
    steered: dict[str, Any] = {}
    if "skipkv" in names:
        looks = [look(engine, prompt, tokens, args.layer) for prompt, tokens in zip(prompts, full, strict=True)]
        h, doubts = (torch.cat([getattr(one, part) for one in looks]) for part in ("opening", "doubts"))
        if doubts.any() and not doubts.all():
            steered = {"vector": args.strength * direction(h, doubts), "layer": args.layer, "at": args.at}
        else:
            print("skipkv: nothing to steer away from, for no thought or each one doubts", file=sys.stderr)
    seen = foresee(engine, prompts, full) if names & set(ORACLES) else ()
    known = dict(zip(ORACLES, seen, strict=False))
    for name, share in left:

        def make(cache: Dense, lengths: Tensor, name: str = name) -> Sketch:
            kind = POLICIES[name]
            extra: tuple[Any, ...] = (known[name],) if name in known else (newline,) if kind is Sentences else ()
            return kind(cache, lengths, *(read_along(engine, questions, prompts) if kind is Oracle else extra))

        began = time.monotonic()
        budget = (lengths * share).ceil().long()
        steer = Steer(engine, **steered) if steered and name == "skipkv" else None
        tokens = decode(engine, prompts, args.max_new_tokens, sketch=make, budget=budget, steer=steer, **options)
        print(f"{name} {share:.0%}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        yield (name, share), tokens
