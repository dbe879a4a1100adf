"""Where attention goes while a model reads worked solutions: what policies take for granted.

Nothing is generated. The texts are reference traces of the puzzles, the same ones as in `evaluate loss --texts
reference`, each behind its question. So any model with a chat template can be measured, also one that cannot solve
them. Every text is read once with the full cache. Where `</think>` is no token of the model, its answer counts as
thinking, too.

    sinks       share of the attention that the tokens behind the question give to the first token of all, to the
                first four, and to the next four, by layer and query head (StreamingLLM's attention sinks). Chance is
                what they would get if all tokens got the same
    sparsity    ThinKV's, of the thinking's queries, as its policy measures it (`ref/sparsity.py`): mean by layer, by
                kind of thought, how well it tells kinds apart (`premises.py`), and how many modes its density has in
                each text. Modes by chance: of noise with the same mean and spectrum (`reread/density.py`)
    needs       how many tokens before a line the newest token stands that carries what the line reads
                (`tasks/needs.py`), without what the question says. They depend on the tokenizer alone
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minithink.analysis import runs
from minithink.analysis.premises import KINDS, separability, sparsity_by_kind
from minithink.cli.commands import positive
from minithink.cli.models import model_name, model_options, model_settings
from minithink.engine import Engine, load
from minithink.errors import UsageError
from minithink.ref.decode_attention import group_reduce
from minithink.reread.attention import QUERIES, layer_row, read
from minithink.reread.density import density, noise_like, peaks
from minithink.reread.later import thinking_of
from minithink.results import record
from minithink.results.progress import progress
from minithink.tasks import needs
from minithink.tasks.prepare import Reference, references
from minithink.text.openings import sentences
from minithink.text.tags import THINK

# Name → the positions whose attention is summed up.
FIRST = {"first_token": slice(0, 1), "first_four": slice(0, 4), "next_four": slice(4, 8)}
WITHIN = (64, 256, 1024)  # tokens back
QUANTILES = (0.5, 0.9, 0.99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `analysis attention`."""
    runs.add_trace_arguments(parser, limit=12)
    parser.add_argument("--tau", type=positive, default=32, metavar="N", help="τ, tokens of a segment (default: 32)")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Read the traces, measure, write the result."""
    record.check(args.output)
    engine = load(args.model, device=args.device, backend="reference", dtype="float32", **model_options(args))
    assert engine.loaded.home is not None
    result = record.new("attention", argv, engine.device, program="minithink.analysis")
    result["checkpoint"] = engine.loaded.home.checkpoint
    result["settings"] = {
        "model": model_name(args.model, args.adapter),
        "limit": args.limit,
        "seed": args.seed,
        "tau": args.tau,
        **model_settings(args),
    }
    traces = [Trace.of(engine, one) for one in references(args.limit, args.seed)]
    looks = list[Look]()
    with progress(len(traces), 0, "reading the traces") as advance:
        for number, trace in enumerate(traces):
            looks.append(look(engine, trace, args.tau, seed=number))
            advance(None)
    result["measurements"] = measured(traces, looks)
    return runs.finish(args, result, lines(result["measurements"]))


@dataclass(frozen=True)
class Trace:
    """A reference trace in the tokens of a model."""

    name: str
    family: str
    question: str
    prompt: list[int]
    tokens: list[int]  # behind the prompt
    think: range  # its thinking tokens, counted from the first of `tokens`

    @classmethod
    def of(cls, engine: Engine, one: Reference) -> Trace:
        """UsageError: the model's context is too short for it."""
        prompt = engine.prompt_ids(one.question)
        tokens = engine.text_ids(f"{one.thinking}{THINK.close}{one.answer}", one.id)
        length = len(prompt) + len(tokens)
        context = engine.config.max_position
        if length > context:
            raise UsageError(
                f"{one.id} has {length:,} tokens and the context holds {context:,}: give another --model."
            )
        think = thinking_of(engine.loaded, tokens)
        return cls(one.id, one.family, one.question, prompt, tokens, think)


