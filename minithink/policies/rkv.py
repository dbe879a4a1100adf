"""R-KV: keep tokens that the newest queries attend to and that do not repeat others.

A reasoning model repeats itself. Attention alone would keep every copy of a thought that it still looks at. R-KV
lowers the score of tokens whose keys resemble other keys, so that the budget goes to different tokens.

Once a KV head holds budget + buffer tokens, it evicts down to the budget. It keeps the last α tokens, and of the
older ones those with the largest

    Z = λ·Ĩ − (1 − λ)·R

Importance Ĩ is the attention of the last α queries, smoothed over neighbouring keys (`ref/window_importance.py`):

    Ĩ = pool(mean_w softmax_j max_g q_w·k_j/√D)      j: the older tokens; w: the last α queries; g: the query heads
                                                     of the KV head

Redundancy R says how much a key resembles the others (`ref/redundancy.py`):

    R = softmax_j mean_i C_ij      i, j: all tokens held; C_ij: the cosine of keys i and j, 0 for i = j and for the
                                   newest j with C_ij > T

The last rule spares the newest of the keys that resemble key i: of several copies the latest loses least.

The class below says when a KV head evicts (`due`), how many of the newest tokens stay (`window_size`), and what the
older ones are worth (`score`, which computes Z). It inherits the rest. `Scored.decide` (`scored.py`) asks `due`. For
the heads that must evict it keeps the newest tokens, and of the older ones as many with the largest scores as there
is room for. It gives `score` a `Choice`, in which `held` are all tokens of these heads, `older` those before the
newest, and `rows` the sequences that have such a head.

`Policy.due` (`kv/contract.py`) adds `slack`, here the buffer, to the budget. `Policy.room` is what protected tokens
leave of the budget: all of it, unless `protect_prompt` is set.

If it evicts every few tokens, it remembers which keys resemble each other, and R is the same but for rounding
(`similar_keys.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Shape, Step, Storage
from minithink.kv.schedule import share_of
from minithink.policies.scored import Choice, Scored
from minithink.policies.similar_keys import SimilarKeys, evicts_often


@dataclass
class Rkv(Scored):
    """Importance less redundancy, in every KV head for itself."""

    budget: int | None = None  # tokens that a KV head keeps, the prompt's and the last α included
    lam: float = 0.1  # λ, weight of importance against redundancy, 0 to 1
    alpha: int = 8  # α, tokens: newest queries that score, and newest keys that always stay
    buffer: int = 128  # tokens beyond the budget that are gathered before an eviction
    threshold: float = 0.5  # T, cosine above which two keys are similar
    recent: float = 0.0  # share, 0 to 1, of the places beside protected tokens: for the newest, if it is more than α
    kernel_size: int = 7  # k, keys: width of the pooling along the sequence, odd
    pooling: Literal["max", "avg"] = "max"
    global_clock: bool = False  # evict when the whole sequence passes a multiple of `buffer` tokens
    schedule: str = "every"  # when to evict in place of the buffer: interval:N, sawtooth:GROW/KEEP, share:R/L
    protect_prompt: bool = False
    exempt_answer: bool = False  # evict only while the model thinks: compression_content="think" of the authors
    # Move the remaining tokens together after an eviction: before the next step (gather), or beside it (overlapped).
    # The generated tokens are the same.
    compaction: Literal["none", "gather", "overlapped"] = "none"

    name = "rkv"
    summary = "keep tokens that are attended to and do not repeat others (R-KV)"
    capturable = True
    scope = "head"
    traced = "older"  # protected tokens, too: they take part in the scores

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise UsageError(f"{self.name}: lam is {self.lam:g}; it must be from 0 to 1.")
        if not 0 <= self.recent <= 1:
            raise UsageError(f"{self.name}: recent is {self.recent:g}; it must be from 0 to 1.")
        if self.alpha < 1 or self.buffer < 0 or (self.global_clock and not self.buffer):
            raise UsageError(
                f"{self.name}: alpha is {self.alpha} and buffer {self.buffer} tokens; alpha must be at least 1, and "
                "buffer at least 0, with global_clock at least 1."
            )
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise UsageError(f"{self.name}: kernel_size is {self.kernel_size} keys; it must be odd.")
        self.slack = self.buffer  # `Policy.due`: evict at budget + slack
        self.storage = Storage(compaction=self.compaction)
        self.demands = (Demand(See.QUERY, rows=self.alpha),)
        self._similar: SimilarKeys | None = None

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which lanes must evict now, and how many tokens each may keep: bool and int32, [L, B, Hkv]."""
        due, keep = super().due(step)
        if self.global_clock and self.schedule == "every":
            on_grid = (step.clock == 0) | ((step.prompt + step.clock - 1) % self.buffer == 0)
            active = step.active & on_grid
            if self.exempt_answer:
                active = active & step.thinking
            due = active[None, :, None] & (step.held() > step.budget)
        return due, keep

    def window_size(self, room: Tensor) -> Tensor:
        """The last α tokens, or the share `recent` if that is more, as far as there is room."""
        return torch.maximum(room.clamp(max=self.alpha), share_of(room, self.recent))

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        """Z of the older tokens: float32 [B, Hkv, S]."""
        q = step.queries(layer)  # [B, Hq, α, D]
        k = step.keys(layer, choice.rows)  # [B, Hkv, S, D]
        # Ĩ = pool(mean_w softmax_j max_g q_w·k_j/√D)
        importance = step.ops.window_importance(
            q=q,
            k=k,
            valid=choice.older,
            kernel_size=self.kernel_size,
            pooling=self.pooling,
        )
        # R = softmax_j mean_i C_ij, over all keys that are held
        if self._similar is None:
            redundancy = step.ops.redundancy(k, choice.held, self.threshold)
        else:
            redundancy = self._similar.redundancy(step, layer, k, choice.held, self.threshold)
        # Z = λ·Ĩ − (1 − λ)·R
        z: Tensor = self.lam * importance - (1 - self.lam) * redundancy
        return z

    def setup(self, shape: Shape) -> None:
        # Keys that are quantized later would no longer be those that were compared. With λ = 1 R does not count.
        may_remember = shape.keys_stay and self.limit is not None and self.lam < 1
        often = may_remember and evicts_often(self.schedule, self.buffer)
        self._similar = SimilarKeys(shape, self.room_for(shape, 1)) if often else None

    def reset(self, row: int) -> None:
        if self._similar is not None:
            self._similar.reset(row)

    def state(self) -> Iterable[Tensor]:
        return () if self._similar is None else self._similar.tensors()


