"""Steering: add a vector to one layer's output while the model thinks, so that the model doubts less.

    H ← H + α·V,   V = mean hidden state before execution thoughts − mean before other thoughts     (SkipKV §4.2)

`seal` and `skipkv` share this part. `python -m minithink.calibrate steering` fits V, a vector for each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Model, Policy, Shape, Step
from minithink.text.sentences import PARAGRAPH, table

FILE = "steering.safetensors"
STRONGEST = 100.0  # the papers steer with strengths of about 1


def check_strength(policy: str, option: str, value: float) -> None:
    """UsageError: a strength is not a number of at most STRONGEST, in either direction."""
    if not abs(value) <= STRONGEST:  # NaN too
        raise UsageError(
            f"{policy}: {option} is {value:g}; it must be from -{STRONGEST:g} to {STRONGEST:g}, for a stronger "
            "vector leaves nothing of what the model thinks."
        )


@dataclass
class Steered(Policy):
    """The common part of policies that steer; a subclass says how strongly (`strength`)."""

    alpha_0: float = 1.0  # α_0, the strength at the beginning; 0: none
    at: Literal["every", "boundary"] = "every"  # every token of the thinking, or those that end a blank line
    layer: int | None = None  # L_s, from 0; none: the one that the calibration recommends
    vector: Literal["plain", "matched"] = "plain"  # V, or the vector of thoughts after equal kinds of sentences

    def __post_init__(self) -> None:
        check_strength(self.name, "alpha_0", self.alpha_0)
        self._layer = -2  # L_s; −2: no layer
        self._v: Tensor | None = None  # V of that layer, float32 [d]
        self._table: Tensor | None = None  # uint8 [states, V]: what each token does (`sentences.py`)

    @property
    def steers(self) -> bool:
        """Whether anything is steered at all."""
        return self.alpha_0 != 0

    def strength(self, step: Step) -> Tensor:
        """α_t: float32 [B]."""
        return torch.full(step.row.shape, self.alpha_0, device=step.row.device)

    # -- what the policy learns of the model: tokenizer, calibration, shape

    @property
    def reads_text(self) -> bool:
        """Whether the policy must know the tokens' texts."""
        return self.steers and self.at == "boundary"

    @property
    def calibration(self) -> str:
        return FILE if self.steers else ""

    def bind(self, model: Model) -> None:
        """Raises UsageError if the model has no such layer."""
        if self.reads_text:
            self._table = table(tuple(model.vocabulary))
        if self.calibration:
            self._take_vector(model.calibration(self.calibration))

    def _take_vector(self, values: Mapping[str, Any]) -> None:
        """values: `plain` and `matched`, float32 [L, d], and `layer`, of `python -m minithink.calibrate steering`."""
        vectors = values[self.vector]
        self._layer = values["layer"] if self.layer is None else self.layer
        if not 0 <= self._layer < len(vectors):
            raise UsageError(
                f"{self.name}: layer={self._layer}, and the model has {len(vectors)} layers: give 0 to "
                f"{len(vectors) - 1}."
            )
        self._v = vectors[self._layer].clone()

    def setup(self, shape: Shape) -> None:
        """UsageError: there is no steering vector, or one of another length than `shape.hidden`; or no tokenizer."""
        # what was read of each row's text (`ref/sentences.py`)
        self._read = torch.zeros(shape.rows, 3, dtype=torch.int32, device=shape.device)
        if self.steers and self._v is None:
            raise UsageError(f"{self.name} knows no steering vector: calibrate the model, or switch steering off.")
        if self._v is not None and len(self._v) != shape.hidden:
            raise UsageError(
                f"{self.name}: the steering vector has {len(self._v):,} numbers, and the model's hidden states have "
                f"{shape.hidden:,}: calibrate this model."
            )
        if self.reads_text and self._table is None:
            raise UsageError(f"{self.name} reads the text, and there is no tokenizer here.")
        self._v = None if self._v is None else self._v.to(shape.device)
        self._table = None if self._table is None else self._table.to(shape.device)

    def reset(self, row: int) -> None:
        self._read[row] = 0

    def state(self) -> Iterable[Tensor]:
        return self._read, *(x for x in (self._v, self._table) if x is not None)

    # -- a step

    def steer(self, step: Step, layer: int, hidden: Tensor) -> Tensor:
        """Steer layer L_s. After the final norm, read the newest tokens.

        hidden: [B, d], of the newest tokens → the same shape and dtype.
        """
        if layer == -1 and self._table is not None:
            self.read(step, hidden)
        if layer != self._layer or self._v is None:
            return hidden
        alpha = self.strength(step)
        where = step.active & step.thinking & (alpha != 0)
        if self.at == "boundary":
            where = where & self._ends_blank_line(step)
        # H ← H + α_t·V
        steered = (hidden.float() + alpha[:, None] * self._v).to(hidden.dtype)
        return torch.where(where[:, None], steered, hidden)

    def read(self, step: Step, hidden: Tensor) -> Tensor:
        """Read the newest token of each row → bool [B], whether it ends a sentence. hidden: [B, d], its state."""
        ends: Tensor = step.ops.sentences(
            token=step.tokens,
            at=step.row,
            active=step.active,
            table=self._table,
            state=self._read,
        )
        return ends

    def _ends_blank_line(self, step: Step) -> Tensor:
        """Whether a blank line ends with the newest token, which is not read yet: bool [B]."""
        assert self._table is not None
        known = (step.tokens >= 0) & (step.tokens < self._table.shape[1])
        before = self._read[step.row, 0].long()
        does = self._table[before, torch.where(known, step.tokens, 0)]
        return known & ((does & PARAGRAPH) != 0)


# Choices
#
# Where this differs from the papers:
#
# - Only generated tokens of the think stage are steered. SkipKV's letter steers every forward pass, the prompt's too.
# - SEAL adds −1 times the opposite vector (others − execution), which is the same. So its coefficient −1 is α = 1
#   here.
# - Layers are counted from 0, and the output of layer L_s is steered. The papers' 20th layer is L_s = 19 here.