@dataclass(frozen=True)
class Look:
    """The measurements of one trace. L are layers."""

    first: dict[str, Tensor]  # by the names of FIRST: mean share of the attention, [L, Hq]
    chance: dict[str, float]  # the same if all tokens got the same
    kinds: list[str]  # of every segment of the thinking
    sparsity: Tensor  # [segments, L]
    tokens: Tensor  # [thinking tokens, L], of single queries
    token_kinds: list[str]
    modes: list[int]  # by layer
    modes_by_chance: list[int]
    back: list[int]  # of every need that the question does not meet: tokens from the newest place to the line
    of_question: int  # needs that the question meets, too
    parsed: float  # share of the lines that the rules read


def look(engine: Engine, trace: Trace, tau: int, seed: int) -> Look:
    """Read one trace, and measure.

    Args:
        engine: the model.
        trace: what is read.
        tau: tokens of a segment.
        seed: of the noise whose modes are counted, too.
    """
    loaded = engine.loaded
    ids = [*trace.prompt, *trace.tokens]
    start = len(trace.prompt)
    shape = (engine.config.num_layers, engine.config.num_heads)
    first = {name: torch.zeros(shape, dtype=torch.float64) for name in FIRST}
    found = defaultdict[int, list[Tensor]](list)

    def see(layer: int, logits: Tensor, seen: Tensor) -> None:
        p = group_reduce(logits, seen, "none")  # [n, Hq, S]
        for name, places in FIRST.items():
            first[name][layer] += p[:, :, places].double().sum((0, 2)).cpu()
        row = layer_row(logits, seen)  # [n, 1, S]
        found[layer].append(loaded.decoder.backend.sparsity(row, seen).cpu())

    queries = torch.arange(start, len(ids), device=loaded.device)
    read(loaded, ids, see, queries=queries, at_once=QUERIES)
    sees = [position + 1 for position in range(start, len(ids))]  # tokens that each query sees
    chance = {}
    for name, places in FIRST.items():
        shares = [len(range(count)[places]) / count for count in sees]
        chance[name] = sum(shares) / len(shares)
    every = torch.stack([torch.cat(parts) for parts in found.values()], 1)  # [generated tokens, L]
    think = slice(trace.think.start, trace.think.stop)
    tokens = every[think]
    token_kinds = kinds_of(engine, trace)
    segments = [slice(at, at + tau) for at in range(0, len(tokens) - len(tokens) % tau, tau)]  # whole ones
    back, of_question, parsed = needed(engine, trace)
    return Look(
        first={name: total / len(sees) for name, total in first.items()},
        chance=chance,
        kinds=[max(KINDS, key=token_kinds[part].count) for part in segments],
        sparsity=torch.stack([tokens[part].mean(0) for part in segments]) if segments else tokens[:0],
        tokens=tokens,
        token_kinds=token_kinds,
        modes=modes_of(tokens),
        modes_by_chance=modes_of(noise_like(tokens, len(tokens), seed)),
        back=back,
        of_question=of_question,
        parsed=parsed,
    )


def modes_of(u: Tensor) -> list[int]:
    """How many modes the density of each layer's sparsity has. u: [tokens, L]."""
    return [len(peaks(density(of_layer)).modes) for of_layer in u.unbind(1)]


def kinds_of(engine: Engine, trace: Trace) -> list[str]:
    """The kind of every thinking token, that of its line."""
    own = trace.tokens[trace.think.start : trace.think.stop]
    kinds: list[str] = []
    for line in sentences(engine.tokenizer.pieces(own)):
        kinds += [line.kind] * (line.end - line.start)
    return kinds