# Choices
#
# The formulas follow the authors' code, Zefan-Cai/R-KV@d15c976 `rkv/compression/r1_kv.py`, because the paper was not
# at hand. The code calls its defaults the paper's; SkipKV's paper, which follows R-KV, names λ = 0.1 and 128 tokens.
#
# When heads evict:
#
# - By default at S ≥ budget + buffer, as in the newer serving code. With buffer=0 one token goes in every step, as
#   ThinKV describes R-KV.
# - `global_clock` is the rule of the first code: at the end of the prompt, then with the first token after every
#   multiple of `buffer` (128) tokens, prompt included. A `schedule` given by the user takes precedence.
#
# Where this differs from the code:
#
# - Order: kept tokens stay in the order of their positions, as in the authors' later serving code, which sorts. The
#   released code stores them in the order of their scores. So from the second eviction on it pools over neighbours in
#   score, and spares the last similar key in score order. On the same tensors 71 to 73 % of the tokens that it keeps
#   are kept here (SnapKV: 80 to 81 %); with sorted survivors all are.
# - Precision: scores are float32. The code rounds the importance to the model's type after a softmax in float32; its
#   cosines, their mean and the softmax of the redundancy are in the model's type throughout.
# - Of equal Z the older token is kept.
# - Every lane is scored by its own tokens; the code scores a left-padded rectangle.
# - divide_method=newline, and other rules of which similar key is spared, are left out.
# - `recent` (not the default) is the local window that DynTS's paper gives R-KV (C.3): a share of the tokens that may
#   stay beside a protected prompt. The last α tokens stay in any case.
# - Where the code is silent: the tokens of a protected prompt (not the default) take part in the scores, but are not
#   evicted. If there is no room for α tokens beside the prompt, the newest that fit are kept.
# - What is remembered is no part of the method. R differs by the rounding of its sums from the one that is computed
#   anew, and where a cosine is so near T that rounding decides. A kernel and its twin differ in the same two ways.
# - `compaction` is no part of the method. It measures what an eviction costs if the remaining tokens must move
#   together (ThinKV §5.1).
