"""The content of a calibration file: L*, Θ, and how far to trust them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from minithink.calibrate import choose
from minithink.calibrate.agreement import compare, fold, related
from minithink.calibrate.problems import graded_of
from minithink.errors import counted
from minithink.policies.thinkv import type_of
from minithink.reread.density import Peaks
from minithink.text.thoughts import NAMES


def conclude(lines: Sequence[Mapping[str, Any]], number: int, count: int) -> dict[str, Any]:
    """L*, Θ and the report.

    Args:
        lines: of `line_of`, one a prompt.
        number: |T|.
        count: |L*| at most.
    """
    graded = graded_of(line["right"] for line in lines)
    found = [[Peaks(x["modes"], x["valleys"], x["depths"]) for x in line["layers"]] for line in lines]
    refreshes = list[list[float]]()
    labelled = list[int]()
    places = list[int]()
    for line in lines:
        refreshes += line["refresh"]
        labelled += line["labels"]
        places += range(len(line["refresh"]))
    refresh = torch.tensor(refreshes, dtype=torch.float64)  # [N, L]
    labels = fold(torch.tensor(labelled, dtype=torch.uint8), number)
    at = torch.tensor(places, dtype=torch.float64)
    looks = choose.look(found, number)
    lengths = [len(line["refresh"]) for line in lines]
    modes = [[len(of.modes) for of in of_layer] for of_layer in zip(*found, strict=True)]  # by layer and prompt
    how, layers, theta = choose.choose(found, refresh, number, count)
    values = refresh[:, layers].mean(1)
    by_sparsity = type_of(values, theta)
    per_layer = []
    for look in looks:
        own = [line["layers"][look.layer] for line in lines]
        prompts = sorted(Counter(modes[look.layer]).items())
        types = type_of(refresh[:, look.layer], theta)
        measured = {
            **vars(look),
            "mean": fmean(layer["mean"] for layer in own),
            "sd": fmean(layer["sd"] for layer in own),
            "prompts_by_modes": {str(n): of for n, of in prompts},
            "keywords": compare(types, labels),
        }
        per_layer.append(measured)
    return {
        "layers": layers,
        "thresholds": theta,
        "chosen": how,
        "fallback": how == "fallback",
        "measurements": {
            "prompts": len(lines),
            "right": fmean(graded) if graded else None,
            "tokens": sum(len(line["tokens"]) for line in lines),
            "share": fmean(looks[i].share for i in layers),  # of prompts with |T| modes, mean over L*
            "shares_of_types": _shares(by_sparsity),
            "shares_of_keywords": _shares(labels),
            "keywords": compare(by_sparsity, labels),
            "related": related(by_sparsity.split(lengths), labels.split(lengths)),
            "correlation_with_position": float(torch.stack((values, at)).corrcoef()[0, 1]) if len(at) > 1 else None,
            "layers": per_layer,
            "share_by_rows": share_by_rows([line["modes_by_rows"] for line in lines], number),
            "share_of_noise": share_by_rows([line["modes_of_noise"] for line in lines], number),
        },
    }


def share_by_rows(modes: Sequence[Mapping[str, Sequence[int]]], number: int) -> dict[str, list[float]]:
    """The share of prompts with `number` modes: averaged rows → by layer. modes: those of each prompt, likewise."""
    shares = {}
    for n, row in modes[0].items():
        shares[n] = [fmean(of[n][i] == number for of in modes) for i in range(len(row))]
    return shares


def eviction(
    values: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], evicted: Mapping[int, list[int]]
) -> dict[str, Any] | None:
    """Types with the full cache (rows) and under eviction (columns); None: nothing was compared."""
    if not evicted:
        return None
    refreshes = list[list[float]]()
    types = list[int]()
    for i in sorted(evicted):
        refreshes += lines[i]["refresh"]
        types += evicted[i]
    refresh = torch.tensor(refreshes, dtype=torch.float64)
    full = type_of(refresh[:, values["layers"]].mean(1), values["thresholds"])
    under = torch.tensor(types, dtype=torch.uint8)
    return {"prompts": len(evicted), **compare(full, under), "shares_of_types": _shares(under)}


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """The findings, in lines for people."""
    m = result["measurements"]
    theta = ", ".join(f"{x:.4g}" for x in result["thresholds"])
    yield f"L* = {', '.join(map(str, result['layers']))}; thresholds {theta}; chosen by: {result['chosen']}"
    right = "not graded" if m["right"] is None else f"{m['right']:.0%} right"
    yield f"{counted(m['prompts'], 'prompt')}, {right}, {counted(m['tokens'], 'token')}"
    yield f"|T| modes in L* for {m['share']:.0%} of the prompts"
    for what, of in (("keywords", m["keywords"]), ("types under eviction", m["eviction"])):
        if of is not None:
            yield f"{of['agree']:.0%} of {counted(of['segments'], 'segment')} agree with {what} (κ {of['kappa']:.2f})"
    found = m["related"]
    yield (
        f"types and keywords: χ² {found['chi_squared']:.1f}, Cramér's V {found['cramers_v']:.2f}; if keywords are "
        f"exchanged within texts, χ² is {found['chance_in_texts']:.1f} on average (p = {found['p_in_texts']:.2g}), "
        f"within thirds of texts {found['chance_in_thirds']:.1f} (p = {found['p_in_thirds']:.2g})"
    )
    for n, shares in m["share_by_rows"].items():
        rows = "rows" if n != "1" else "row "  # columns stay below each other
        yield f"|T| modes with {n:>2} {rows} averaged, by layer: " + " ".join(f"{share:4.0%}" for share in shares)
        noise = m["share_of_noise"][n]
        yield "    by chance, in noise with the same spectrum:  " + " ".join(f"{share:4.0%}" for share in noise)


def _shares(of: Tensor) -> dict[str, float]:
    return {name: float((of == i).double().mean()) for i, name in enumerate(NAMES)}
