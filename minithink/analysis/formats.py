"""How much every number format of the cache changes a model's own keys and values, and what attention gives.

Nothing is generated. Reference traces are read once with the full cache, as in `analysis attention`, in float32. Then
each layer's keys and values are stored in each format and read back:

    error     Σ(x̂ − x)² / Σx², of a layer's keys or values, x̂ being what the format gives back
    output    Σ‖ô − o‖² / Σ‖o‖², of a layer's attention before the output projection, for queries that are spread
              evenly over the text behind the question. The queries are those of the full cache, so that the error of
              one layer does not come on top of another's

Both are sums over all traces, tokens and heads, and the mean over layers counts each layer once. Keys are stored
after RoPE, as in the cache. They are grouped in two ways: a scale for some channels of one token, or for one channel
of as many tokens. Formats of symmetric numbers are measured with two rules for a group's scale: `largest`, which the
cache has, by the largest magnitude, and `best`, by the least squared error (`best_scale.py`).

All tokens have one format, the prompt's too, and none waits in a buffer. So the output's error is larger than a
policy's that keeps some tokens in more bits. The last tokens of a text, too few for a group, are left out.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minithink.analysis import runs
from minithink.analysis.attention import Trace
from minithink.analysis.best_scale import best_scale
from minithink.cli.commands import positive
from minithink.cli.models import model_name, model_options, model_settings
from minithink.engine import load
from minithink.errors import UsageError
from minithink.loaded import Loaded
from minithink.quant import Format, parse
from minithink.quant.format import Grouped
from minithink.quant.symmetric import Symmetric
from minithink.reread.attention import read
from minithink.results import record
from minithink.results.progress import progress
from minithink.tasks.prepare import references

FORMATS = ("fp8", "int8", "nvfp4", "int4s", "int4", "tq4", "tq3", "ternary", "int2s", "int2", "tq2")
# Parts of the cache: those numbers that are stored in a format, while all others are exact.
KEYS = "keys"  # a group: channels of one token
KEYS_BY_TOKEN = "keys by token"  # a group: one channel of several tokens
VALUES = "values"
BOTH = "both"
BOTH_BY_TOKEN = "both, keys by token"
# Kinds of errors: of the stored numbers themselves, or of what attention makes of them.
ERROR = "error"
OUTPUT = "output"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `analysis formats`."""
    runs.add_trace_arguments(parser, limit=6)
    add = parser.add_argument
    add("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help=f"default: {' '.join(FORMATS)}")
    add("--queries", type=positive, default=128, metavar="N", help="queries of a trace, in each layer (default: 128)")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Read the traces, store and compare, write the result."""
    record.check(args.output)
    formats = [parse(text) for text in args.formats]
    for fmt in formats:
        if fmt.by == "token":
            raise UsageError(f"{fmt}: keys are measured by token and by channel anyway; leave by=token out.")
    engine = load(args.model, device=args.device, backend="reference", dtype="float32", **model_options(args))
    assert engine.loaded.home is not None
    ways = list[Way]()
    for fmt in formats:
        ways += ways_of(fmt.fit(engine.config.head_dim))
    result = record.new("formats", argv, engine.device, program="minithink.analysis")
    result["checkpoint"] = engine.loaded.home.checkpoint
    result["settings"] = {
        "model": model_name(args.model, args.adapter),
        "formats": list(args.formats),
        "limit": args.limit,
        "seed": args.seed,
        "queries": args.queries,
        **model_settings(args),
    }
    traces = [Trace.of(engine, one) for one in references(args.limit, args.seed)]
    sums = Sums()
    with progress(len(traces), 0, "reading the traces") as advance:
        for trace in traces:
            measure(engine.loaded, trace, ways, args.queries, sums)
            advance(None)
    rows = [row_of(way, sums, engine.config.head_dim) for way in ways]
    texts = [{"id": one.name, "family": one.family, "tokens": len(one.prompt) + len(one.tokens)} for one in traces]
    result["measurements"] = {"texts": texts, "formats": rows}
    return runs.finish(args, result, lines(rows))


# -- formats


@dataclass(frozen=True)
class Way:
    """A format with a rule for the scales of its groups."""

    format: Format  # grouped by channel, if at all
    scale: str = "largest"  # or "best", of a Symmetric

    def __call__(self, x: Tensor, tensor_scale: Tensor) -> Tensor:
        """Store and read back. x: float32 [..., D]; tensor_scale: float32 [] → float32 [..., D]."""
        fmt = self.format
        if self.scale == "best":
            assert isinstance(fmt, Symmetric)
            groups = x.unflatten(-1, (-1, fmt.group))
            codes, params = best_scale(fmt, groups, tensor_scale)
            return fmt.decode(fmt.point(codes), params, tensor_scale).flatten(-2)
        codes, params = fmt.quantize(x, tensor_scale)
        return fmt.dequantize(codes, params, tensor_scale, torch.float32)

    def by_token(self, x: Tensor, tensor_scale: Tensor) -> Tensor:
        """The same with groups along tokens. x: [H, T, D], where groups divide T → [H, T, D]."""
        return self(x.mT.contiguous(), tensor_scale).mT


def ways_of(fmt: Format) -> list[Way]:
    """The ways in which a format is measured."""
    if isinstance(fmt, Symmetric):
        return [Way(fmt), Way(fmt, "best")]
    return [Way(fmt)]


def stored(way: Way, k: Tensor, v: Tensor, prompt: int) -> dict[str, Tensor]:
    """Keys and values of a layer as a format gives them back: part of the cache → float32 [H, T, D].

    Args:
        way: the format.
        k, v: float32 [H, T, D].
        prompt: its tokens, which set the scale of a tensor.
    """
    fmt = way.format
    scale_of_keys = fmt.tensor_scale(k[:, :prompt].abs().amax())
    scale_of_values = fmt.tensor_scale(v[:, :prompt].abs().amax())
    found = {KEYS: way(k, scale_of_keys), VALUES: way(v, scale_of_values)}
    if isinstance(fmt, Grouped):
        found[KEYS_BY_TOKEN] = way.by_token(k, scale_of_keys)
    return found


# -- one trace


class Sums:
    """Sums of squares by way, by the part of the cache that is stored in it, by the kind of error, and by layer."""

    def __init__(self) -> None:
        self.sums: dict[tuple[Way, str, str], dict[int, list[float]]] = defaultdict(dict)

    def add(self, way: Way, part: str, kind: str, layer: int, found: Tensor, true: Tensor) -> None:
        """Count numbers beside what they should be. part: KEYS or another; kind: ERROR or OUTPUT."""
        pair = self.sums[way, part, kind].setdefault(layer, [0.0, 0.0])
        pair[0] += float((found - true).double().square().sum())
        pair[1] += float(true.double().square().sum())

    def by_layer(self, way: Way, part: str, kind: str) -> list[float]:
        """The relative errors of all layers; empty: this was not measured."""
        pairs = self.sums.get((way, part, kind), {})
        return [pairs[layer][0] / pairs[layer][1] for layer in sorted(pairs)]


def measure(loaded: Loaded, trace: Trace, ways: Sequence[Way], queries: int, sums: Sums) -> None:
    """Read one trace, and count its errors.

    Args:
        loaded: the model.
        trace: what is read.
        ways: the formats.
        queries: how many see the stored numbers, in each layer.
        sums: what is counted so far.
    """
    longest = max(way.format.group for way in ways) or 1
    ids = [*trace.prompt, *trace.tokens]
    ids = ids[: len(ids) - len(ids) % longest]
    start = len(trace.prompt)
    at = torch.linspace(start, len(ids) - 1, queries, device=loaded.device).long().unique()
    see = partial(_of_layer, ways=ways, at=at, prompt=start, sums=sums)
    read(loaded, ids, before_attention=see)


def _of_layer(
    layer: int, q: Tensor, k: Tensor, v: Tensor, *, ways: Sequence[Way], at: Tensor, prompt: int, sums: Sums
) -> None:
    """Count the errors of one layer. q: [T, Hq, D]; k, v: [Hkv, T, D]; at: positions of the queries that count."""
    q = q[at].unflatten(1, (len(k), -1))  # [n, Hkv, g, D]
    output = attention(q, k, v, at)
    for way in ways:
        found = stored(way, k, v, prompt)
        for part, x in found.items():
            sums.add(way, part, ERROR, layer, x, v if part == VALUES else k)
        for part, keys, values in pairs_of(found, k, v):
            sums.add(way, part, OUTPUT, layer, attention(q, keys, values, at), output)


def pairs_of(found: dict[str, Tensor], k: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The keys and values with which attention is computed, each pair behind the part of it that is stored."""
    yield KEYS, found[KEYS], v
    yield VALUES, k, found[VALUES]
    yield BOTH, found[KEYS], found[VALUES]
    if KEYS_BY_TOKEN in found:
        yield KEYS_BY_TOKEN, found[KEYS_BY_TOKEN], v
        yield BOTH_BY_TOKEN, found[KEYS_BY_TOKEN], found[VALUES]


def attention(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """softmax(q·kᵀ/√D)·v of queries anywhere in a text, each of which sees the tokens up to its own.

    Args:
        q: [n, Hkv, g, D].
        k, v: [Hkv, T, D].
        at: int64 [n], the positions of the queries.

    Returns:
        [n, Hkv, g, D].
    """
    logits = torch.einsum("nhgd,htd->nhgt", q, k) / q.shape[-1] ** 0.5
    later = torch.arange(k.shape[1], device=k.device) > at[:, None]  # [n, T]
    weights = logits.masked_fill(later[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("nhgt,htd->nhgd", weights, v)


# -- the result


def row_of(way: Way, sums: Sums, dim: int) -> dict[str, Any]:
    """A way and its errors: means over layers, and by layer. dim: D, channels of a head."""
    fmt = way.format
    row: dict[str, Any] = {
        "format": str(fmt),
        "scale": way.scale if isinstance(fmt, Symmetric) else None,
        "bits": 8 * fmt.bytes_per_token(dim) / dim,
    }
    for part in (KEYS, KEYS_BY_TOKEN, VALUES, BOTH, BOTH_BY_TOKEN):
        errors = {kind: sums.by_layer(way, part, kind) for kind in (ERROR, OUTPUT)}
        measured = {kind: by_layer for kind, by_layer in errors.items() if by_layer}
        if measured:
            row[part] = {kind: sum(by_layer) / len(by_layer) for kind, by_layer in measured.items()}
            row[part]["layers"] = measured
    return row


SAID = {  # in the lines for people: heading → part of the cache, kind of error
    "keys": (KEYS, ERROR),
    "keys by token": (KEYS_BY_TOKEN, ERROR),
    "values": (VALUES, ERROR),
    "output, both": (BOTH, OUTPUT),
    "output, both by token": (BOTH_BY_TOKEN, OUTPUT),
}


def lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The findings, for people: relative squared errors."""
    out = []
    for row in rows:
        name = row["format"] + (f", {row['scale']} scale" if row["scale"] else "")
        errors = [f"{heading} {row[part][kind]:.3%}" for heading, (part, kind) in SAID.items() if part in row]
        out.append(f"{name} ({row['bits']:g} bits): {'; '.join(errors)}")
    return out
