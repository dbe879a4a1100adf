"""A policy that is shown one row at a time decides as if it were shown all rows, and remembers the same.

Alone: python -m pytest tests/policies/test_one_row.py
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.kv.contract import Edit, Evict, OpenSegment, Policy, Requantize, SetBudget
from minithink.kv.manager import KVManager
from minithink.kv.stack import members
from minithink.kv.view import View
from minithink.policies import parse
from tests.compare import assert_close, assert_same
from tests.kv.run import feed, manager_for, text_of
from tests.kv.test_batches import ONE_BY_ONE, with_backend
from tests.policies.test_laws import CLOSE, OPEN, TEXTS, WIDTH, decoder_of

torch.set_num_threads(1)

PROMPTS = {0: 13, 1: 5, 2: 9}  # one of four rows is empty
STEPS = 36


def effects(edits: Iterable[Edit], step: View) -> dict[str, Tensor]:
    """What the edits do to the rows of a step, by name; the first axis is that of the rows."""
    found: dict[str, Tensor] = {}

    def whole(x: Tensor, layer: int | None, empty: Tensor) -> Tensor:
        """Of all layers: [Lt, B, …]."""
        if layer is None:
            return x
        out = empty.clone()
        out[min(layer, len(out) - 1)] = x
        return out

    nothing = torch.zeros_like(step.pos(), dtype=torch.bool)
    for edit in edits:
        if isinstance(edit, Evict):
            name, done = f"evict, protected too: {edit.even_protected}", whole(edit.drop, edit.layer, nothing)
            found[name] = found.get(name, nothing) | done & (step.pos() >= 0)
        elif isinstance(edit, Requantize):
            name, done = f"{edit.fmt}, {edit.how}", whole(edit.where, edit.layer, nothing)
            found[name] = found.get(name, nothing) | done & (step.pos() >= 0)
        elif isinstance(edit, SetBudget):
            found["budget"] = whole(edit.tokens, edit.layer, step.budget)
        elif isinstance(edit, OpenSegment):
            found["open"] = edit.open[None]
            found["thought"] = torch.where(edit.open, edit.thought, 0)[None]
    return {name: x.movedim(1, 0) for name, x in found.items()}


class OneByOne:
    """Asks a copy of each policy about one row after the other, and then the policy itself about all of them."""

    def __init__(self, manager: KVManager) -> None:
        self.manager = manager
        self.decisions = 0  # rows of which an edit changed something
        for policy in members(manager.policy):
            for name in ("decide", "watch", "steer"):
                if getattr(type(policy), name) is not getattr(Policy, name):
                    setattr(policy, name, self.compared(policy, name))

    def compared(self, policy: Policy, name: str) -> Any:
        def ask(step: View, *rest: Any) -> Any:
            other: Any = copy.deepcopy(policy)
            alone = []
            for i in range(len(step.batch)):
                shown = self.alone(step, i, policy, other)
                found = getattr(type(policy), name)(
                    other, shown, *[x[i : i + 1] if torch.is_tensor(x) else x for x in rest]
                )
                alone.append(effects(found, shown) if name == "decide" else found)
            result = getattr(type(policy), name)(policy, step, *rest)
            if name == "decide":
                result = list(result)
                self.same_edits(alone, effects(result, step), step)
            elif name == "steer":
                assert_same("hidden", torch.cat(alone), result)
            for i, (got, want) in enumerate(zip(other.state(), policy.state(), strict=True)):
                # The last bits of a product depend on the batch's size.
                assert_close(f"state {i} after {name}", got, want, atol=1e-6 if want.is_floating_point() else 0)
            return result

        return ask

    def alone(self, step: View, i: int, policy: Policy, other: Policy) -> View:
        """Row i of a step, as the policy's copy sees it."""
        budgets = {**step.budgets, id(other): step.budgets[id(policy)]}
        batch = step.batch[[i]]
        view = View(step.store, step.observations, self.manager.policy, budgets, batch, step.asks)
        assert view.shape.rows == len(view.row) == 1
        return view.seen_by(other)

    def same_edits(self, alone: list[dict[str, Tensor]], batch: dict[str, Tensor], step: View) -> None:
        for i, found in enumerate(alone):
            if not step.active[i]:
                continue
            for name in found.keys() | batch.keys():
                empty = step.budget.movedim(1, 0)[i] if name == "budget" else torch.zeros((), dtype=torch.bool)
                got = found[name][0] if name in found else empty
                want = batch[name][i] if name in batch else empty
                assert torch.equal(*torch.broadcast_tensors(got, want)), (name, i)
                self.decisions += bool((want != empty).any())


@pytest.mark.parametrize("text", TEXTS)
def test_one_row_at_a_time(text: str) -> None:
    """In a ragged batch with pauses, beside an empty row."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    manager = manager_for(
        decoder, parse(text), backend=ONE_BY_ONE, rows=4, tokens=WIDTH, poison=False, think_ids=(OPEN, CLOSE)
    )
    seen = OneByOne(manager)
    tokens = {seq: text_of(decoder.config, n + STEPS, seq) for seq, n in PROMPTS.items()}
    for seq, n in PROMPTS.items():
        manager.join(seq, WIDTH, n)
        feed(decoder, manager, {seq: tokens[seq][:n]})
    for i in range(STEPS):
        seqs = [seq for seq in PROMPTS if (i + seq) % 5]
        new = {seq: tokens[seq][PROMPTS[seq] + i] for seq in seqs}
        new = {seq: 5 if token in (OPEN, CLOSE) else token for seq, token in new.items()}
        if (i, 2) == (30, seqs[-1]):
            new[2] = CLOSE
        feed(decoder, manager, {seq: [token] for seq, token in new.items()})
    decides = any(type(m).decide is not Policy.decide for m in members(manager.policy))
    assert bool(seen.decisions) == decides
