"""What the answer attends to in the thinking, and whether LRFU's score finds the tokens that are needed (Crystal-KV).

Texts of the full cache are read again with full attention. Every KV head is measured alone. Its weights are the
largest probabilities of its query heads, renormalised to 1, as in the policy (`policies/crystal_kv.py`). A hit is a
token of the smallest set that holds the share p of a query's weights (§5.2, algorithm 1). A token's birth is a hit.

`hits`: how many generated tokens a query hits, `tokens`, and the share of those that it sees, `share`.

`answer`: the key insight (§3, figure 2). The thinking tokens are ranked by the attention of the answer's queries,
which stand behind `</think>`. Means over traces, by layer and head:

    concentration  share of the answer's attention to the thinking that is on the top tenth of the tokens
    agreement      share of its top tenth that one row of the answer has in common with another; 0.1 by chance
    needs_in_top   share of the answer's needs with a token among the top 30 %; `by_chance`: if the rank were random
    top, bottom    the top and the bottom 30 % under the thinking's own queries:
        late       share of the attention to a token that comes more than 64 tokens after its birth
        episodes   runs of hits; a new one begins after 64 tokens without a hit
        last_hit   when the last hit comes: 0 at the token's birth, 1 at the end of the thinking
        at_end     attention of the thinking's last 64 queries to a token; 1: the mean of all thinking tokens

Tokens of the last 64 are left out of `top` and `bottom`, because they have no late attention.

`needs`: whether scores of eviction find the tokens that statements need (`needed_ranks.py`).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minithink.analysis import answer_pictures, runs
from minithink.analysis.answer_pictures import Milestone, Shown
from minithink.analysis.dense import thinking_end
from minithink.analysis.needed_ranks import FAR, Pair, needs_of, of_pairs, pairs_of, scores
from minithink.cli.commands import finite, location
from minithink.engine import Engine
from minithink.errors import MinithinkError, counted
from minithink.policies.crystal_kv import CrystalKVLite
from minithink.ref.decode_attention import group_reduce
from minithink.ref.lrfu import hit_set
from minithink.reread.attention import read
from minithink.results import record
from minithink.results.figures import need_matplotlib
from minithink.tasks import Problem
from minithink.tasks.needs import Reading
from minithink.tasks.needs import read as read_needs

TENTH, SET = 0.1, 0.3  # of the thinking tokens: for concentration and agreement; top and bottom set (figure 2)
LIFE = ("late", "episodes", "last_hit", "at_end")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser)
    add = parser.add_argument
    add("--lam", type=finite, default=0.6, help="λ of CRF (default: 0.6)")
    add("--p", type=finite, default=0.9, help="share of a query's weights that its hits hold (default: 0.9)")
    add(
        "--plot",
        type=location,
        metavar="DIR",
        help="draw pictures here, of the text that needs the most tokens far "
        "back, in the head whose answer attention is the most concentrated",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, read again, measure, draw, write the result, print what the scores find."""
    CrystalKVLite(lam=args.lam, p=args.p)  # checks them
    if args.plot is not None:
        need_matplotlib()
        record.check(args.plot / "picture.svg", "--plot")
    engine, problems, result = runs.begin(args, "answer-attention", argv)
    generated = runs.generate(engine, problems, args)
    traces = [trace_of(engine, problem, tokens) for problem, tokens in zip(problems, generated, strict=True)]
    shown = max((t for t in traces if t.answers), key=lambda t: len(t.pairs), default=None)
    if shown is None or not shown.pairs:
        raise MinithinkError(
            f"None of {counted(len(traces), 'text')} answers and needs a token more than {FAR} tokens back: give "
            "more --max-new-tokens, or another --family."
        )
    looks = [look(engine, trace, args.lam, args.p, seed) for seed, trace in enumerate(traces)]
    needed: list[Pair] = []
    for trace in traces:
        needed += trace.pairs
    needs = {"given": sum(t.given for t in traces)} | needs_of(needed, looks)
    found: dict[str, Any] = {
        "full_cache": runs.outcome(engine, problems, generated),
        "hits": {name: mean(looks, name) for name in ("tokens", "share")},
        "answer": answer_of(traces, looks),
        "needs": needs,
    }
    result["measurements"] = found
    if args.plot is not None:
        by_head = torch.tensor(found["answer"]["concentration"])
        layer, head = divmod(int(by_head.argmax()), by_head.shape[1])
        picture = show(engine, shown, args.p, layer, head)
        answer_pictures.draw(args.plot, f"answer-attention-{args.family}", picture, by_head)
    lines = []
    for m in needs["scores"]:
        shares = m["all"]
        lines.append(
            f"{m['score']}: in the best quarter {shares['heads']:.0%} of heads, {shares['somewhere']:.0%} in one"
        )
    return runs.finish(args, result, lines)


