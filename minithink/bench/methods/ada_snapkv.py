"""Ada-SnapKV: the kernel of its selection is timed beside its twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from minithink.bench.methods import LAYERS, Inputs, Operation

KV_HEADS = 8  # of a layer


def heads(rows: int, tokens: int, device: str, layers: int = LAYERS) -> Inputs:
    """Whole numbers as scores. 8 of 9 tokens may go, and half of them stay, a fifth of these for certain."""
    shape = layers, rows, KV_HEADS, tokens
    score = torch.randint(1 << 20, shape, device=device).float()
    candidate = (torch.arange(tokens, device=device) < tokens * 8 // 9).expand(shape).contiguous()
    count = torch.full(shape[:2], KV_HEADS * (tokens * 4 // 9), dtype=torch.int32, device=device)
    return score, candidate, count, torch.full(shape[:3], tokens * 4 // 45, dtype=torch.int32, device=device)


def selections(lengths: Sequence[int], due: Sequence[int], size: int) -> Iterator[tuple[str, int, list[Inputs]]]:
    """All layers of several sequences at once; bytes: score and flag of each token, and whether it stays."""
    for tokens, rows in product(lengths, due):
        own = 6 * LAYERS * rows * KV_HEADS * tokens
        yield f"{rows} × {tokens:,} tokens", own, [heads(rows, tokens, "cuda") for _ in range(-(-size // own))]


OPERATIONS = {"keep_shared": Operation(lambda device, tokens: heads(2, tokens, device, layers=1), selections)}
