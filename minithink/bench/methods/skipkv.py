"""SkipKV and SEAL: both halves of SkipKV beside other methods, its threshold, steering by vector, place and strength,
budgets that pay for padding (table 3); its steps beside R-KV's, and throughput (table 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from minithink.bench.methods import Case, Cases, Goal, Result, Row, StandIn, StandIns, Sweep, Table, settings
from minithink.engine import TINY
from minithink.kv.contract import Shape, Step
from minithink.kv.schedule import Schedule
from minithink.policies.scored import Choice
from minithink.policies.seal import Seal
from minithink.policies.skipkv import SkipKV
from minithink.policies.steering import Steered

# Answers -----------------------------------------------------------------------------------------------------------

EVERY = "schedule=interval:16"  # the embedded model's texts are short: 128 tokens would be a large part of a budget
# Chosen on validation (skipkv-tau, skipkv-steering): at every token the paper's strength spoils this model's texts.
CHOSEN = "tau=0.9,at=boundary"
NEITHER = "skip=false,steering=false"  # R-KV's score, with SkipKV's schedule
RKV = "rkv:buffer=16,protect_prompt=true"
H2O = settings.CHOSEN["h2o"]
BUDGETS = (0.25, 0.5, 0.75)


def _of(*options: str) -> tuple[str, ...]:
    return tuple(f"skipkv:{','.join(filter(None, (EVERY, option)))}" for option in options)


SWEEPS = {
    "skipkv": Sweep(
        "SkipKV, its score by the letter of the paper, and other methods",
        (
            *_of(CHOSEN, "tau=0.9,steering=false", "steering=false", f"form=paper,{CHOSEN}"),
            RKV,
            "seal",
            f"seal+{RKV}",
            H2O,
            f"seal+{H2O}",
            "random:protect_prompt=true",
        ),
        budgets=BUDGETS,
        split="test",
        needed=True,
        beside=RKV,
    ),
    "skipkv-parts": Sweep(
        "sentences and steering, each alone (table 2)",
        (
            RKV,
            *_of(
                NEITHER,
                "tau=0.9,steering=false",
                "skip=false,at=boundary",
                CHOSEN,
                "tau=0.9,alpha_0=0.25,gamma=0.005",
                "tau=0.9",
            ),
        ),
        budgets=(0.25, 0.5),
        beside=_of(NEITHER)[0],
    ),
    "skipkv-tau": Sweep(
        "the similarity above which a sentence is penalised, τ",
        _of(*(f"steering=false,tau={tau:g}" for tau in (0.8, 0.9, 0.95, 0.98, 1))),
        budgets=(0.25, 0.5),
    ),
    "skipkv-steering": Sweep(
        "steering alone: by vector, place, strength and layer",
        (
            "seal",
            "seal:vector=matched",
            *(f"seal:vector=plain,alpha_0={alpha:g}" for alpha in (0.25, 0.5, 2)),
            *(f"seal:vector=matched,alpha_0={alpha:g}" for alpha in (0.25, 0.5, 2)),
            *(f"seal:at=every,vector=plain,alpha_0={alpha:g}" for alpha in (0.1, 0.25, 1)),
            *(f"seal:at=every,vector=matched,alpha_0={alpha:g}" for alpha in (0.1, 0.25, 1)),
            *(f"seal:vector=matched,layer={layer}" for layer in (3, 4, 5)),
        ),
        budgets=(),
    ),
    "skipkv-padded": Sweep(
        "budgets that pay for the padding of batches of 10 (table 3)",
        (*_of(CHOSEN), RKV),
        budgets=(0.25, 0.5),
        padded=10,
        beside=RKV,
    ),
    "skipkv-grouped": Sweep(
        "the same with batches of prompts of similar length",
        (*_of(CHOSEN), RKV),
        budgets=(0.25, 0.5),
        padded=10,
        group=True,
        beside=RKV,
    ),
}

# Steps and throughput on synthetic caches --------------------------------------------------------------------------

VOCABULARY = 128_256  # of the shape that is measured
SENTENCE = 24  # tokens of a sentence, on average: one token of 24 in the vocabulary has a line break


class Informed(StandIn, Steered):
    """A policy that steers, with a vocabulary in which some tokens end sentences, and a vector of noise."""

    def setup(self, shape: Shape) -> None:
        noise = 1e-3 * torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(0))
        values = {self.vector: noise.expand(shape.layers, -1), "layer": round(0.7 * shape.layers) - 1}
        vocabulary = [b".\n\n" if token % SENTENCE == 0 else b" x" for token in range(VOCABULARY)]
        model: Any = SimpleNamespace(vocabulary=vocabulary, calibration=lambda name: values)
        self.bind(model)
        super().setup(shape)


class InformedSeal(Informed, Seal):
    """SEAL with such a vocabulary and vector."""

    capturable = True


class Filled(Informed, SkipKV):
    """SkipKV whose scores are drawn while a cache is filled. Its ring of vectors is full from the start."""

    capturable = True

    @property
    def period(self) -> int:
        return Schedule.parse(self.schedule).interval or 1

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 2 * self.budget + self.period  # a full lane has been replaced once

    def reset(self, row: int) -> None:
        super().reset(row)
        if self.skip:
            self._count[row, 0] = self.vectors + 1
            self._vector[row].normal_().div_(self._vector.shape[-1] ** 0.5)

    def parts(self, step: Step, layer: int, choice: Choice) -> tuple[Tensor, Tensor]:
        if self.filling:
            noise = torch.rand(2, *choice.held.shape, device=choice.held.device)
            return noise[0], noise[1]
        return super().parts(step, layer, choice)


Some = TypeVar("Some", bound=Informed)


def _informed(cls: type[Some], policy: Any) -> Some:
    return cls(**{f.name: getattr(policy, f.name) for f in fields(policy) if f.init})


STAND_INS: StandIns = {
    Seal: lambda policy, share, seed, layers: _informed(InformedSeal, policy),
    SkipKV: lambda policy, share, seed, layers: _informed(Filled, policy),
}
METHODS = {
    "full": "full",
    "seal": "seal",
    "rkv": "rkv:budget={budget}",
    "skipkv": "skipkv:budget={budget}",
    "skipkv-sentences": "skipkv:budget={budget},steering=false",
}


def cases(batches: Sequence[int], shares: Sequence[float], pool: float = 1.0) -> list[Case]:
    """Steps of every method, bytes, and the largest batch."""
    out = [Case("step", method, batch) for batch in batches for method in METHODS]
    out += [Case("bytes", method) for method in ("rkv", "skipkv")]
    return out + [Case("throughput", method) for method in ("full", "seal", "rkv", "skipkv")]


CASES = {
    "skipkv": Cases(
        "SkipKV's steps beside R-KV's and a full cache's, its bytes and throughput (table 1).",
        METHODS,
        {"budget": (1024, "tokens of a lane")},
        cases,
        goals=(Goal("step/skipkv/64", "step/rkv/64", 1 / 1.05),),
        as_many=("full", "seal"),
        lines={"full": "#444444", "seal": "#E69F00", "rkv": "#56B4E9", "skipkv": "#0072B2"},
    )
}

# The steering vectors that ship ------------------------------------------------------------------------------------


def by_layer(result: Result) -> Iterator[Row]:
    """Both vectors of each layer; the recommended layer is bold."""
    m = result["measurements"]
    for i, plain in enumerate(m["separation"]["plain"]):
        yield {
            "layer": f"**{i}**" if i == result["layer"] else f"{i}",
            "plain": plain,
            "matched": m["separation"]["matched"][i],
            "norm": m["norm"]["plain"][i],
            "norm_matched": m["norm"]["matched"][i],
            "cosine": m["cosine"][i],
        }


def texts(result: Result) -> list[str]:
    """What was read, as sentences."""
    m = result["measurements"]
    text = f"{m['prompts']} problems of `{result['settings']['dataset']}`, {m['right']} answered rightly, "
    text += f"{m['tokens']:,} tokens, at most {result['settings']['max_new_tokens']:,} of each. Thoughts: "
    kinds = [f"after {x['after']} {x['execution']:,} of execution and {x['other']:,} others" for x in m["thoughts"]]
    return [text + ", ".join(kinds) + ".", ""]


def shape_said(result: Result) -> list[str]:
    """Of which shape the steps are, and what each cache holds, as a sentence."""
    settings = result["settings"]
    first = next(iter(result["measurements"]))
    text = f"Shape `{settings['model_shape']}`, random weights of {first['weight_bytes']:,} bytes. A lane holds its "
    text += f"budget of {settings['budget']:,} tokens and the policy's buffer. "
    if any(m["method"] in ("full", "seal") for m in result["measurements"]):
        text += "Caches of `full` and `seal`, which evict nothing, are measured while they hold about "
        text += f"{settings['budget']:,} tokens. "
    return [text + "`skipkv-sentences`: without steering.", ""]


def steps(result: Result) -> list[Row]:
    """The measurements of steps, with the GPU's own time (its parts, added up), and both times beside R-KV's."""
    own = [m for m in result["measurements"] if m["kind"] == "step"]
    gpu = {m["case"]: sum(m["device_milliseconds"].values()) for m in own}
    times = {m["case"]: m["step_milliseconds"] for m in own}
    out = list[Row]()
    for m in own:
        case = m["case"]
        rkv = f"step/rkv/{m['batch']}"
        more = {x: of[case] / of[rkv] - 1 for x, of in (("over", times), ("gpu_over", gpu)) if rkv in of}
        out.append({**m, "gpu_milliseconds": gpu[case], **(more if m["method"] != "rkv" else {})})
    return out


TABLES = {
    "skipkv-steps": Table(
        (
            ("method", "method", "`{}`"),
            ("sequences", "batch", "{:,}"),
            ("a step", "step_milliseconds", "**{:.2f} ms**"),
            ("more than R-KV's", "over", "{:.1%}"),
            ("on the GPU", "gpu_milliseconds", "{:.2f} ms"),
            ("more than R-KV's", "gpu_over", "{:.1%}"),
            ("of it the decision", "parts_milliseconds.eviction", "{:.2f} ms"),
        ),
        rows=steps,
        said=shape_said,
        kind="step",
        file="skipkv",
    ),
    "skipkv-embedded": Table(
        (("sequences", "batch", "{:,}"),),
        across="method",
        rows=steps,
        cells=(
            ("`{}`: a step", "step_milliseconds", "**{:.2f} ms**"),
            ("tokens a second", "tokens_per_second", "{:,.0f}"),
        ),
        said=shape_said,
    ),
    "steering": Table(
        (
            ("layer", "layer", "{}"),
            ("separation, plain", "plain", "{:.2f}"),
            ("matched", "matched", "{:.2f}"),
            ("length of V, plain", "norm", "{:.1f}"),
            ("matched", "norm_matched", "{:.1f}"),
            ("cosine of both", "cosine", "{:.2f}"),
        ),
        rows=by_layer,
        said=texts,
        shipped=(TINY / "steering.safetensors",),
    ),
}
