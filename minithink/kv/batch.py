"""Batch: one tensor with everything that a decode step must know of each of its rows.

A captured CUDA graph reads its inputs from fixed addresses. So everything that differs from step to step goes through
this tensor: the host fills it and copies it to the device. A step that is not captured reads the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = ("row", "active", "length", "prompt", "thinking", "token", "waiting", "sequence", "target")
ROW = FIELDS.index("row")
ACTIVE = FIELDS.index("active")
LENGTH = FIELDS.index("length")
PROMPT = FIELDS.index("prompt")
THINKING = FIELDS.index("thinking")
TOKEN = FIELDS.index("token")
WAITING = FIELDS.index("waiting")
SEQUENCE = FIELDS.index("sequence")
TARGET = FIELDS.index("target")


@dataclass(frozen=True)
class Batch:
    """Rows of a step, each once. A row that is not active is a padding row: the step must not change it."""

    values: Tensor  # int64 [FIELDS, N]
    whole: bool = False  # these are all rows of the manager, in order

    @classmethod
    def of(cls, device: torch.device | str = "cpu", whole: bool = False, **fields: Sequence[int] | Tensor) -> Batch:
        """A batch of the given fields. If a field is missing, `active` is 1 and any other field is 0."""
        n = len(fields["row"])
        columns = []
        for name in FIELDS:
            missing = [1] * n if name == "active" else [0] * n
            column = torch.as_tensor(fields.get(name, missing), dtype=torch.int64)
            columns.append(column.to(device))
        return cls(torch.stack(columns), whole)

    def __len__(self) -> int:
        return self.values.shape[1]

    def __getitem__(self, which: Tensor | Sequence[int]) -> Batch:
        """Some of the rows. which: a mask or indices."""
        return Batch(self.values[:, which])

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device."""
        return self if self.values.device == device else Batch(self.values.to(device), self.whole)

    @property
    def row(self) -> Tensor:
        """Number of the manager's row: int64 [N]."""
        return self.values[ROW]

    @property
    def active(self) -> Tensor:
        """Whether the row brings a token: bool [N]."""
        return self.values[ACTIVE].bool()

    @property
    def length(self) -> Tensor:
        """Tokens that the row has had when the step's token is in the cache: int64 [N]."""
        return self.values[LENGTH]

    @property
    def prompt(self) -> Tensor:
        """Tokens of the prompt: int64 [N]."""
        return self.values[PROMPT]

    @property
    def thinking(self) -> Tensor:
        """Whether the step's token belongs to the think stage: bool [N]."""
        return self.values[THINKING].bool()

    @property
    def token(self) -> Tensor:
        """The step's token: int64 [N]."""
        return self.values[TOKEN]

    @property
    def waiting(self) -> Tensor:
        """Tokens in the row's full-precision buffer before the step: int64 [N]."""
        return self.values[WAITING]

    @property
    def sequence(self) -> Tensor:
        """Number of the sequence, which decides its draws: int64 [N]."""
        return self.values[SEQUENCE]

    @property
    def target(self) -> Tensor:
        """The token that follows the step's token, if the text is given: int64 [N]. Without a given text it is 0."""
        return self.values[TARGET]