# -- texts. Positions are counted from the first generated token.


class Trace(NamedTuple):
    """A text of the full cache."""

    prompt: list[int]
    generated: list[int]
    end: int  # where `</think>` stands; the text's length if it never comes
    reading: Reading  # positions here are counted from the beginning of the prompt
    pairs: list[Pair]
    given: int  # needs as old that a token of the prompt meets, too

    @property
    def answers(self) -> bool:
        """Whether there are two rows of the answer, and thinking tokens before the last FAR."""
        return len(self.rows) > 1 and self.end > FAR

    @property
    def rows(self) -> range:
        """The answer's queries: those of its tokens but the last, behind which nothing is written."""
        return range(self.end + 1, len(self.generated) - 1)


def trace_of(engine: Engine, problem: Problem, generated: list[int]) -> Trace:
    prompt = engine.prompt_ids(problem.question)
    end = thinking_end(engine, generated)
    reading = read_needs(problem.question, engine.tokenizer.pieces([*prompt, *generated]), len(prompt))
    return Trace(prompt, generated, end, reading, *pairs_of(reading, len(prompt), end))


# -- one layer. mass: float32 [T, Hkv, T], hits: bool [T, Hkv, T], of the generated tokens: queries, heads, keys.


def weights(logits: Tensor, seen: Tensor, prompt: int, p: float) -> tuple[Tensor, Tensor]:
    """Mass and hits. The prompt's tokens share in the softmax and can be hit, but have no column.

    logits: [T, Hkv, g, prompt + T], of the generated tokens' queries; seen: bool [T, 1, prompt + T].
    """
    mass = group_reduce(logits, seen, "max")
    mass = mass / mass.sum(-1, keepdim=True)
    born = torch.eye(len(mass), dtype=torch.bool, device=mass.device)
    heads = [hit_set(one, seen[:, 0], p)[:, prompt:] | born for one in mass.unbind(1)]  # in turn: bounds memory
    return mass[..., prompt:], torch.stack(heads, 1)


def concentration(answer: Tensor) -> Tensor:
    """Share of the attention that the top tenth of the tokens has. answer: [rows, Hkv, n] → [Hkv]."""
    received = answer.sum(0)
    return received.topk(part(answer, TENTH)).values.sum(-1) / received.sum(-1)


def agreement(answer: Tensor) -> Tensor:
    """Share of its top tenth that one row has in common with another, mean over pairs of rows.

    answer: [rows, Hkv, n], two rows or more → [Hkv].
    """
    rows = len(answer)
    best = part(answer, TENTH)
    chosen = torch.zeros_like(answer).scatter(-1, answer.topk(best).indices, 1.0).sum(0)  # [Hkv, n]: by how many rows
    return (chosen * (chosen - 1)).sum(-1) / (rows * (rows - 1) * best)


def ends(answer: Tensor) -> dict[str, Tensor]:
    """The top and the bottom 30 % of the tokens: bool [Hkv, n]. Of equal tokens the older ranks first.

    answer: [rows, Hkv, n].
    """
    order = answer.sum(0).argsort(dim=-1, descending=True, stable=True)
    size = part(answer, SET)
    none = torch.zeros_like(order, dtype=torch.bool)
    return {"top": none.scatter(1, order[:, :size], True), "bottom": none.scatter(1, order[:, -size:], True)}


def part(x: Tensor, share: float) -> int:
    """A share of the last dimension, at least 1."""
    return max(1, int(x.shape[-1] * share))


def life(mass: Tensor, hits: Tensor) -> dict[str, Tensor]:
    """LIFE of every token, as the module's docstring says: float64 [Hkv, T]. The newest token's `last_hit` is NaN."""
    time = torch.arange(len(mass), device=mass.device)
    old = (time[:, None] - time > FAR)[:, None]
    late, received, at_end = (x.sum(0, dtype=torch.float64) for x in (mass.masked_fill(~old, 0.0), mass, mass[-FAR:]))
    last = torch.where(hits, time[:, None, None], -1).cummax(0).values  # [T, Hkv, T], −1: no hit so far
    rested = time[1:, None, None] - last[:-1] > FAR
    episodes = hits[0].double() + (hits[1:] & (rested | (last[:-1] < 0))).sum(0)
    last_hit = (last[-1] - time) / (len(time) - 1 - time)
    found = (late / received, episodes, last_hit.double(), at_end / at_end.mean(1, keepdim=True))
    return dict(zip(LIFE, found, strict=True))


# -- one trace


