"""What `evaluate loss` reads: policies at budgets, and which texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minithink.engine import PROMPT_TOKENS
from minithink.evaluate.plan import Spec, given
from minithink.evaluate.texts import LENGTH, REFERENCE, STDLIB
from minithink.kv.byte_size import ByteSize


@dataclass(frozen=True, kw_only=True)
class LossJob:
    """The options of `evaluate loss`, but for where the results go. None: what the option's help says."""

    policies: Sequence[Spec] | None = None
    budgets: Sequence[int | float | ByteSize] = ()
    schedule: str | None = None  # of --schedule; each Spec has it, too
    beside_full: bool = True  # the full cache is read, too; if not, nothing is compared with it
    texts: str = STDLIB
    answers: bool = False
    prompt_tokens: int = PROMPT_TOKENS
    length: int | None = None
    limit: int | None = None
    seed: int = 0
    model: str = "tiny"
    adapter: Path | None = None
    template: Mapping[str, Any] | None = None
    think_tags: Sequence[str] | None = None
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    calibration: Path | None = None
    batch_size: int | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> LossJob:
        """The job of a command line. Options that it does not have are at their defaults."""
        return cls(**given(cls, args))

    @property
    def read_length(self) -> int | None:
        """Tokens of a text that are read at most; None: all."""
        if self.answers:
            return None
        if self.length is None and self.texts != REFERENCE:
            return LENGTH
        return self.length
