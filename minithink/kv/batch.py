"""Batch: one tensor with everything that a decode step must know of each of its rows.

A captured CUDA graph reads its inputs from fixed addresses. So everything that differs from step to step goes through
this tensor: the host fills it and copies it to the device. A step that is not captured reads the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = ("row", "active", "length", "prompt", "thinking", "token", "waiting", "sequence")
ACTIVE = FIELDS.index("active")


@dataclass(frozen=True)
class Batch:
    """Rows of a step, each once. A row that is not active is a padding row: the step must not change it."""

    values: Tensor  # int64 [FIELDS, N]
    whole: bool = False  # these are all rows of the manager, in order

    @classmethod
    def of(cls, device: torch.device | str = "cpu", whole: bool = False, **fields: Sequence[int] | Tensor) -> Batch:
        """A batch of the given fields. If a field is missing, `active` is 1 and any other field is 0."""
        n = len(fields["row"])
        known = {"active": [1] * n} | fields
        columns = [torch.as_tensor(known.get(name, [0] * n), dtype=torch.int64) for name in FIELDS]
        return cls(torch.stack([x.to(device) for x in columns]), whole)

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
        return self.values[0]

    @property
    def active(self) -> Tensor:
        """Whether the row brings a token: bool [N]."""
        return self.values[1].bool()

    @property
    def length(self) -> Tensor:
        """Tokens that the row has seen when the step's token is in the cache: int64 [N]."""
        return self.values[2]

    @property
    def prompt(self) -> Tensor:
        """Tokens of the prompt: int64 [N]."""
        return self.values[3]

    @property
    def thinking(self) -> Tensor:
        """Whether the step's token belongs to the think stage: bool [N]."""
        return self.values[4].bool()

    @property
    def token(self) -> Tensor:
        """The step's token: int64 [N]."""
        return self.values[5]

    @property
    def waiting(self) -> Tensor:
        """Tokens in the row's full-precision buffer before the step: int64 [N]."""
        return self.values[6]

    @property
    def sequence(self) -> Tensor:
        """Number of the sequence, which decides its draws: int64 [N]."""
        return self.values[7]
