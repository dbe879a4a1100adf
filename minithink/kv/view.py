"""View: what a policy sees of a cache between two steps. It implements `contract.Step`.

A view shows the rows of a batch: all rows of the manager, or the few that are due. Lengths, tokens and the like come
from the batch's tensor, because a captured decision is replayed with other rows each time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from minithink.kv.batch import Batch
from minithink.kv.contract import Policy, See
from minithink.kv.observe import Observations
from minithink.kv.reading import Reading
from minithink.kv.step import ShownStep
from minithink.kv.store import PagedStore

# Called with the view, the policy, its scores and where they count; a recorder sets it (`Step.note`).
Noted = Callable[["View", Policy, Tensor, "Tensor | None"], None]


@dataclass(frozen=True)
class _Read:
    """A reader of some of the rows that a view shows."""

    rows: Tensor | None  # bool [N], the rows that were asked for
    shown: Tensor | None  # int64, the same as indices; None: all rows
    reading: Reading


class View(ShownStep):
    """`contract.Step` over a store and its observations."""

    def __init__(
        self,
        store: PagedStore,
        observations: Observations,
        policy: Policy,
        budgets: Mapping[int, Tensor],
        batch: Batch,
        asks: bool = True,
        noted: Noted | None = None,
    ) -> None:
        """
        Args:
            policy: of the manager; `seen_by` shows the same to a member of a stack.
            budgets: of every member, by its id: int32 [Lt, B, Ht].
            asks: whether the host may read the device's memory; False while a graph is captured.
            noted: called with the scores that policies note; None: they are dropped.
        """
        self.store = store
        self.observations = observations
        self.policy = policy
        self.budgets = budgets
        self.batch = batch
        self.asks = asks
        self._noted = noted
        self.shape = replace(store.shape, rows=len(batch))
        self.ops = store.pages.backend
        self.row = batch.row
        self.active = batch.active
        self.length = batch.length
        self.thinking = batch.thinking
        self.tokens = batch.token
        self.wants_scores = noted is not None
        self.prompt = batch.prompt.int()
        self.clock = (batch.length - batch.prompt).clamp(min=0).int()
        self.protects = self.prompt if policy.protect_prompt else torch.zeros_like(self.prompt)
        self._last_read: _Read | None = None
        self._in_ring: dict[int, Tensor] = {}  # where the last queries are, by how many

    def seen_by(self, policy: Policy) -> View:
        if policy is self.policy:
            return self
        other = copy.copy(self)
        other.policy = policy
        other.__dict__.pop("budget", None)
        return other

    @cached_property
    def budget(self) -> Tensor:
        of_any = next(iter(self.budgets.values()))
        return self._shown(self.budgets.get(id(self.policy), of_any), 1)

    @cached_property
    def thought(self) -> Tensor:
        return self._shown(self.store.thought, 0)

    def _shown(self, x: Tensor, dim: int) -> Tensor:
        """The rows that are shown, of a tensor of all rows."""
        return x if self.batch.whole else x.index_select(dim, self.row)

    def pos(self, layer: int | None = None) -> Tensor:
        return self._at(self._pos, layer)

    @cached_property
    def _pos(self) -> Tensor:
        return self._shown(self.store.lists.positions(), 1)

    def held(self, layer: int | None = None) -> Tensor:
        held = self._shown(self.store.lists.count, 1) if self._supposed is None else self._supposed
        return self._at(held, layer)

    def format(self, layer: int | None = None) -> Tensor:
        return self._at(self._shown(self.store.format(), 1), layer)

    def protected(self, layer: int | None = None) -> Tensor:
        return self._at(self._protected, layer)

    @cached_property
    def droppable(self) -> Tensor:
        """Tokens that may be evicted: unprotected ones of active rows. bool [Lt, N, Ht, S]."""
        never = torch.iinfo(torch.int32).max
        first = torch.where(self.active, self.protects, never)
        return self._pos >= first[:, None, None]

    @cached_property
    def _protected(self) -> Tensor:
        end = self.protects[None, :, None, None]
        return (self._pos >= 0) & (self._pos < end)

    def keys(self, layer: int, rows: Tensor | None = None) -> Tensor:
        return self._read(layer, rows, 0)

    def values(self, layer: int, rows: Tensor | None = None) -> Tensor:
        return self._read(layer, rows, 1)

    def _read(self, layer: int, rows: Tensor | None, which: int) -> Tensor:
        """Keys (0) or values (1) of a layer, [N, Hkv, S, D]. A policy reads the same rows layer by layer, so the last
        reader is kept."""
        last = self._last_read
        if last is None or last.rows is not rows:
            shown = None  # all rows
            if rows is not None and self.asks:
                shown = rows.nonzero().flatten()
            last = _Read(rows, shown, self._reader(shown))
            self._last_read = last
        x = last.reading(layer)[which]
        if last.shown is None:
            return x
        every_row = x.new_zeros(self.shape.rows, *x.shape[1:])
        return every_row.index_copy_(0, last.shown, x)

    def _reader(self, shown: Tensor | None) -> Reading:
        """A reader of some of the rows shown (int64, indices), or of all."""
        row = self.row
        length = self.length
        clock = self.clock
        if shown is not None:
            row = row[shown]
            length = length[shown]
            clock = clock[shown]
        if self.store.storage.lag:  # a prompt that was just read is not in the ring yet
            return Reading(self.store, row, length, settled=clock > 0)
        every_row = shown is None and self.batch.whole
        return Reading(self.store, None if every_row else row)

    def segments(self, tau: int, total: int) -> tuple[Tensor, Tensor]:
        lists = self.store.lists
        return self.ops.segments(lists.pos, lists.count, self.row, self.prompt, tau, total)

    def survivors(self, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
        return self.ops.survivors(self._reader(None), first, size, goal, longest)

    def tri_score(self, layer: int, query: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
        return self.ops.tri_score(self._every_row, layer, query, weight, candidates)

    @cached_property
    def _every_row(self) -> Reading:
        """A reader of all rows that are shown."""
        return self._reader(None)

    # -- observations

    def mass(self, layer: int | None = None) -> Tensor:
        if layer is None:
            demand = self._demand(See.MASS, 0)
            whole = self.observations.all_layers(demand.group)
            if whole is not None:
                return self._shown(whole[..., : self.store.lists.columns_read], 1)
        return super().mass(layer)

    def _weights(self, what: See, layer: int, rule: str) -> Tensor:
        width = self.store.lists.columns_read
        kept = self.observations.mass if what is See.MASS else self.observations.newest
        held = kept.get((layer, rule))
        if held is None:
            heads = self.shape.query_heads if rule == "none" else self.shape.kv_heads
            return torch.zeros(self.shape.rows, heads, width, device=self.shape.device)
        shown = self._shown(held[..., :width], 0)
        more = width - shown.shape[-1]
        if more > 0:
            shown = torch.nn.functional.pad(shown, (0, more))
        return shown

    def _last_queries(self, layer: int, n: int) -> Tensor:
        ring = self.observations.queries[layer]  # [B, Hq, size, D]
        n = min(n, ring.shape[2])
        if n not in self._in_ring:
            last = torch.arange(n, device=ring.device) - n
            self._in_ring[n] = (self.length[:, None] + last) % ring.shape[2]  # [N, n]
        return ring[self.row[:, None], :, self._in_ring[n]].transpose(1, 2)

    def _newest_hidden(self, layer: int) -> Tensor:
        return self._shown(self.observations.hidden[layer], 0)

    # -- for traces

    def note(self, score: Tensor, where: Tensor | None = None) -> None:
        if self._noted is not None:
            self._noted(self, self.policy, score, where)

    def _at(self, x: Tensor, layer: int | None) -> Tensor:
        return x if layer is None else x[min(layer, x.shape[0] - 1)]
