"""Premises that policies rest on, measured on the backbone beside the embedded model: the tables of docs/backbone.md.

python -m minithink.analysis attention --model FOLDER        sinks, sparsity, needs
python -m minithink.evaluate loss --texts reference …        what a window loses with and without sinks
python -m minithink.evaluate loss --texts FOLDER …           how long a policy reads (in docs/appendix/loss.md)
python -m minithink.evaluate loss --answers …                the loss of answers alone (in docs/appendix/transfer.md)
python -m minithink.calibrate centers --model FOLDER         whether queries lie around a centre
python -m minithink.calibrate thoughts --model FOLDER        whether sparsity tells thoughts apart
python -m minithink.calibrate predictor --model FOLDER       whether hidden states tell what the answer reads
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from minithink.bench.methods import Result, Row, Table
from minithink.engine import TINY
from minithink.evaluate.contingency import cramers_v
from minithink.evaluate.loss_summary import Above, difference_text
from minithink.evaluate.summary import FULL, budget_text

ATTENTION = ("backbone-attention", "embedded-attention")
LOSS = ("backbone-loss", "embedded-loss")
MODELS = ("smollm2-think", "tiny", "tiny-control")  # whose centres of queries ship beside them
THREE = 3  # modes that ThinKV wants, one for each type of thought


def model_of(result: Result) -> str:
    """The heading of a model: its name and the hash of its weights."""
    return f"{result['settings']['model']} `{result['checkpoint']}`"


def premises(result: Result) -> Iterable[Row]:
    """Every figure of every model, a row each."""
    for one in result["each"]:
        figures = of_loss(one) if one["benchmark"] == "loss" else of_attention(one)
        for what, value in figures:
            yield {"what": what, "value": value, "model": model_of(one)}


def of_attention(result: Result) -> Iterable[tuple[str, str]]:
    """The figures of `analysis attention`."""
    m = result["measurements"]
    sinks = m["sinks"]
    mean = sinks["mean"]
    chance = sinks["chance"]
    heads = [*chain.from_iterable(row["first_token"] for row in sinks["layers"])]
    most = sum(share > 0.5 for share in heads)
    yield "layers × query heads", f"{len(sinks['layers'])} × {len(heads) // len(sinks['layers'])}"
    yield "attention on the first token", f"**{mean['first_token']:.1%}**"
    yield "if all tokens got the same", f"{chance['first_token']:.1%}"
    yield "attention on the first 4 tokens", f"{mean['first_four']:.1%}"
    yield "attention on the next 4", f"{mean['next_four']:.1%}"
    yield "heads that give the first token more than half", f"**{most}** of {len(heads)}"
    layers = m["sparsity"]["layers"]
    means = [row["mean"] for row in layers]
    yield "sparsity, least and most of a layer", f"{min(means):.2f}, {max(means):.2f}"
    yield "traces with three modes of sparsity, in the best layer", f"**{with_three(layers, 'modes')}**"
    yield "likewise of noise, in the best layer", with_three(layers, "modes_by_chance")
    for pair in m["sparsity"]["separability"]["auc"]:
        yield f"{' or '.join(pair['kinds'])}: AUC", f"{pair['auc']:.2f} (layer {pair['layer']})"


def of_loss(result: Result) -> Iterable[tuple[str, str]]:
    """The figures of `evaluate loss`."""
    for row in result["measurements"]:
        if row["policy"] == FULL:
            yield "loss with the full cache, nats a token", f"{row['loss']:.4f}"
        else:
            what = f"loss above that, `{row['policy']}` at {budget_text(row['budget'])}"
            yield what, f"**{difference_text(Above(**row['above']))}**"


def with_three(layers: Iterable[Row], name: str) -> str:
    """As in "9 of 12 (layer 7)": the layer in which most traces have three modes."""
    best = max(layers, key=lambda row: three(row[name]))
    count = three(best[name])
    where = f" (layer {best['layer']})" if count else ""
    return f"{count} of {len(best[name])}{where}"


def three(modes: Iterable[int]) -> int:
    """In how many traces there are three modes."""
    return sum(number == THREE for number in modes)


def premises_said(result: Result) -> Iterable[str]:
    """What the figures are of, in words."""
    about = []
    for one in result["each"]:
        texts = len(one["settings"]["texts"]) if one["benchmark"] == "loss" else len(one["measurements"]["texts"])
        about.append((one["benchmark"], texts))
    traces = dict(about)
    length = next(one["settings"]["length"] for one in result["each"] if one["benchmark"] == "loss")
    yield (
        f"Attention: {traces['attention']} reference traces, mean over them. Loss: the first {traces['loss']} of "
        f"them, up to {length:,} tokens of each, with the 95 % interval by bootstrap over traces. AUC: the "
        "probability that a segment of one kind is sparser than one of the other in the same third of a text, in "
        "the layer and the order that fit best, so 0.5 is the least."
    )
    yield ""


def layers(result: Result) -> Iterable[Row]:
    """A row for each layer: attention on the first tokens, and sparsity by kind of thought."""
    m = result["measurements"]
    kinds: dict[int, dict[str, float]] = {}
    for row in m["sparsity"]["kinds"]:
        kinds.setdefault(row["layer"], {})[row["kind"]] = row["mean"]
    for sinks, sparsity in zip(m["sinks"]["layers"], m["sparsity"]["layers"], strict=True):
        row = {name: sum(sinks[name]) / len(sinks[name]) for name in ("first_token", "first_four", "next_four")}
        first = sinks["first_token"]
        row |= {"layer": sinks["layer"], "least": min(first), "most": max(first)}
        row |= {"mean": sparsity["mean"], "sd": sparsity["sd"], **kinds.get(sinks["layer"], {})}
        row |= {"three": three(sparsity["modes"]), "by_chance": three(sparsity["modes_by_chance"])}
        yield row


def layers_said(result: Result) -> Iterable[str]:
    """Which model it is."""
    texts = len(result["measurements"]["texts"])
    yield (
        f"{model_of(result)}, {texts} reference traces. Heads: the least and the most that a head gives the first "
        "token. Three modes, of noise: in how many traces."
    )
    yield ""


def needs(result: Result) -> Iterable[Row]:
    """How far back needed tokens lie: a row for each model and family."""
    for one in result["each"]:
        for row in one["measurements"]["needs"]:
            in_all = row["needs"] + row["in_question"]
            about: dict[str, Any] = {"model": model_of(one), "in_question": row["in_question"] / in_all}
            yield {**row, **about, "back": [*row["back"].values()], "within": [*row["within"].values()]}


def needs_said(result: Result) -> Iterable[str]:
    """What the columns mean."""
    yield (
        "Tokens from the newest token that says a thing to the line that reads it, without things that the question "
        "says. Within: the share of these needs that lie at most so many tokens back."
    )
    yield ""


def centers(result: Result) -> Iterable[Row]:
    """How closely the queries of a band of a head lie around their centre: a row for each model."""
    for name, one in zip(MODELS, result["each"], strict=True):
        m = one["measurements"]
        medians = m["median"]
        strongest = m["median_of_strongest"]
        yield {
            "model": f"{name} `{one['checkpoint']}`",
            "least": min(medians),
            "most": max(medians),
            "close": m["close"],
            "strongest_least": min(strongest),
            "strongest_most": max(strongest),
            "strongest_close": m["close_of_strongest"],
        }


def centers_said(result: Result) -> Iterable[str]:
    """What the columns mean."""
    tokens = ", ".join(f"{one['measurements']['tokens']:,}" for one in result["each"])
    yield (
        "R: the length of the mean query of a band of a head before RoPE, divided by the mean length; 1: all queries "
        "point the same way. Strongest: the band of a head with the longest queries. Medians: of a layer's bands, "
        f"the least and the most of the layers. Texts of the models' own, {tokens} tokens."
    )
    yield ""


def thoughts(result: Result) -> Iterable[Row]:
    """Whether sparsity tells thoughts apart: a row for each model."""
    for name, one in zip(MODELS, result["each"], strict=True):
        m = one["measurements"]
        of_texts = m["share_by_rows"]["1"]
        of_noise = m["share_of_noise"]["1"]
        yield {
            "model": f"{name} `{one['checkpoint']}`",
            "layers": len(of_texts),
            "three": max(of_texts),
            "by_chance": max(of_noise),
            "segments": m["keywords"]["segments"],
            "agree": m["keywords"]["agree"],
            "kappa": m["keywords"]["kappa"],
            "v": cramers_v(torch.tensor(m["keywords"]["confusion"])),
            "majority": m["keywords"]["majority"],
        }


def thoughts_said(result: Result) -> Iterable[str]:
    """What the columns mean."""
    texts = ", ".join(f"{one['measurements']['prompts']}" for one in result["each"])
    yield (
        f"Three modes: the share of texts in which the sparsity of single queries has them, in the best layer; of "
        f"{texts} texts of the models' own. Agree: segments whose type by sparsity is that of their keywords; κ: "
        "beyond chance; V: Cramér's, 0 if the two have nothing to do with each other, 1 if one decides the other; "
        "one type: the share if all segments had the most frequent one."
    )
    yield ""


def predictor(result: Result) -> Iterable[Row]:
    """How well DynTS's predictor foretells on texts that it has not seen: all, by the number of texts that it has
    learned from, and then each family."""
    rows = sorted(result["measurements"], key=lambda m: m["trained_traces"])
    yield from (m for m in rows if m["dataset"] == "all")
    most = rows[-1]["trained_traces"]
    yield from (m for m in rows if m["dataset"] != "all" and m["trained_traces"] == most)


def predictor_said(result: Result) -> Iterable[str]:
    """What the columns mean."""
    yield (
        "Texts of prompts that it has not learned from. τ: Kendall's rank correlation of predicted and true "
        "importance. Top 20 %: the share of the most important fifth of tokens among the three tenths that are "
        "predicted to be the most important. By position: the mean scores of the training texts in bins of 32 tokens."
    )
    yield ""


def loss_times(result: Result) -> Iterable[Row]:
    """Each policy's seconds, with how far it is above the full cache."""
    rows = result["measurements"]
    seconds = {(m["policy"], m["budget"]): m["tokens"] / m["tokens_per_second"] for m in rows}
    for m in rows:
        taken = seconds[m["policy"], m["budget"]]
        above = difference_text(None if m["above"] is None else Above(**m["above"]))
        times = taken / seconds[FULL, None]
        yield {**m, "seconds": taken, "times": times, "above": above}


