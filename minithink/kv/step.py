"""ShownStep: what the steps of both managers share. A policy sees only what it has demanded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Policy, See, Shape, name_of
from minithink.ref.decode_attention import query_rows

Some = TypeVar("Some", bound="ShownStep")


class ShownStep:
    """The part of `contract.Step` that does not depend on how tokens are stored.

    A manager's own step inherits from it. It says how observations are found: `_weights`, `_last_queries` and
    `_newest_hidden`.
    """

    policy: Policy  # to which the step is shown
    shape: Shape
    length: Tensor  # int64 [B]: tokens that each row has had
    asks: bool = True  # whether the host may read the device's memory; False while a graph is captured
    _supposed: Tensor | None = None  # tokens that lanes are said to hold (`with_budget`)

    def with_budget(self: Some, budget: Tensor, held: Tensor) -> Some:
        """The same step as if lanes had these budgets and held so many tokens. Both: int32 [Lt, B, Ht]."""
        other = copy.copy(self)
        vars(other)["budget"] = budget
        other._supposed = held
        return other

    def any(self, what: Tensor | Callable[[], Tensor]) -> bool:
        """Whether any element is true; True while a graph is captured."""
        if not self.asks:
            return True
        found = what if isinstance(what, Tensor) else what()
        return bool(found.any())

    # -- observations

    def mass(self, layer: int | None = None) -> Tensor:
        """MASS of a layer, or of all."""
        if layer is None:
            return torch.stack([self.mass(layer) for layer in range(self.shape.layers)])
        demand = self._demand(See.MASS, layer)
        return self._weights(See.MASS, layer, demand.group)

    def rows(self, layer: int) -> Tensor:
        """ROWS of a layer. One row was kept when the layer attended; more rows are computed again here."""
        demand = self._demand(See.ROWS, layer)
        if demand.rows == 1:
            return self._weights(See.ROWS, layer, demand.group).unsqueeze(2)
        queries = self._last_queries(layer, demand.rows)
        return query_rows(queries, self.keys(layer), self.pos(layer), self.length, demand.group)

    def queries(self, layer: int) -> Tensor:
        """QUERY of a layer."""
        demand = self._demand(See.QUERY, layer)
        return self._last_queries(layer, demand.rows)

    def hidden(self, layer: int) -> Tensor:
        """HIDDEN of a layer."""
        self._demand(See.HIDDEN, layer)
        return self._newest_hidden(layer)

    def _demand(self, what: See, layer: int) -> Demand:
        """The policy's demand. UsageError: it has none."""
        for demand in self.policy.demands:
            if demand.shows(what, layer):
                return demand
        raise UsageError(
            f"The policy {name_of(self.policy)} reads {what.name} of layer {layer}, which it has not demanded: add "
            f"Demand(See.{what.name}) to its `demands`, with this layer if it names layers."
        )

    # -- how a manager finds them

    def pos(self, layer: int | None = None) -> Tensor:
        """Positions, as of `contract.Step`."""
        raise NotImplementedError

    def keys(self, layer: int, rows: Tensor | None = None) -> Tensor:
        """Keys, as of `contract.Step`."""
        raise NotImplementedError

    def _weights(self, what: See, layer: int, rule: str) -> Tensor:
        """The attention weights that were kept as MASS or as ROWS, 0 if none were: [B, heads, S]."""
        raise NotImplementedError

    def _last_queries(self, layer: int, n: int) -> Tensor:
        """The last n queries, oldest first, or as many as a sequence can have: [B, Hq, n, D]."""
        raise NotImplementedError

    def _newest_hidden(self, layer: int) -> Tensor:
        """The residual stream of the newest token: [B, d]."""
        raise NotImplementedError
