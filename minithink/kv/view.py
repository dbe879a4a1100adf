"""What a policy sees of a manager's cache between two steps: `contract.Step`.

A view shows all rows, or, where decisions are recorded as a CUDA graph, some rows as a batch of their own. All that
the host knows of the rows comes in one tensor: a graph is replayed with another one each time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minithink.kv.contract import Demand, Policy, See
from minithink.kv.pages import Reading
from minithink.ref.decode_attention import group_reduce

if TYPE_CHECKING:
    from minithink.kv.manager import KVManager

STATE = 6  # numbers of a row: row, took part, tokens seen, tokens of the prompt, thinks, newest token
ACTIVE = 1  # the second of them


class View:
    """`contract.Step`, over a manager."""

    def __init__(self, manager: KVManager, policy: Policy, state: Tensor, recorded: bool = False) -> None:
        """
        Args:
            state: int64 [STATE, R], of every row that is shown.
            recorded: the rows are any of the manager's, each once, and nothing here may ask the host; otherwise they
                are all of them, in order.
        """
        self.manager, self.policy, self.recorded = manager, policy, recorded
        self.shape, self.ops = replace(manager.shape, rows=state.shape[1]), manager.backend
        self.row, active, self.length, prompt, self._thinks, self.tokens = state
        self.active = active.bool()
        self.prompt, self.clock = prompt.int(), (self.length - prompt).clamp(min=0).int()
        self._reading: tuple[Tensor | None, Reading] | None = None  # the last one asked for
        self._slots: dict[int, Tensor] = {}  # where the last queries are, by how many

    def seen_by(self, policy: Policy) -> View:
        if policy is self.policy:
            return self
        other = copy.copy(self)
        other.policy = policy
        other.__dict__.pop("budget", None)
        return other

    @cached_property
    def budget(self) -> Tensor:
        budgets = self.manager.budgets
        return self._shown(budgets.get(id(self.policy), next(iter(budgets.values()))), 1)

    @cached_property
    def thinking(self) -> Tensor:
        return self._thinks.bool()

    @cached_property
    def thought(self) -> Tensor:
        return self._shown(self.manager.store.thought, 0)

    def _shown(self, x: Tensor, dim: int) -> Tensor:
        """The rows that are shown, of a tensor of all rows."""
        return x.index_select(dim, self.row) if self.recorded else x

    def pos(self, layer: int | None = None) -> Tensor:
        return self._at(self._pos, layer)

    @cached_property
    def _pos(self) -> Tensor:
        return self._shown(self.manager.store.positions(), 1)

    def held(self, layer: int | None = None) -> Tensor:
        return self._at(self._shown(self.manager.store.count, 1), layer)

    def format(self, layer: int | None = None) -> Tensor:
        return self._at(self._shown(self.manager.store.format(), 1), layer)

    def protected(self, layer: int | None = None) -> Tensor:
        return self._at(self._protected, layer)

    @cached_property
    def droppable(self) -> Tensor:
        """Tokens that may go: those of rows that took part, but for what is protected. bool [Lt, R, Ht, S]."""
        first = self.prompt if self.manager.policy.protect_prompt else torch.zeros_like(self.prompt)
        first = torch.where(self.active, first, torch.iinfo(torch.int32).max)
        return self._pos >= first[:, None, None]

    @cached_property
    def _protected(self) -> Tensor:
        if not self.manager.policy.protect_prompt:
            return torch.zeros_like(self._pos, dtype=torch.bool)
        return (self._pos >= 0) & (self._pos < self.prompt[None, :, None, None])

    def keys(self, layer: int, rows: Tensor | None = None) -> Tensor:
        return self._read(layer, rows, 0)

    def values(self, layer: int, rows: Tensor | None = None) -> Tensor:
        return self._read(layer, rows, 1)

    def _read(self, layer: int, rows: Tensor | None, which: int) -> Tensor:
        rows = None if self.recorded else rows  # all that are shown
        if self._reading is None or self._reading[0] is not rows:
            some = rows.nonzero().flatten() if rows is not None else self.row if self.recorded else None
            self._reading = rows, self.manager.store.reader(some)
        reading = self._reading[1]
        x = reading(layer)[which]
        if rows is None or reading.rows is None:
            return x
        return x.new_zeros(self.shape.rows, *x.shape[1:]).index_copy_(0, reading.rows, x)

    def segments(self, tau: int, total: int) -> tuple[Tensor, Tensor]:
        store = self.manager.store
        return self.ops.segments(store.pos, store.count, self.row, self.prompt, tau, total)

    def survivors(self, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
        read = self.manager.store.reader(self.row if self.recorded else None)
        return self.ops.survivors(read, first, size, goal, longest)

    def chronological(self, layer: int) -> Tensor:
        pos = self.pos(layer)
        return torch.arange(pos.shape[-1], device=pos.device).expand(pos.shape)

    def mass(self, layer: int) -> Tensor:
        return self._weights(self.manager._mass, layer, self._demand(See.MASS, layer).group)

    def _weights(self, all_held: dict[tuple[int, str], Tensor], layer: int, group: str) -> Tensor:
        """What the manager holds of attention: [R, heads, S]."""
        width = self.manager.store.seen
        if (held := all_held.get((layer, group))) is None:
            heads = self.shape.query_heads if group == "none" else self.shape.kv_heads
            return torch.zeros(self.shape.rows, heads, width, device=self.manager.device)
        shown = self._shown(held[..., :width], 0)
        more = width - shown.shape[-1]
        return torch.nn.functional.pad(shown, (0, more)) if more > 0 else shown

    def queries(self, layer: int) -> Tensor:
        return self._last_queries(layer, self._demand(See.QUERY, layer).rows)

    def _last_queries(self, layer: int, n: int) -> Tensor:
        """The last n queries of every row, oldest first: [R, Hq, n, D]."""
        ring = self.manager._queries[layer]  # [B, Hq, size, D]
        if n not in self._slots:
            last = torch.arange(n, device=ring.device) - n
            self._slots[n] = (self.length[:, None] + last) % ring.shape[2]  # [R, n]
        return ring[self.row[:, None], :, self._slots[n]].transpose(1, 2)

    def rows(self, layer: int) -> Tensor:
        demand, pos = self._demand(See.ROWS, layer), self.pos(layer)  # pos: [R, Ht, S]
        if demand.rows == 1:  # attention has told
            return self._weights(self.manager._newest, layer, demand.group).unsqueeze(2)
        q, k = self._last_queries(layer, demand.rows).float(), self.keys(layer).float()
        out = []
        for i in range(demand.rows):
            own = (self.length - demand.rows + i)[:, None, None]  # the query's position
            valid = (pos >= 0) & (pos <= own)
            logits = q[:, :, i].unflatten(1, (k.shape[1], -1)) @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
            out.append(group_reduce(logits, valid, demand.group).nan_to_num(0.0))  # no valid token: no such query
        return torch.stack(out, dim=2)

    def hidden(self, layer: int) -> Tensor:
        return self._shown(self.manager._hidden[layer], 0)

    def note(self, score: Tensor, where: Tensor | None = None) -> None:
        if (recorder := self.manager.recorder) is not None:
            recorder.noted(self, self.policy, score, where)

    def any(self, what: Tensor | Callable[[], Tensor]) -> bool:
        return self.recorded or bool((what if isinstance(what, Tensor) else what()).any())

    def _at(self, x: Tensor, layer: int | None) -> Tensor:
        return x if layer is None else x[min(layer, x.shape[0] - 1)]

    def _demand(self, what: See, layer: int) -> Demand:
        for demand in self.policy.demands:
            if demand.what & what and (demand.layers is None or layer in demand.layers):
                return demand
        raise ValueError(f"{self.policy.name} reads {what.name} of layer {layer} and has not demanded it")
