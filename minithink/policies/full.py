"""Full: every token's key and value stays, unrounded. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from minithink.kv.contract import Policy


@dataclass
class Full(Policy):
    """Nothing to choose, nothing to do."""

    name = "full"
    summary = "keep every token's key and value (the baseline)"
    # What no policy tells apart may share a table: one for all lanes of a sequence.
    scope = "sequence"