def loss_times_said(result: Result) -> Iterable[str]:
    """How many texts were read, and how long they are."""
    rows = result["measurements"]
    settings = result["settings"]
    yield (
        f"{settings['model']}, {rows[0]['texts']} texts of {settings['length']:,} tokens, read together; nothing "
        "else ran on the GPU. Above the full cache: nats a token, with the 95 % interval by bootstrap over texts."
    )
    yield ""


def answers(result: Result) -> Iterable[Row]:
    """A row for each policy and budget: how far its answers' loss is above the full cache's."""
    for m in result["measurements"]:
        if m["policy"] != FULL:
            yield {**m, "above": difference_text(Above(**m["above"]))}


def answers_said(result: Result) -> Iterable[str]:
    """How many answers there were, and what the full cache's loss is."""
    full = next(m for m in result["measurements"] if m["policy"] == FULL)
    yield (
        f"{full['texts']} reference traces, {full['tokens']:,} tokens of answers. With the full cache their loss is "
        f"{full['loss']:.4f}. Above it: nats a token, mean over texts, with the 95 % interval by bootstrap over "
        "texts. Tokens and bytes: the mean over the steps of all texts."
    )
    yield ""


LAYERS = Table(
    (
        ("layer", "layer", "{}"),
        ("first token", "first_token", "**{:.1%}**"),
        ("heads", ("least", "most"), "{:.1%} to {:.1%}"),
        ("first 4", "first_four", "{:.1%}"),
        ("next 4", "next_four", "{:.1%}"),
        ("sparsity", ("mean", "sd"), "{:.2f} ± {:.2f}"),
        ("reasoning", "reasoning", "{:.2f}"),
        ("execution", "execution", "{:.2f}"),
        ("transition", "transition", "{:.2f}"),
        ("three modes", "three", "{}"),
        ("of noise", "by_chance", "{}"),
    ),
    rows=layers,
    said=layers_said,
)
TABLES = {
    "backbone": Table(
        (("", "what", "{}"),),
        rows=premises,
        across="model",
        cells=(("{}", "value", "{}"),),
        said=premises_said,
        files=(*ATTENTION, *LOSS),
    ),
    "backbone-needs": Table(
        (
            ("tokens of", "model", "{}"),
            ("family", "family", "{}"),
            ("needs", "needs", "{:,}"),
            ("median, 90 %, 99 %", lambda row: tuple(row["back"]), "{:,}, {:,}, {:,}"),
            ("within 64, 256, 1,024", lambda row: tuple(row["within"]), "{:.0%}, {:.0%}, {:.0%}"),
            ("the question says", "in_question", "{:.0%} of all"),
        ),
        rows=needs,
        said=needs_said,
        files=ATTENTION,
    ),
    "backbone-centers": Table(
        (
            ("model", "model", "{}"),
            ("R of all bands: median", ("least", "most"), "{:.2f} to {:.2f}"),
            ("above 0.95", "close", "{:.1%}"),
            ("R of the strongest bands: median", ("strongest_least", "strongest_most"), "{:.2f} to {:.2f}"),
            ("above 0.95", "strongest_close", "**{:.1%}**"),
        ),
        rows=centers,
        said=centers_said,
        shipped=tuple(TINY.parent / name / "centers.safetensors" for name in MODELS),
    ),
    "backbone-thoughts": Table(
        (
            ("model", "model", "{}"),
            ("layers", "layers", "{}"),
            ("three modes", "three", "**{:.0%}**"),
            ("of noise", "by_chance", "{:.0%}"),
            ("segments", "segments", "{:,}"),
            ("agree", "agree", "{:.0%}"),
            ("κ", "kappa", "**{:.2f}**"),
            ("V", "v", "{:.2f}"),
            ("one type", "majority", "{:.0%}"),
        ),
        rows=thoughts,
        said=thoughts_said,
        shipped=tuple(TINY.parent / name / "thoughts.json" for name in MODELS),
    ),
    "backbone-predictor": Table(
        (
            ("learned from", "trained_traces", "{} texts"),
            ("on", ("dataset", "traces"), "{}: {} texts"),
            ("τ", "tau", "{:.2f}"),
            ("by position", lambda row: row["position"]["tau"], "{:.2f}"),
            ("top 20 %", "top_30", "**{:.0%}**"),
            ("by position", lambda row: row["position"]["top_30"], "{:.0%}"),
        ),
        rows=predictor,
        said=predictor_said,
        shipped=(TINY.parent / "smollm2-think" / "predictor.json",),
    ),
    "loss-speed": Table(
        (
            ("policy", "policy", "`{}`"),
            ("budget", lambda row: budget_text(row["budget"]), "{}"),
            ("seconds", "seconds", "**{:.1f}**"),
            ("of the full cache's", "times", "{:.1f} ×"),
            ("bytes of a text, mean", "kv_bytes_mean", "{:,.0f}"),
            ("loss above full", "above", "{}"),
        ),
        rows=loss_times,
        said=loss_times_said,
    ),
    "backbone-answers": Table(
        (
            ("policy", "policy", "`{}`"),
            ("budget", lambda row: budget_text(row["budget"]), "{}"),
            ("loss of the answer, above full", "above", "**{}**"),
            ("tokens", "tokens_mean", "{:,.0f}"),
            ("bytes", "kv_bytes_mean", "{:,.0f}"),
        ),
        rows=answers,
        said=answers_said,
    ),
    **dict.fromkeys(ATTENTION, LAYERS),
}
