"""Measure where the queries of each head lie before RoPE: their centre and their mean lengths, for TriAttention.

The model answers problems with the full cache. Its texts, prompts included, are then read again in one pass, and the
queries before RoPE (after Qwen3's norm and Qwen2's bias) are averaged in every layer and head. RoPE turns pairs of
channels, so a query of D channels counts as D/2 complex numbers, one a band: q_f = q[f] + i·q[f + D/2].

    center   c_f = E[q_f]
    norm     a_f = E|q_f|
    R_f = |c_f| / a_f, from 0 to 1, says how closely the queries lie around their centre: the concentration

`center` and `norm` go to the file, and with them `omega`, the angular frequency of each band.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minithink.calibrate.from_texts import calibrate, say
from minithink.calibrate.problems import graded_of
from minithink.calibrate.thoughts import add_common_arguments
from minithink.checkpoint.calibration import CENTERS
from minithink.cli.commands import INTERRUPTED, positive
from minithink.engine import Engine
from minithink.errors import counted
from minithink.evaluate.datasets import Example
from minithink.model import rope_frequencies
from minithink.reread.attention import read
from minithink.results.progress import progress

TOKENS = 100_000  # that are read, by default
CLOSE = 0.95  # concentration from which on a band's queries count as close together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `calibrate centers`."""
    add_common_arguments(parser, 100, CENTERS)
    parser.add_argument(
        "--tokens",
        type=positive,
        default=TOKENS,
        metavar="N",
        help=f"read texts until they have so many tokens, prompts included (default: {TOKENS})",
    )


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Generate, read again, average, write."""
    done = calibrate(args, argv, CENTERS, partial(measure, most=args.tokens), resumed_with=("tokens",))
    if done is None:
        return INTERRUPTED
    path, about = done
    for line in summary(about["measurements"]):
        print(line)
    say(f"written to {path}")
    return 0


class Sums:
    """Sums of queries before RoPE, and of their lengths by band, of every layer and head."""

    def __init__(self, layers: int, heads: int, dim: int) -> None:
        self.query = torch.zeros(layers, heads, dim, dtype=torch.float64)
        self.length = torch.zeros(layers, heads, dim // 2, dtype=torch.float64)
        self.count = [0] * layers

    def add(self, layer: int, q: Tensor) -> None:
        """q: [n, Hq, D], of any float type, on any device."""
        q = q.double().cpu()
        self.query[layer] += q.sum(0)
        self.length[layer] += lengths(q).sum(0)
        self.count[layer] += len(q)

    def tensors(self) -> dict[str, Tensor]:
        """`center`, float32 [L, Hq, D], and `norm`, float32 [L, Hq, D/2]."""
        count = torch.tensor(self.count, dtype=torch.float64)[:, None, None]
        center = self.query / count
        norm = self.length / count
        return {"center": center.float(), "norm": norm.float()}


def lengths(x: Tensor) -> Tensor:
    """The absolute value of each band: [..., D] → [..., D/2]."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.hypot(real, imaginary)


def measure(
    engine: Engine, examples: Sequence[Example], lines: Sequence[Mapping[str, Any]], most: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the file, and what was measured.

    Args:
        engine: the model whose texts these are.
        examples: the problems; a line's `prompt` is an index into them.
        lines: of the journal, one a prompt.
        most: texts are read until they have so many tokens.

    Returns:
        `center` float32 [L, Hq, D], `norm` float32 [L, Hq, D/2] and `omega` float64 [D/2]; `measurements`, for the
        metadata.
    """
    config = engine.config
    sums = Sums(config.num_layers, config.num_heads, config.head_dim)
    none = torch.zeros(0, dtype=torch.long, device=engine.device)  # no attention is wanted
    rights = list[bool | None]()
    used = 0
    tokens = 0
    with progress(len(lines), 0, "reading the texts again") as advance:
        for line in lines:
            if tokens < most:
                prompt = engine.prompt_ids(examples[line["prompt"]].question)
                text = [*prompt, *line["tokens"]]
                read(engine.loaded, text, lambda *_: None, queries=none, before_rope=sums.add)
                rights.append(line["right"])
                used += 1
                tokens += len(text)
            advance(line["right"])
    omega, _ = rope_frequencies(config)
    tensors = sums.tensors() | {"omega": omega.double()}
    graded = graded_of(rights)
    right = sum(graded) if graded else None
    about = {"prompts": used, "right": right, "tokens": tokens, **concentration(tensors)}
    return tensors, {"measurements": about}


def concentration(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """How closely queries lie around their centres, in all bands, and in the strongest of each head (largest a_f).

    Returns:
        `median` and `median_of_strongest`: of R, layer by layer. `close` and `close_of_strongest`: the share of bands
        of all layers in which R is above CLOSE.
    """
    norm = tensors["norm"].double()
    r = lengths(tensors["center"].double()) / norm.clamp(min=torch.finfo(torch.float32).tiny)
    strongest = r.gather(-1, norm.argmax(-1, keepdim=True)).squeeze(-1)  # [L, Hq]
    return {
        "median": r.flatten(1).median(-1).values.tolist(),
        "median_of_strongest": strongest.median(-1).values.tolist(),
        "close": float((r > CLOSE).double().mean()),
        "close_of_strongest": float((strongest > CLOSE).double().mean()),
    }


def summary(m: Mapping[str, Any]) -> list[str]:
    """The findings, in lines."""
    right = "not graded" if m["right"] is None else f"{m['right']} answered rightly"
    return [
        f"{counted(m['prompts'], 'prompt')}, {right}, {counted(m['tokens'], 'token')}",
        "concentration R by layer, median of all bands: " + " ".join(f"{x:.2f}" for x in m["median"]),
        "of the strongest band of each head: " + " ".join(f"{x:.2f}" for x in m["median_of_strongest"]),
        f"R is above {CLOSE} in {m['close']:.1%} of the bands, and in {m['close_of_strongest']:.1%} of the strongest",
    ]
