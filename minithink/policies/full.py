"""Full: every token's key and value stays, in full precision. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from minithink.kv.contract import Policy


@dataclass
class Full(Policy):
    """Keep everything; never edit the cache."""

    name = "full"
    summary = "keep every token's key and value (the baseline)"
    capturable = True  # there is nothing to decide
    scope = "sequence"


# Choices
#
# - All lanes of a sequence keep the same tokens, so one table is enough.
