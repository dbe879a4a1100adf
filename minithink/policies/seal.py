"""SEAL: steer the thinking towards execution with constant strength, evict no token (arXiv 2504.07986).

A steering vector V is added to one layer's output, times the strength α_0 (`steering.py`). SEAL adds it at blank
lines only, where a thought ends and the model decides the kind of the next one. at=every adds it at every token of
the thinking, as SkipKV does. There α_0 = 1 with vector=plain spoils texts of the embedded model (docs/skipkv.md).
`seal+rkv` steers, and evicts as R-KV does.
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
    capturable = True


# Choices
#
# - The rule follows a copy of the authors' code (Zemelee/SEAL) and the step of SkipKV's (TTTTTTris/SkipKV
#   `skipkv/modeling_nhid.py`): α = 1, and V is fitted at the blank lines before thoughts.
# - In the authors' code an empty last step, behind the last blank line, is a step and counts as execution. Here a
#   thought has text (`openings.py`), so V is fitted on one execution thought less for each such text.
