"""R-KV: keep tokens that the newest queries attend to and that do not repeat others.

Once budget + buffer tokens are held, every KV head keeps as many as the budget says: the last α tokens, and of the
others those with the largest

    Z = λ·Ĩ − (1 − λ)·R

where importance Ĩ is the last α queries' attention, smoothed over neighbouring keys (`ref/window_importance.py`), and
redundancy R says how much a key resembles the others (`ref/redundancy.py`). The formulas follow the authors' code,
Zefan-Cai/R-KV `rkv/compression/r1_kv.py`, for the paper is not at hand; defaults are the paper's.

Deviations: the softmaxes stay in float32 (the code rounds to the model's type); kept tokens stay in their order, and
of equal Z the older is kept; every lane is scored by its own tokens (the code looks at a left-padded rectangle).
Silences: where a prompt is protected (it is not by default) its tokens are scored along, but not chosen among; where
there is no room for α tokens beside it, the newest that fit are kept.
Trigger: S ≥ budget + buffer, as in the newer serving code; with buffer=0 one token goes every step, as ThinKV
describes R-KV. Left out: the code's divide_method=newline and its other rules of which similar key is spared. A
schedule given by the user stands above `global_clock`, which is the first code's: at the end of the prompt, and
after that with the first token behind every multiple of 128, prompt included.
`compaction` is what an eviction costs where tokens cannot stay where they are (ThinKV §5.1): a measure, no part of
the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Evict, Policy, See, Step, Storage


@dataclass
class Rkv(Policy):
    """Importance less redundancy, in every KV head for itself."""

    budget: int | None = None  # tokens that a KV head keeps, the prompt's and the last α included
    lam: float = 0.1  # λ, weight of importance against redundancy, 0 to 1
    alpha: int = 8  # α, tokens: newest queries that score, and newest keys that always stay
    buffer: int = 128  # tokens beyond the budget that are gathered before an eviction
    threshold: float = 0.5  # T, cosine above which two keys are similar
    kernel_size: int = 7  # k, keys: width of the pooling along the sequence, odd
    pooling: Literal["max", "avg"] = "max"
    global_clock: bool = False  # evict when the whole sequence passes a multiple of `buffer` tokens
    schedule: str = "every"
    protect_prompt: bool = False
    exempt_answer: bool = False  # the code's compression_content="think"
    # what stays is moved together after an eviction, before the next step or beside it; no token changes
    compaction: Literal["none", "gather", "overlapped"] = "none"

    name = "rkv"
    summary = "keep tokens that are attended to and do not repeat others (R-KV)"
    recordable = True
    scope = "head"

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise UsageError(f"{self.name}: lam is {self.lam:g}; it must be from 0 to 1.")
        if self.alpha < 1 or self.buffer < 0 or (self.global_clock and not self.buffer):
            raise UsageError(
                f"{self.name}: alpha is {self.alpha} and buffer {self.buffer} tokens; alpha must be at least 1, and "
                "buffer at least 0, with global_clock at least 1."
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise UsageError(f"{self.name}: kernel_size is {self.kernel_size} keys; it must be odd.")
        self.slack = self.buffer
        self.storage = Storage(compaction=self.compaction)
        self.demands = (Demand(See.QUERY, rows=self.alpha),)

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which lanes must evict now, and how many tokens each may keep: bool and int32, [L, B, Hkv]."""
        due, keep = super().due(step)
        if self.global_clock and self.schedule == "every":
            on_grid = (step.clock == 0) | ((step.prompt + step.clock - 1) % self.buffer == 0)
            active = step.active & on_grid & (step.thinking if self.exempt_answer else True)
            due = active[None, :, None] & (step.held() > step.budget)
        return due, keep

    def decide(self, step: Step) -> Iterator[Evict]:
        due, _ = self.due(step)
        if not step.any(due):
            return
        room, rows, pos = self.room(step), due.any(-1).any(0), step.pos()  # rows: bool [B], pos: [L, B, Hkv, S]
        window = self.window(step, room)
        free = (pos >= 0) & ~step.protected()
        # Lanes that are not due have no valid token: a kernel does nothing there.
        valid = (pos >= 0) & due[..., None]
        older = valid & ~window
        layers = range(step.shape.layers)
        score = torch.stack([self.score(step, layer, valid[layer], older[layer], rows) for layer in layers])
        step.note(score, older)
        others = room - (free & window).sum(-1, dtype=torch.int32)
        keep = window | step.ops.keep_best(score, free & ~window, others)
        yield Evict(free & ~keep & due[..., None])

    def window(self, step: Step, room: Tensor) -> Tensor:
        """The last α tokens of every lane, fewer where there is no room for them: bool [L, B, Hkv, S]."""
        pos, held = step.pos(), step.held()[..., None]
        column = torch.arange(pos.shape[-1], device=pos.device)
        return (column < held) & (column >= held - room.clamp(max=self.alpha)[..., None])

    def score(self, step: Step, layer: int, valid: Tensor, older: Tensor, rows: Tensor) -> Tensor:
        """Z = λ·Ĩ − (1 − λ)·R, float32 [B, Hkv, S]: of the valid tokens of some rows that are older than the window,
        of no meaning elsewhere. valid, older: bool [B, Hkv, S], rows: bool [B]."""
        q, k = step.queries(layer), step.keys(layer, rows)  # [B, Hq, α, D], [B, Hkv, S, D]
        importance = step.ops.window_importance(q, k, older, self.kernel_size, self.pooling)
        redundancy = step.ops.redundancy(k, valid, self.threshold)
        score: Tensor = self.lam * importance - (1 - self.lam) * redundancy
        return score
