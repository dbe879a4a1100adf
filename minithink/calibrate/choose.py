"""From the modes of every prompt and layer to the layers L* and the thresholds Θ (ThinKV, algorithm 1).

    every     L* = layers with exactly |T| modes for every prompt                        lines 13 to 24
    most      if there are none: layers with |T| modes for more than half of the prompts        (chosen)
    fallback  if there are none: the layers with |T| modes for the most prompts                 (chosen)

If there are more layers than wanted, those with the deepest valleys stay. In the fallback depth decides only among
layers with |T| modes for equally many prompts, because a valley of one prompt in a hundred may well be deep. The
thresholds are the mean valleys over the layers of L* and the prompts where they have |T| modes.

In the fallback the thresholds are quantiles of the values that the policy compares with them: the sparsity at every
refresh, averaged over L*. Quantiles need no labels, and every type gets some segments. With E 35 %, R 35 %, T 30 %
bits and bytes are about the paper's (3.4 bits under R4E4T2 mean 30 % T).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from minithink.reread.density import Peaks
from minithink.results.files import rounded

SHARES = (0.35, 0.70)  # of segments below θ1 and below θ2


@dataclass(frozen=True)
class Layer:
    """One layer, over all prompts."""

    layer: int
    share: float  # of prompts for which it has |T| modes
    depth: float  # of the shallowest valley, mean over these prompts; 0: there are none
    valleys: tuple[float, ...]  # means over these prompts


def look(prompts: Sequence[Sequence[Peaks]], types: int) -> list[Layer]:
    """All layers, over all prompts. prompts: for every prompt, the modes in every layer; types: |T|."""
    out = []
    for number, of_layer in enumerate(zip(*prompts, strict=True)):
        own = [p for p in of_layer if len(p.modes) == types]
        depth = fmean(min(p.depths) for p in own) if own else 0.0
        valleys = tuple(fmean(p.valleys[j] for p in own) for j in range(types - 1)) if own else ()
        out.append(Layer(number, len(own) / len(of_layer), depth, valleys))
    return out


def ranked(layers: Sequence[Layer]) -> list[Layer]:
    """The order of the fallback: layers with |T| modes for the most prompts first."""
    return sorted(layers, key=lambda x: (-x.share, -x.depth, x.layer))


def by_modes(prompts: Sequence[Sequence[Peaks]], types: int, count: int) -> tuple[str, list[int], list[float]] | None:
    """How L* was chosen ("every" or "most"), L*, Θ; None: no layer has |T| modes for more than half of the prompts.
    count: |L*| at most."""
    layers = look(prompts, types)
    every = [x for x in layers if x.share == 1]
    how, able = ("every", every) if every else ("most", [x for x in layers if x.share > 0.5])
    if not able:
        return None
    chosen = sorted(x.layer for x in sorted(able, key=lambda x: (-x.depth, x.layer))[:count])
    own = list[Peaks]()
    for of in prompts:
        own += [of[i] for i in chosen if len(of[i].modes) == types]
    return how, chosen, [fmean(p.valleys[j] for p in own) for j in range(types - 1)]


def quantiles(values: Tensor, types: int) -> list[float]:
    """Thresholds that leave SHARES below them. values: [N]."""
    return values.double().quantile(torch.tensor(SHARES[: types - 1], dtype=torch.float64)).tolist()


def choose(
    prompts: Sequence[Sequence[Peaks]], refresh: Tensor, types: int, count: int
) -> tuple[str, list[int], list[float]]:
    """How L* was chosen, L*, Θ rounded as the file has them. refresh: sparsity at every refresh, [N, L]."""
    if (found := by_modes(prompts, types, count)) is not None:
        how, layers, theta = found
    else:
        how = "fallback"
        layers = sorted(x.layer for x in ranked(look(prompts, types))[:count])
        theta = quantiles(refresh[:, layers].mean(1), types)
    return how, layers, rounded(theta)
