"""What an evaluation runs: policies at budgets, on which problems, and how tokens are drawn."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minithink.evaluate.plan import Spec, given
from minithink.evaluate.summary import Budget
from minithink.kv.byte_size import ByteSize


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of `minithink.evaluate`, but for where the results go. None: what the option's help says."""

    policies: Sequence[Spec] | None = None
    budgets: Sequence[int | float | ByteSize] = ()
    schedule: str | None = None  # of --schedule; each Spec has it, too
    without: Sequence[tuple[str, Budget]] = ()  # policies at budgets that are not run, as records name them
    reference_length: int | None = None
    model: str = "tiny"
    adapter: Path | None = None
    template: Mapping[str, Any] | None = None
    think_tags: Sequence[str] | None = None
    dataset: str = "facts"
    split: str | None = None
    fields: Mapping[str, str] | None = None
    limit: int | None = None
    grader: str = "exact"
    num_samples: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    max_new_tokens: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    calibration: Path | None = None
    batch_size: int | None = None
    padded_budget: int | None = None
    group: bool = False
    recall: bool = False
    needed: bool = False
    trace: Path | None = None
    keep_text: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Job:
        """The job of a command line. Options that it does not have are at their defaults."""
        return cls(**given(cls, args))
