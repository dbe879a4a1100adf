"""SEAL: steer the thinking towards execution with constant strength, evict nothing (arXiv 2504.07986).

A steering vector is added to one layer's output (`steering.py`). SEAL adds it at blank lines only, where a thought
ends and the model decides the kind of the next one. at=every adds it at every token of the thinking, as SkipKV
does; there α_0 = 1 with the plain vector spoils texts of the embedded model (docs/skipkv.md). Another policy may
evict beside it: `seal+rkv`.

The rule follows the authors' code, as SkipKV's repository (TTTTTTris/SkipKV) has it: α = 1, and V is fitted at the
blank lines before thoughts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minithink.policies.steering import Steered


@dataclass
class Seal(Steered):
    """Steering of constant strength α_0."""

    at: Literal["every", "boundary"] = "boundary"

    name = "seal"
    summary = "steer the thinking towards execution, evict nothing (SEAL)"
    recordable = True
