"""Parts: what a manager hands to the forward pass that is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minithink.kv.batch import Batch
from minithink.kv.contract import Policy
from minithink.kv.observe import Observations
from minithink.kv.store import PagedStore
from minithink.kv.view import View
from minithink.model import Rope


@dataclass(frozen=True)
class Parts:
    """The parts of a manager that a pass works with."""

    policy: Policy
    store: PagedStore
    observations: Observations
    rope: Rope
    view: Callable[[Batch], View]  # some rows as the policy sees them
    steers: bool  # whether the policy steers the residual stream
    watches: bool  # whether the policy looks at every decode step

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return self.store.shape.query_heads, self.store.shape.kv_heads

    @property
    def dense(self) -> bool:
        """Whether decode steps attend over dense copies of keys and values, see `KVManager.dense`."""
        return self.policy.pull > 0 or self.store.storage.lag
