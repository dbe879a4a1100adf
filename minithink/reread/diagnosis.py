"""Diagnosis: why logits are not finite.

A weight that is NaN, or numbers that overflow in float16, make all logits of a sequence NaN or infinite. No token can
be drawn then, and the sequence ends (`errors.NON_FINITE`). Afterwards this module looks for the cause: first in the
weights, then layer by layer, while the same tokens are read once more with the full cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.checkpoint.weights import tensors_of
from minithink.errors import counted
from minithink.kv.full import FullCache
from minithink.loaded import Loaded

CHUNK = 2048  # tokens of a forward pass
ROWS = 1024  # rows of a weight that are looked at together


def sentence(loaded: Loaded, prompt: Sequence[int], tokens: Sequence[int], policy: str = "") -> str:
    """What made the logits of a sequence NaN or infinite, and what to do.

    Args:
        prompt, tokens: the prompt of the sequence, and the tokens that were generated after it.
        policy: the name of the policy under which it ran; "": there was none.
    """
    dtype = str(loaded.dtype).removeprefix("torch.")
    where = f"after {counted(len(prompt), 'prompt token')} and {counted(len(tokens), 'generated one')}"
    return f"The logits are not finite {where}: {_cause(loaded, [*prompt, *tokens], policy, dtype)}."


def _cause(loaded: Loaded, ids: list[int], policy: str, dtype: str) -> str:
    broken = broken_weight(loaded)
    if broken is not None:
        name, count = broken
        are = "is" if count == 1 else "are"
        numbers = f"{counted(count, 'number')} that {are} NaN or infinite"
        return f"the weight {name} holds {numbers}, so its file is damaged"
    found = first_layer(loaded, ids)
    if found is not None:
        another = "--dtype float32 or bfloat16" if dtype == "float16" else "another --dtype or another checkpoint"
        return f"all weights are finite, and {found} is the first whose output is not, in {dtype}; try {another}"
    if policy:
        return f"with the full cache they are finite, so the policy {policy} or its formats cause it; try another one"
    return f"all weights are finite, and a second pass in {dtype} is, too; try another --dtype or --backend"


@torch.inference_mode()
def broken_weight(loaded: Loaded) -> tuple[str, int] | None:
    """The first weight that holds NaN or ∞, by its name in the checkpoint, and how many; None: all are finite."""
    for name, weight in tensors_of(loaded.decoder).items():
        count = sum(int((~rows.isfinite()).sum()) for rows in weight.split(ROWS))
        if count:
            return name, count
    return None


@torch.inference_mode()
def first_layer(loaded: Loaded, ids: Sequence[int]) -> str | None:
    """The first part of the model whose output is not finite when these tokens are read; None: all are finite."""
    decoder = loaded.decoder
    cache = _Watched(loaded.config, loaded.rope, device=loaded.device, dtype=loaded.dtype, backend=decoder.backend)
    cache.join(0, len(ids))
    for start in range(0, len(ids), CHUNK):
        part = list(ids[start : start + CHUNK])
        cache.begin_step([0], [len(part)], part)
        hidden = decoder(torch.tensor(part, device=loaded.device), cache)
        cache.end_step()
        if cache.found is None and not bool(decoder.logits(hidden[-1:]).isfinite().all()):
            cache.found = "the product with the vocabulary"
        if cache.found is not None:
            return cache.found
    return None


class _Watched(FullCache):
    """A full cache that checks every output that it is shown, and remembers the first that is not finite."""

    found: str | None = None

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, qk, v)
        self._look(f"the attention of layer {layer}", out)
        return out

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        self._look("the final norm" if layer == -1 else f"layer {layer}", hidden)
        return hidden

    def _look(self, name: str, x: Tensor) -> None:
        if self.found is None and not bool(x.isfinite().all()):
            self.found = name