def needed(engine: Engine, trace: Trace) -> tuple[list[int], int, float]:
    """`back`, `of_question` and `parsed` of a Look."""
    start = len(trace.prompt)
    pieces = engine.tokenizer.pieces([*trace.prompt, *trace.tokens])
    reading = needs.read(trace.question, pieces, start)
    back = []
    of_question = 0
    for need in reading.needs:
        if min(need.places) < start:
            of_question += 1
        else:
            line = reading.statements[need.statement]
            back.append(line.start - max(need.places))
    return back, of_question, reading.parsed


# -- the result


def measured(traces: Sequence[Trace], looks: Sequence[Look]) -> dict[str, Any]:
    """Everything that the result says. Attention is the mean over traces, each of which counts once."""
    texts = []
    for trace in traces:
        thinking = len(trace.think)
        size = {"prompt_tokens": len(trace.prompt), "tokens": len(trace.tokens), "thinking_tokens": thinking}
        texts.append({"id": trace.name, "family": trace.family, **size})
    return {
        "texts": texts,
        "sinks": sinks(looks),
        "sparsity": {
            "layers": layers(looks),
            "kinds": sparsity_by_kind(looks),
            "separability": separability(looks),
        },
        "needs": distances(traces, looks),
    }


def sinks(looks: Sequence[Look]) -> dict[str, Any]:
    """Attention on the first tokens: in all, by chance, and by layer and head."""
    mean = {}
    chance = {}
    for name in FIRST:
        mean[name] = torch.stack([one.first[name] for one in looks]).mean(0)  # [L, Hq]
        chance[name] = sum(one.chance[name] for one in looks) / len(looks)
    by_layer = []
    for layer in range(len(mean["first_four"])):
        by_layer.append({"layer": layer, **{name: mean[name][layer].tolist() for name in FIRST}})
    overall = {name: float(of.mean()) for name, of in mean.items()}
    return {"mean": overall, "chance": chance, "layers": by_layer}


def layers(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """For every layer the mean and standard deviation of the sparsity, and the modes in each trace."""
    out = []
    every = torch.cat([one.tokens for one in looks]).double()
    for layer in range(every.shape[1]):
        own = every[:, layer]
        row = {
            "layer": layer,
            "mean": float(own.mean()),
            "sd": float(own.std(correction=0)),
            "modes": [one.modes[layer] for one in looks],
            "modes_by_chance": [one.modes_by_chance[layer] for one in looks],
        }
        out.append(row)
    return out


def distances(traces: Sequence[Trace], looks: Sequence[Look]) -> list[dict[str, Any]]:
    """How far back needed tokens lie: of each family, and of all traces together ("all")."""
    families = list(dict.fromkeys(trace.family for trace in traces))
    out = []
    for name in [*families, "all"]:
        own = [one for trace, one in zip(traces, looks, strict=True) if name in (trace.family, "all")]
        back = sorted(distance for one in own for distance in one.back)
        in_question = sum(one.of_question for one in own)
        row: dict[str, Any] = {
            "family": name,
            "needs": len(back),
            "in_question": in_question,
            "parsed": sum(one.parsed for one in own) / len(own),
            "back": {f"{share:g}": back[int(len(back) * share)] if back else None for share in QUANTILES},
            "within": {},
        }
        for tokens in WITHIN:
            near = sum(distance <= tokens for distance in back)
            row["within"][str(tokens)] = near / len(back) if back else None
        out.append(row)
    return out


def lines(found: dict[str, Any]) -> list[str]:
    """The findings, for people."""
    of = found["sinks"]
    said = []
    for name, share in of["mean"].items():
        said.append(f"{name.replace('_', ' ')}: {share:.1%} of the attention, {of['chance'][name]:.1%} by chance")
    three = [sum(n == len(KINDS) for n in row["modes"]) for row in found["sparsity"]["layers"]]
    best = max(range(len(three)), key=three.__getitem__)
    said.append(f"three modes of sparsity: in {three[best]} of {len(found['texts'])} traces at most (layer {best})")
    *_, every = found["needs"]
    median, _, far = every["back"].values()
    said.append(f"needed tokens lie {median} tokens back (median), 1 % of them more than {far}")
    return said
