"""DynTS (Guo et al.): keep the thinking tokens that a small network, the predictor, expects the answer to need.

While the model thinks, a sequence holds three windows (§4.2), the same tokens in all layers and heads:

    question    the M tokens of the prompt, which stay                            W_q = M
    selection   the older generated tokens, each with a score                     W_s = B − W_q − W_l
    local       the last W_l generated tokens, which stay                         W_l

A trigger is a step at which the sequence holds its budget, B tokens. Then the k = int(r·W_s) tokens of the selection
window with the highest scores stay, and K = W_s − k tokens are evicted. So triggers are K tokens apart. Tokens that
stay compete again at the next trigger, with the same scores.

The forward pass of a token also gives its score (eq. 7): a predictor of three layers reads the last hidden state,
after the final norm (`ref/predict.py`). `python -m minithink.calibrate predictor` trains one for a model. The target
says what it predicts of a thinking token:

    answer      attention from the answer (eq. 6)
    hindsight   attention from all later tokens
    needs       how often later statements need the token

On the embedded model `needs` is the best target. `answer` is no better than random scores. `hindsight` selects the
oldest tokens, and is no better than a window (docs/dynts.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Edit, Evict, Model, Policy, See, Shape, Step
from minithink.kv.schedule import PLACES, divided, share_of
from minithink.policies import dynts_cost as cost
from minithink.policies.dynts_cost import break_even as break_even
from minithink.policies.random import lots
from minithink.policies.scored import newest

LEAST = torch.finfo(torch.float32).min  # the score of tokens without a score
PARTS = 10**PLACES  # a share is a number of such parts


@dataclass
class Windows(Policy):
    """The three windows. Subclasses give the tokens of the selection window their scores."""

    budget: int | None = None  # B, tokens that a sequence holds while the model thinks, the prompt's included
    ratio: float = 0.3  # r, the share of the selection window that stays
    local: float = 0.4  # W_l: below 1 a share of the budget beside the question, from 1 on tokens

    scope = "sequence"
    protect_prompt = True
    exempt_answer = True

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1 or share_of(PARTS, self.ratio) == PARTS:
            raise UsageError(
                f"{self.name}: ratio is {self.ratio:.15g}; it must be at least 0, and below 1 in nine decimals, for "
                "with 1 no token ever goes."
            )
        share = self.local if self.local < 1 else 0.0
        whole = self.local <= 1 or self.local % 1 == 0
        if not 0 <= self.local < 2**30 or not whole or share_of(PARTS, share) == PARTS:
            raise UsageError(
                f"{self.name}: local is {self.local:.15g}; give a share from 0 to below 1 in nine decimals, or whole "
                f"tokens from 1 to {2**30 - 1:,}."
            )
        self.beside = 1 + (int(self.local) if self.local >= 1 else 0)  # a selection window of one token

    def sizes(self, budget: Any, question: Any) -> tuple[Any, Any, Any]:
        """W_s, k and W_l for whole numbers or tensors of them. budget: B; question: W_q."""
        return divided(budget, question, self.ratio, self.local)

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        question = step.protects[None, :, None]
        _, k, local = self.sizes(step.budget, question)
        now = step.active & step.thinking
        return now[None, :, None] & (step.held() >= step.budget), question + k + local

    def decide(self, step: Step) -> Iterable[Edit]:
        due, _ = self.due(step)  # bool [Lt, B, Ht]
        if not step.any(due):
            return
        self.prepare(step, due)
        _, k, local = self.sizes(step.budget, step.protects[None, :, None])
        if step.wants_scores:
            self._tell(step, local)
        drop = step.ops.select(
            score=self._score,
            pos=step.pos(),
            held=step.held(),
            at=step.row,
            first=step.protects,
            local=local,
            keep=k,
            due=due,
        )
        yield Evict(drop)

    def prepare(self, step: Step, due: Tensor) -> None:
        """Write the scores of the rows that are due, if they are not there yet. due: bool [Lt, B, Ht]."""

    def _tell(self, step: Step, local: Tensor) -> None:
        """Note the scores of the selection windows."""
        pos = step.pos()  # [Lt, B, Ht, S]
        selection = (pos >= 0) & ~newest(step, local) & ~step.protected()
        by_position = self._score[step.row][None, :, None].expand(*pos.shape[:3], -1)
        position = pos.clamp(0, by_position.shape[-1] - 1).long()
        step.note(by_position.gather(-1, position), selection)

    # -- state: the score of every position

    def setup(self, shape: Shape) -> None:
        self._score = torch.full((shape.rows, max(1, shape.tokens)), LEAST, device=shape.device)

    def reset(self, row: int) -> None:
        self._score[row] = LEAST

    def state(self) -> Iterable[Tensor]:
        return (self._score,)


@dataclass
class DynTS(Windows):
    """The windows with predicted scores."""

    target: Literal["answer", "hindsight", "needs"] = "answer"  # what the predictor has learned
    select: Literal["top", "random", "bottom"] = "top"  # the tokens of the selection window that stay
    question: bool = True  # whether the question has a window of its own
    seed: int = 0  # of select=random

    name = "dynts"
    summary = "keep the thinking tokens that a predictor expects the answer to need (DynTS)"
    capturable = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.protect_prompt = self.question
        self._weights: tuple[Tensor, ...] = ()
        if self.predicts:
            self.demands = (Demand(See.HIDDEN, layers=frozenset({-1})),)

    @property
    def predicts(self) -> bool:
        """Whether scores come from the predictor."""
        return self.select != "random" and self.ratio > 0

    @property
    def calibration(self) -> str:
        return f"predictor-{self.target}.safetensors" if self.predicts else ""

    def bind(self, model: Model) -> None:
        if self.calibration:
            self._weights = tuple(model.calibration(self.calibration)["weights"])  # the predictor's W1, W2 and W3

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        if not self.predicts:
            return
        if not self._weights:
            raise UsageError(
                f"{self.name} has no predictor: `python -m minithink.calibrate predictor --targets {self.target}` "
                "trains one for the embedded model; --model and --dataset name another."
            )
        d = self._weights[0].shape[0]
        if d != shape.hidden:
            raise UsageError(
                f"{self.name}: the predictor reads hidden states of {d} numbers, and the model's have "
                f"{shape.hidden}: train one for this model."
            )
        self._weights = tuple(weight.to(shape.device, shape.dtype) for weight in self._weights)

    def state(self) -> Iterable[Tensor]:
        return *super().state(), *self._weights

    def watch(self, step: Step) -> None:
        if self.ratio == 0:
            return
        position = (step.prompt + step.clock - 1).clamp(0, self._score.shape[1] - 1).long()
        if self.select == "random":
            lot = lots(self.seed, step.clock, position.view(1, -1, 1, 1))
            score = lot.view(-1).float()
        else:
            # s_{x_t} (eq. 7)
            score = step.ops.predict(step.hidden(-1), self._weights)
            if self.select == "bottom":
                score = -score
        old = self._score[step.row, position]
        self._score[step.row, position] = torch.where(step.active, score, old)

    def caution(self, shape: Shape) -> str:
        if not self.predicts or self.budget is None or self.budget > shape.tokens:
            return ""
        window, k, _ = self.sizes(self.budget, 0)
        if window == k:  # no selection window: the budget will be refused
            return ""
        each = window - k
        evicted = each * cost.triggers(shape.tokens, 0, self.budget, each)
        least = break_even(shape.hidden, shape.layers, width=shape.query_heads * shape.head_dim)
        if evicted > least:
            return ""
        return (
            f"{self.name} evicts at most {evicted:,} of {shape.tokens:,} tokens with budget={self.budget}, "
            f"ratio={self.ratio:g} and local={self.local:g}, and its predictor costs as much as attention to "
            f"{least:,.0f} tokens: it never pays"
        )


# Choices
#
# The authors' code (Robin930/DynTS) differs from their paper: the prompt competes in the selection window, and a
# trigger comes one token later. This module follows the paper. Where the paper is silent, or says two things:
#
# - No selection runs after `</think>`, because the predictor was not trained on answer tokens. The answer is appended
#   beside the budget (the paper goes on selecting).
# - A text that never opens `<think>` is treated as thinking, so that its budget applies.
# - A `<think>` that the model generates has a score, as every generated token.
# - Of tokens with equal scores the older one stays; positions are the original ones.
# - r and W_l are read as decimals of up to nine places, because in floats int(0.7·90) is 62.
# - `local` below 1 is a share of B − W_q, so that each sequence may have its own budget (2,000 of 5,000 tokens are
#   about 0.4). From 1 on it is a number of tokens. local=0 is the paper's "without L".
# - ratio=0 is "without T": it needs no predictor. With ratio=1 no token would ever be evicted, so it is refused.
# - question=false is "without Q": W_q = 0, and the prompt has the lowest score, so it is evicted first.
# - select=random draws one score for each token and never changes it; select=bottom keeps the lowest scores.
# - Scores are kept by position, 4 bytes for each token that a sequence may have.
# - The activations of the predictor are softplus without bias, as in the code; eq. 7 names none.
