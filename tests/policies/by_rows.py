"""A policy that is told attention rows, for worked examples: one sequence, one layer, no decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from minithink.backend import REFERENCE
from minithink.kv.contract import Policy, Shape


def step_of(policy: Policy, prompt: int, clock: int, held: Sequence[int], row: Any) -> Any:
    """The step in which token prompt + clock − 1 came. row: attention of one KV head, or of several."""
    pos, one = torch.tensor(held, dtype=torch.int32).view(1, 1, 1, -1), torch.ones(1, 1, 1, dtype=torch.int32)
    mass = torch.tensor(row).view(1, 1, -1, len(held))
    pos = pos.expand(1, 1, mass.shape[2] if policy.scope == "head" else 1, -1)
    protected = (pos < prompt) & policy.protect_prompt
    tensors = {"pos": pos, "held": torch.full(pos.shape[:3], len(held)), "protected": protected, "mass": mass}
    return SimpleNamespace(
        shape=shape_of(policy, mass.shape[2]),
        ops=REFERENCE,
        row=torch.tensor([0]),
        active=torch.tensor([True]),
        clock=clock * one[0, 0],
        prompt=prompt * one[0, 0],
        budget=torch.full(pos.shape[:3], policy.budget),
        thinking=torch.tensor([True]),
        any=lambda x: bool(x.any()),
        note=lambda *_: None,
        **{name: lambda layer=None, x=x: x if layer is None else x[layer] for name, x in tensors.items()},
    )


def shape_of(policy: Policy, heads: int) -> Shape:
    return Shape(1, 1, heads, heads, 2, 2, policy.scope, torch.device("cpu"))


def layer_scores(policy: Any, step: Any) -> torch.Tensor:
    """The scores that a policy gives the tokens of the first layer in a step in which it is due: [B, Hkv, S]."""
    due, _ = policy.due(step)
    assert due.any()
    return policy.score(step, 0, policy.choice(step, due).of_layer(0))


def by_rows(policy: Policy, prompt: int, rows: Sequence[Any]) -> Iterator[list[int]]:
    """What a lane holds after each step. rows: attention rows over the tokens held and the newest one."""
    policy.setup(shape_of(policy, 1))
    held = list(range(prompt))
    for clock, row in enumerate(rows, start=1):
        held.append(prompt + clock - 1)
        step = step_of(policy, prompt, clock, held, row[: len(held)])
        policy.watch(step)
        for edit in policy.decide(step):
            held = [p for p, drop in zip(held, edit.drop.flatten().tolist(), strict=True) if not drop]  # type: ignore
        yield held


def remembered(policy: Any, held: Sequence[int]) -> list[list[int]]:
    """What a policy knows of the tokens that are held: [TS], or [TS, MRI]."""
    pos, *known = (x.flatten().tolist() for x in policy.state())
    return [[x[pos.index(p)] for p in held] for x in known]
