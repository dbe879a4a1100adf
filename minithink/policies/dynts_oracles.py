"""Oracles in DynTS's windows: they know what the answer, later tokens or later statements will look at.

    answer_oracle      attention from the answer (eq. 6): what DynTS's predictor learns, without its errors
    hindsight_oracle   attention from all tokens that are still to come
    needs_oracle       what a continuation may still read by the rules of the task families (`tasks/needs.py`), then
                       the other tokens of these statements, then the newer token

The first two read a text that the full cache has generated for the same prompt with the same draws (`python -m
minithink.calibrate foresight`); other draws are refused. Evictions change a text sooner or later; from then on the
oracle knows the future of another text. So its figures are lower bounds of what its score can do. The third oracle
reads the text that is being written, up to the newest token.

All three work between the steps, on the host: the first two look a text up and read it with the model, the third
follows it with a grammar. `due` tells when.

None of the three bounds what a method can reach. On the embedded model other methods that keep as many tokens are
right more often than the first two, and DynTS with target=needs more often than the third (`docs/dynts.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from minithink.errors import MinithinkError, UsageError
from minithink.kv.contract import Model, Shape, Step
from minithink.loaded import Loaded
from minithink.policies.dynts import Windows
from minithink.reread.later import later

EVERY = 16  # generated tokens from one known state of the attention that is still to come to the next


@dataclass
class AnswerOracle(Windows):
    """Keep what the answer of the recorded text attends to."""

    name = "answer_oracle"
    summary = "keep what the answer attends to, known from a recorded text (an oracle in DynTS's windows)"
    tells_due = True
    part = "answer"  # the part of the recorded text whose attention counts

    @property
    def calibration(self) -> str:
        return "foresight.json"

    def bind(self, model: Model) -> None:
        # a prompt's ids → the ids that the full cache generated; None: no text is recorded
        self._text: Callable[[Sequence[int]], Sequence[int] | None] = model.calibration(self.calibration)["text"]
        # The oracle reads texts with the model itself, so it can only be bound to one that is loaded.
        self._later: Callable[..., Tensor] = partial(later, cast(Loaded, model))

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        self._heard = [list[int]() for _ in range(shape.rows)]  # the prompts
        self._future: list[Tensor | None] = [None] * shape.rows  # [blocks, T], of the recorded texts

    def reset(self, row: int) -> None:
        super().reset(row)
        self._heard[row] = []
        self._future[row] = None

    def state(self) -> Iterable[Tensor]:
        return *super().state(), *(x for x in self._future if x is not None)

    def listen(self, row: int, ids: Sequence[int]) -> None:
        if self._future[row] is None:
            self._heard[row] += ids

    def prepare(self, step: Step, due: Tensor) -> None:
        for i in due.any(2).any(0).nonzero().flatten().tolist():
            row = int(step.row[i])
            future = self._future[row]
            if future is None:
                future = self._read(self._heard[row][: int(step.prompt[i])])
                self._future[row] = future
            block = min(int(step.clock[i]) // EVERY, len(future) - 1)
            now = future[block][: self._score.shape[1]]
            self._score[row] = 0
            self._score[row, : len(now)] = now

    def _read(self, prompt: Sequence[int]) -> Tensor:
        """The attention that the recorded text of a prompt is still to give, every EVERY tokens: [blocks, T].

        Raises:
            MinithinkError: no text is recorded for this prompt.
        """
        text = self._text(prompt)
        if text is None:
            raise MinithinkError(
                f"{self.name} knows no recorded text for a prompt of {len(prompt)} tokens: `python -m "
                "minithink.calibrate foresight` records the texts of a dataset."
            )
        return self._later(prompt, text, self.part, EVERY).to(self._score.device)


@dataclass
class HindsightOracle(AnswerOracle):
    """Keep what the rest of the recorded text attends to."""

    name = "hindsight_oracle"
    summary = "keep what all later tokens attend to, known from a recorded text (an oracle in DynTS's windows)"
    tells_due = True
    part = "rest"


class Live(Protocol):
    """Follows a text and knows what its continuation may still read."""

    def add(self, token: int) -> None:
        """The next token's id."""

    def live(self) -> tuple[list[int], list[int]]:
        """Positions of the tokens that a continuation may still read, and of the other tokens of their statements."""


@dataclass
class NeedsOracle(Windows):
    """Keep what a continuation may still read."""

    name = "needs_oracle"
    summary = "keep what the text may still read by the rules of the task families (an oracle in DynTS's windows)"
    tells_due = True

    def bind(self, model: Model) -> None:
        # The grammars of the task families are loaded only for this oracle.
        from minithink.tasks.needs_follower import followers

        self._follow: Callable[[Sequence[int]], Live] = followers(model.pieces, model.config.vocab_size)

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        if not hasattr(self, "_follow"):
            raise UsageError(f"{self.name} reads the text, and there is no tokenizer here.")
        self._heard = [list[int]() for _ in range(shape.rows)]  # tokens that the reader has not read yet
        self._reader: list[Live | None] = [None] * shape.rows

    def reset(self, row: int) -> None:
        super().reset(row)
        self._heard[row] = []
        self._reader[row] = None

    def listen(self, row: int, ids: Sequence[int]) -> None:
        self._heard[row] += ids

    def prepare(self, step: Step, due: Tensor) -> None:
        position = torch.arange(self._score.shape[1], dtype=torch.float32)
        for i in due.any(2).any(0).nonzero().flatten().tolist():
            row = int(step.row[i])
            live, beside = self._read(row, int(step.prompt[i])).live()
            # First what may still be read, then the other tokens of these statements, then the newer token.
            score = position.clone()
            score[beside] = position[beside] + len(position)
            score[live] = position[live] + 2 * len(position)
            self._score[row] = score.to(self._score.device)

    def _read(self, row: int, prompt: int) -> Live:
        """A row's reader, which has read all that was heard. prompt: tokens of the prompt."""
        heard = self._heard[row]
        self._heard[row] = []
        reader = self._reader[row]
        if reader is None:
            reader = self._follow(heard[:prompt])
            self._reader[row] = reader
            heard = heard[prompt:]
        for token in heard:
            reader.add(token)
        return reader


# Choices
#
# - No oracle is in the paper.
# - Attention is the mean over layers and heads, because all of them keep the same tokens.
# - Tokens behind the end of the recorded text have the score 0.
# - What is still to come is known every EVERY tokens; between them the last known state counts.
