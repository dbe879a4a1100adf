"""TOVA: the worked example, and a running decoder."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minithink.policies import parse
from minithink.policies.tova import Tova
from tests.policies.by_rows import step_of
from tests.policies.drive import follow, held
from tests.policies.fixture import H0, H1, KEYS, attention


def kept(policy: Tova, rows: torch.Tensor) -> list[int]:
    """What a layer keeps of tokens 0, 1, …. rows: attention of the newest query, [Hkv, S]."""
    lane = list(range(rows.shape[-1]))
    step = step_of(policy, 1, len(lane) - 1, lane, rows.tolist())
    step = SimpleNamespace(**vars(step) | {"rows": lambda layer: rows[None, :, None]})
    (edit,) = policy.decide(step)
    return [p for p, drop in zip(lane, edit.drop.flatten().tolist(), strict=True) if not drop]  # type: ignore


def test_worked_example() -> None:
    """The mean over the heads decides (spec §5)."""
    rows = torch.stack([attention(q[1:], KEYS).softmax(-1)[0] for q in (H0, H1)])
    assert torch.allclose(rows.mean(0), torch.tensor([0.2203, 0.2172, 0.1193, 0.2295, 0.0487, 0.1650]), atol=1e-4)
    assert kept(Tova(budget=4), rows) == [0, 1, 3, 5]


def test_the_newest_token_may_go() -> None:
    rows = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert kept(Tova(budget=3), rows) == [0, 1, 2]
    assert kept(Tova(budget=3, newest=True), rows) == [0, 1, 3]


def drops(policy: Tova, layers: list[Tensor], scope: str, prompt: int = 1) -> tuple[Any, list[Any]]:
    """The tokens that go, [Lt, B, Ht, S], and what a recorder is told. layers: attention rows [Hkv, S] of each."""
    tokens, told = layers[0].shape[-1], list[Any]()
    policy.scope = scope  # type: ignore[assignment]
    step = step_of(policy, prompt, tokens - prompt, range(tokens), layers[0].tolist())
    step.shape = replace(step.shape, layers=len(layers))
    step.rows = lambda layer: layers[layer][None, :, None]
    step.note = lambda *known: told.append(known)
    return [edit.drop for edit in policy.decide(step)], told  # type: ignore[union-attr]


TWO_HEADS = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.2, 0.6]])


def test_heads_with_tables_of_their_own_go_by_their_own_queries() -> None:
    """As in a stack whose heads keep different tokens."""
    (drop,), _ = drops(Tova(budget=2), [TWO_HEADS], "head")
    assert (~drop[0, 0]).tolist() == [[True, True, False, False], [False, False, True, True]]


def test_layers_that_keep_the_same_tokens_go_by_their_mean() -> None:
    """As in a stack with one table for all layers: the first layer alone would keep tokens 0 and 1."""
    layers = [torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[0.1, 0.0, 0.1, 0.8]])]
    (drop,), _ = drops(Tova(budget=2), layers, "sequence")
    assert (~drop).flatten().tolist() == [True, False, False, True]  # means 0.25, 0.15, 0.15, 0.45


def test_a_recorder_sees_the_mean_and_that_the_prompt_is_no_candidate() -> None:
    _, ((score, candidate),) = drops(Tova(budget=3, protect_prompt=True), [TWO_HEADS], "layer")
    assert torch.allclose(score.flatten(), torch.tensor([0.3, 0.2, 0.15, 0.35]))
    assert candidate.flatten().tolist() == [False, True, True, True]


def test_heads_of_a_layer_hold_the_same_tokens() -> None:
    """As many as the budget, once there are so many, at the end of a long prompt, too."""
    for i, manager in enumerate(follow(parse("tova:budget=9"), [14, 3], 20)):
        for seq, prompt in ((0, 14), (1, 3)):
            layers = held(manager, seq)
            assert [len(table) for table in layers] == [min(9, prompt + i)] * 2  # 2 layers, one table each
