"""Observations: tensors that a policy demands to see (`contract.Demand`), kept until the policy reads them.

MASS, ROWS   attention weights, [B, heads, S] for each layer and rule; attention writes them as it reads the
             keys. After the prompt, MASS is the sum over all queries of the prompt
QUERY        the last rotated queries, in a ring: position p stands at p mod the ring's size
HIDDEN       the residual stream of the newest token: [B, d]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from minithink.kv.contract import Demand, See
from minithink.kv.store import PagedStore
from minithink.ref.decode_attention import causal_weights

Weights = dict[tuple[int, str], Tensor]  # (layer, rule) → attention weights, [B, heads, S]

QUERY_BLOCK = 128  # prompt queries whose probabilities are in memory at once


class Observations:
    """The observations of all rows of a store."""

    def __init__(self, store: PagedStore, demands: Sequence[Demand], width: int) -> None:
        """width: columns of the attention weights that are kept, if the store's widths are fixed."""
        self.store = store
        self.demands = demands
        self.width = width
        # (layer, rule) → [B, heads, S]: of MASS, and of ROWS with one row
        self.mass: Weights = {}
        self.newest: Weights = {}
        self._layers: dict[str, Tensor] = {}  # rule → [L, B, heads, S], which `mass` has layer by layer
        self.hidden: dict[int, Tensor] = {}  # layer → [B, d]
        shape = store.shape
        asked = max((d.queries for d in demands), default=0)
        if shape.tokens:
            asked = min(asked, shape.tokens)  # no sequence has more queries
        layers = shape.layers if asked else 0
        ring = (layers, shape.rows, shape.query_heads, asked, shape.head_dim)
        self.queries = torch.zeros(ring, dtype=store.dtype, device=shape.device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of observations."""
        return [self.queries, *self._by_row()]

    def _by_row(self) -> list[Tensor]:
        """The observations whose first axis is the row."""
        weights = [*self.mass.values(), *self.newest.values()]
        return [*weights, *self.hidden.values()]

    def reset(self, row: int) -> None:
        """A new sequence takes this row: forget the last one."""
        self.queries[:, row] = 0
        for held in self._by_row():
            held[row] = 0

    def of(self, demands: Sequence[Demand], what: See, layer: int) -> Iterator[Demand]:
        """Demands of one kind at a layer, each rule once. demands: those of this pass."""
        rules = set()
        for demand in demands:
            if demand.shows(what, layer) and demand.group not in rules:
                rules.add(demand.group)
                yield demand

    def asked(self, demands: Sequence[Demand], layer: int) -> dict[str, See]:
        """The rules of the weights that a layer's attention must write, each with MASS, ROWS or both."""
        asked: dict[str, See] = {}
        for demand in demands:
            if demand.weights and demand.at(layer):
                known = asked.get(demand.group, demand.weights)
                asked[demand.group] = known | demand.weights
        return asked

    # -- observations of one decode step. at: int64 [N], rows; active: bool [N], rows that bring a token (None: all)

    def in_place(
        self,
        layer: int,
        rule: str,
        what: See,
        active: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Where a kernel may write attention weights itself, instead of `keep_weights`: the weights that are kept,
        float32 [B, heads, S], and the rows that may change, `active`. None: there is no such place, because widths
        are not fixed, or because the weights are kept twice."""
        if self.store.lists.columns is None or active is None:
            return None
        kept = self._kept(what)
        if len(kept) != 1:
            return None
        [weights] = kept
        key = (layer, rule)
        if key not in weights:
            weights[key] = self._fixed(weights, key)
        return weights[key], active

    def keep_weights(
        self,
        layer: int,
        rule: str,
        what: See,
        at: Tensor | None,
        active: Tensor | None,
        mass: Tensor,
    ) -> None:
        """Keep attention weights. mass: [N, heads, S], of one query of each row. at: None: these are all rows."""
        key = (layer, rule)
        for weights in self._kept(what):
            if self.store.lists.columns is not None:
                self._write(weights, key, at, active, mass)
            else:
                self._replace(weights, key, at, mass)

    def _kept(self, what: See) -> list[Weights]:
        """Where weights are kept: as MASS, as ROWS, or both."""
        kept = []
        if what & See.MASS:
            kept.append(self.mass)
        if what & See.ROWS:
            kept.append(self.newest)
        return kept

    def _write(
        self,
        weights: Weights,
        key: tuple[int, str],
        at: Tensor | None,
        active: Tensor | None,
        mass: Tensor,
    ) -> None:
        """Write weights of a fixed width in place, because graphs know the addresses."""
        if key not in weights:
            weights[key] = self._fixed(weights, key)
        held = weights[key][..., : mass.shape[-1]]
        if at is not None:
            held[at] = _of_active(mass, held, at, active)
        elif active is None:
            held.copy_(mass)
        else:
            by_row = active[:, None, None]
            torch.where(by_row, mass, held, out=held)

    def _replace(self, weights: Weights, key: tuple[int, str], at: Tensor | None, mass: Tensor) -> None:
        """Replace weights by new ones, as wide as the lanes are now. Prompts that are being read keep their
        unfinished sums."""
        rows = self.store.shape.rows
        if at is None:
            at = torch.arange(rows, device=mass.device)
        held = mass.new_zeros(rows, *mass.shape[1:])
        held.index_copy_(0, at, mass)
        if self.store.unsettled and key in weights:
            prompts = list(self.store.unsettled)
            unfinished = weights[key][prompts]
            width = max(held.shape[-1], unfinished.shape[-1])
            held = _padded(held, width)
            held[prompts] = _padded(unfinished, width)
        weights[key] = held

    def _heads(self, rule: str) -> int:
        """Heads whose weights are kept apart."""
        shape = self.store.shape
        return shape.query_heads if rule == "none" else shape.kv_heads

    def _fixed(self, weights: Weights, key: tuple[int, str]) -> Tensor:
        """Room for weights of a fixed width, zeros: [B, heads, S]."""
        layer, rule = key
        shape = self.store.shape
        heads = self._heads(rule)
        size = (shape.rows, heads, self.width)
        if weights is not self.mass or not self._everywhere(rule):
            return torch.zeros(size, device=shape.device)
        if rule not in self._layers:
            self._layers[rule] = torch.zeros(shape.layers, *size, device=shape.device)
        return self._layers[rule][layer]

    def _everywhere(self, rule: str) -> bool:
        """Whether MASS is demanded under this rule at all layers at once."""
        for demand in self.demands:
            everywhere = demand.group == rule and demand.layers is None
            if everywhere and demand.what & See.MASS:
                return True
        return False

    def all_layers(self, rule: str) -> Tensor | None:
        """MASS of all layers, if it lies in one tensor: [L, B, heads, S]."""
        return self._layers.get(rule)

    def keep_queries(self, layer: int, q: Tensor, at: Tensor, position: Tensor) -> None:
        """Keep queries in the ring. q: [N, Hq, D]; position: int64 [N]."""
        if self._keeps_queries(layer):
            ring = self.queries[layer].transpose(1, 2)  # [B, size, Hq, D]
            place = position % ring.shape[1]
            ring[at, place] = q

    def keep_hidden(self, layer: int, hidden: Tensor, at: Tensor, active: Tensor | None) -> None:
        """Keep the residual stream of the newest tokens. hidden: [N, d]."""
        if layer not in self.hidden:
            size = (self.store.shape.rows, hidden.shape[-1])
            self.hidden[layer] = torch.zeros(size, device=hidden.device)
        held = self.hidden[layer]
        new = hidden.float()
        held[at] = _of_active(new, held, at, active)

    # -- observations of a prompt

    def add_prompt_mass(
        self,
        layer: int,
        row: int,
        rule: str,
        q: Tensor,
        k: Tensor,
        prompt: int,
    ) -> None:
        """Add the attention weights of a chunk's queries, some queries at a time. q: [n, Hq, D], k: [Hkv, S, D];
        prompt: tokens of the whole prompt."""
        total = k.shape[1]
        key = (layer, rule)
        held = self._room(self.mass, key, row, total, prompt)
        before = total - len(q)  # tokens of earlier chunks
        for start in range(0, len(q), QUERY_BLOCK):
            block = q[start : start + QUERY_BLOCK]
            weights = causal_weights(block, k, before + start, rule)  # [block, heads, S]
            held += weights.sum(0)

    def keep_prompt_row(
        self,
        layer: int,
        row: int,
        rule: str,
        q: Tensor,
        k: Tensor,
        prompt: int,
    ) -> None:
        """Keep the attention weights of the prompt's last query. q: [1, Hq, D], k: [Hkv, S, D]."""
        total = k.shape[1]
        key = (layer, rule)
        held = self._room(self.newest, key, row, total, prompt)
        [weights] = causal_weights(q, k, total - 1, rule)
        held[:] = weights

    def keep_prompt_queries(
        self,
        layer: int,
        rows: Sequence[int],
        q: Sequence[Tensor],
        ends: Sequence[int],
    ) -> None:
        """Keep the last queries of chunks: q[i] [n, Hq, D] of row rows[i], which ends before the position ends[i]."""
        if not self._keeps_queries(layer):
            return
        size = self.queries.shape[3]
        for row, end, q_i in zip(rows, ends, q, strict=True):
            n = min(len(q_i), size)
            places = [position % size for position in range(end - n, end)]
            index = torch.tensor(places, device=q_i.device)
            last = q_i[-n:].transpose(0, 1)  # [Hq, n, D]
            self.queries[layer, row, :, index] = last

    def _keeps_queries(self, layer: int) -> bool:
        return any(d.queries and d.at(layer) for d in self.demands)

    def _room(
        self,
        weights: Weights,
        key: tuple[int, str],
        row: int,
        total: int,
        prompt: int,
    ) -> Tensor:
        """The weights of a prompt's first `total` tokens, as a view that can be written: [heads, total]."""
        held = weights.get(key)
        if held is None or held.shape[-1] < total:
            if self.store.lists.columns is not None:
                wider = self._fixed(weights, key)
            else:
                _, rule = key
                shape = self.store.shape
                heads = self._heads(rule)
                width = max(total, prompt)
                wider = torch.zeros(shape.rows, heads, width, device=shape.device)
            if held is not None:
                before = held.shape[-1]
                wider[..., :before] = held
            weights[key] = wider
            held = wider
        return held[row, :, :total]


def _of_active(new: Tensor, held: Tensor, at: Tensor, active: Tensor | None) -> Tensor:
    """New values of active rows, held values of the other rows. new: [N, …], held: [B, …]."""
    if active is None:
        return new
    ones = [1] * (new.ndim - 1)
    by_row = active.view(-1, *ones)
    return torch.where(by_row, new, held[at])


def _padded(weights: Tensor, width: int) -> Tensor:
    """Attention weights with 0 in further columns, up to this width."""
    lacking = width - weights.shape[-1]
    return pad(weights, (0, lacking))