def look(engine: Engine, trace: Trace, lam: float, p: float, seed: int = 0) -> dict[str, Tensor]:
    """Read a trace again → name → [L, Hkv], of pairs [pairs, L, Hkv]. seed: of the noise."""
    out = defaultdict[str, list[Tensor]](list)
    generator = torch.Generator().manual_seed(seed)

    def see(_: int, mass: Tensor, hits: Tensor) -> None:
        noise = torch.rand(mass.shape[1:], generator=generator, dtype=torch.float64).to(mass.device)
        at = scores(mass, hits, {pair.time for pair in trace.pairs}, noise, lam)
        found = of_pairs(trace.pairs, mass, hits, at) | of_answer(trace, mass, hits)
        hit = hits[: trace.end].sum((0, 2)).double()
        found |= {"tokens": hit / trace.end, "share": hit / (trace.end * (trace.end + 1) / 2)}
        for name, values in found.items():
            out[name].append(values)

    see_layers(engine, trace, p, see)
    return {name: torch.stack(layers, -2).cpu() for name, layers in out.items()}


def see_layers(engine: Engine, trace: Trace, p: float, see: Callable[[int, Tensor, Tensor], None]) -> None:
    """Call see(layer, mass, hits) for every layer; one layer is in memory at a time."""
    ids = [*trace.prompt, *trace.generated]
    prompt = len(trace.prompt)
    queries = torch.arange(prompt, len(ids), device=engine.device)

    def see_weights(layer: int, logits: Tensor, seen: Tensor) -> None:
        see(layer, *weights(logits, seen, prompt, p))

    read(engine.loaded, ids, see_weights, queries=queries)


def of_answer(trace: Trace, mass: Tensor, hits: Tensor) -> dict[str, Tensor]:
    """One layer's measures of the answer's attention: name → [Hkv]. Empty if the trace has no answer."""
    if not trace.answers:
        return {}
    end = trace.end
    answer = mass[trace.rows, :, : trace.end]
    sets = ends(answer)
    lives = life(mass[:end, :, :end], hits[:end, :, :end])
    out = {"concentration": concentration(answer), "agreement": agreement(answer)}
    if own := [list(pair.places) for pair in trace.pairs if pair.answers]:
        out["needs_in_top"] = torch.stack([sets["top"][:, places].any(1) for places in own]).double().mean(0)
    else:
        out["needs_in_top"] = torch.full_like(out["agreement"], torch.nan)
    for which, chosen in sets.items():
        for name, values in lives.items():
            out[f"{which} {name}"] = values[:, :-FAR].where(chosen[:, :-FAR], torch.nan).nanmean(1)
    return out


def show(engine: Engine, trace: Trace, p: float, layer: int, head: int) -> Shown:
    """The data of the pictures of a trace: the thinking as one head sees it, and the hits of the token that is in the
    most pairs."""
    prompt = len(trace.prompt)
    counts = Counter[int]()
    for pair in trace.pairs:
        counts.update(pair.places)
    [(token, _)] = counts.most_common(1)
    hit = list[Tensor]()
    maps = list[Tensor]()

    def see(at: int, mass: Tensor, hits: Tensor) -> None:
        hit.append(hits[..., token].T.cpu())
        if at == layer:
            maps.append(mass[:, head, : trace.end].cpu())

    see_layers(engine, trace, p, see)
    [mass] = maps
    sets = {which: chosen[0] for which, chosen in ends(mass[trace.rows, None]).items()}
    statements = trace.reading.statements
    needed = {statements[n.statement].start - prompt for n in trace.reading.needs if token + prompt in n.places}
    said = next(trace.generated[s.start - prompt : s.end - prompt] for s in statements if token + prompt < s.end)
    own = Milestone(token, engine.tokenizer.decode(said).strip(), torch.stack(hit), sorted(needed))
    return Shown(layer, head, mass[: trace.end], mass[trace.rows], sets, own)


# -- all traces


def mean(looks: Sequence[Mapping[str, Tensor]], name: str) -> list[list[float]]:
    """Mean over the traces that have a value, by layer and head."""
    found: list[list[float]] = torch.stack([x[name].double() for x in looks if name in x]).nanmean(0).tolist()
    return found


def answer_of(traces: Sequence[Trace], looks: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """The result's `answer`: means over the traces that answer."""
    answering = [t for t in traces if t.answers]
    chances = []
    for t in answering:
        size = max(1, int(t.end * SET))
        for pair in t.pairs:
            if pair.answers:
                missed = math.comb(t.end - len(pair.places), size) / math.comb(t.end, size)
                chances.append(1 - missed)
    return {
        "traces": len(answering),
        "rows": sum(len(t.rows) for t in answering) / len(answering),
        "by_chance": sum(chances) / len(chances) if chances else None,
        **{name: mean(looks, name) for name in ("concentration", "agreement", "needs_in_top")},
        **{which: {name: mean(looks, f"{which} {name}") for name in LIFE} for which in ("top", "bottom")},
    }
